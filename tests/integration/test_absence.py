"""With the operator away, with the CRD away, and what happens when they come back."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import yaml

from specserve import names
from tests.cluster.light import light_cluster as start_light_cluster
from tests.integration.api import CRD, CRDS, Api, condition, eventually, path, throughout
from tests.integration.conftest import CRDS as CRD_FOLDER
from tests.integration.kubelet import Kubelet
from tests.integration.operator_process import BRISK, OperatorProcess, install
from tests.integration.stage import HIGH, LOW, Stage, make_node, specserve


async def test_a_restart_sends_nothing_when_reality_matches(start_operator, stage):
    """O-G1.4: all engines are read first."""
    first = start_operator()
    await first.leads()
    pods = await stage.up(replicas=2)
    for pod in pods:
        pod.engine.set_load(*HIGH)
    await stage.summary("Off 2/2")
    said = await stage.speculation()
    assert await first.stop() == 0
    orders = [len(pod.engine.orders) for pod in pods]
    reads = [pod.visits["admin"] for pod in pods]
    second = start_operator()
    await second.leads()
    await eventually(
        lambda: all(pod.visits["admin"] > n for pod, n in zip(pods, reads, strict=True)), 10
    )
    await throughout(lambda: [len(pod.engine.orders) for pod in pods] == orders, 2)
    assert await stage.speculation() == said
    for pod in pods:
        pod.engine.set_load(*LOW)
    await stage.summary("On 2/2")
    assert [pod.engine.modes for pod in pods] == [["on", "off", "on"]] * 2


async def test_what_changed_while_it_was_away_is_caught_up(start_operator, stage):
    first = start_operator(**BRISK)
    await first.leads()
    (pod,) = await stage.up()
    first.kill()
    pod.engine.set_load(*HIGH)
    await stage.edit(replicas=2)
    await stage.create("new")
    await asyncio.to_thread(stage.kubectl, "delete", "service", "chat")
    second = start_operator(**BRISK)
    # The lease of the one that was killed runs out first.
    await second.leads(within=25)
    await stage.kubelet.running("chat", 2)
    await stage.kubelet.running("new")
    await eventually(lambda: pod.engine.modes == ["on", "off"], 5)
    await stage.ready("new")
    await stage.api.get(stage.at("services", "chat"))


async def test_deletion_needs_no_operator(start_operator, stage):
    """O-D4.1-2: no finalizer; an operator that comes later makes nothing again."""
    first = start_operator()
    await first.leads()
    await stage.up()
    assert await first.stop() == 0
    at = stage.at(names.PLURAL, "chat")
    await stage.api.delete(at)
    assert await stage.api.find(at) is None
    second = start_operator()
    await second.leads()

    async def gone() -> bool:
        return (
            await stage.api.find(stage.at("deployments", "chat")) is None
            and await stage.api.find(stage.at("secrets", "chat-credentials")) is None
            and not await stage.api.items("pods", stage.namespace)
        )

    await eventually(gone, 30)
    await throughout(gone, 1)


async def test_a_namespace_with_specserves_can_go_with_no_operator(start_operator, stage):
    """O-D4.3, O-F3.2."""
    first = start_operator()
    await first.leads()
    await stage.up("one")
    await stage.up("two")
    assert await first.stop() == 0
    namespace = f"/api/v1/namespaces/{stage.namespace}"
    await stage.api.delete(namespace)

    async def gone() -> bool:
        return await stage.api.find(namespace) is None

    await eventually(gone, 60, "the namespace to go")


async def test_a_watched_namespace_may_go_and_another_come_late(start_operator, stage):
    """O-D6.1, O-F5.4: one of the named goes with its SpecServe, one does not exist yet."""
    late = f"{stage.namespace}-late"
    operator = start_operator(watch_namespaces=f"{stage.namespace},{late}")
    await operator.leads()
    await stage.up()
    namespace = f"/api/v1/namespaces/{stage.namespace}"
    await stage.api.delete(namespace)
    await stage.api.post("/api/v1/namespaces", {"metadata": {"name": late}})
    await stage.api.post(path(names.PLURAL, late), specserve("chat"))

    async def served() -> bool:
        return await stage.api.find(path("deployments", late, "chat")) is not None

    async def gone() -> bool:
        return await stage.api.find(namespace) is None

    try:
        await eventually(served, 30, "the late namespace to be served")
        await eventually(gone, 60, "the namespace to go")
        assert operator.running
        assert await operator.value("specserve_reconcile_total", result="bug") == 0
    finally:
        await stage.api.delete(path(names.PLURAL, late, "chat"))
        for pod in await stage.api.items("pods", late):
            await stage.api.delete(
                path("pods", late, pod["metadata"]["name"]), gracePeriodSeconds=0
            )
        await stage.api.delete(f"/api/v1/namespaces/{late}")


@pytest.fixture
def bare_cluster():
    """A cluster of the test's own, without the CRD."""
    with start_light_cluster(audit=True) as cluster:
        make_node(cluster, "gpu-node", gpus=10)
        yield cluster


@pytest.fixture
async def bare_stage(bare_cluster, tmp_path):
    async with Api(bare_cluster) as api:
        await api.post("/api/v1/namespaces", {"metadata": {"name": "demo"}})
        async with Kubelet(api, "demo", tmp_path) as kubelet:
            yield Stage(api, bare_cluster, "demo", kubelet)


async def add_crd(stage):
    text = (CRD_FOLDER / f"{names.GROUP}_{names.PLURAL}.yaml").read_text()
    await stage.api.post(CRDS, yaml.safe_load(text))

    async def established() -> bool:
        return condition(await stage.api.get(CRD), "Established").get("status") == "True"

    await eventually(established, 10)


async def test_the_crd_may_come_late_go_and_come_back(bare_cluster, bare_stage):
    """O-D6.2-3: it waits and says so; calls stop with the CRD; a new CRD is served."""
    stage = bare_stage
    operator = OperatorProcess(bare_cluster, install(bare_cluster))
    with contextlib.ExitStack() as stack:
        stack.callback(operator.kill)
        await operator.leads()

        def said() -> bool:
            return any(names.PLURAL in line for line in operator.lines("WARNING", "ERROR"))

        await eventually(said, 10, "a line that names the missing kind")
        assert await operator.probe("/healthz") == 200
        await add_crd(stage)
        (pod,) = await stage.up()
        await stage.api.delete(CRD)

        async def gone() -> bool:
            return await stage.api.find(CRD) is None

        await eventually(gone, 20)
        seen = [-1]

        async def calls_stopped() -> bool:
            before, seen[0] = seen[0], sum(pod.visits.values())
            await asyncio.sleep(1)
            return before == seen[0]

        await eventually(calls_stopped, 10, "calls to engines to stop")
        assert operator.running
        await add_crd(stage)
        await stage.create("again")
        await stage.kubelet.running("again", within=20)
        await stage.ready("again", within=20)
        assert operator.running
        assert await operator.probe("/healthz") == 200
        assert await operator.value("specserve_reconcile_total", result="bug") == 0
