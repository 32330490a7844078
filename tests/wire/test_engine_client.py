"""What the client makes of engines that hang, reset, refuse, lie or answer something else."""

import asyncio
import contextlib
import json
import socket
import time
import traceback
from typing import Any

import pytest
from aiohttp import web

from specserve import engine as module
from specserve import names
from specserve.engine import Endpoint, EngineClient, EngineRefused, EngineUnreachable
from specserve.signals import MetricNames

NAMES = MetricNames(
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:generation_tokens_total"
)
SECRET = "sesame-open"
LOADS = {"loads": [{"num_running_reqs": 4, "num_waiting_reqs": 2}]}
METRICS = "sglang:num_running_reqs 4\nsglang:num_queue_reqs 2\n"
READ_BACK = {
    "podUID": "u",
    "bootID": "b",
    "epoch": 1,
    "mode": "on",
    "controllable": True,
    "lease": {"holder": None, "remainingSeconds": None},
    "groups": [],
}
DIRECTIVE = {"epoch": 2, "mode": "off", "deadlineMs": 200}


class Pod:
    """One server on both ports' paths; `answers` maps a path to what it does."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.seen: list[tuple[str, str, str, Any]] = []
        self.runner = web.AppRunner(
            web.Application(client_max_size=2**20),
            shutdown_timeout=0.01,
            handler_cancellation=True,
        )
        self.runner.app.router.add_route("*", "/{path:.*}", self._serve)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        key = request.headers.get("Authorization", "")
        self.seen.append((request.method, request.path, key, body))
        answer = self.answers.get(request.path)
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if callable(answer):
            answer = await answer(request)
        if isinstance(answer, web.StreamResponse):
            return answer
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response(answer)


@contextlib.asynccontextmanager
async def serving(monkeypatch, host: str = "127.0.0.1"):
    pod = Pod()
    await pod.runner.setup()
    site = web.TCPSite(pod.runner, host, 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    monkeypatch.setattr(names, "PORT_SERVING", port)
    monkeypatch.setattr(names, "PORT_ADMIN", port)
    try:
        yield pod
    finally:
        await pod.runner.cleanup()


@pytest.fixture
async def pod(monkeypatch):
    async with serving(monkeypatch) as running:
        yield running


@pytest.fixture
async def client():
    async with EngineClient(NAMES) as made:
        yield made


HERE = Endpoint("127.0.0.1", (SECRET, "sesame-old"), api_key="sesame-key")


async def hang(_: web.Request) -> None:
    await asyncio.Event().wait()


async def reset(request: web.Request) -> None:
    request.transport.abort()


async def code_of(call, kind=EngineUnreachable) -> str:
    with pytest.raises(kind) as caught:
        await call
    words = "".join(traceback.format_exception(caught.value))
    for error in (caught.value, caught.value.__cause__):
        words += f"{error!r}{error}{vars(error) if error else ''}"
    assert "sesame" not in words
    return caught.value.code


# -- load -----------------------------------------------------------------------------------


async def test_load_comes_from_loads(pod, client):
    pod.answers[names.PATH_LOADS] = LOADS
    reading = await client.load(HERE)
    assert (reading.running, reading.queued) == (4, 2)
    assert pod.seen == [("GET", names.PATH_LOADS, "Bearer sesame-key", None)]


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_without_loads_is_read_by_its_metrics(pod, client, status: int):
    async def missing(_: web.Request) -> web.Response:
        return web.Response(status=status)

    pod.answers.update({names.PATH_LOADS: missing, names.PATH_METRICS: METRICS})
    assert (await client.load(HERE)).queued == 2


async def test_an_open_port_is_sent_no_key(pod, client):
    pod.answers[names.PATH_LOADS] = LOADS
    await client.load(Endpoint("127.0.0.1", ()))
    assert pod.seen[0][2] == ""


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "<html>",
        "[" * 100_000,
        '{"loads": [{"num_running_reqs": NaN, "num_waiting_reqs": 0}]}',
        {"loads": []},
        [],
        "x" * (module.LONGEST_ANSWER + 1),
    ],
)
async def test_what_holds_no_load_is_refused(pod, client, answer):
    pod.answers[names.PATH_LOADS] = answer
    assert await code_of(client.load(HERE), EngineRefused) == "Unreadable"


@pytest.mark.parametrize("metrics", ["", "sglang:num_running_reqs NaN", "vllm:x 1"])
async def test_metrics_that_hold_no_load_are_refused(pod, client, metrics: str):
    pod.answers[names.PATH_METRICS] = metrics
    assert await code_of(client.load(HERE), EngineRefused) == "Unreadable"


async def test_a_redirect_is_not_followed(pod, client):
    async def away(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": names.PATH_METRICS})

    pod.answers.update({names.PATH_LOADS: away, names.PATH_METRICS: METRICS})
    assert await code_of(client.load(HERE), EngineRefused) == "EngineHTTP302"
    assert len(pod.seen) == 1


async def test_a_key_that_no_header_can_carry(pod, client):
    broken = Endpoint("127.0.0.1", (), api_key="sesame\nX-Evil: 1")
    assert await code_of(client.load(broken), EngineRefused) == "KeyUnusable"
    assert pod.seen == []


async def test_an_ipv6_pod(monkeypatch, client):
    async with serving(monkeypatch, "::1") as pod:
        pod.answers[names.PATH_LOADS] = LOADS
        assert (await client.load(Endpoint("::1", ()))).running == 4


def test_an_ipv6_address_gets_its_brackets():
    url = Endpoint("fd00:10:1::2a", ()).url(30000, "/v1/loads")
    assert url == "http://[fd00:10:1::2a]:30000/v1/loads"


# -- reasons --------------------------------------------------------------------------------


async def test_a_hung_engine_costs_its_limit(pod, client):
    pod.answers[names.PATH_LOADS] = hang
    started = time.monotonic()
    assert await code_of(client.load(HERE)) == "EngineTimeout"
    assert time.monotonic() - started < 2.5


async def test_an_answer_that_never_ends_costs_its_limit(pod, client):
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.05)

    pod.answers[names.PATH_SPECULATION] = drip
    assert await code_of(client.switch(HERE, {**DIRECTIVE, "deadlineMs": 0})) == "EngineTimeout"


async def test_a_reset(pod, client):
    pod.answers[names.PATH_LOADS] = reset
    assert await code_of(client.load(HERE)) == "EngineConnectionReset"


async def test_nobody_listens(client, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(names, "PORT_ADMIN", closed.getsockname()[1])
        assert await code_of(client.read_back(HERE)) == "EngineConnectionRefused"


async def test_a_proxy_in_between(pod, client):
    async def envoy(_: web.Request) -> web.Response:
        words = "upstream connect error or disconnect/reset before headers"
        return web.Response(status=503, text=words, headers={"Server": "envoy"})

    pod.answers[names.PATH_SPECULATION] = envoy
    assert await code_of(client.read_back(HERE), EngineRefused) == "ProxyUnavailable"


async def test_ten_hung_pods_cost_one_limit(pod, client):
    pod.answers[names.PATH_SPECULATION] = hang
    started = time.monotonic()
    calls = [client.switch(HERE, DIRECTIVE) for _ in range(10)]
    assert await asyncio.gather(*(code_of(call) for call in calls)) == ["EngineTimeout"] * 10
    assert time.monotonic() - started < 1.8


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (500, "Internal Server Error", "EngineHTTP500"),
        (503, "busy", "EngineHTTP503"),
        (503, {"code": "Loading", "message": "the engine is loading"}, "Loading"),
        (409, {"code": "StaleEpoch", "message": "older", "epoch": 9}, "StaleEpoch"),
        (412, {"code": "Rebooted"}, "Rebooted"),
        (504, {"code": "Timeout"}, "Timeout"),
        (400, {"code": ""}, "EngineHTTP400"),
        (400, {"code": "two words\n"}, "EngineHTTP400"),
        (400, {"code": 7, "message": ["x"]}, "EngineHTTP400"),
        (400, ["x"], "EngineHTTP400"),
        (403, "", "Unauthorized"),
        (204, "", "EngineHTTP204"),
    ],
)
async def test_a_refusal_has_a_code_that_a_condition_can_carry(pod, client, status, body, code):
    async def refuse(_: web.Request) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text or None)

    pod.answers[names.PATH_SPECULATION] = refuse
    with pytest.raises(EngineRefused) as caught:
        await client.switch(HERE, DIRECTIVE)
    assert (caught.value.code, caught.value.status) == (code, status)
    assert caught.value.body == (body if isinstance(body, dict) else {})


async def test_words_of_an_engine_are_cut_to_one_line(pod, client):
    async def shout(_: web.Request) -> web.Response:
        return web.json_response({"message": "a\nb " * 10_000}, status=500)

    pod.answers[names.PATH_SPECULATION] = shout
    with pytest.raises(EngineRefused) as caught:
        await client.read_back(HERE)
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


# -- tokens ---------------------------------------------------------------------------------


def taking(token: str):
    async def check(request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {token}":
            return web.json_response({"code": "Unauthorized"}, status=401)
        return web.json_response(READ_BACK)

    return check


@pytest.mark.parametrize(("token", "calls"), [(SECRET, 1), ("sesame-old", 2)])
async def test_the_token_before_is_tried_after_the_present_one(pod, client, token, calls):
    pod.answers[names.PATH_SPECULATION] = taking(token)
    assert (await client.read_back(HERE))["bootID"] == "b"
    assert len(pod.seen) == calls


async def test_no_token_fits(pod, client):
    pod.answers[names.PATH_SPECULATION] = taking("another")
    assert await code_of(client.read_back(HERE), EngineRefused) == "Unauthorized"
    assert await code_of(client.read_back(Endpoint("127.0.0.1", ())), EngineRefused) == (
        "Unauthorized"
    )


def test_an_endpoint_does_not_show_its_secrets():
    assert "sesame" not in f"{HERE!r}{HERE}"


# -- read-back ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": "abc"},
        {"epoch": None},
        {"epoch": -1},
        {"podUID": 7},
        {"bootID": None},
        {"mode": ["on"]},
        {"controllable": "yes"},
        {"lease": [1]},
        {"lease": {"remainingSeconds": "soon"}},
        {"groups": [7]},
        {"groups": {"a": 1}},
        {"groups": [{"stats": [7]}]},
        {"groups": [{"ranks": 7}]},
        {"groups": [{"ranks": [{"activeSteps": "3"}]}]},
        {"groups": [{"stats": [{"steps": 3, "rounds": 1, "acceptLength": float("nan")}]}]},
        {"groups": [{"stats": [{"steps": 3, "rounds": float("inf")}]}]},
        {"groups": [{"stats": [{"steps": 3, "medianRoundSeconds": "0.02"}]}]},
        {"groups": [{"at": [1]}]},
        {"groups": [{"acceptance": {"steps": 3}}]},
        {"groups": [{"acceptance": [{"steps": 3, "verifies": -1, "accepted": []}]}]},
        {"groups": [{"acceptance": [{"steps": 1, "verifies": 1, "accepted": ["1"]}]}]},
        {"groups": [{"acceptance": [{"steps": 1, "verifies": 1, "accepted": 1}]}]},
        {"mode": "tiers", "tiers": [{"steps": "x"}]},
    ],
)
async def test_a_read_back_of_other_types_is_refused(pod, client, wrong):
    pod.answers[names.PATH_SPECULATION] = {**READ_BACK, **wrong}
    assert await code_of(client.read_back(HERE), EngineRefused) == "Unreadable"


@pytest.mark.parametrize("answer", ["", "[]", "7", "null"])
async def test_a_read_back_that_is_no_object_is_refused(pod, client, answer):
    pod.answers[names.PATH_SPECULATION] = answer
    assert await code_of(client.switch(HERE, DIRECTIVE), EngineRefused) == "Unreadable"


# -- a lost answer --------------------------------------------------------------------------


async def test_a_directive_that_is_read_and_never_answered(pod, client):
    async def apply_and_close(request: web.Request) -> None:
        request.transport.close()

    pod.answers[names.PATH_SPECULATION] = apply_and_close
    assert await code_of(client.switch(HERE, DIRECTIVE)) == "EngineConnectionReset"
    assert all(body == DIRECTIVE for *_, body in pod.seen)


async def test_idle_connections_that_the_server_closes_are_no_fault(pod, client):
    pod.answers[names.PATH_SPECULATION] = READ_BACK
    await client.read_back(HERE)
    for connection in list(pod.runner.server.connections):
        connection.transport.close()
    assert (await client.read_back(HERE))["epoch"] == 1


async def test_an_answer_after_the_limit_is_not_taken_for_the_next_call(pod, client):
    late = asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        await late.wait()
        return web.json_response({**READ_BACK, "epoch": 7})

    pod.answers[names.PATH_SPECULATION] = slow
    assert await code_of(client.switch(HERE, DIRECTIVE)) == "EngineTimeout"
    late.set()
    pod.answers[names.PATH_SPECULATION] = {**READ_BACK, "epoch": 8}
    assert (await client.read_back(HERE))["epoch"] == 8
