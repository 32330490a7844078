"""What keeps a SpecServe from being ready is said, and heals without an edit where it can."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from specserve import names
from tests.integration.api import condition, eventually, path
from tests.integration.operator_process import USER
from tests.integration.stage import HIGH, LOW, make_node
from tests.unit.test_last_words import DRAFT, MISFIT

TOKEN = "hf_example_token_value"


async def make_secret(stage, name, **values):
    await stage.api.post(
        path("secrets", stage.namespace), {"metadata": {"name": name}, "stringData": values}
    )


async def test_a_missing_hub_token_is_named_and_heals_when_it_comes(operator, stage):
    """O-A4: secret or key missing; created later; its value shows nowhere."""
    await make_secret(stage, "wrong-key", other="x")
    fetch = {"initContainers": [{"name": "fetch", "image": "fetcher:1"}]}
    for name, secret in (("late", "hf"), ("keyless", "wrong-key")):
        await stage.create(
            name,
            model={"tokenSecretRef": {"name": secret, "key": "token"}},
            pod=fetch,
        )
    late = await stage.has("Ready", "False", "SecretMissing", name="late")
    assert "Secret hf is missing (spec.model.tokenSecretRef)" in late["message"]
    keyless = await stage.has("Ready", "False", "SecretMissing", name="keyless")
    assert "Secret wrong-key has no key token" in keyless["message"]
    await stage.has("Stalled", "True", "SecretMissing", name="late")

    def waits() -> Any:
        return next((p for p in stage.kubelet.pods.values() if p.instance == "late"), None)

    pod = await eventually(waits, 10)
    for container in [*pod.item["spec"]["initContainers"], *pod.item["spec"]["containers"]]:
        variable = next(v for v in container["env"] if v["name"] == names.ENV_HUB_TOKEN)
        assert variable["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}
    await make_secret(stage, "hf", token=TOKEN)
    await stage.api.merge(stage.at("secrets", "wrong-key"), {"stringData": {"token": TOKEN}})
    await stage.has("Ready", "True", name="late", within=25)
    await stage.has("Ready", "True", name="keyless", within=25)
    asked = [
        event
        for event in stage.cluster.audit_events(USER)
        if event["requestURI"].endswith(f"/{stage.namespace}/secrets/hf")
    ]
    assert len(asked) < 6, "a missing Secret is no reason for a hot loop"
    shown = json.dumps(
        [
            await stage.get("late"),
            await stage.api.items("events", stage.namespace),
            await stage.api.items("deployments", stage.namespace),
            [pod.item for pod in stage.kubelet.pods.values()],
            operator.lines(),
        ]
    )
    assert TOKEN not in shown
    assert base64.b64encode(TOKEN.encode()).decode() not in shown


async def test_a_crash_loop_takes_readiness_back_and_carries_the_last_words(operator, stage):
    """O-A4.4, O-B4.1: the termination message is in the condition; recovery needs no edit."""
    (pod,) = await stage.up()
    words = "loading\nRuntimeError: Sizes of tensors must match"
    await pod.crash(words)
    ready = await stage.has("Ready", "False", "CrashLooping")
    assert "Sizes of tensors must match" in ready["message"]
    assert pod.name in ready["message"]
    assert (await stage.event("CrashLooping"))["type"] == "Warning"
    await pod.report(ready=False)
    await stage.has("Ready", "False", "Restarted")
    await stage.event("Restarted")
    await pod.crash(words)
    await stage.has("Ready", "False", "CrashLooping")
    # As SGLang's first process ends, which is the first process of its container.
    await pod.crash(f"{DRAFT}{MISFIT}", exit_code=0, reason="Completed")
    ready = await stage.has("Ready", "False", "DraftRejected")
    assert MISFIT in ready["message"]
    await stage.event("DraftRejected")
    # It came before, and its second end was no news.
    assert len(await stage.events(reason="CrashLooping")) == 1
    await pod.run()
    await stage.ready()
    await stage.summary("On 1/1")


async def test_an_image_that_cannot_be_pulled_is_named_and_heals(operator, stage):
    stage.kubelet.pulls = False
    await stage.create()
    ready = await stage.has("Ready", "False", "ImagePullFailed")
    assert "engine-image:1" in ready["message"]
    why = (await stage.get())["status"]["why"]
    assert why.startswith("ImagePullFailed: 0/1 pods ready; pod ")
    stage.kubelet.pulls = True
    await stage.kubelet.resync()
    await stage.ready()


@pytest.mark.parametrize("name", ["specserve", "sglang"])
async def test_a_specserve_named_like_the_product_starts(operator, stage, name):
    """O-A5: no Service of the namespace becomes a variable of the engine."""
    (pod,) = await stage.up(name)
    assert pod.item["spec"]["enableServiceLinks"] is False


async def test_a_threshold_above_the_engines_cap_is_called_unreachable(operator, stage):
    """O-B2: running requests are capped at 48, the threshold is at 64."""
    bounds = {"offAbove": 64, "onBelow": 20}
    (pod,) = await stage.up(
        policy={"signal": "Running", "threshold": bounds}, engine={"maxRunningRequests": 48}
    )
    pod.engine.set_load(48, 212)
    reach = await stage.has("ThresholdReachable", "False", "ThresholdUnreachable")
    assert "at most 48" in reach["message"]
    assert "offAbove 64" in reach["message"]
    assert pod.engine.modes == ["on"]
    await stage.event("ThresholdUnreachable")
    await stage.edit(policy={"signal": "InFlight"})
    await stage.has("ThresholdReachable", "True", "WithinReach")
    await stage.summary("Off 1/1")


async def test_a_loading_engine_is_progress_and_is_not_called(operator, stage):
    """O-E1.3: long loading is no failure: no restart, reason Loading, then ready."""
    stage.kubelet.loads = False
    await stage.create()
    pod = await stage.kubelet.engine("chat")
    await stage.has("Ready", "False", "Loading")
    await stage.has("Reconciling", "True", "RollingOut")
    await stage.has("Stalled", "False")
    assert pod.visits["serving"] == pod.visits["admin"] == 0
    deployment = (await stage.deployment())["spec"]
    probe = deployment["template"]["spec"]["containers"][0]["startupProbe"]
    budget = probe["periodSeconds"] * probe["failureThreshold"]
    assert deployment["progressDeadlineSeconds"] > budget >= 900
    assert not await stage.events(reason="Loading")
    await pod.loaded()
    await stage.ready()


async def test_an_unschedulable_pod_is_shown_with_the_schedulers_words(operator, stage):
    """O-A3.3: shown with the scheduler's message; heals when a node comes."""
    node = f"late-{stage.namespace}"
    await stage.create(pod={"nodeSelector": {"node": node}})
    ready = await stage.has("Ready", "False", "Unschedulable")
    assert "didn't match Pod's node affinity/selector" in ready["message"]
    make_node(stage.cluster, node, gpus=1)
    try:
        await stage.kubelet.running("chat")
        await stage.ready()
    finally:
        await stage.api.delete(f"/api/v1/nodes/{node}")


@pytest.fixture
async def three_gpus(stage):
    """Spec of a SpecServe that fills a node of its own."""
    node = f"three-{stage.namespace}"
    make_node(stage.cluster, node, gpus=3)
    yield {
        "replicas": 3,
        "engine": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        "pod": {"nodeSelector": {"node": node}},
    }
    await stage.api.delete(f"/api/v1/nodes/{node}")


def images(pods):
    return {pod.item["spec"]["containers"][0]["image"] for pod in pods}


async def test_a_rollout_ends_on_a_full_node_and_keeps_two_of_three(operator, stage, three_gpus):
    """O-E2.1-3: no spare GPU; a pod on its way out still holds one, which is no failure."""
    await stage.up(**three_gpus)
    fewest = [3]

    async def rolled() -> bool:
        pods = await stage.api.items("pods", stage.namespace)
        ready = [
            pod
            for pod in pods
            if not pod["metadata"].get("deletionTimestamp")
            and condition(pod, "Ready").get("status") == "True"
        ]
        fewest[0] = min(fewest[0], len(ready))
        seen = condition(await stage.get(), "Ready")
        assert seen["reason"] != "Unschedulable", seen
        engines = stage.kubelet.of("chat")
        return len(engines) == 3 and images(engines) == {"engine-image:2"}

    stage.kubelet.finishes = False
    await stage.edit(engine={"image": "engine-image:2"})
    await stage.has("Reconciling", "True", "RollingOut")

    async def waits() -> bool:
        pods = await stage.api.items("pods", stage.namespace)
        return any(condition(pod, "PodScheduled").get("status") == "False" for pod in pods)

    await eventually(waits, 10, "a new pod to wait for the old one's GPU")
    waiting = await stage.has("Ready", "False")
    assert waiting["reason"] != "Unschedulable"
    stage.kubelet.finishes = True
    await stage.kubelet.resync()
    await eventually(rolled, 30, "the rollout to end")
    await stage.ready()
    assert fewest[0] >= 2


async def test_a_surge_that_finds_no_room_is_called_blocked(operator, stage, three_gpus):
    """O-E2.4: the user's surge is respected; if it blocks, the status says so and why."""
    pods = await stage.up(**three_gpus, rollout={"maxSurge": 1, "maxUnavailable": 0})
    await stage.edit(engine={"image": "engine-image:2"})
    blocked = await stage.has("Reconciling", "True", "RolloutBlocked")
    assert "Insufficient nvidia.com/gpu" in blocked["message"]
    assert "maxSurge 0" in blocked["message"]
    await stage.has("Ready", "True")
    for pod in pods:
        pod.engine.set_load(*HIGH)
    await stage.summary("Off 3/3")
    await stage.edit(rollout={"maxSurge": 0, "maxUnavailable": 1})

    def rolled() -> bool:
        engines = stage.kubelet.of("chat")
        return len(engines) == 3 and images(engines) == {"engine-image:2"}

    await eventually(rolled, 30, "the rollout to end")
    await stage.ready()


async def test_a_refused_deployment_keeps_the_last_pods_and_says_the_servers_words(
    operator, stage
):
    (pod,) = await stage.up()
    await stage.edit(pod={"volumeMounts": [{"name": "nowhere", "mountPath": "/data"}]})
    ready = await stage.has("Ready", "False", "SpecRejected")
    assert "volumeMounts" in ready["message"]
    assert "nowhere" in ready["message"]
    assert "go on serving" in ready["message"]
    await stage.has("Stalled", "True", "SpecRejected")
    await stage.has("Available", "True")
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    pod.engine.set_load(*LOW)
    await stage.edit(pod={"volumeMounts": None})
    await stage.ready()
    assert (await stage.kubelet.engine("chat")).uid == pod.uid


async def test_a_deployment_refused_from_the_start_heals_on_edit(operator, stage):
    await stage.create(pod={"volumeMounts": [{"name": "nowhere", "mountPath": "/data"}]})
    await stage.has("Ready", "False", "SpecRejected")
    await stage.edit(pod={"volumes": [{"name": "nowhere", "emptyDir": {}}]})
    await stage.kubelet.running("chat")
    await stage.ready()
