"""Credentials: made once, rotated when asked, made again when lost; names are not taken."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace

from specserve import names
from tests.integration.api import eventually, path
from tests.integration.stage import HIGH, LOW

SECRET = "chat-credentials"


async def secret(stage):
    return await stage.api.find(stage.at("secrets", SECRET))


async def rotate(stage, value):
    annotations = {"annotations": {names.ANNOTATION_ROTATE: value}}
    await stage.api.merge(stage.at(names.PLURAL, "chat"), {"metadata": annotations})


async def test_credentials_are_made_once(operator, stage):
    await stage.up()
    first = await secret(stage)
    await stage.edit(replicas=2, policy={"leaseSeconds": 30})
    await stage.kubelet.running("chat", 2)
    await stage.ready()
    again = await secret(stage)
    assert again["data"] == first["data"]
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_rotation_keeps_engines_controllable_all_the_way(operator, stage):
    (pod,) = await stage.up()
    old = await secret(stage)
    stage.kubelet.mounts = False
    await rotate(stage, "monday")

    async def rotated():
        found = await secret(stage)
        return found if found["data"] != old["data"] else None

    new = await eventually(rotated, 10)
    assert new["data"]["plugin-token-previous"] == old["data"]["plugin-token"]
    assert new["data"]["plugin-token"] != old["data"]["plugin-token"]
    assert new["data"]["admin-key"] == old["data"]["admin-key"]
    assert new["metadata"]["uid"] == old["metadata"]["uid"]
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    assert pod.engine.strangers > 0, "the new token was tried first"
    stage.kubelet.mounts = True
    await stage.kubelet.resync()
    pod.engine.set_load(*LOW)
    await stage.summary("On 1/1")
    await stage.has("SpeculationControl", "True")
    await stage.event("CredentialsRotated")
    await rotate(stage, "monday")
    await stage.edit(policy={"leaseSeconds": 30})
    await stage.ready()
    assert (await secret(stage))["data"] == new["data"]
    assert stage.kubelet.of("chat")[0].uid == pod.uid
    tokens = {new["data"][key] for key in ("plugin-token", "admin-key", "plugin-token-previous")}
    log = "\n".join(operator.lines())
    assert not [t for t in tokens if base64.b64decode(t).decode() in log]


async def test_engines_with_the_key_before_are_steered_until_a_restart_suits(operator, stage):
    clients = {"metadata": {"name": "clients"}, "stringData": {"key": "renewed-key"}}
    await stage.api.post(path("secrets", stage.namespace), clients)
    stage.kubelet.tune = lambda config: replace(config, api_key="earlier-key")
    (pod,) = await stage.up(engine={"apiKeySecretRef": {"name": "clients", "key": "key"}})
    healthy = await stage.has("EnginesHealthy", "False", "ApiKeyRefused")
    assert f"{pod.name}: refuses the API key" in healthy["message"]
    assert (await stage.event("ApiKeyRefused"))["type"] == "Warning"
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    await stage.has("MetricsFresh", "True")
    assert stage.kubelet.of("chat")[0].uid == pod.uid
    stage.kubelet.tune = lambda config: config
    stage.kubectl("rollout", "restart", "deployment", "chat")
    await stage.has("EnginesHealthy", "True")
    (after,) = await stage.kubelet.running("chat")
    assert after.uid != pod.uid
    assert after.engine.config.api_key == "renewed-key"
    shown = json.dumps(
        [
            await stage.get(),
            await stage.api.items("events", stage.namespace),
            await stage.deployment(),
            operator.lines(),
        ]
    )
    assert not [key for key in ("renewed-key", "earlier-key") if key in shown]


async def test_a_deleted_secret_is_made_again(operator, stage):
    (pod,) = await stage.up()
    old = await secret(stage)
    await stage.api.delete(stage.at("secrets", SECRET))

    async def remade():
        found = await secret(stage)
        return found and found["metadata"]["uid"] != old["metadata"]["uid"]

    await eventually(remade, 10)
    await stage.ready()
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1", within=15)
    await stage.has("SpeculationControl", "True", within=15)


async def test_objects_of_others_are_not_taken_over(operator, stage):
    pod = {
        "metadata": {"labels": {"app": "x"}},
        "spec": {"containers": [{"name": "x", "image": "x"}]},
    }
    foreign = {
        "one": (
            "deployments",
            "one",
            {"spec": {"replicas": 0, "selector": {"matchLabels": {"app": "x"}}, "template": pod}},
        ),
        "two": ("services", "two", {"spec": {"ports": [{"port": 80}]}}),
        "three": ("secrets", "three-credentials", {"stringData": {"plugin-token": "theirs"}}),
        "four": ("serviceaccounts", "four", {}),
    }
    made = {}
    for owner, (kind, name, body) in foreign.items():
        made[owner] = await stage.api.post(
            path(kind, stage.namespace), {"metadata": {"name": name}, **body}
        )
        await stage.create(owner)
    for owner, (kind, name, _) in foreign.items():
        ready = await stage.has("Ready", "False", "NameTaken", name=owner)
        assert name in ready["message"]
        now = await stage.api.get(stage.at(kind, name))
        assert now["metadata"]["uid"] == made[owner]["metadata"]["uid"]
        assert now["metadata"].get("labels") == made[owner]["metadata"].get("labels")
        assert now.get("data") == made[owner].get("data")
    await asyncio.gather(
        *(stage.api.delete(stage.at(kind, name)) for kind, name, _ in foreign.values())
    )
    for owner in foreign:
        await stage.kubelet.running(owner, within=20)
        await stage.ready(owner)
