from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from specserve_engine import Capability, Control, Identity, Listener, Versions, bind, serving
from specserve_engine import listener as listener_module
from specserve_engine.auth import TokenFile
from specserve_engine.control import Order
from specserve_engine.ranks import GroupState, RankState, Verdict, Vote
from specserve_engine.wire import Mode

TOKEN = "a-secret-token"
BODY = {
    "podUID": "pod",
    "bootID": "boot",
    "epoch": 1,
    "holder": "ours",
    "leaseSeconds": 5,
    "mode": "off",
    "fallback": {"mode": "auto"},
}


class OneRank:
    layout = (1,)

    def __init__(self):
        self.obeyed = []
        self.failures = []
        self.moved = asyncio.Event()
        self.asked = asyncio.Event()
        self.commits = asyncio.Event()
        self.commits.set()
        self.reads = asyncio.Event()
        self.reads.set()

    async def prepare(self, _order, _deadline):
        return [Vote(0, 0, Verdict.YES)]

    async def commit(self, order, _deadline):
        self.asked.set()
        await self.commits.wait()
        if self.failures:
            raise self.failures.pop()
        self.obeyed.append(order)
        self.moved.set()
        return [Vote(0, 0, Verdict.YES)]

    async def abort(self, _order):
        pass

    async def read(self, _deadline):
        epoch = self.obeyed[-1].epoch if self.obeyed else 0
        self.asked.set()
        await self.reads.wait()
        return [GroupState((RankState(0, epoch),))]


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "plugin-token").write_text(TOKEN)
    return TokenFile(tmp_path)


def engine(tokens, pod_uid="pod", **options):
    control = Control(Identity(pod_uid, "boot"), Versions("0", "0", proved=False))
    control.serve(Capability(controllable=True, available_steps=(0, 3)))
    ranks = OneRank()
    return control, ranks, Listener(control, ranks, tokens, **options)


@asynccontextmanager
async def hosted(app, host="127.0.0.1"):
    listening = bind(host, 0)
    port = listening.getsockname()[1]
    async with serving(app, listening):
        yield port


async def put(port, body=BODY, host="127.0.0.1"):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = f"http://{host}:{port}/v1/speculation"
    async with aiohttp.request("PUT", url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def get(port):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = f"http://127.0.0.1:{port}/v1/speculation"
    async with aiohttp.request("GET", url, headers=headers) as answer:
        return await answer.json()


class Clock:
    """Monotonic seconds that can be turned on."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead


# The lease watchdog


async def test_a_lease_expires_without_anybody_asking(tokens, caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    control, ranks, listener = engine(tokens, clock=clock)
    async with hosted(listener.app) as port:
        assert (await put(port))[0] == 200
        clock.ahead = 4.8
        ranks.moved.clear()
        # Renewed meanwhile by nobody; what wakes the watchdog is the next order, or time.
        listener._moved.set()
        async with asyncio.timeout(2):
            await ranks.moved.wait()
    assert [order.setting.mode for order in ranks.obeyed] == [Mode.OFF, Mode.AUTO]
    assert ranks.obeyed[-1].epoch == 2
    assert control.epoch == 2
    assert ': {"mode": "off", "draftKv": "cold"} (' in caplog.text
    assert "Setting(" not in caplog.text


async def test_a_renewal_moves_the_watchdog(tokens):
    clock = Clock()
    _, ranks, listener = engine(tokens, clock=clock)
    async with hosted(listener.app) as port:
        await put(port)
        clock.ahead = 4.0
        assert (await put(port, {**BODY, "leaseSeconds": 60}))[0] == 200
        clock.ahead = 30.0
        listener._moved.set()
        assert (await put(port, {**BODY, "leaseSeconds": 60}))[0] == 200
    assert ranks.obeyed == [Order(1, ranks.obeyed[0].setting)]


async def test_a_fallback_waits_for_the_order_under_way(tokens, caplog):
    clock = Clock()
    _, ranks, listener = engine(tokens, clock=clock)
    async with hosted(listener.app) as port:
        await put(port)
        ranks.commits.clear()
        ranks.asked.clear()
        under_way = asyncio.create_task(put(port, {**BODY, "epoch": 2, "deadlineMs": 10_000}))
        await ranks.asked.wait()
        clock.ahead = 60.0
        ranks.moved.clear()
        listener._moved.set()
        await asyncio.sleep(0.05)  # the watchdog has woken, and nothing can be seen of it
        assert len(ranks.obeyed) == 1
        ranks.commits.set()
        assert (await under_way)[0] == 200
        async with asyncio.timeout(2):
            while len(ranks.obeyed) < 3:
                ranks.moved.clear()
                await ranks.moved.wait()
    assert [order.epoch for order in ranks.obeyed] == [1, 2, 3]
    assert "could not be ordered" not in caplog.text


async def test_what_was_read_before_a_doubt_does_not_settle_it(tokens):
    control, ranks, listener = engine(tokens)
    async with hosted(listener.app) as port:
        ranks.failures = [ConnectionError("cut")]
        assert (await put(port))[0] == 504
        ranks.reads.clear()
        ranks.asked.clear()
        early = asyncio.create_task(get(port))
        await ranks.asked.wait()
        ranks.failures = [ConnectionError("cut")]
        assert (await put(port, {**BODY, "epoch": 2}))[0] == 504
        ranks.reads.set()
        assert (await early)["unresolvedEpoch"] == 2
        assert control.doubtful.epoch == 2
        assert (await get(port))["unresolvedEpoch"] is None


async def test_the_watchdog_outlives_an_error(tokens, monkeypatch, caplog):
    monkeypatch.setattr(listener_module, "EXPIRY_SECONDS", 0.2)
    clock = Clock()
    control, ranks, listener = engine(tokens, clock=clock)
    expire, errors = control.expire, [ValueError("a defect")]

    def failing_once(now):
        if errors:
            raise errors.pop()
        return expire(now)

    monkeypatch.setattr(control, "expire", failing_once)
    async with hosted(listener.app) as port:
        await put(port)
        ranks.failures = [ConnectionError("the path to the scheduler broke")]
        ranks.moved.clear()
        clock.ahead = 60.0
        listener._moved.set()
        async with asyncio.timeout(5):
            await ranks.moved.wait()
    assert ranks.obeyed[-1] == Order(2, ranks.obeyed[-1].setting)
    assert "a defect" in caplog.text


async def test_an_app_without_a_lifespan_is_watched_by_hand(tokens):
    clock = Clock()
    control, ranks, listener = engine(tokens, clock=clock)
    async with listener.watching():
        sent = asyncio.Queue()
        request = {
            "type": "http",
            "method": "PUT",
            "path": "/v1/speculation",
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
        }
        body = {"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}

        async def receive():
            return body

        await listener.app(request, receive, sent.put)
        assert (await sent.get())["status"] == 200
        ranks.moved.clear()
        clock.ahead = 10.0
        listener._moved.set()
        async with asyncio.timeout(2):
            await ranks.moved.wait()
    assert control.epoch == 2


# Many in one process


async def test_engines_in_one_process_know_nothing_of_each_other(tokens):
    async with AsyncExitStack() as stack:
        engines = [engine(tokens, f"pod-{number}") for number in range(8)]
        ports = [
            await stack.enter_async_context(hosted(listener.app)) for _, _, listener in engines
        ]
        assert (await put(ports[3], {**BODY, "podUID": "pod-3"}))[0] == 200
        assert (await put(ports[4], {**BODY, "podUID": "pod-3"}))[0] == 412
        assert [control.epoch for control, _, _ in engines] == [0, 0, 0, 1, 0, 0, 0, 0]


async def test_signals_stay_with_the_host(tokens):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    async with hosted(engine(tokens)[2].app):
        during = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert during == before


async def test_a_host_that_leaves_finds_its_port_closed(tokens):
    async with hosted(engine(tokens)[2].app) as port:
        pass
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


# Sockets


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
async def test_both_families_are_answered(tokens, address):
    async with hosted(engine(tokens)[2].app, "::") as port:
        assert (await put(port, host=address))[0] == 200


async def test_a_machine_without_ipv6_is_answered_on_ipv4(tokens, monkeypatch):
    real = socket.socket

    def without_ipv6(family=-1, *rest, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no such address family")
        return real(family, *rest, **options)

    monkeypatch.setattr(listener_module.socket, "socket", without_ipv6)
    listening = bind("::", 0)
    monkeypatch.undo()
    assert listening.family == socket.AF_INET
    async with serving(engine(tokens)[2].app, listening):
        assert (await put(listening.getsockname()[1]))[0] == 200


def test_a_port_in_use_is_an_error():
    with bind("::", 0) as taken, pytest.raises(OSError, match="in use"):
        bind("::", taken.getsockname()[1])


def test_one_address_of_ipv6_is_that_alone():
    with bind("::1", 0) as listening:
        assert listening.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1


# Requests that don't end


async def test_a_body_that_stops_short_is_given_up(tokens, monkeypatch):
    monkeypatch.setattr(listener_module, "BODY_SECONDS", 0.2)
    async with hosted(engine(tokens)[2].app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"PUT /v1/speculation HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        writer.write(head.encode() + b"Content-Length: 500\r\n\r\n{")
        async with asyncio.timeout(5):
            assert b"400" in await reader.readline()
        writer.close()


async def test_a_body_without_an_end_is_given_up(tokens):
    async def endless():
        while True:
            yield b" " * 8_192

    async with hosted(engine(tokens)[2].app) as port, aiohttp.ClientSession() as session:
        try:
            async with session.put(
                f"http://127.0.0.1:{port}/v1/speculation",
                data=endless(),
                headers={"Authorization": f"Bearer {TOKEN}"},
            ) as answer:
                assert answer.status == 400
        except aiohttp.ClientConnectionError:
            pass  # the server may close while the client still sends
        assert (await put(port))[0] == 200


async def test_a_client_that_goes_away_does_no_harm(tokens):
    control, _, listener = engine(tokens)
    async with hosted(listener.app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"PUT /v1/speculation HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        writer.write(head.encode() + b"Content-Length: 500\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
        assert (await put(port))[0] == 200
    assert control.epoch == 1


async def test_an_answer_is_not_held_back_by_the_network_stack(tokens):
    """Nagle's algorithm and delayed acknowledgements make 40 ms of each answer."""
    async with hosted(engine(tokens)[2].app) as port, aiohttp.ClientSession() as session:
        took = []
        for _ in range(15):
            began = time.perf_counter()
            async with session.get(f"http://127.0.0.1:{port}/health") as answer:
                await answer.read()
            took.append(time.perf_counter() - began)
    assert sorted(took)[len(took) // 2] < 0.03


async def test_no_token_is_logged(tokens, caplog):
    with caplog.at_level(logging.DEBUG):
        async with hosted(engine(tokens)[2].app) as port:
            assert (await put(port))[0] == 200
            assert (await put(port, {**BODY, "epoch": "x"}))[0] == 400
            assert (await put(port, {**BODY, "holder": "theirs"}))[0] == 409
    ours = [record for record in caplog.records if record.name.startswith("specserve_engine")]
    assert ours
    assert TOKEN not in caplog.text
