"""The installed role is enough, and no more than enough."""

from __future__ import annotations

import yaml

from specserve import names
from specserve.workload.objects import Owner, owner_reference
from tests.integration.api import eventually, path
from tests.integration.operator_process import RIGHTS, USER

SPARE = {
    # Updates of the subresource are no requests: admission asks for the right when an owner
    # reference with blockOwnerDeletion is written, on clusters with that admission plugin.
    ("specserve.dev", "specserves/finalizers", "update"),
}


def granted():
    """What the role allows, as group, resource and verb."""
    return {
        (group, resource, verb)
        for document in yaml.safe_load_all(RIGHTS.read_text())
        for rule in document.get("rules", ())
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(events):
    """What the operator was allowed to do, as group, resource and verb."""
    found = set()
    for event in events:
        reference = event["objectRef"]
        resource = reference["resource"]
        if "subresource" in reference:
            resource += f"/{reference['subresource']}"
        found.add((reference.get("apiGroup", ""), resource, event["verb"]))
        if event["verb"] == "patch" and event["responseStatus"]["code"] == 201:
            # Server-side apply creates by PATCH and needs the right to create.
            found.add((reference.get("apiGroup", ""), resource, "create"))
    return found


def own(cluster):
    return [event for event in cluster.audit_events(USER) if "objectRef" in event]


def uid(item):
    return item["metadata"]["uid"]


async def test_every_right_is_used(start_operator, stage):
    operator = start_operator(watch_namespaces=stage.namespace)
    await operator.leads()
    made = await stage.create()
    await stage.ready()
    assert await operator.stop() == 0
    # An object that is ours by owner and labels, under a name that no longer is asked for: what
    # an operator of another version may leave.
    left = {
        "metadata": {
            "name": "left",
            "labels": names.labels("chat"),
            "ownerReferences": [owner_reference(Owner("chat", stage.namespace, uid(made)))],
        }
    }
    await stage.api.post(
        path("services", stage.namespace), {**left, "spec": {"ports": [{"port": 80}]}}
    )
    deployment = await stage.deployment()
    await stage.api.post(
        path("deployments", stage.namespace),
        {**left, "spec": {**deployment["spec"], "replicas": 0}},
    )
    operator = start_operator()
    await operator.leads()
    # One is calibrated, which takes a while; the edits below replace the pod that is measured.
    stage.kubelet.works = False
    calibrate = {"metadata": {"annotations": {names.ANNOTATION_CALIBRATE: "1"}}}
    await stage.edit(policy={"breakEven": {"calibration": {"lastPod": "Take"}}})
    await stage.api.merge(stage.at(names.PLURAL, "chat"), calibrate)
    await eventually(
        lambda: stage.api.items("jobs", stage.namespace), 15, "the Job of a calibration"
    )
    await stage.api.post(
        path("secrets", stage.namespace),
        {"metadata": {"name": "hub"}, "stringData": {"token": "x"}},
    )
    await stage.edit(replicas=2, model={"tokenSecretRef": {"name": "hub", "key": "token"}})
    await stage.api.merge(
        stage.at(names.PLURAL, "chat"),
        {"metadata": {"annotations": {names.ANNOTATION_ROTATE: "1"}}},
    )
    await stage.event("CredentialsRotated")
    await stage.edit(pod={"serviceAccountName": "default"})

    async def pruned() -> bool:
        gone = (("serviceaccounts", "chat"), ("services", "left"), ("deployments", "left"))
        return not any([await stage.api.find(stage.at(*one)) for one in gone])

    await eventually(pruned, 15, "what is not asked for to be pruned")
    await stage.has("Calibrated", "False", "Failed")
    await stage.kubelet.running("chat", 2)
    await stage.ready()
    unused = granted() - used(own(stage.cluster)) - SPARE
    assert unused == set()
