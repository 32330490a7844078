"""The local copy equals what the server holds, whatever happens to list and watch."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import web

from specserve import informer as module
from specserve.informer import Informer, Informers
from tests.wire.apiserver import PODS, ApiServer, failure


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(module, "BACKOFF_FIRST", 0.02)
    monkeypatch.setattr(module, "BACKOFF_LONGEST", 0.1)


class Copy:
    """An informer at work, and what it told."""

    def __init__(self, kube, idle: float) -> None:
        self.told: list[tuple[str | None, str | None]] = []
        self.news = asyncio.Condition()
        self.informer = Informer(
            kube, PODS, lambda item: item["value"], self._take, {"labelSelector": "a=b"}, idle
        )

    def _take(self, old, new) -> None:
        self.told.append((old, new))

    async def holds(self, *values: str) -> None:
        async with asyncio.timeout(10):
            while sorted(self.informer.values.values()) != sorted(values):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def copy_of(kube, idle: float = 10.0):
    made = Copy(kube, idle)
    task = asyncio.create_task(made.informer.run())
    try:
        yield made
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_there_and_what_happens(server, kube):
    await server.put("a", value="1")
    async with copy_of(kube) as copy:
        await asyncio.wait_for(copy.informer.synced.wait(), 5)
        assert copy.informer.values == {"uid-a": "1"}
        await server.watched()
        await server.put("b", value="2")
        await server.put("a", value="3")
        await copy.holds("2", "3")
        await server.delete("b")
        await copy.holds("3")
    assert copy.told == [(None, "1"), (None, "2"), ("1", "3"), ("2", None)]
    assert {request.query["labelSelector"] for request in server.requests} == {"a=b"}


async def test_a_list_comes_in_pages(server, kube):
    server.page = 3
    for n in range(10):
        await server.put(f"n{n}", value=str(n))
    async with copy_of(kube) as copy:
        await copy.holds(*map(str, range(10)))
    assert len([r for r in server.requests if "watch" not in r.query]) == 4


async def test_equal_values_are_no_news(server, kube):
    await server.put("a", value="1", other=1)
    async with copy_of(kube) as copy:
        await server.watched()
        await server.put("a", value="1", other=2)
        await server.put("b", value="2")
        await copy.holds("1", "2")
    assert copy.told == [(None, "1"), (None, "2")]


async def test_a_watch_that_ends_goes_on_where_it_was(server, kube):
    await server.put("a", value="1")
    ended = asyncio.Event()

    async def end_once(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("watch") and not ended.is_set():
            ended.set()
            response = web.StreamResponse()
            await response.prepare(request)
            await server.put("late", value="2")
            return response
        return None

    server.fault = end_once
    async with copy_of(kube) as copy:
        await copy.holds("1", "2")
    assert len([r for r in server.requests if "watch" not in r.query]) == 1


async def test_a_bookmark_moves_the_place(server, kube):
    async with copy_of(kube, idle=0.3) as copy:
        await server.watched()
        await server.bookmark()
        mark = str(server.version)
        await server.watched(2)
        assert server.requests[-1].query["resourceVersion"] == mark
        assert copy.told == []


async def _expire_in_stream(server: ApiServer, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'{"type":"ERROR","object":{"code":410,"reason":"Expired"}}\n')
    return response


async def _expire_as_status(server: ApiServer, request: web.Request) -> web.StreamResponse:
    return failure(410, "Expired")


async def _lose_history(server: ApiServer, request: web.Request) -> web.StreamResponse:
    return failure(500, "InternalError")


@pytest.mark.parametrize("expire", [_expire_in_stream, _expire_as_status, _lose_history])
async def test_a_new_list_finds_what_vanished(server, kube, expire):
    await server.put("early", value="1")
    await server.put("same", value="2")
    expired = asyncio.Event()

    async def once(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("watch") and not expired.is_set():
            expired.set()
            del server.items["early"]
            server.items["late"] = server._stamped("late", {"value": "3"})
            server.forget_history()
            return await expire(server, request)
        return None

    server.fault = once
    async with copy_of(kube) as copy:
        await copy.holds("2", "3")
    assert copy.told == [(None, "1"), (None, "2"), (None, "3"), ("1", None)]


async def test_what_a_broken_off_list_has_shown_can_vanish(server, kube):
    server.page = 1
    await server.put("a", value="1")
    await server.put("b", value="2")
    broken = asyncio.Event()

    async def break_off(request: web.Request) -> web.Response | None:
        if request.query.get("continue") and not broken.is_set():
            broken.set()
            del server.items["a"]
            return failure(410, "Expired")
        return None

    server.fault = break_off
    async with copy_of(kube) as copy:
        await copy.holds("2")
    assert copy.told[-1] == ("1", None)


async def test_a_half_open_watch_is_noticed(server, kube):
    await server.put("early", value="1")
    hung = asyncio.Event()

    async def half_open(request: web.Request) -> web.StreamResponse | None:
        if not request.query.get("watch") or hung.is_set():
            return None
        hung.set()
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    server.fault = half_open
    async with copy_of(kube, idle=0.3) as copy:
        await copy.holds("1")
        await asyncio.wait_for(hung.wait(), 5)
        await server.put("late", value="2")
        await server.delete("early")
        await copy.holds("2")


async def test_the_pause_that_is_asked_for_is_kept(server, kube):
    refused = asyncio.Event()

    async def once(request: web.Request) -> web.Response | None:
        if refused.is_set():
            return None
        refused.set()
        return failure(429, "TooManyRequests", **{"Retry-After": "1"})

    server.fault = once
    async with copy_of(kube) as copy:
        await asyncio.wait_for(copy.informer.synced.wait(), 5)
    assert server.times[1] - server.times[0] >= 1.0


async def test_health_grows_stale_without_credentials(server, kube):
    async with copy_of(kube) as copy:
        await asyncio.wait_for(copy.informer.synced.wait(), 5)
        await server.watched()

        async def refuse(_: web.Request) -> web.Response:
            return failure(401, "Unauthorized")

        server.fault = refuse
        await server.go_down()
        await server.listen()
        heard = copy.informer.heard
        seen = len(server.requests)
        async with asyncio.timeout(10):
            while len(server.requests) < seen + 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert copy.informer.heard == heard
        assert time.monotonic() - heard > 0


async def test_an_api_server_that_goes_and_comes_back(server, kube):
    await server.put("early", value="1")
    async with copy_of(kube) as copy:
        await copy.holds("1")
        await server.watched()
        await server.go_down()
        del server.items["early"]
        server.forget_history()
        server.items["late"] = server._stamped("late", {"value": "2"})
        await asyncio.sleep(0.2)

        async def expire(request: web.Request) -> web.Response | None:
            old = request.query.get("resourceVersion")
            if request.query.get("watch") and int(old) < server.version:
                return failure(410, "Expired")
            return None

        server.fault = expire
        await server.listen()
        await copy.holds("2")


@pytest.mark.parametrize("answer", ["ends at once", "expired", "no list"])
async def test_failure_never_becomes_a_tight_loop(server, kube, answer: str):
    async def fault(request: web.Request) -> web.StreamResponse | None:
        if answer == "no list":
            return web.Response(text="<html>")
        if not request.query.get("watch"):
            return None
        if answer == "expired":
            return failure(410, "Expired")
        response = web.StreamResponse()
        await response.prepare(request)
        return response

    server.fault = fault
    async with copy_of(kube):
        await asyncio.sleep(1.0)
    assert len(server.requests) < 40


async def test_a_list_without_items_is_empty(server, kube):
    async def nothing(request: web.Request) -> web.Response | None:
        if request.query.get("watch"):
            return None
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": None})

    server.fault = nothing
    async with copy_of(kube) as copy:
        await asyncio.wait_for(copy.informer.synced.wait(), 5)
        assert copy.informer.values == {}


async def test_lost_rights_are_no_loss_of_life(server, kube):
    """A restart would not bring them back; the other namespaces go on."""
    async with copy_of(kube) as copy:
        await asyncio.wait_for(copy.informer.synced.wait(), 5)
        await server.watched()

        async def refuse(_: web.Request) -> web.Response:
            return failure(403, "Forbidden")

        server.fault = refuse
        await server.go_down()
        await server.listen()
        heard = copy.informer.heard
        async with asyncio.timeout(10):
            while copy.informer.heard == heard:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_informers_of_a_namespace_come_and_go_together(server, kube):
    await server.put("a", value="1")
    told: list[tuple[str | None, str | None]] = []

    def make(namespace: str) -> list[Informer[str]]:
        path = f"/api/v1/namespaces/{namespace}/pods"
        take = lambda old, new: told.append((old, new))  # noqa: E731
        return [Informer(kube, path, lambda item: item["value"], take) for _ in range(2)]

    informers = Informers(make)
    running = asyncio.create_task(informers.run())
    for namespace in ("one", "two"):
        informers.begin(namespace)
        await asyncio.wait_for(informers.synced(namespace), 5)
    assert told == [(None, "1")] * 4
    assert len(list(informers)) == 4
    await server.watched(4)
    await informers.end("one")
    assert told[4:] == [("1", None)] * 2
    await server.put("a", value="2")
    async with asyncio.timeout(5):
        while told[6:] != [("1", "2")] * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(told) == 8


async def test_an_informer_that_ends_ends_all(server, kube):
    await server.put("a", nothing="1")
    informers = Informers(
        lambda namespace: [Informer(kube, PODS, lambda item: item[namespace], lambda _, __: None)]
    )
    running = asyncio.create_task(informers.run())
    informers.begin("nothing")
    await asyncio.wait_for(informers.synced("nothing"), 5)
    informers.begin("else")
    with pytest.raises(KeyError, match="else"):
        await asyncio.wait_for(running, 5)
