"""The API server freezes, and refuses: what the operator does meanwhile and afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
from aiohttp import web

from specserve import names
from tests.chart.generate import ROOT
from tests.cluster.light import light_cluster as start_light_cluster
from tests.integration.api import Api, eventually, path, throughout
from tests.integration.kubelet import Kubelet
from tests.integration.operator_process import BRISK, OperatorProcess, install
from tests.integration.operator_process import NAMESPACE as SYSTEM
from tests.integration.stage import HIGH, Stage, make_node, specserve

LEASE_SECONDS = float(BRISK["lease_seconds"])
RETRY_AFTER = 3


@pytest.fixture
def cluster():
    with start_light_cluster(crds=[ROOT / "crds"]) as started:
        make_node(started, "gpu-node", gpus=10)
        started.kubectl("create", "namespace", "demo")
        yield started


@pytest.fixture
async def stage(cluster, tmp_path):
    async with Api(cluster) as api, Kubelet(api, "demo", tmp_path) as kubelet:
        yield Stage(api, cluster, "demo", kubelet)


@pytest.fixture
def start(cluster):
    kubeconfig = install(cluster)
    with contextlib.ExitStack() as stack:

        def begin(kubeconfig=kubeconfig, **settings):
            process = OperatorProcess(cluster, kubeconfig, **settings)
            stack.callback(process.kill)
            stack.callback(lambda: print(process.tail()))  # shown for failed tests
            return process

        yield begin


async def test_a_leader_that_is_cut_off_stops_steering_by_itself(cluster, stage, start):
    """No call later than its lease; it ends, and a new one goes on where it was."""
    first = start(**BRISK)
    await first.leads()
    (pod,) = await stage.up()
    lease = (await stage.api.get(path("leases", SYSTEM, "specserve")))["spec"]
    lease_ends = datetime.fromisoformat(lease["renewTime"]) + timedelta(seconds=LEASE_SECONDS)
    frozen = time.monotonic()
    cluster.apiserver.pause()
    try:
        while datetime.now(UTC) < lease_ends:  # noqa: ASYNC110 - a clock tells nobody
            await asyncio.sleep(0.01)
        visits = sum(pod.visits.values())
        await eventually(lambda: not first.running, 5, "the leader to end")
        assert time.monotonic() - frozen < LEASE_SECONDS + 1
        assert sum(pod.visits.values()) == visits
        pod.engine.set_load(*HIGH)
        await throughout(lambda: sum(pod.visits.values()) == visits, 2)
        assert pod.engine.modes == ["on"]
    finally:
        cluster.apiserver.resume()
    second = start(**BRISK)
    await second.leads(30)
    await stage.summary("Off 1/1", within=20)
    assert pod.engine.modes == ["on", "off"]


class RefusingProxy:
    """Stands before the API server and refuses lists until told otherwise.

    Attributes:
        kubeconfig: of the proxy, for the rights of another kubeconfig.
        early: lists that were asked for again before the time that the refusal named.
        most: requests under way at once, but watches.
    """

    def __init__(self, cluster, kubeconfig, folder, status):
        self._upstream = cluster.server
        self._status = status
        self._config = json.loads(kubeconfig.read_text())
        self.kubeconfig = folder / "proxy.kubeconfig"
        self.refusing = True
        self.refused = 0
        self.early = []
        self.most = 0
        self._now = 0
        self._not_before = defaultdict(float)

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        config = json.loads(json.dumps(self._config))
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.write_text(json.dumps(config))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=False),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        try:
            yield self
        finally:
            await self._session.close()
            await runner.cleanup()

    async def _handle(self, request):
        watch = request.query.get("watch") == "true"
        listing = request.method == "GET" and not watch and "limit" in request.query
        self._now += not watch
        self.most = max(self.most, self._now)
        try:
            if listing and self.refusing:
                return self._refuse(request)
            return await self._pass_on(request)
        finally:
            self._now -= not watch

    def _refuse(self, request):
        now = time.monotonic()
        if now < self._not_before[request.path_qs]:
            self.early.append(request.path_qs)
        self._not_before[request.path_qs] = now + RETRY_AFTER
        self.refused += 1
        status = {"kind": "Status", "apiVersion": "v1", "code": self._status, "reason": "Refused"}
        headers = {"Retry-After": str(RETRY_AFTER)}
        return web.json_response(status, status=self._status, headers=headers)

    async def _pass_on(self, request):
        headers = {
            k: v
            for k, v in request.headers.items()
            if k.lower() in {"authorization", "accept", "content-type"}
        }
        async with self._session.request(
            request.method,
            self._upstream + request.path_qs,
            headers=headers,
            data=await request.read() or None,
        ) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.content_type}
            )
            await response.prepare(request)
            with contextlib.suppress(ConnectionResetError):  # whoever asked has gone
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            return response


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("status", "count"), [(429, 20), (503, 200)])
async def test_refused_lists_are_waited_out_as_asked(cluster, start, tmp_path, status, count):
    """O-D3: bounded, in no hurry, and all is served afterwards, with no restart."""
    teams = [f"team-{n}" for n in range(count)]
    async with Api(cluster) as api:
        for team in teams:
            await api.post("/api/v1/namespaces", {"metadata": {"name": team}})
            await api.post(path(names.PLURAL, team), specserve("chat", replicas=0))
        proxy = RefusingProxy(cluster, install(cluster), tmp_path, status)
        async with proxy.running():
            operator = start(
                proxy.kubeconfig, watch_namespaces=",".join(teams), api_connections="8"
            )
            await eventually(lambda: proxy.refused > len(teams), 40, "refusals")
            await asyncio.sleep(2 * RETRY_AFTER)
            assert operator.running
            proxy.refusing = False

            async def served():
                items = (await api.get(f"/apis/{names.API_VERSION}/{names.PLURAL}"))["items"]
                done = [i for i in items if (i.get("status") or {}).get("observedGeneration") == 1]
                assert len(done) == len(teams)
                return True

            await eventually(served, 150, "all of them to be served")
            assert operator.running
            assert proxy.early == []
            # The election's own calls do not wait for their turn.
            assert proxy.most <= 8 + 1
            code = str(status)
            assert await operator.value("specserve_api_requests_total", code=code) == proxy.refused
            assert await operator.value("specserve_namespaces", state="served") == len(teams)
            assert await operator.probe("/healthz") == 200
            assert await operator.stop() == 0
