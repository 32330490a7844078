"""Strategy BreakEven under real decode rounds, the decision log, overrides, pins and curves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from specserve import curves, names
from tests.integration.api import eventually, path
from tests.integration.operator_process import NAMESPACE
from tests.integration.stage import LOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.kubelet import PlayedPod

STREAMS = 8


@contextlib.asynccontextmanager
async def traffic(pod: PlayedPod) -> AsyncIterator[None]:
    """Keep some requests running in a pod."""
    url = f"http://{pod.address}:{names.PORT_SERVING}/generate"
    body = {"text": "one two", "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}

    async def ask(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.post(url, json=body) as answer:
                await answer.read()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as session:
        tasks = [asyncio.create_task(ask(session)) for _ in range(STREAMS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def accept(pod: PlayedPod, length: float) -> None:
    """Change how many tokens a verify wins."""
    pod.engine.behave(replace(pod.engine.behaviour, accept_length=length))


async def told(operator: Any, at: str) -> tuple[int, Any]:
    """What the operator answers under a path."""
    async with aiohttp.request("GET", f"http://127.0.0.1:{operator.port}{at}") as answer:
        return answer.status, json.loads(await answer.text())


@pytest.mark.long
async def test_acceptance_decides_and_a_probe_finds_that_it_is_back(operator, stage):
    (pod,) = await stage.up(policy={"strategy": "BreakEven", "breakEven": {"profile": "h200-a"}})
    async with traffic(pod):
        await stage.has("CurveKnown", "True", "Live", within=30)
        await stage.has("DraftEffective", "True", within=20)
        await stage.summary("On 1/1", within=20)
        accept(pod, 1.1)
        await stage.summary("Off 1/1", within=30)
        off = await stage.event("SpeculationDisabled")
        assert "below break-even" in off["message"]
        switched = (await stage.speculation())["decisions"][-1]
        assert (switched["pod"], switched["mode"]) == (pod.name, "Off")
        assert "below break-even" in switched["reason"]
        accept(pod, 3.5)
        # Off, nobody sees it; the first look is due a minute after the switch.
        await stage.summary("On 1/1", within=100)
        on = await stage.event("SpeculationEnabled")
        assert "above break-even" in on["message"]
        assert [one["mode"] for one in (await stage.speculation())["decisions"]][-2:] == [
            "Off",
            "On",
        ]
        status, kept = await told(operator, f"/decisions/{stage.namespace}/chat")
        assert status == 200
        modes = [one for one in kept if one["what"] == "mode"]
        assert [one["mode"] for one in modes][-2:] == ["Off", "On"]
        assert modes[-2]["numbers"]["accept@3"] < modes[-2]["numbers"]["breakEven@3"]
        assert any(one["probe"] and "acceptance was last seen" in one["reason"] for one in kept)
        probes = await operator.value("specserve_policy_probes_total", namespace=stage.namespace)
        assert probes >= 1
    # A look that changed nothing is no event and no switch on record.
    assert len(await stage.events(reason="SpeculationDisabled")) == 1


async def test_decisions_are_told_by_the_leader_only(start_operator, stage):
    leader = start_operator()
    await leader.leads()
    standby = start_operator()
    await standby.answers()
    await stage.up()
    assert await told(standby, "/decisions") == (
        503,
        {"message": "this process does not lead; the holder of the Lease knows the decisions"},
    )
    status, listed = await told(leader, "/decisions")
    assert status == 200
    assert {"namespace": stage.namespace, "name": "chat"}.items() <= listed[0].items()
    assert (await told(leader, f"/decisions/{stage.namespace}/other"))[0] == 404
    assert (await told(leader, "/decisions/a/b/c"))[0] == 404


async def test_one_configmap_turns_all_off_and_survives_a_restart(start_operator, stage):
    operator = start_operator()
    await operator.leads()
    (pod,) = await stage.up()
    pod.engine.set_load(*LOW)
    lease = operator.lease
    override = path("configmaps", NAMESPACE)
    data = {"mode": "Off", "reason": "garbled output"}
    await stage.api.post(override, {"metadata": {"name": f"{lease}-override"}, "data": data})
    await stage.summary("Off 1/1, override")
    decides = await stage.has("StrategyDecides", "False", "Overridden")
    assert "Off, garbled output" in decides["message"]
    assert "garbled output" in (await stage.event("Overridden"))["message"]
    assert await operator.value("specserve_override", mode="Off") == 1
    assert await operator.stop() == 0
    orders = len(pod.engine.modes)
    operator = start_operator()
    await operator.leads()

    async def steered() -> bool:
        return await operator.value("specserve_override", mode="Off") == 1

    await eventually(steered, 10)
    await stage.summary("Off 1/1, override")
    await asyncio.to_thread(
        stage.cluster.kubectl, "-n", NAMESPACE, "patch", "configmap", f"{lease}-override",
        "--type=merge", "-p", json.dumps({"data": {"mode": "of"}}),
    )  # fmt: skip

    async def said() -> bool:
        seen = await stage.has("StrategyDecides", "False", "Overridden")
        return "its mode is 'of'" in seen["message"]

    await eventually(said, 15)
    assert pod.engine.modes[orders - 1 :] == ["off"]
    await stage.api.delete(f"{override}/{lease}-override")
    await stage.summary("On 1/1", within=15)
    await stage.has("StrategyDecides", "True")


async def test_a_pin_ends_at_its_time(operator, stage):
    end = datetime.now(UTC) + timedelta(seconds=20)
    until = end.strftime("%Y-%m-%dT%H:%M:%SZ")
    (pod,) = await stage.up(policy={"mode": "Off", "modeUntil": until})
    pod.engine.set_load(*LOW)
    await stage.summary("Off 1/1")
    pinned = await stage.has("StrategyDecides", "False", "Pinned")
    assert f"until {until}, then Auto" in pinned["message"]
    await stage.summary("On 1/1", within=35)
    await stage.has("StrategyDecides", "True", "PinEnded")


async def test_a_curve_from_a_configmap(operator, stage):
    document = curves.shipped("h200-a").document
    origin = {"model": "hf://example-org/model-a", "draft": "hf://example-org/draft-a"}
    fits = document.model_copy(
        update={"provenance": document.provenance.model_copy(update={**origin, "sglang": None})}
    )
    text = fits.model_dump_json(by_alias=True)
    at = path("configmaps", stage.namespace)
    await stage.create(
        policy={"strategy": "BreakEven", "breakEven": {"curveConfigMap": "measured"}}
    )
    missing = await stage.has("CurveKnown", "False", "Unreadable", within=15)
    assert "ConfigMap measured: there is none" in missing["message"]
    await stage.api.post(at, {"metadata": {"name": "measured"}, "data": {"curve.json": text}})
    await stage.has("CurveKnown", "True", "Calibrated", within=45)
    stale = text.replace("hf://example-org/model-a", "hf://example-org/model-z")
    await stage.api.merge(f"{at}/measured", {"data": {"curve.json": stale}})
    seen = await stage.has("CurveKnown", "False", "Stale", within=45)
    assert "model hf://example-org/model-z, and here it is hf://example-org" in seen["message"]
    assert "hf://example-org/model-z" in (await stage.event("Stale"))["message"]
    assert await stage.events(reason="Unreadable")


async def test_an_engine_that_fails_while_on_is_left_off(operator, stage):
    (pod,) = await stage.up()
    pod.engine.set_load(*LOW)
    for _ in range(2):
        await stage.summary("On 1/1", within=20)
        await pod.crash("Sizes of tensors must match")
        await stage.has("Ready", "False", "CrashLooping")
        await stage.summary("-")
        await pod.run()
        pod.engine.set_load(*LOW)
    await stage.summary("Off 1/1", within=20)
    seen = await stage.has("DraftEffective", "False", "CrashedWhileOn")
    assert pod.name in seen["message"]
