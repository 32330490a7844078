"""Engines that are silent, stalled, forgetful, slow, busy, or somebody else's by now."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import replace

import aiohttp
import pytest

from specserve import names
from specserve_sim.behaviour import WELL, Fault, Load
from tests.integration.api import eventually, path, throughout
from tests.integration.stage import HIGH, LOW

BUSY = replace(WELL, load=Load(*HIGH))


async def test_an_empty_answer_is_not_zero(operator, stage):
    """O-C4: no loads, no metrics, NaN, missing series: hold and say so; a true 0 is 0."""
    (pod,) = await stage.up()
    engine = pod.engine
    engine.behave(BUSY)
    await stage.summary("Off 1/1")
    for broken in (
        replace(BUSY, loads_gone=True, metrics="gone"),
        replace(BUSY, loads_gone=True, metrics="nan"),
        replace(BUSY, loads_gone=True, metrics="drop"),
    ):
        engine.behave(broken)
        await stage.has("MetricsFresh", "False", within=2)
        await throughout(lambda: engine.modes == ["on", "off"], 1.5)
        assert (await stage.speculation())["summary"] == "Off 1/1"
        engine.behave(BUSY)
        await stage.has("MetricsFresh", "True", within=3)
        assert engine.modes == ["on", "off"]
    engine.set_load(0, 0)
    await stage.summary("On 1/1")


async def test_the_metrics_page_stands_in_for_the_loads_route(operator, stage):
    (pod,) = await stage.up()
    pod.engine.behave(replace(BUSY, loads_gone=True))
    await stage.summary("Off 1/1")
    await stage.has("MetricsFresh", "True")


async def test_a_stalled_engine_is_reported_and_left_alone(operator, stage):
    """O-C8: nothing runs, many wait, no token is made: a condition, one event, no call."""
    (pod,) = await stage.up()
    engine = pod.engine
    orders = len(engine.orders)
    engine.behave(replace(WELL, stalled=True, load=Load(0, 180)))
    healthy = await stage.has("EnginesHealthy", "False", "EngineStalled", within=15)
    assert pod.name in healthy["message"]
    await stage.event("EngineStalled")
    await throughout(lambda: len(engine.orders) == orders, 2)
    assert engine.modes == ["on"]
    assert len(await stage.events(reason="EngineStalled")) == 1
    assert pod.restarts == 0
    engine.behave(replace(WELL, load=Load(*LOW)))
    await stage.has("EnginesHealthy", "True")


async def test_an_engine_that_lost_its_state_is_told_again(operator, stage):
    """O-G1: same pod, uid and address; the status says what the engine reports."""
    (pod,) = await stage.up()
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    before = len(pod.engine.applied)
    await pod.restart("CUDA error")
    pod.engine.set_load(*HIGH)
    await eventually(lambda: len(pod.engine.applied) > before, 5)
    last = pod.engine.applied[-1]
    assert last.mode == "off"
    assert last.at - pod.ready_at < 1.0
    assert pod.engine.boots == 2
    await stage.summary("Off 1/1")
    assert pod.engine.orders[-1].body["bootID"] == pod.engine.boot_id


async def test_drift_by_a_foreign_hand_is_found_and_corrected(operator, stage):
    """O-G1.3: somebody calls the admin endpoint; no Kubernetes object changes."""
    (pod,) = await stage.up()
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    last = pod.engine.orders[-1].body
    foreign = {
        **last,
        "epoch": last["epoch"] + 7,
        "mode": "on",
        "steps": 3,
        "reason": "somebody's hand",
    }
    token = (stage.kubelet.folder / "chat-credentials" / names.KEY_PLUGIN_TOKEN).read_text()
    url = f"http://{pod.address}:{names.PORT_ADMIN}{names.PATH_SPECULATION}"
    async with aiohttp.request(
        "PUT", url, json=foreign, headers={"Authorization": f"Bearer {token}"}
    ) as answer:
        assert answer.status == 200
    assert pod.engine.modes[-1] == "on"
    await eventually(lambda: pod.engine.modes[-1] == "off", 5, "the drift to be corrected")
    assert pod.engine.orders[-1].body["epoch"] > foreign["epoch"]
    await stage.summary("Off 1/1")


async def test_an_address_taken_by_another_pod_is_not_commanded(operator, stage):
    """O-G2: the call names its pod; the other one refuses and stays as it is."""
    (pod,) = await stage.up()
    engine = pod.engine
    applied = len(engine.applied)
    engine.adopt("uid-of-somebody-else")
    engine.set_load(*HIGH)
    control = await stage.has("SpeculationControl", "False", "WrongPod")
    assert pod.name in control["message"]
    assert len(engine.applied) == applied
    assert {order.status for order in engine.orders[applied:]} <= {412}
    seen = await stage.speculation()
    assert seen["summary"] != "Off 1/1"
    assert seen["off"] == 0
    engine.adopt(pod.uid)
    engine.set_load(*HIGH)
    await stage.summary("Off 1/1", within=15)


async def test_a_lost_answer_is_read_back_and_not_repeated(operator, stage):
    """O-G4: applied, and the connection broke before the answer."""
    (pod,) = await stage.up()
    engine = pod.engine
    engine.answers_to_lose = 1
    engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    await stage.has("SpeculationControl", "True")
    assert engine.answers_to_lose == 0
    assert engine.modes == ["on", "off"]
    # A PUT on a pooled connection that breaks is sent again by the HTTP client itself. It carries
    # the same epoch, so to the engine it is a renewal.
    assert (
        len({order.body["epoch"] for order in engine.orders if order.body["mode"] == "off"}) == 1
    )
    assert not await stage.events(reason="SpeculationSwitchFailed")


async def test_a_late_answer_is_found_by_read_back_and_not_repeated(operator, stage):
    """O-G5.4: carried out at once, answered after the limit."""
    (pod,) = await stage.up()
    engine = pod.engine
    engine.answer_after = 6.0
    engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    await throughout(lambda: engine.most_under_way == 1, 1)
    assert engine.modes == ["on", "off"]
    assert [order.body["mode"] for order in engine.orders].count("off") == 1


async def test_a_busy_engine_is_asked_again_with_patience(operator, stage):
    """O-G5.2-3: refusals are retried with back-off, one at a time, and are no flips."""
    (pod,) = await stage.up()
    engine = pod.engine
    refusing = Fault("admin", "status", status=503)
    before = pod.visits["admin"]
    engine.behave(replace(BUSY, faults=(refusing,)))
    control = await stage.has("SpeculationControl", "False")
    assert "503" in control["message"]
    await asyncio.sleep(3)
    # Each try is at most a connection and a read or an order; the first pauses are 0.5, 1, 2 s.
    assert pod.visits["admin"] - before < 20
    assert engine.modes == ["on"]
    engine.behave(BUSY)
    await stage.summary("Off 1/1", within=15)
    await stage.has("SpeculationControl", "True")
    assert engine.modes == ["on", "off"]


async def test_one_reset_is_no_fault_of_the_pod(operator, stage):
    """O-G4.3: three in a row are."""
    (pod,) = await stage.up()
    reset = Fault("serving", "reset")
    pod.engine.behave(replace(WELL, load=Load(*LOW), faults=(reset,)))
    fresh = await stage.has("MetricsFresh", "False", "EngineConnectionReset")
    assert pod.name in fresh["message"]
    pod.engine.behave(replace(WELL, load=Load(*LOW)))
    await stage.has("MetricsFresh", "True")


def mesh(engine):
    engine.meshed = True
    engine.behave(BUSY)


def reset(engine):
    engine.behave(replace(BUSY, faults=(Fault("admin", "reset"),)))


def silence(engine):
    engine.behave(replace(BUSY, faults=(Fault("admin", "hang"),)))


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (mesh, "ProxyUnavailable"),
        (reset, "EngineConnectionReset"),
        (silence, "EngineTimeout"),
    ],
)
async def test_a_blocked_admin_port_is_told_apart_from_load_that_is_known(
    operator, stage, block, reason
):
    """O-E6.1, 4: three reasons; the load goes on being read, and nothing is restarted."""
    (pod,) = await stage.up()
    made = await stage.deployment()
    block(pod.engine)
    control = await stage.has("SpeculationControl", "False", reason, within=20)
    assert pod.name in control["message"]
    fresh = await stage.has("MetricsFresh", "True")
    await stage.has("Ready", "True")
    reads = pod.visits["serving"]
    await eventually(lambda: pod.visits["serving"] > reads + 10, 10, "further readings")
    assert await stage.has("MetricsFresh", "True") == fresh
    assert pod.engine.modes == ["on"]
    after = await stage.deployment()
    assert after["metadata"]["generation"] == made["metadata"]["generation"]
    pod.engine.meshed = False
    pod.engine.behave(BUSY)
    await stage.summary("Off 1/1", within=15)
    await stage.has("SpeculationControl", "True")
    assert (await stage.kubelet.engine("chat")).uid == pod.uid


async def test_one_hung_engine_delays_nobody(operator, stage):
    """O-D7.3, O-G5.1: 20 SpecServes, one engine accepts and never answers."""
    usual = {"policy": {"samplePeriodMilliseconds": 500, "staleAfterSeconds": 5}}
    fleet = [f"m{number:02}" for number in range(20)]
    await asyncio.gather(*(stage.create(name, **usual) for name in fleet))
    await asyncio.gather(*(stage.kubelet.running(name, within=30) for name in fleet))
    await asyncio.gather(*(stage.summary("On 1/1", name, within=30) for name in fleet))
    pods = {name: stage.kubelet.of(name)[0] for name in fleet}
    hung, others = pods["m00"], [pods[name] for name in fleet[1:]]
    hang = (Fault("serving", "hang"), Fault("admin", "hang"))
    hung.engine.behave(replace(BUSY, faults=hang))
    await stage.has("MetricsFresh", "False", name="m00", within=15)
    at = {pod.name: pod.engine.set_load(*HIGH) for pod in others}
    await eventually(lambda: all(pod.engine.modes[-1] == "off" for pod in others), 5)
    assert max(pod.engine.applied[-1].at - at[pod.name] for pod in others) < 2.0
    assert hung.engine.modes == ["on"]


async def test_only_usable_pods_are_called_and_counted(operator, stage):
    """O-E4: leaving, evicted, finished, pending, loading and lost pods are not."""
    kubelet = stage.kubelet
    (usable,) = await stage.up()
    kubelet.loads = False
    template = usable.item

    async def beside(name, **spec):
        await stage.api.post(
            path("pods", stage.namespace),
            {
                "metadata": {
                    "name": name,
                    "labels": {
                        key: value
                        for key, value in template["metadata"]["labels"].items()
                        if key != "pod-template-hash"
                    },
                },
                "spec": {
                    **{k: v for k, v in template["spec"].items() if k != "nodeName"},
                    **spec,
                },
            },
        )

    for name in ("p-term", "p-evict", "p-done", "p-load", "p-lost"):
        await beside(name)
    await beside("p-pend", nodeSelector={"node": "nowhere"})
    await kubelet.running("chat", 6)
    pods = kubelet.pods
    await pods["p-term"].loaded()
    await stage.summary("On 2/2")
    kubelet.finishes = False
    await stage.api.delete(stage.at("pods", "p-term"))
    await pods["p-evict"].finish("Failed", "Evicted")
    await kubelet.write_status(
        pods["p-evict"], {"podIP": usable.address, "podIPs": [{"ip": usable.address}]}
    )
    await pods["p-done"].finish("Succeeded", "Completed")
    await stage.summary("On 1/1")
    still = [pods[name] for name in ("p-term", "p-load", "p-lost")]
    before = [copy.copy(pod.visits) for pod in still]
    called = usable.visits["serving"]
    await eventually(lambda: usable.visits["serving"] > called + 10, 10)
    assert [pod.visits for pod in still] == before
    assert not pods["p-load"].visits
    assert not pods["p-lost"].visits
    status = (await stage.get())["status"]
    assert (status["readyReplicas"], status["ready"]) == (1, "1/1")
    assert not operator.lines("ERROR")
    for name in ("p-evict", "p-done", "p-load", "p-lost", "p-pend"):
        await stage.api.delete(stage.at("pods", name), gracePeriodSeconds=0)


async def test_scaled_to_zero_and_back(operator, stage):
    """O-E7: 0 is honoured and no alarm; the first pod after it is told within two ticks."""
    policy = {"samplePeriodMilliseconds": 500, "staleAfterSeconds": 5}
    await stage.up(policy=policy)
    noise = len(operator.lines("WARNING", "ERROR"))
    await stage.edit(replicas=0)
    ready = await stage.has("Ready", "True", "ScaledToZero")
    assert ready["message"]
    fresh = await stage.has("MetricsFresh", "Unknown", "NoPods")
    assert fresh["message"] == "no pod is ready"
    assert (await stage.deployment())["spec"]["replicas"] == 0
    assert (await stage.get())["spec"]["replicas"] == 0
    assert (await stage.speculation())["summary"] == "-"
    await asyncio.sleep(2)
    assert len(operator.lines("WARNING", "ERROR")) == noise
    flips = await operator.value("specserve_speculation_switches_total")
    stage.kubelet.begin = lambda engine: engine.set_load(*HIGH)
    await stage.edit(replicas=1)
    pod = await stage.kubelet.engine("chat")
    await eventually(lambda: pod.engine.orders, 5)
    assert pod.engine.modes == ["off"]
    assert pod.engine.applied[0].at - pod.ready_at < 1.2
    await stage.summary("Off 1/1")
    assert await operator.value("specserve_speculation_switches_total") <= flips + 1
    assert time.monotonic() > pod.ready_at
