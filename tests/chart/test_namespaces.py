"""O-F5: an installation for some namespaces, with the operator running by just those rights."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from specserve import names
from specserve.settings import PREFIX
from tests.chart.generate import ROOT
from tests.chart.release import Release
from tests.chart.rendering import NAMESPACE
from tests.cluster.light import light_cluster as start_light_cluster
from tests.integration.api import Api, eventually, path
from tests.integration.kubelet import Kubelet
from tests.integration.stage import HIGH, LOW, Stage, make_node

USER = f"system:serviceaccount:{NAMESPACE}:specserve"
FIRST, SECOND, LATE = "team-a", "team-b", "team-late"
#: Else the operator asks for what it serves once a minute.
LOOK_SECONDS = 5
VALUES = {
    "watchNamespaces": [FIRST, SECOND, LATE],
    "rbac": {"clusterScoped": False},
    "crds": {"enabled": False},
    "extraEnv": [{"name": f"{PREFIX}LOOK_SECONDS", "value": str(LOOK_SECONDS)}],
}
ROLE = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SECOND}/roles/specserve-engines"
NOTICED = 15.0


@pytest.fixture
def cluster():
    with start_light_cluster(crds=[ROOT / "crds"], audit=True) as started:
        make_node(started, "gpu-node", gpus=100)
        for name in (NAMESPACE, FIRST, SECOND):
            started.kubectl("create", "namespace", name)
        yield started


@pytest.fixture
async def stages(cluster, tmp_path):
    """One for each of the two teams."""
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(Api(cluster))
        found = []
        for team in (FIRST, SECOND):
            folder = tmp_path / team
            folder.mkdir()
            kubelet = await stack.enter_async_context(Kubelet(api, team, folder))
            found.append(Stage(api, cluster, team, kubelet))
        yield found


@pytest.fixture
def release(cluster):
    with contextlib.ExitStack() as stack:
        yield Release(cluster, stack, **VALUES)


async def serves(operator, count, within=30.0):
    async def so():
        seen = [await operator.value("specserve_namespaces", state=s) for s in STATES]
        assert seen == [count, 3 - count]
        return True

    await eventually(so, within, f"{count} namespaces to be served")


STATES = ("served", "waiting")


async def said(stage, reason, *words):
    async def so():
        found = [e for e in await stage.api.items("events", NAMESPACE) if e["reason"] == reason]
        assert any(all(word in e["message"] for word in words) for e in found), found
        return True

    await eventually(so, 15, reason)


def lists(cluster, namespace):
    """How often anything was listed in a namespace: anew, whenever a loop is rebuilt."""
    return [
        e["requestURI"]
        for e in cluster.audit_events(USER)
        if e["verb"] == "list"
        and e["objectRef"].get("namespace") == namespace
        and not e["requestURI"].endswith("specserves?limit=1")
    ]


@contextlib.asynccontextmanager
async def undisturbed(stage, pod):
    """A namespace is steered all through the block, and its loops are not rebuilt."""
    before = lists(stage.cluster, stage.namespace)

    async def flip_on_and_off():
        while True:
            pod.engine.set_load(*HIGH)
            await stage.summary("Off 1/1")
            pod.engine.set_load(*LOW)
            await stage.summary("On 1/1")
            await asyncio.sleep(1)

    flipping = asyncio.create_task(flip_on_and_off())
    try:
        yield
        assert not flipping.done(), flipping
    finally:
        flipping.cancel()
        await asyncio.gather(flipping, return_exceptions=True)
    pod.engine.set_load(*LOW)
    await stage.summary("On 1/1")
    assert lists(stage.cluster, stage.namespace) == before


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_namespaces_come_and_go_and_the_others_notice_nothing(cluster, stages, release):
    """O-F5.1, 2, 4: one does not exist yet, one loses its rights for a while."""
    first, second = stages
    notes = release.helm("install")
    assert f"namespace {LATE} does not exist yet" in notes
    operator = release.start()
    await operator.leads()
    await serves(operator, 2)
    await said(first, "NamespacesWaiting", f"no rights in {LATE}")
    (pod,) = await first.up()
    (other,) = await second.up()

    async with undisturbed(first, pod), undisturbed(second, other):
        cluster.kubectl("create", "namespace", LATE)
        release.helm("upgrade")
        await serves(operator, 3)
        await said(first, "NamespacesServed")
        await first.api.post(path(names.PLURAL, LATE), like(await first.get()))
        made = path("deployments", LATE, "chat")
        await eventually(lambda: first.api.find(made), 15, "the late namespace to be served")

    async with undisturbed(first, pod):
        await first.api.delete(ROLE)
        await serves(operator, 2, NOTICED)
        await said(first, "NamespacesWaiting", f"no rights in {SECOND}")
        orders, modes = len(other.engine.orders), list(other.engine.modes)
        other.engine.set_load(*HIGH)
        await asyncio.sleep(3)
        assert len(other.engine.orders) == orders
        # Back again, first without the right to read Secrets.
        release.helm("upgrade")
        rules = (await first.api.get(ROLE))["rules"]
        fewer = [rule for rule in rules if rule["resources"] != ["secrets"]]
        await first.api.merge(ROLE, {"rules": fewer})
        await said(first, "NamespacesWaiting", f"not everything can be read in {SECOND}")
        assert await operator.value("specserve_namespaces", state="waiting") == 1
        await first.api.merge(ROLE, {"rules": rules})
        await serves(operator, 3)
        await second.summary("Off 1/1", within=20)
        assert other.engine.modes[len(modes) :][-1] == "off"
        assert (await second.kubelet.engine("chat")).uid == other.uid

    assert operator.running
    assert await operator.probe("/healthz") == 200
    assert await operator.value("specserve_reconcile_total", result="bug") == 0
    everywhere = {
        e["requestURI"]
        for e in cluster.audit_events(USER)
        if "objectRef" in e
        and e["objectRef"].get("namespace") not in {NAMESPACE, FIRST, SECOND, LATE}
    }
    assert everywhere == set()


def like(item):
    return {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": {"name": item["metadata"]["name"]},
        "spec": item["spec"],
    }
