"""O-D2: other operators in the cluster, of this kind and of others, and who serves what."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.chart.generate import ROOT
from tests.chart.release import Release
from tests.cluster.light import light_cluster as start_light_cluster
from tests.integration.api import Api, path
from tests.integration.kubelet import Kubelet
from tests.integration.stage import HIGH, LOW, Stage, make_node

TEAMS = ("team-a", "team-b")
SYSTEMS = ("system-a", "system-b")
HOLDER = "system-a/rel-a-specserve"


@pytest.fixture
def cluster():
    with start_light_cluster(crds=[ROOT / "crds"], audit=True) as started:
        make_node(started, "gpu-node", gpus=100)
        for name in (*SYSTEMS, *TEAMS):
            started.kubectl("create", "namespace", name)
        yield started


@pytest.fixture
async def stages(cluster, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(Api(cluster))
        found = []
        for team in TEAMS:
            folder = tmp_path / team
            folder.mkdir()
            kubelet = await stack.enter_async_context(Kubelet(api, team, folder))
            found.append(Stage(api, cluster, team, kubelet))
        yield found


@pytest.fixture
def releases(cluster):
    """Two, each in a namespace of its own and for one team."""
    with contextlib.ExitStack() as stack:
        yield [
            Release(
                cluster,
                stack,
                f"rel-{team[-1]}",
                system,
                watchNamespaces=[team],
                crds={"enabled": False},
            )
            for team, system in zip(TEAMS, SYSTEMS, strict=True)
        ]


async def flips(stage, pod):
    before = len(pod.engine.modes)
    pod.engine.set_load(*HIGH)
    await stage.summary("Off 1/1")
    pod.engine.set_load(*LOW)
    await stage.summary("On 1/1")
    assert pod.engine.modes[before:] == ["off", "on"]


def touched(cluster, user):
    """Namespaces that a user's requests were about; an empty one stands for the cluster."""
    return {
        event["objectRef"].get("namespace", "")
        for event in cluster.audit_events(user)
        if "objectRef" in event
    }


@pytest.mark.timeout(240)
async def test_two_releases_leave_each_other_alone(cluster, stages, releases):
    """O-D2.3: while their namespaces differ nothing is shared; where they meet, it is said."""
    operators = []
    for release in releases:
        release.helm("install")
        operators.append(release.start())
    for operator in operators:
        await operator.leads()
    pods = [(await stage.up())[0] for stage in stages]
    await asyncio.gather(*(flips(stage, pod) for stage, pod in zip(stages, pods, strict=True)))
    for release, team in zip(releases, TEAMS, strict=True):
        assert touched(cluster, release.user) <= {release.namespace, team}
    for operator in operators:
        assert await operator.value("specserve_foreign_specserves") == 0

    # The second is told to serve the first one's team, too.
    (first, second), (one, _) = releases, operators
    made = await stages[0].deployment()
    second.values["watchNamespaces"] = list(TEAMS)
    second.helm("upgrade")
    assert await operators[1].stop() == 0
    two = second.start()
    await two.leads()
    event = await stages[0].event("OtherOperator", within=20)
    assert HOLDER in event["message"]
    assert await two.value("specserve_foreign_specserves") == 1
    assert await one.value("specserve_foreign_specserves") == 0
    await asyncio.gather(*(flips(stage, pod) for stage, pod in zip(stages, pods, strict=True)))
    after = await stages[0].deployment()
    assert after["metadata"]["generation"] == made["metadata"]["generation"]
    assert {order.body["holder"] for order in pods[0].engine.orders} == {HOLDER}

    # One goes; the other one's work goes on.
    first_user = first.user
    second.helm("uninstall", chart=None)
    two.kill()
    await flips(stages[0], pods[0])
    assert touched(cluster, first_user) <= {SYSTEMS[0], TEAMS[0]}


def peering(scope, kind):
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.lower()}s.kopf.dev"},
        "spec": {
            "group": "kopf.dev",
            "scope": scope,
            "names": {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower()},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "x-kubernetes-preserve-unknown-fields": True,
                        }
                    },
                }
            ],
        },
    }


@pytest.mark.parametrize("served", [[TEAMS[0]], []], ids=["namespaced", "cluster-wide"])
async def test_a_strangers_peering_object_freezes_nobody(cluster, stages, releases, served):
    """O-D2.1: kopf's peering is not used, neither read nor written."""
    stage = stages[0]
    for scope, kind in (("Cluster", "ClusterKopfPeering"), ("Namespaced", "KopfPeering")):
        crd = peering(scope, kind)
        cluster.apply(crd)
        name = crd["metadata"]["name"]
        cluster.kubectl("wait", "crd", name, "--for=condition=Established", "--timeout=20s")
        stranger = {"priority": 100, "lifetime": 86400, "lastseen": "2099-01-01T00:00:00"}
        body = {
            "apiVersion": "kopf.dev/v1",
            "kind": kind,
            "metadata": {"name": "default"},
            "status": {"stranger-op": stranger},
        }
        cluster.apply(body, namespace=TEAMS[0] if scope == "Namespaced" else "")

    release = releases[0]
    release.values["watchNamespaces"] = served
    release.helm("install")
    operator = release.start()
    await operator.leads()
    (pod,) = await stage.up()
    await flips(stage, pod)
    assert await stage.api.items("leases", SYSTEMS[0])
    asked = {
        event["objectRef"].get("apiGroup", "")
        for event in cluster.audit_events(release.user)
        if "objectRef" in event
    }
    assert asked & {"kopf.dev", "zalando.org"} == set()
    assert await stage.api.find(path("leases", SYSTEMS[0], "rel-a-specserve")) is not None
