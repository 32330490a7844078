"""Nothing is written that holds already, and other managers' fields are theirs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from specserve import names
from specserve.api import SpecServeStatus
from tests.integration.api import MERGE, eventually
from tests.integration.operator_process import USER
from tests.integration.stage import HIGH

LEASE_SECONDS = 15
#: Longer than two renewals of the lease (5 s), a look at what there is (10 s), and read-backs.
QUIET_SECONDS = 12.0
INJECTED = "injector.example/stamp"


def writes(cluster, since):
    """Writes of the operator since a time, without those that keep its lease."""
    return [
        f"{event['verb']} {event['requestURI']}"
        for event in cluster.audit_events(USER)
        if event["requestReceivedTimestamp"] > since
        and event["verb"] not in {"get", "list", "watch"}
        and "/leases/" not in event["requestURI"]
    ]


def stamp():
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def inject(stage):
    """Put an annotation into the pod template, as an injector of another team does."""
    at = stage.at("deployments", "chat") + "?fieldManager=injector"
    annotations = {"metadata": {"annotations": {INJECTED: "42"}}}
    await stage.api.request("PATCH", at, {"spec": {"template": annotations}}, MERGE)


async def test_another_managers_annotation_stays_and_nothing_is_written_at_rest(operator, stage):
    """O-D5: server-side defaults and injected fields are no differences."""
    await stage.up(replicas=2, policy={"leaseSeconds": LEASE_SECONDS})
    await inject(stage)

    async def replaced() -> bool:
        pods = stage.kubelet.of("chat")
        return len(pods) == 2 and all(
            INJECTED in pod.item["metadata"]["annotations"] for pod in pods
        )

    await eventually(replaced, 20, "the pods to carry the annotation")
    await stage.ready()
    await stage.summary("On 2/2")
    before = await stage.deployment()
    # Status writes and events that the last pod's arrival caused are gathered for a second.
    quiet = [stamp()]

    async def at_rest() -> bool:
        found = await asyncio.to_thread(writes, stage.cluster, quiet[0])
        quiet[0] = stamp()
        await asyncio.sleep(1.5)
        return not found

    await eventually(at_rest, 10, "the operator to come to rest")
    since = stamp()
    await asyncio.sleep(QUIET_SECONDS)
    assert await asyncio.to_thread(writes, stage.cluster, since) == []
    # Neither a new label on the resource nor a switch is a reason to write to the children.
    await stage.api.merge(
        stage.at(names.PLURAL, "chat"), {"metadata": {"labels": {"team": "demo"}}}
    )
    for pod in stage.kubelet.of("chat"):
        pod.engine.set_load(*HIGH)
    await stage.summary("Off 2/2")
    after = await stage.deployment()
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert after["spec"]["template"]["metadata"]["annotations"][INJECTED] == "42"
    changed = [w for w in writes(stage.cluster, since) if "/status" not in w and "events" not in w]
    assert changed == []


async def test_what_is_written_into_our_fields_is_put_right(operator, stage):
    await stage.up()
    at = stage.at("deployments", "chat")
    await stage.api.merge(at, {"spec": {"replicas": 3}, "metadata": {"labels": {"x": "y"}}})

    async def back() -> bool:
        item = await stage.deployment()
        assert item["spec"]["replicas"] == 1
        return item["metadata"]["labels"].get("x") == "y"

    await eventually(back, 5)
    await stage.api.delete(stage.at("services", "chat"))
    await eventually(lambda: stage.api.find(stage.at("services", "chat")), 5)


async def test_every_status_field_survives_its_way_through_the_schema(operator, stage):
    """O-D5.3: what the schema does not know would be dropped, and written again for ever."""
    await stage.up()
    status = (await stage.get())["status"]
    read = SpecServeStatus.model_validate(status)
    assert read.model_dump(by_alias=True, exclude_unset=True) == status
    assert await operator.value("specserve_reconcile_total", result="bug") == 0
