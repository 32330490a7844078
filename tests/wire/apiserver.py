"""A small API server on loopback: a collection with list and watch, Leases, faults on demand."""

import asyncio
import contextlib
import copy
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from kubernetes.aio import client

from specserve.kube import Kube

PODS = "/api/v1/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/system/leases"
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


def failure(status: int, reason: str, **headers: str) -> web.Response:
    body = {"kind": "Status", "code": status, "reason": reason, "message": f"{reason}, it says"}
    return web.json_response(body, status=status, headers=headers)


class ApiServer:
    """Objects of one collection and Leases. `fault` sees each request before it is served."""

    def __init__(self) -> None:
        self.versions = itertools.count(100)
        self.version = 100
        self.items: dict[str, dict[str, Any]] = {}
        self.leases: dict[str, dict[str, Any]] = {}
        self.log: deque[tuple[int, dict[str, Any]]] = deque()
        self.requests: list[web.Request] = []
        self.times: list[float] = []
        self.fault: Fault | None = None
        self.page = 500
        self._changed = asyncio.Condition()
        self._watches = 0
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self.runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        self.port = 0

    async def start(self) -> None:
        await self.runner.setup()
        await self.listen()

    async def listen(self) -> None:
        self._site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()
        self.port = self._site._server.sockets[0].getsockname()[1]

    async def go_down(self) -> None:
        """Refuse connections, and break those that there are."""
        await self._site.stop()
        for connection in list(self.runner.server.connections):
            connection.force_close()
            if connection.transport:
                connection.transport.abort()

    def kube(self, calls: int = 64) -> Kube:
        settings = client.Configuration()
        settings.host = f"http://127.0.0.1:{self.port}"
        return Kube(client.ApiClient(configuration=settings), calls)

    # -- objects

    async def put(self, name: str, **fields: Any) -> None:
        kind = "MODIFIED" if name in self.items else "ADDED"
        self.items[name] = self._stamped(name, fields)
        await self._tell(kind, self.items[name])

    async def delete(self, name: str) -> None:
        item = self.items.pop(name)
        await self._tell("DELETED", self._stamped(name, item))

    async def bookmark(self) -> None:
        self.version = next(self.versions)
        await self._tell("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def forget_history(self) -> None:
        self.log.clear()
        self.version = next(self.versions)

    def _stamped(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        self.version = next(self.versions)
        meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        return {**fields, "metadata": meta}

    async def _tell(self, kind: str, item: dict[str, Any]) -> None:
        async with self._changed:
            self.log.append((self.version, {"type": kind, "object": copy.deepcopy(item)}))
            self._changed.notify_all()

    async def watched(self, count: int = 1) -> None:
        """Wait until so many watches have been opened."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._watches >= count)

    def count(self, **query: str) -> int:
        return sum(all(r.query.get(k) == v for k, v in query.items()) for r in self.requests)

    # -- requests

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.times.append(asyncio.get_running_loop().time())
        if self.fault is not None:
            answer = await self.fault(request)
            if answer is not None:
                return answer
        if request.path.startswith(LEASES):
            return await self._lease(request)
        if request.query.get("watch"):
            return await self._watch(request)
        return self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        start = int(request.query.get("continue") or 0)
        size = min(self.page, int(request.query.get("limit") or self.page))
        items = list(self.items.values())
        meta = {"resourceVersion": str(self.version)}
        if start + size < len(items):
            meta["continue"] = str(start + size)
        return web.json_response({"metadata": meta, "items": items[start : start + size]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        async with self._changed:
            self._watches += 1
            self._changed.notify_all()
        while True:
            async with self._changed:
                while not self.log or self.log[-1][0] <= version:
                    await self._changed.wait()
                news = [event for at, event in self.log if at > version]
                version = self.log[-1][0]
            for event in news:
                await response.write(json.dumps(event).encode() + b"\n")

    async def _lease(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix(LEASES).strip("/")
        if request.method == "POST":
            body = await request.json()
            name = body["metadata"]["name"]
            if name in self.leases:
                return failure(409, "AlreadyExists")
        elif name not in self.leases:
            return failure(404, "NotFound")
        elif request.method == "GET":
            return web.json_response(self.leases[name])
        else:
            body = await request.json()
            have = self.leases[name]["metadata"]["resourceVersion"]
            if body["metadata"]["resourceVersion"] != have:
                return failure(409, "Conflict")
        body["metadata"]["resourceVersion"] = str(next(self.versions))
        self.leases[name] = body
        return web.json_response(body)


async def hang(_: web.Request) -> None:
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.start()
    try:
        yield server
    finally:
        await server.runner.cleanup()
