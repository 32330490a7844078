"""Two operators: one steers, the other takes over; nothing is lost and nothing done twice."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
import yaml

from tests.integration.api import eventually, path, throughout
from tests.integration.operator_process import ACCOUNT, BRISK, NAMESPACE, RIGHTS
from tests.integration.stage import HIGH, LOW

TAKEOVER_SECONDS = 15.0
HAND_OVER_SECONDS = 2.0
STANDBY = "standby"


async def leaders(*processes):
    return [p for p in processes if await p.value("specserve_leader") == 1]


async def test_a_killed_leader_is_replaced_and_no_directive_is_lost_or_doubled(
    start_operator, stage
):
    """O-D2.2: the lease of no engine expires meanwhile, and each decision is sent once."""
    first = start_operator()
    await first.leads()
    second = start_operator()
    await second.answers()
    pods = await stage.up(replicas=2)
    await throughout(lambda: alone(first, second), 1)
    killed = time.monotonic()
    first.kill()
    for pod in pods:
        pod.engine.set_load(*HIGH)
    await second.leads(TAKEOVER_SECONDS)
    await eventually(lambda: all(pod.engine.modes[-1] == "off" for pod in pods), 5)
    for pod in pods:
        assert pod.engine.applied[-1].at - killed < TAKEOVER_SECONDS
    await stage.summary("Off 2/2")
    for pod in pods:
        pod.engine.set_load(*LOW)
    await stage.summary("On 2/2")
    for pod in pods:
        # An expired lease would have left a fallback, mode tiers, in between.
        assert pod.engine.modes == ["on", "off", "on"]
        assert all(order.status == 200 for order in pod.engine.orders)
        assert len({order.body["holder"] for order in pod.engine.orders}) == 1


async def alone(first, second):
    assert await leaders(first, second) == [first]
    return True


async def test_a_leader_that_is_asked_to_end_hands_over_at_once(start_operator, stage):
    first = start_operator()
    await first.leads()
    second = start_operator()
    await second.answers()
    (pod,) = await stage.up()
    orders = len(pod.engine.orders)
    assert await first.stop() == 0
    await second.leads(5)
    await throughout(lambda: len(pod.engine.orders) == orders, 1)
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    assert pod.engine.modes == ["on", "off"]


async def test_a_standby_holds_the_lease_two_seconds_after_sigterm(start_operator, stage):
    """By the Lease's own word, from the signal on, whenever in the standby's pause it comes."""
    leader = start_operator()
    await leader.leads()
    (pod,) = await stage.up()
    for pause in (0.0, 0.3, 0.6, 0.9):
        standby = start_operator()
        await standby.answers()
        await throughout(lambda running=leader: running.running, 1 + pause)
        orders = len(pod.engine.orders)
        signalled = datetime.now(UTC)
        leader.terminate()

        async def taken(by=standby):
            found = (await stage.api.get(lease_of(by)))["spec"]
            return found if found["holderIdentity"] == by.identity else None

        lease = await eventually(taken, 10, f"{standby.identity} to hold the lease")
        acquired = datetime.fromisoformat(lease["acquireTime"])
        assert (acquired - signalled).total_seconds() <= HAND_OVER_SECONDS
        assert await leader.ended() == 0
        await standby.leads(5)
        # It reads first, and finds nothing to send.
        await throughout(lambda known=orders: len(pod.engine.orders) == known, 0.5)
        leader = standby
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    assert pod.engine.modes == ["on", "off"]


def lease_of(operator):
    return path("leases", NAMESPACE, operator.settings["lease_name"])


@pytest.fixture
def rights_of_standby(light_cluster, rights):
    """The operator's rights under another name, to be told apart in the audit log."""
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": STANDBY, "namespace": NAMESPACE},
    }
    bindings = [
        one
        for one in yaml.safe_load_all(RIGHTS.read_text())
        if one["kind"] in {"ClusterRoleBinding", "RoleBinding"}
    ]
    for binding in bindings:
        binding["metadata"]["name"] += f"-{STANDBY}"
        assert [subject["name"] for subject in binding["subjects"]] == [ACCOUNT]
        binding["subjects"][0]["name"] = STANDBY
    light_cluster.apply(account, *bindings)
    return light_cluster.kubeconfig_for(STANDBY, NAMESPACE)


async def test_a_standby_reads_its_lease_and_does_nothing_else(
    start_operator, stage, rights_of_standby
):
    """O-D2.2: by the audit log; while the leader creates, patches and steers."""
    leader = start_operator(**BRISK)
    await leader.leads()
    standby = start_operator(rights_of_standby, **BRISK)
    await standby.answers()
    pods = await stage.up(replicas=2)
    for pod in pods:
        pod.engine.set_load(*HIGH)
    await stage.summary("Off 2/2")
    await stage.edit(replicas=1)
    await stage.kubelet.running("chat", 1)

    def done():
        user = f"system:serviceaccount:{NAMESPACE}:{STANDBY}"
        return [
            (event["verb"], event["objectRef"]["resource"])
            for event in stage.cluster.audit_events(user)
            if "objectRef" in event
        ]

    await eventually(lambda: len(done()) > 5, 10, "the standby's looks at the Lease")
    assert set(done()) == {("get", "leases")}
    assert await standby.value("specserve_admin_request_duration_seconds_count") == 0
    leader.kill()
    await standby.leads(TAKEOVER_SECONDS)
    await eventually(lambda: ("patch", "specserves") in done() or ("list", "pods") in done(), 10)


async def test_an_operator_without_its_lease_steers_nothing(start_operator, stage):
    """A second installation that shares the Lease only stands by."""
    first = start_operator()
    await first.leads()
    second = start_operator()
    await second.answers()
    (pod,) = await stage.up()
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    assert await second.value("specserve_speculation_switches_total") == 0
    assert await second.value("specserve_admin_request_duration_seconds_count") == 0
