"""The whole loop: SpecServe → objects → pods → load → live switch → status."""

from __future__ import annotations

import asyncio
import json

import aiohttp

from specserve import names
from tests.integration.api import eventually, throughout
from tests.integration.stage import HIGH, LOW


async def test_a_specserve_becomes_objects_that_it_owns(operator, stage):
    made = await stage.create(replicas=2)
    await stage.kubelet.running("chat", 2)
    await stage.ready()
    for kind, name in (
        ("deployments", "chat"),
        ("services", "chat"),
        ("serviceaccounts", "chat"),
        ("secrets", "chat-credentials"),
    ):
        item = await stage.api.get(stage.at(kind, name))
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (made["metadata"]["uid"], True)
        assert names.labels("chat").items() <= item["metadata"]["labels"].items()
    status = (await stage.get())["status"]
    assert (status["replicas"], status["readyReplicas"], status["ready"]) == (2, 2, "2/2")
    assert status["observedGeneration"] == 1
    assert status["speculation"]["controlMode"] == "Live"
    assert not (await stage.get())["metadata"].get("finalizers")


async def test_load_switches_speculation_off_and_on_in_every_pod(operator, stage):
    pods = await stage.up(replicas=3)
    await stage.summary("On 3/3")
    for pod in pods:
        pod.engine.set_load(*HIGH)
    await stage.summary("Off 3/3")
    for pod in pods:
        assert pod.engine.modes[-1] == "off"
    seen = await stage.speculation()
    assert (seen["wanted"], seen["drifted"]) == ("Off", 0)
    assert "above 48" in seen["lastSwitchReason"]
    assert "lastSwitchTime" in seen
    for pod in pods:
        pod.engine.set_load(*LOW)
    await stage.summary("On 3/3")
    assert [pod.engine.modes for pod in pods] == [["on", "off", "on"]] * 3
    disabled = await stage.event("SpeculationDisabled")
    enabled = await stage.event("SpeculationEnabled")
    assert "65 in flight above 48" in disabled["message"]
    assert "5 in flight below 32" in enabled["message"]


async def test_kubectl_waits_scales_and_shows(operator, stage):
    await stage.create()
    said = await asyncio.to_thread(
        stage.kubectl, "wait", "--for=condition=Ready", "specserve/chat", "--timeout=20s"
    )
    assert "condition met" in said
    await asyncio.to_thread(stage.kubectl, "scale", "specserve", "chat", "--replicas=2")
    await stage.kubelet.running("chat", 2)
    await stage.summary("On 2/2")
    table = await asyncio.to_thread(stage.kubectl, "get", "sps")
    header, row = table.splitlines()
    assert dict(zip(header.split(), row.split(maxsplit=len(header.split()) - 1), strict=False))[
        "READY"
    ] in {"2/2", "True"}
    assert "2/2" in row
    assert "On 2/2" in row


async def test_requests_in_flight_survive_flips(operator, stage):
    (pod,) = await stage.up()
    tokens, streams = 2000, 30

    async def stream(session: aiohttp.ClientSession) -> tuple[int, bool]:
        body = {
            "text": "one two three",
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
            "stream": True,
        }
        url = f"http://{pod.address}:{names.PORT_SERVING}/generate"
        async with session.post(url, json=body) as answer:
            lines = [line.strip() async for line in answer.content if line.strip()]
        last = json.loads(lines[-2].removeprefix(b"data: "))
        return last["meta_info"]["completion_tokens"], lines[-1] == b"data: [DONE]"

    async def flip() -> int:
        flips = 0
        while True:
            for load, mode in ((HIGH, "off"), (LOW, "on")):
                pod.engine.set_load(*load)
                await eventually(lambda mode=mode: pod.engine.modes[-1] == mode, 5, mode)
                flips += 1
                if all(task.done() for task in running):
                    return flips

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        running = [asyncio.create_task(stream(session)) for _ in range(streams)]
        async with asyncio.timeout(60):
            flips = await flip()
        ended = await asyncio.gather(*running)
    assert ended == [(tokens, True)] * streams
    assert flips >= 10


async def test_policy_edits_leave_the_deployment_alone(operator, stage):
    (pod,) = await stage.up()
    before = await stage.deployment()
    await stage.edit(policy={"threshold": {"offAbove": 3, "onBelow": 2}, "leaseSeconds": 30})
    pod.engine.set_load(*LOW)
    await stage.summary("Off 1/1")
    await stage.edit(policy={"mode": "On"})
    await stage.summary("On 1/1")
    after = await stage.deployment()
    assert json.dumps(after["spec"], sort_keys=True) == json.dumps(before["spec"], sort_keys=True)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert (await stage.kubelet.engine("chat")).uid == pod.uid


async def test_a_pin_holds_against_the_load(operator, stage):
    (pod,) = await stage.up(policy={"mode": "Off"})
    pod.engine.set_load(*LOW)
    await stage.summary("Off 1/1")
    await stage.edit(policy={"mode": "On"})
    pod.engine.set_load(*HIGH)
    await stage.summary("On 1/1")
    reach = await stage.has("ThresholdReachable", "True")
    assert reach["reason"] == "Pinned"


async def test_observe_sends_nothing(operator, stage):
    await stage.create(policy={"mode": "Observe"})
    pod = await stage.kubelet.engine("chat")
    pod.engine.set_load(*HIGH)

    async def wants_off() -> bool:
        return (await stage.speculation()).get("wanted") == "Off"

    await eventually(wants_off, 10)
    pod.engine.set_load(*LOW)
    await throughout(lambda: not pod.engine.orders, 1.0)
    assert not pod.engine.applied
    settled = await stage.has("SpeculationSettled", "True")
    assert settled["reason"] == "Observing"
    assert not await stage.events(reason="SpeculationDisabled")
