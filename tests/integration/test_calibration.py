"""A pod of a SpecServe is calibrated: taken out of its Service, measured by a Job, put back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specserve import names
from specserve.policy.curve import Curve
from specserve_sim.behaviour import WELL
from specserve_sim.profile import load_profile
from tests.integration.api import eventually

SWEEP = {"sizes": [1, 4], "repeats": 2, "promptTokens": 16, "maxNewTokens": 64}
POLICY = {"strategy": "BreakEven", "breakEven": {"calibration": SWEEP}}
#: A successor leads within seconds, not within twelve.
IMPATIENT = {"lease_seconds": "3", "renew_seconds": "2", "retry_seconds": "0.5"}
MODEL, DRAFT = "hf://example-org/model-a", "hf://example-org/draft-a"


async def ask(stage, request):
    """Ask for a calibration, or for none any more."""
    await stage.api.merge(
        stage.at(names.PLURAL, "chat"),
        {"metadata": {"annotations": {names.ANNOTATION_CALIBRATE: request}}},
    )


async def aside(stage):
    """Names of the pods that are out of the Service."""
    return {
        pod["metadata"]["name"]
        for pod in await stage.api.items("pods", stage.namespace)
        if pod["metadata"]["labels"].get(names.LABEL_PART_OF) == names.ASIDE
    }


async def taken(stage):
    """Wait until a pod is aside; returns it as the kubelet plays it."""
    (name,) = await eventually(lambda: aside(stage), 10, "a pod to be taken aside")
    return stage.kubelet.pods[name]


async def serve(stage, *pods):
    """Wait until the Service selects these pods; no endpoint can have a loopback address."""
    service = await stage.api.get(stage.at("services", "chat"))

    async def so():
        selected = {
            one["metadata"]["name"]
            for one in await stage.api.items("pods", stage.namespace)
            if service["spec"]["selector"].items() <= one["metadata"]["labels"].items()
        }
        assert selected == {one.name for one in pods}
        return True

    await eventually(so, 15, "the Service to select these pods")


@pytest.mark.timeout(180)
async def test_a_pod_is_measured_and_the_policy_uses_the_curve(start_operator, stage):
    """Through another number of pods and the death of the operator in the middle of it."""
    stage.kubelet.tune = lambda config: replace(config, time_scale=20.0)
    operator = start_operator(**IMPATIENT)
    await operator.leads()
    pods = await stage.up(replicas=2, policy=POLICY)
    await stage.has("Calibrated", "Unknown", "NotAskedFor")
    await stage.has("CurveKnown", "False", "NoCurve")
    # A request that is under way when the pod is taken aside.
    first = min(pods, key=lambda pod: pod.name)
    first.engine.set_load(1, 0)
    await ask(stage, "first")
    pod = await taken(stage)
    (other,) = (one for one in pods if one is not pod)
    assert pod is first
    await stage.has("Calibrated", "Unknown", "Draining")
    await serve(stage, other)
    await stage.summary("On 1/1")
    await stage.has("Ready", "True")
    assert await stage.api.items("jobs", stage.namespace) == []
    pod.engine.behave(WELL)
    worker = await stage.kubelet.worker()
    # As an autoscaler does: what is under way goes on.
    await stage.edit(replicas=3)
    pods = await stage.kubelet.running("chat", 3)
    operator.kill()
    operator = start_operator(**IMPATIENT)
    await operator.leads()
    seen = await stage.has("Calibrated", "True", "Measured", within=30)
    assert "2 cells, the least certain within" in seen["message"], worker.said
    await serve(stage, *pods)
    assert stage.kubelet.of("chat") == pods  # nobody was replaced

    kept = await stage.api.get(stage.at("configmaps", "chat-curve"))
    assert kept["metadata"]["annotations"][names.ANNOTATION_CALIBRATED] == "first"
    curve = Curve.from_json(kept["data"]["curve.json"])
    runs_on = load_profile("h200-a")
    for point in curve.document.cells:
        expected = runs_on.r(point.batch, 3) / runs_on.r(point.batch, 0)
        assert point.ratio == pytest.approx(expected, rel=0.05)
    origin = curve.provenance
    assert (origin.model, origin.draft, origin.host) == (MODEL, DRAFT, pod.name)
    assert origin.gpu == "asked for: node=gpu-node"
    await stage.has("CurveKnown", "True")
    await stage.ready()

    async def steered_again():
        assert pod.engine.orders[-1].body["holder"].startswith("specserve-system/")
        return True

    await eventually(steered_again, 10, "the operator to steer the pod again")
    # What was dealt with is done once, also by a successor.
    assert len(await stage.api.items("jobs", stage.namespace)) == 1

    await stage.edit(model={"source": "hf://example-org/model-b"})
    seen = await stage.has("Calibrated", "False", "Stale")
    assert f"with model {MODEL}, and here it is hf://example-org/model-b" in seen["message"]
    await stage.event("Stale")


@pytest.mark.timeout(120)
async def test_whatever_ends_a_calibration_the_pod_returns(operator, stage):
    (pod,) = await stage.up(policy=POLICY)
    await ask(stage, "one")
    await stage.has("Calibrated", "False", "NotEnoughPods")
    await stage.event("NotEnoughPods")
    await stage.edit(policy={"breakEven": {"calibration": {"lastPod": "Take"}}})
    assert await taken(stage) is pod
    await stage.has("Available", "False", "Running")
    # Taken back while it drains.
    await ask(stage, None)
    await serve(stage, pod)
    await stage.ready()
    # The engine ends while it is measured: the worker says so in its last words.
    await ask(stage, "two")
    worker = await stage.kubelet.worker()
    pod.engine.meshed = True
    seen = await stage.has("Calibrated", "False", "Failed", within=20)
    assert worker.name in seen["message"], worker.said
    assert "no SpecServe plugin answers" in seen["message"]
    pod.engine.meshed = False
    await serve(stage, pod)
    await stage.ready()
    assert not (await stage.api.get(stage.at("configmaps", "chat-curve")))["data"].get(
        "curve.json"
    )
