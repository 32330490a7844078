"""The API server freezes, and refuses: what the operator does meanwhile and afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict

import aiohttp
import pytest
from aiohttp import web

from specserve import names
from tests.chart.generate import ROOT
from tests.cluster.light import light_cluster as start_light_cluster
from tests.integration.api import Api, eventually, path, throughout
from tests.integration.kubelet import Kubelet
from tests.integration.operator_process import OperatorProcess, install
from tests.integration.stage import HIGH, Stage, make_node, specserve

LEASE_SECONDS, RENEW_SECONDS = 6.0, 4.0
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
    """Before another one could lead, it ends; a new one goes on where it was."""
    quick = {
        "lease_seconds": str(LEASE_SECONDS),
        "renew_seconds": str(RENEW_SECONDS),
        "retry_seconds": "1",
    }
    first = start(**quick)
    await first.leads()
    (pod,) = await stage.up()
    frozen = time.monotonic()
    cluster.apiserver.pause()
    try:
        await eventually(lambda: not first.running, LEASE_SECONDS + 5, "the leader to end")
        assert time.monotonic() - frozen < LEASE_SECONDS + 1
        visits = sum(pod.visits.values())
        pod.engine.set_load(*HIGH)
        await throughout(lambda: sum(pod.visits.values()) == visits, 2)
        assert pod.engine.modes == ["on"]
    finally:
        cluster.apiserver.resume()
    second = start(**quick)
    await second.leads(30)
    await stage.summary("Off 1/1", within=20)
    assert pod.engine.modes == ["on", "off"]


class RefusingProxy:
    """Stands before the API server and refuses lists until told otherwise.

    Attributes:
        kubeconfig: of the proxy, for the rights of another kubeconfig.
        early: lists that were asked for again before the time that the refusal named.
        most: requests under way at once, but watches and those of the SpecServe watcher.
    """

    def __init__(self, cluster, kubeconfig, folder):
        self._upstream = cluster.server
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
        kopfs = request.path.endswith(f"/{names.PLURAL}")
        listing = request.method == "GET" and not watch and "limit" in request.query
        counted = not watch and not kopfs
        self._now += counted
        self.most = max(self.most, self._now)
        try:
            if listing and self.refusing:
                return self._refuse(request)
            return await self._pass_on(request)
        finally:
            self._now -= counted

    def _refuse(self, request):
        now = time.monotonic()
        if now < self._not_before[request.path_qs]:
            self.early.append(request.path_qs)
        self._not_before[request.path_qs] = now + RETRY_AFTER
        self.refused += 1
        status = {"kind": "Status", "apiVersion": "v1", "code": 429, "reason": "TooManyRequests"}
        return web.json_response(status, status=429, headers={"Retry-After": str(RETRY_AFTER)})

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


@pytest.mark.timeout(200)
async def test_refused_lists_are_waited_out_as_asked(cluster, start, tmp_path):
    """O-D3, with fewer namespaces: all is served afterwards, with no restart."""
    teams = [f"team-{n}" for n in range(20)]
    async with Api(cluster) as api:
        for team in teams:
            await api.post("/api/v1/namespaces", {"metadata": {"name": team}})
            await api.post(path(names.PLURAL, team), specserve("chat", replicas=0))
        proxy = RefusingProxy(cluster, install(cluster), tmp_path)
        async with proxy.running():
            operator = start(
                proxy.kubeconfig, watch_namespaces=",".join(teams), api_connections="8"
            )
            await eventually(lambda: proxy.refused > len(teams), 40, "refusals")
            await asyncio.sleep(2 * RETRY_AFTER)
            assert operator.running
            proxy.refusing = False

            async def served():
                for team in teams:
                    item = await api.get(path(names.PLURAL, team, "chat"))
                    if (item.get("status") or {}).get("observedGeneration") != 1:
                        return False
                return True

            await eventually(served, 60, "all of them to be served")
            assert operator.running
            assert proxy.early == []
            # The election's own calls do not wait for their turn.
            assert proxy.most <= 8 + 1
            refused = await operator.value("specserve_api_requests_total", code="429")
            assert refused > len(teams)
            assert await operator.stop() == 0
