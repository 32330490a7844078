"""O-F2.3: an object of ours whose immutable field is another's value is said, and not fought."""

from __future__ import annotations

import asyncio
import copy

from specserve import names
from tests.integration.api import eventually, path
from tests.integration.operator_process import USER
from tests.integration.stage import HIGH, LOW


def refusals(stage):
    """Writes to the Deployment that the API server refused."""
    return [
        event
        for event in stage.cluster.audit_events(USER)
        if event["requestURI"].split("?")[0] == stage.at("deployments", "chat")
        and event["verb"] == "patch"
        and event["responseStatus"]["code"] == 422
    ]


async def with_another_selector(stage):
    """Put a Deployment with one selector label more in place of ours, around the same pods."""
    ours = await stage.deployment()
    other = copy.deepcopy(ours)
    for labels in (
        other["spec"]["selector"]["matchLabels"],
        other["spec"]["template"]["metadata"]["labels"],
    ):
        labels["version"] = "old"
    meta = ours["metadata"]
    other["metadata"] = {key: meta[key] for key in ("name", "labels", "ownerReferences")}
    del other["status"]
    await stage.api.delete(stage.at("deployments", "chat"), propagationPolicy="Background")

    async def gone():
        return not await stage.api.items("pods", stage.namespace)

    await eventually(gone, 20, "the old pods to go")
    return await stage.api.post(path("deployments", stage.namespace), other)


async def test_a_selector_of_old_is_said_and_its_pods_are_steered_on(start_operator, stage):
    first = start_operator()
    await first.leads()
    await stage.up()
    assert await first.stop() == 0
    old = await with_another_selector(stage)
    pod = await stage.kubelet.engine("chat")

    second = start_operator()
    await second.leads()
    await stage.ready()
    assert not refusals(stage)
    await stage.edit(pod={"annotations": {"example.com/note": "new"}})
    ready = await stage.has("Ready", "False", "SpecRejected")
    assert "Deployment chat" in ready["message"]
    assert "immutable" in ready["message"]
    await stage.has("Available", "True")
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    pod.engine.set_load(*LOW)
    await stage.summary("On 1/1")
    tried = len(refusals(stage))
    await asyncio.sleep(10)
    assert len(refusals(stage)) - tried <= 1
    kept = await stage.deployment()
    assert kept["metadata"]["uid"] == old["metadata"]["uid"]

    # The documented way out.
    await stage.api.delete(stage.at("deployments", "chat"), propagationPolicy="Background")
    await stage.ready(within=30)
    assert (await stage.kubelet.engine("chat")).uid != pod.uid
    selector = (await stage.deployment())["spec"]["selector"]["matchLabels"]
    assert selector == names.selector("chat")
