"""Prometheus servers that ask for a login, refuse, send elsewhere, hang, drip or talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import BasicAuth, web

from specserve import api, prometheus, queries
from specserve.prometheus import PrometheusClient, PrometheusError
from specserve.signals import MetricNames
from specserve.target import Access, Target
from tests.cluster.pki import authority
from tests.integration.api import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

NAMES = MetricNames("sglang:num_running_reqs", "sglang:num_queue_reqs", "")
SECRET = "s3cr3t-of-a-tenant"
PODS = ("chat-1", "chat-2")


def answer(running: int = 20, queued: int = 1) -> dict[str, Any]:
    now = time.time()
    values = {
        "running": running,
        "running_time": now - 1,
        "queued": queued,
        "queued_time": now - 1,
    }
    result = [
        {
            "metric": {"namespace": "team", "pod": pod, "specserve_signal": mark},
            "value": [now, str(value)],
        }
        for pod in PODS
        for mark, value in values.items()
    ]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


class Played:
    """A server that is told how to answer, and notes what it is asked."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        self.reply: Callable[[web.Request], web.StreamResponse] = lambda _: web.json_response(
            answer()
        )
        self.url = ""

    async def take(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        return self.reply(request)


@contextlib.asynccontextmanager
async def playing(tls: ssl.SSLContext | None = None) -> AsyncIterator[Played]:
    played = Played()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", played.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        played.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        yield played
    finally:
        await runner.cleanup()


@pytest.fixture
async def server():
    async with playing() as played:
        yield played


class Time:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Time()


@pytest.fixture
async def client(clock):
    async with PrometheusClient(NAMES, hosts=("127.0.0.1",), clock=clock) as made:
        yield made


def target(url: str, access: Access = Access(), **fields: Any) -> Target:  # noqa: B008 - frozen
    policy = api.Policy.model_validate(
        {"source": "Prometheus", "prometheus": {"url": url, **fields}}
    )
    return Target(
        key=("team", "chat"),
        policy=queries.paced(policy),
        draft=api.Draft(),
        tokens=("plugin-token",),
        api_key=None,
        model="m",
        access=access,
    )


async def settled(client: PrometheusClient, wanted: Target, pod: str = "chat-1") -> Any:
    """What is known of a pod once the query under way has ended."""
    with contextlib.suppress(PrometheusError):
        await client.load(wanted, pod)
    server = client._servers.get(wanted.key)
    while server is not None and server.asking is not None:
        await asyncio.wait({server.asking})
    try:
        return await client.load(wanted, pod)
    except PrometheusError as error:
        return error


# -- asking ---------------------------------------------------------------------------------


async def test_one_query_serves_all_pods_for_a_period(server, client, clock):
    wanted = target(server.url)
    for pod in PODS * 3:
        assert (await client.load(wanted, pod)).running == 20
        clock.now += 1.0
    assert len(server.requests) == 1
    clock.now += 2.0
    await asyncio.gather(*(client.load(wanted, pod) for pod in PODS))
    assert len(server.requests) == 2


async def test_a_reading_ages_while_its_answer_is_kept(server, client, clock):
    first = await client.load(target(server.url), "chat-1")
    assert first.age == pytest.approx(1.0, abs=0.1)
    clock.now += 4.0
    second = await client.load(target(server.url), "chat-1")
    assert second.stamp == first.stamp
    assert second.age == pytest.approx(first.age + 4.0, abs=0.001)


async def test_a_failure_is_shared_too_and_the_server_not_pressed(server, client):
    server.reply = lambda _: web.Response(status=500)
    for pod in PODS * 3:
        with pytest.raises(PrometheusError):
            await client.load(target(server.url), pod)
    assert len(server.requests) == 1


async def test_a_pod_that_has_no_series_is_named(server, client):
    with pytest.raises(PrometheusError, match=r"no series of pod chat-9; query: \{__name__") as e:
        await client.load(target(server.url), "chat-9")
    assert e.value.code == "NoSamples"


async def test_a_changed_policy_is_asked_with_at_once(server, client):
    await client.load(target(server.url), "chat-1")
    await client.load(target(server.url, queryParams={"namespace": "team"}), "chat-1")
    assert server.requests[-1].query["namespace"] == "team"


async def test_the_prefix_of_the_url_stays(server, client):
    await client.load(target(server.url + "/select/0/prometheus/"), "chat-1")
    assert server.requests[0].path == "/select/0/prometheus/api/v1/query"


# -- login ----------------------------------------------------------------------------------


async def test_token_and_tenant(server, client, caplog):
    """O-C7: 401 without a token, 403 for another tenant's, 200 with the right one."""
    caplog.set_level(logging.DEBUG)

    def judge(request: web.Request) -> web.StreamResponse:
        if "Authorization" not in request.headers:
            return web.Response(status=401)
        if request.headers.get("X-Scope-OrgID") != "team-a":
            return web.Response(status=403, text=f"no: {request.headers['Authorization']}")
        return web.json_response(answer())

    server.reply = judge
    tenant = {"headers": [{"name": "X-Scope-OrgID", "value": "team-a"}]}
    access = Access(token=SECRET)
    bare = await settled(client, target(server.url, **tenant))
    wrong = await settled(client, target(server.url, access))
    right = await settled(client, target(server.url, access, **tenant))
    assert (bare.code, wrong.code, right.running) == ("Unauthorized", "Unauthorized", 20)
    assert bare.answered
    assert SECRET not in f"{wrong} {wrong!r} {target(server.url, access)!r} {access!r}"
    assert SECRET not in caplog.text


async def test_user_and_password(server, client):
    def judge(request: web.Request) -> web.StreamResponse:
        login = BasicAuth.decode(request.headers.get("Authorization", "Basic "), "utf-8")
        right = (login.login, login.password) == ("jürgen", SECRET)
        return web.json_response(answer()) if right else web.Response(status=401)

    server.reply = judge
    access = Access(basic=("jürgen", SECRET))
    assert (await settled(client, target(server.url, access))).running == 20


@pytest.mark.parametrize("token", [f"{SECRET}\nX-Evil: 1", f"{SECRET}\u2603"])
async def test_a_token_that_no_header_can_carry(server, client, caplog, token):
    caplog.set_level(logging.DEBUG)
    error = await settled(client, target(server.url, Access(token=token)))
    assert error.code == "KeyUnusable"
    assert SECRET not in f"{error!r} {caplog.text}"
    assert server.requests == []


async def test_a_missing_secret_is_not_left_out(server, client):
    access = Access(
        missing="Secret login is missing (spec.policy.prometheus.bearerTokenSecretRef)"
    )
    error = await settled(client, target(server.url, access))
    assert error.code == "SecretMissing"
    assert "Secret login" in str(error)
    assert server.requests == []


async def test_a_token_file_of_the_operator_is_read_each_time(secured, pki, clock, tmp_path):
    """O-C7.1: a service account's token rotates."""
    file = tmp_path / "token"
    seen = []
    public = Access(authorities=pki.certificate.read_text())

    def asked(access: Access = public, **fields: Any) -> Target:
        return target(secured.url, access, **CA, **fields)

    async with PrometheusClient(
        NAMES, hosts=("127.0.0.1",), token_files={"127.0.0.1": str(file)}, clock=clock
    ) as client:
        for token in ("one", "two"):
            file.write_text(token + "\n")
            clock.now += 60.0
            await client.load(asked(), "chat-1")
            seen.append(secured.requests[-1].headers["Authorization"])
        # Who writes a query of their own would read with the operator's rights.
        for fields in ({"runningQuery": "up"}, {"podLabel": "exported_pod"}):
            await settled(client, asked(**fields))
            assert "Authorization" not in secured.requests[-1].headers
        await settled(client, asked(replace(public, token="own")))
        assert secured.requests[-1].headers["Authorization"] == "Bearer own"
        file.unlink()
        clock.now += 60.0
        error = await settled(client, asked())
    assert seen == ["Bearer one", "Bearer two"]
    assert error.code == "KeyUnusable"


async def test_a_token_file_of_the_operator_does_not_go_out_in_the_open(server, tmp_path):
    (tmp_path / "token").write_text("operator")
    files = {"127.0.0.1": str(tmp_path / "token")}
    async with PrometheusClient(NAMES, hosts=("127.0.0.1",), token_files=files) as client:
        await client.load(target(server.url), "chat-1")
    assert "Authorization" not in server.requests[0].headers


async def test_no_cookie_is_kept(server, client, clock):
    """A server could fill the memory with them."""
    server.reply = lambda _: web.json_response(
        answer(), headers={"Set-Cookie": "session=1; Path=/"}
    )
    await client.load(target(server.url), "chat-1")
    clock.now += 60.0
    await client.load(target(server.url), "chat-1")
    assert "Cookie" not in server.requests[-1].headers


async def test_the_environment_is_not_asked(server, client, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login operator password own\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    await client.load(target(server.url), "chat-1")
    assert "Authorization" not in server.requests[0].headers


# -- answers that are none ------------------------------------------------------------------


async def test_words_of_prometheus_about_a_query_are_handed_on(server, client):
    said = {"status": "error", "errorType": "bad_data", "error": "1:3: parse error"}
    server.reply = lambda _: web.json_response(said, status=400)
    error = await settled(client, target(server.url, runningQuery="sum("))
    assert error.code == "QueryRefused"
    assert "400 bad_data: 1:3: parse error; query: sum(" in str(error)


@pytest.mark.parametrize("text", ["inner matters", '{"error": "inner matters"}', '["inner"]'])
@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 502, 503])
async def test_words_of_others_are_not(server, client, status, text):
    """The server may be any that the operator reaches; a SpecServe is no way to read it."""
    server.reply = lambda _: web.Response(status=status, text=text)
    error = await settled(client, target(server.url))
    assert error.code == f"PrometheusHTTP{status}"
    assert "inner" not in str(error)
    assert "query: {__name__=" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>inner matters</html>",
        b"null",
        b"[]",
        b"{}",
        b'{"status":"success"}',
        b'{"status":"success","data":null}',
        b'{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}',
        b'{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[]}]}}',
        json.dumps(answer()).encode()[:-9],
        b"[" * 100_000,
        b"\xff\xfe\x00",
    ],
)
async def test_nonsense_is_unreadable(server, client, body):
    server.reply = lambda _: web.Response(body=body, content_type="application/json")
    error = await settled(client, target(server.url))
    assert error.code == "Unreadable"
    assert "inner" not in str(error)
    assert "query: " in str(error)


async def test_an_endless_answer_is_cut_off(server, client, monkeypatch):
    monkeypatch.setattr(prometheus, "LONGEST_ANSWER", 200_000)
    server.reply = lambda _: web.Response(body=b" " * 1_000_000)
    error = await settled(client, target(server.url))
    assert "too long" in str(error)


async def test_nothing_is_unpacked(server, client):
    """A kilobyte that becomes a gigabyte."""

    def pack(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        response = web.json_response(answer())
        response.enable_compression(web.ContentCoding.gzip)
        response.headers["Content-Encoding"] = "gzip"
        return response

    server.reply = pack
    assert (await settled(client, target(server.url))).code in {"Unreadable", "PrometheusTimeout"}


async def test_a_redirect_is_not_followed(server, client):
    async with playing() as elsewhere:
        server.reply = lambda _: web.Response(
            status=302, headers={"Location": f"{elsewhere.url}/inner"}
        )
        error = await settled(client, target(server.url, Access(token=SECRET)))
        assert elsewhere.requests == []
    assert error.code == "PrometheusRedirects"
    assert error.answered


async def test_nobody_is_there(client):
    error = await settled(client, target("http://127.0.0.1:9"))
    assert (error.code, error.answered) == ("PrometheusUnreachable", False)
    assert "Connection refused" in str(error)


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:x"])
async def test_an_address_that_is_none(url):
    async with PrometheusClient(NAMES) as client:
        error = await settled(client, target(url))
    assert error.code == "UrlUnusable"


async def test_a_fault_of_our_own_quotes_nothing(server, client, caplog, monkeypatch):
    def broken(*_: Any) -> Any:
        raise AssertionError(SECRET)

    monkeypatch.setattr(prometheus.PrometheusConnect, "custom_query", broken)
    error = await settled(client, target(server.url, Access(token=SECRET)))
    assert error.code == "PrometheusFailed"
    assert "AssertionError" in caplog.text
    assert SECRET not in f"{error} {caplog.text}"


async def test_an_end_waits_for_no_server():
    async def hang(_: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5.0)

    async with raw(hang) as url:
        began = time.monotonic()
        async with PrometheusClient(NAMES, hosts=("127.0.0.1",)) as client:
            with pytest.raises(PrometheusError, match="has not answered yet"):
                await client.load(target(url), "chat-1")
        assert time.monotonic() - began < 1.0


# -- servers that take their time -----------------------------------------------------------


@contextlib.asynccontextmanager
async def raw(handle: Callable[[asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """A server that does no HTTP but what a test does."""

    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await handle(writer)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving)


async def drip(writer: asyncio.StreamWriter, start: bytes) -> None:
    writer.write(start)
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "start",
    [b"", b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"],
    ids=["status", "header", "body"],
)
async def test_a_byte_now_and_then_holds_no_thread(client, monkeypatch, start):
    monkeypatch.setattr(prometheus, "DEADLINE", 0.4)
    async with raw(lambda writer: drip(writer, start)) as url:
        began = time.monotonic()
        error = await settled(client, target(url))
        assert time.monotonic() - began < 2.0
    assert (error.code, error.answered) == ("PrometheusTimeout", False)


async def test_a_slow_server_holds_up_no_tick(client, clock):
    """The answer before serves meanwhile; its age tells."""
    slow = asyncio.Event()

    async def late(writer: asyncio.StreamWriter) -> None:
        if slow.is_set():
            await asyncio.sleep(1.0)
        body = json.dumps(answer()).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    async with raw(late) as url:
        first = await client.load(target(url), "chat-1")
        slow.set()
        clock.now += 60.0
        began = time.monotonic()
        second = await client.load(target(url), "chat-1")
        assert time.monotonic() - began < 0.9
        assert second.stamp == first.stamp
        assert second.age >= 60.0
        third = await settled(client, target(url))
        assert third.stamp > first.stamp


async def test_a_hanging_server_delays_no_other(server, client, monkeypatch):
    monkeypatch.setattr(prometheus, "DEADLINE", 3.0)

    async def hang(_: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5.0)

    async with raw(hang) as url:
        hung = [replace(target(url), key=("other", f"chat-{n}")) for n in range(30)]
        waiting = [asyncio.create_task(settled(client, one)) for one in hung]
        await asyncio.sleep(0.3)
        began = time.monotonic()
        assert (await client.load(target(server.url), "chat-1")).running == 20
        assert time.monotonic() - began < 0.5
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for one in hung:
            client.forget(one.key)


async def test_letting_go_ends_the_connections(server, client):
    await client.load(target(server.url), "chat-1")
    client.forget(("team", "chat"))
    await eventually(lambda: server.requests[0].transport is None, 2)


# -- where may be called --------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [("*",), ("127.*",), ("*.0.0.1", "prometheus.example")])
async def test_no_pattern_allows_the_operators_own_machine(server, hosts):
    async with PrometheusClient(NAMES, hosts=hosts) as client:
        error = await settled(client, target(server.url))
    assert error.code == "HostForbidden"
    assert server.requests == []


async def test_a_name_that_leads_to_the_own_machine_is_no_way_around(server):
    """What counts is the address that is called, not the one looked up before."""
    url = server.url.replace("127.0.0.1", "localhost")
    async with PrometheusClient(NAMES, hosts=("*",)) as client:
        error = await settled(client, target(url))
    assert error.code == "HostForbidden"
    assert server.requests == []


async def test_other_hosts_than_the_installations_are_not_called(client):
    error = await settled(client, target("http://169.254.169.254"))
    assert error.code == "HostForbidden"
    assert "does not allow the host 169.254.169.254" in str(error)


# -- certificates ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
async def secured(pki):
    certificate, key = pki.issue("server", "server", alternatives="IP:127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    async with playing(context) as played:
        yield played


CA = {"caSecretRef": {"name": "querier-ca"}}


async def test_a_private_authority(secured, client, pki):
    access = Access(authorities=pki.certificate.read_text())
    assert (await settled(client, target(secured.url, access, **CA))).running == 20


async def test_a_certificate_is_verified_and_the_authority_named(
    secured, client, tmp_path_factory
):
    """O-C7.4: by default by the public ones, else by those of the Secret and no others."""
    bare = await settled(client, target(secured.url))
    other = authority(tmp_path_factory.mktemp("other")).certificate.read_text()
    wrong = await settled(client, target(secured.url, Access(authorities=other), **CA))
    assert bare.code == wrong.code == "CertificateRejected"
    assert "the public authorities" in str(bare)
    assert "Secret querier-ca, key ca.crt" in str(wrong)
    assert secured.requests == []


async def test_a_certificate_of_another_host(client, pki):
    certificate, key = pki.issue("elsewhere", "elsewhere", alternatives="DNS:elsewhere")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    async with playing(context) as played:
        access = Access(authorities=pki.certificate.read_text())
        error = await settled(client, target(played.url, access, **CA))
        assert played.requests == []
    assert error.code == "CertificateRejected"
    assert "127.0.0.1" in str(error)


async def test_a_secret_without_certificates(secured, client):
    error = await settled(client, target(secured.url, Access(authorities="no PEM"), **CA))
    assert error.code == "CertificateRejected"
    assert "Secret querier-ca, key ca.crt, holds no certificates" in str(error)


async def test_a_secured_url_on_an_open_port(server, client):
    error = await settled(client, target(server.url.replace("http://", "https://")))
    assert error.code == "PrometheusUnreachable"
