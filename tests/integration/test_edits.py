"""Bursts of edits, and SpecServes that vanish while they are handled."""

from __future__ import annotations

import asyncio

from specserve import names
from tests.integration.api import eventually, path, throughout
from tests.integration.stage import HIGH

CHILDREN = ("deployments", "services", "serviceaccounts", "secrets")


async def children(stage, name):
    return [
        item
        for kind in CHILDREN
        for item in await stage.api.items(kind, stage.namespace)
        if (item["metadata"].get("labels") or {}).get(names.LABEL_INSTANCE) == name
    ]


async def test_only_the_last_of_a_burst_of_edits_counts(operator, stage):
    """O-D7.1: replicas 1, 3, 2 and offAbove 32, 16, 24, one right after the other."""
    await stage.up(policy={"threshold": {"offAbove": 48, "onBelow": 8}})
    for replicas, off_above in ((1, 32), (3, 16), (2, 24)):
        await stage.edit(replicas=replicas, policy={"threshold": {"offAbove": off_above}})

    async def scaled() -> bool:
        deployment = await stage.deployment()
        settled = (
            deployment["status"]["observedGeneration"] == deployment["metadata"]["generation"]
        )
        return settled and (deployment["spec"]["replicas"], deployment["status"]["replicas"]) == (
            2,
            2,
        )

    # Two of three pods may run before the third, and one of the two may be the one to go.
    await eventually(scaled, 10, "two replicas, no more and no less")
    pods = await stage.kubelet.running("chat", 2)
    await stage.ready()

    def in_force() -> bool:
        return all(
            [tier["minBatch"] for tier in pod.engine.orders[-1].body["fallback"]["tiers"]]
            == [1, 25]
            for pod in pods
        )

    await eventually(in_force, 5, "offAbove 24 in the engines' fallback")
    for pod in pods:
        pod.engine.set_load(24, 0)
    await throughout(lambda: all(pod.engine.modes[-1] == "on" for pod in pods), 1)
    for pod in pods:
        pod.engine.set_load(25, 0)
    await stage.summary("Off 2/2")


async def test_created_and_deleted_at_once_leaves_nothing(operator, stage):
    """O-D7.2: no child stays, and no line of the log is an error."""
    errors = len(operator.lines("ERROR"))
    for number, pause in enumerate((0.0, 0.02, 0.05, 0.1, 0.2)):
        name = f"brief-{number}"
        await stage.create(name)
        await asyncio.sleep(pause)
        await stage.api.delete(stage.at(names.PLURAL, name))

    async def none_left() -> bool:
        found = [await children(stage, f"brief-{number}") for number in range(5)]
        assert not any(found), found
        return True

    await eventually(none_left, 15, "all children to vanish")
    await throughout(none_left, 2)
    assert len(operator.lines("ERROR")) == errors
    assert await operator.value("specserve_reconcile_total", result="bug") == 0


async def test_a_specserve_of_the_same_name_gets_objects_of_its_own(operator, stage):
    (old,) = await stage.up()
    first = await stage.deployment()
    await stage.api.delete(stage.at(names.PLURAL, "chat"))
    made = await stage.create()

    async def renewed() -> bool:
        item = await stage.api.find(stage.at("deployments", "chat"))
        owners = (item or {}).get("metadata", {}).get("ownerReferences", [])
        return [owner["uid"] for owner in owners] == [made["metadata"]["uid"]]

    await eventually(renewed, 20)
    assert (await stage.deployment())["metadata"]["uid"] != first["metadata"]["uid"]

    def new_engine() -> bool:
        pods = stage.kubelet.of("chat")
        return len(pods) == 1 and pods[0].uid != old.uid

    await eventually(new_engine, 20)
    stage.kubelet.of("chat")[0].engine.set_load(*HIGH)
    await stage.summary("Off 1/1")


async def test_deleting_a_specserve_stops_all_calls_at_once(operator, stage):
    """O-D4.3: also while a directive hangs; nothing is sent after the deletion."""
    (pod,) = await stage.up()
    pod.engine.answer_after = 20.0
    pod.engine.set_load(*HIGH)
    await eventually(lambda: pod.engine.under_way == 1, 5)
    stage.kubelet.finishes = False
    await stage.api.delete(stage.at(names.PLURAL, "chat"))
    assert await stage.api.find(stage.at(names.PLURAL, "chat")) is None
    calls = await settled(pod)
    await throughout(lambda: sum(pod.visits.values()) == calls, 2)
    stage.kubelet.finishes = True
    await stage.kubelet.resync()

    async def gone() -> bool:
        return not await children(stage, "chat") and not await stage.api.items(
            "pods", stage.namespace
        )

    await eventually(gone, 30)


async def settled(pod) -> int:
    """Wait until the calls to a pod have ended; returns how many there were."""
    seen = [-1]

    async def same() -> bool:
        before, seen[0] = seen[0], sum(pod.visits.values())
        await asyncio.sleep(0.3)
        return before == seen[0]

    await eventually(same, 5)
    return seen[0]


async def test_the_scale_of_a_workload_follows_the_specserve(operator, stage):
    """O-E3.3: the resource's count is the truth and is passed down."""
    await stage.up()
    scale = await stage.api.get(stage.at(names.PLURAL, "chat") + "/scale")
    assert scale["status"]["selector"] == names.selector_string("chat")
    await stage.api.merge(stage.at(names.PLURAL, "chat") + "/scale", {"spec": {"replicas": 3}})
    await stage.kubelet.running("chat", 3)
    await stage.ready()
    listed = await stage.api.get(path("deployments", stage.namespace))
    assert [item["spec"]["replicas"] for item in listed["items"]] == [3]
