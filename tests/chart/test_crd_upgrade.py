"""O-F1: the CRD goes up and down with the chart, by plain helm; live SpecServes live on."""

from __future__ import annotations

import contextlib

import pytest
import yaml

from specserve import names
from specserve.settings import PREFIX
from tests.chart import rendering
from tests.chart.release import Release
from tests.chart.rendering import NAMESPACE
from tests.cluster.errors import CommandError
from tests.cluster.light import light_cluster as start_light_cluster
from tests.integration.api import Api, eventually
from tests.integration.kubelet import Kubelet
from tests.integration.stage import HIGH, LOW, Stage, make_node

TEAM = "team-a"
ADDED, REMOVED = "maxFlipsPerHour", "legacyBias"


@pytest.fixture
def older(tmp_path):
    """The chart as it would have been: without a field of today, with one that went."""

    def edit(spec):
        policy = spec["properties"]["policy"]
        del policy["properties"][ADDED]
        del policy["default"][ADDED]
        policy["properties"][REMOVED] = {"type": "integer"}

    return rendering.edit_schema(rendering.copy(tmp_path, version="0.0.9"), edit)


@pytest.fixture
def cluster():
    with start_light_cluster() as started:
        make_node(started, "gpu-node", gpus=10)
        for name in (NAMESPACE, TEAM):
            started.kubectl("create", "namespace", name)
        yield started


@pytest.fixture
async def stage(cluster, tmp_path):
    async with Api(cluster) as api, Kubelet(api, TEAM, tmp_path) as kubelet:
        yield Stage(api, cluster, TEAM, kubelet)


@pytest.fixture
def release(cluster):
    with contextlib.ExitStack() as stack:
        # Else it compares once in half a minute.
        often = [{"name": f"{PREFIX}COMPARE_SECONDS", "value": "1"}]
        yield Release(cluster, stack, extraEnv=often)


async def differs(operator, lacking, unknown):
    async def said():
        seen = [
            await operator.value("specserve_schema_differences", kind=kind)
            for kind in ("lacking", "unknown")
        ]
        assert seen == [lacking, unknown]
        return True

    # The server publishes a schema some seconds after it took it.
    await eventually(said, 30, "the comparison of the schemas")


def notes(cluster):
    """What was said of the schema, oldest first."""
    found = [
        event
        for event in cluster.get("events", "-n", NAMESPACE)["items"]
        if event["reason"].startswith("Schema")
    ]
    return [
        (event["reason"], event["message"])
        for event in sorted(found, key=lambda e: e["eventTime"])
    ]


def fill(stage, **policy):
    """Change the policy as users do, with a client that knows the schema."""
    text = yaml.safe_dump({"spec": {"policy": policy}})
    stage.kubectl("patch", names.PLURAL, "chat", "--type=merge", "--patch", text)


async def flips(stage, pod):
    """The engine still is the one it was, and is steered."""
    before = len(pod.engine.modes)
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    pod.engine.set_load(*LOW)
    await stage.summary("On 1/1")
    assert pod.engine.modes[before:] == ["off", "on"]
    assert (await stage.kubelet.engine("chat")).uid == pod.uid


@pytest.mark.timeout(300)
async def test_the_crd_is_upgraded_and_rolled_back_under_live_specserves(
    cluster, stage, release, older
):
    release.helm("install", chart=older)
    process = release.start()
    await process.leads()
    await differs(process, 1, 1)
    (pod,) = await stage.up(policy={REMOVED: 3, ADDED: None})
    made = await stage.get()
    with pytest.raises(CommandError, match="unknown field"):
        cluster.apply({**plain(made), "spec": {**made["spec"], "policy": {ADDED: 7}}})
    await flips(stage, pod)

    release.helm("upgrade", "--reuse-values")
    await differs(process, 0, 0)
    kept = await stage.get()
    assert kept["metadata"]["uid"] == made["metadata"]["uid"]
    fill(stage, **{ADDED: 3599})
    assert (await stage.get())["spec"]["policy"][ADDED] == 3599
    assert REMOVED not in (await stage.get())["spec"]["policy"]
    await stage.ready()
    await flips(stage, pod)

    release.helm("rollback", "1", chart=None)
    await differs(process, 1, 1)
    read = await stage.get()
    assert read["metadata"]["uid"] == made["metadata"]["uid"]
    fill(stage, dwellOnSeconds=0, **{REMOVED: 4})
    written = (await stage.get())["spec"]["policy"]
    assert written[REMOVED] == 4
    assert ADDED not in written
    await stage.ready()
    await flips(stage, pod)

    said = notes(cluster)
    assert [reason for reason, _ in said] == ["SchemaDiffers", "SchemaMatches", "SchemaDiffers"]
    assert f"it lacks spec.policy.{ADDED}" in said[0][1]
    assert f"does not know spec.policy.{REMOVED}" in said[0][1]
    assert process.running
    assert await process.value("specserve_reconcile_total", result="bug") == 0


def plain(item):
    meta = item["metadata"]
    return {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
    }
