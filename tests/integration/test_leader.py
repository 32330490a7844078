"""Two operators: one steers, the other takes over; nothing is lost and nothing done twice."""

from __future__ import annotations

import time

from tests.integration.api import eventually, throughout
from tests.integration.stage import HIGH, LOW

TAKEOVER_SECONDS = 15.0
POLICY = {"leaseSeconds": 15}


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
