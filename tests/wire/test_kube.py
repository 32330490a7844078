"""What becomes of an API server's answers, and of their absence."""

import asyncio

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio import client, config

from specserve.kube import APPLY, Kube, KubeRefused, KubeUnreachable
from tests.wire.apiserver import PODS, failure, hang


def answering(response_of):
    async def fault(_: web.Request) -> web.StreamResponse:
        return response_of()

    return fault


async def test_an_answer_is_decoded(server, kube):
    await server.put("a")
    page = await kube.call("GET", PODS)
    assert [item["metadata"]["name"] for item in page["items"]] == ["a"]


async def test_a_refusal_tells_status_reason_words_and_pause(server, kube):
    server.fault = answering(lambda: failure(429, "TooManyRequests", **{"Retry-After": "7"}))
    with pytest.raises(KubeRefused) as caught:
        await kube.call("GET", PODS)
    error = caught.value
    assert (error.status, error.reason, error.retry_after) == (429, "TooManyRequests", 7.0)
    assert error.message == "TooManyRequests, it says"


async def test_a_refusal_of_a_proxy_keeps_its_words(server, kube):
    server.fault = answering(lambda: web.Response(status=503, text="upstream " * 100))
    with pytest.raises(KubeRefused) as caught:
        await kube.call("GET", PODS)
    assert (caught.value.status, caught.value.reason) == (503, "Unknown")
    assert caught.value.message.startswith("upstream")
    assert len(caught.value.message) == 200


@pytest.mark.parametrize("text", ["", "<html>", "[]", '{"half": '])
async def test_what_is_no_object_is_no_answer(server, kube, text: str):
    server.fault = answering(lambda: web.Response(text=text))
    with pytest.raises(KubeUnreachable, match="no JSON object"):
        await kube.call("GET", PODS)


async def test_a_call_is_bounded(server, kube):
    server.fault = hang
    with pytest.raises(KubeUnreachable, match="GET /api/v1/pods: timed out"):
        await asyncio.wait_for(kube.call("GET", PODS, timeout=0.2), 2)


async def test_a_lost_connection_is_no_answer(server, kube):
    async def cut(request: web.Request) -> None:
        request.transport.abort()

    server.fault = cut
    with pytest.raises(KubeUnreachable):
        await kube.call("POST", PODS, body={})


async def test_a_server_that_is_not_there(server, kube):
    await server.go_down()
    with pytest.raises(KubeUnreachable, match=r"refused|Cannot connect"):
        await kube.call("GET", PODS)


async def test_a_manifest_is_sent_as_an_apply(server, kube):
    seen = {}

    async def keep(request: web.Request) -> web.Response:
        seen.update(type=request.headers["Content-Type"], query=dict(request.query))
        return web.json_response(await request.json())

    server.fault = keep
    query = {"fieldManager": "specserve", "force": "true"}
    body = {"spec": {"replicas": 0}}
    assert body == await kube.call("PATCH", PODS, query=query, body=body, content_type=APPLY)
    assert seen == {"type": APPLY, "query": query}


async def stream(request: web.Request, *lines: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for line in lines:
        await response.write(line)
    return response


async def read(kube: Kube, idle: float = 5.0) -> list[dict]:
    return [event async for event in kube.watch(PODS, {"resourceVersion": "1"}, idle)]


async def test_a_watch_yields_until_the_server_ends_it(server, kube):
    lines = (b'{"type":"ADDED","object":{}}\n', b'{"type":"BOOK', b'MARK","object":{}}\n')
    server.fault = lambda request: stream(request, *lines)
    assert [event["type"] for event in await read(kube)] == ["ADDED", "BOOKMARK"]
    assert server.requests[0].query["allowWatchBookmarks"] == "true"


async def test_an_error_in_the_stream_is_a_refusal(server, kube):
    line = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}\n'
    server.fault = lambda request: stream(request, line)
    with pytest.raises(KubeRefused) as caught:
        await read(kube)
    assert caught.value.status == 410


async def test_a_refused_watch_is_a_refusal(server, kube):
    server.fault = answering(lambda: failure(401, "Unauthorized"))
    with pytest.raises(KubeRefused, match="401"):
        await read(kube)


async def test_an_event_that_was_cut_off_is_a_broken_watch(server, kube):
    server.fault = lambda request: stream(request, b'{"type":"ADDED","obj')
    with pytest.raises(KubeUnreachable, match="no JSON object"):
        await read(kube)


async def test_an_event_beyond_measure_is_a_broken_watch(server, kube):
    server.fault = lambda request: stream(request, b"x" * 2**23, b"\n")
    with pytest.raises(KubeUnreachable, match="too long"):
        await read(kube)


async def test_a_silent_watch_is_noticed(server, kube):
    async def half_open(request: web.Request) -> web.StreamResponse:
        response = await stream(request, b'{"type":"ADDED","object":{}}\n')
        await asyncio.Event().wait()
        return response

    server.fault = half_open
    events = kube.watch(PODS, {"resourceVersion": "1"}, 0.2)
    assert (await anext(events))["type"] == "ADDED"
    with pytest.raises(KubeUnreachable, match="timed out"):
        await anext(events)


async def test_a_watch_that_is_never_answered_is_noticed(server, kube):
    server.fault = hang
    with pytest.raises(KubeUnreachable, match="timed out"):
        await asyncio.wait_for(read(kube, 0.2), 5)


async def test_an_ipv6_api_server_gets_its_brackets(tmp_path, monkeypatch):
    token, root = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("t")
    root.write_text("c")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00:10:96::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    settings = client.Configuration()
    loader = config.incluster_config.InClusterConfigLoader(str(token), str(root))
    loader.load_and_set(settings)
    assert settings.host == "https://[fd00:10:96::1]:443"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_librarys_requests_wait_as_long_as_the_server_asks(server, kube, status: int):
    server.fault = answering(lambda: failure(status, "Later", **{"Retry-After": "1"}))
    async with kube.session() as session:
        url = f"{kube.server}{PODS}"
        async with session.get(url, params={"limit": "1"}) as answer:
            assert answer.status == status
        server.fault = None
        async with session.get(url, params={"limit": "1"}) as answer:
            assert (await answer.json())["items"] == []
        async with session.get(url) as answer:
            assert answer.status == 200
    assert server.times[1] - server.times[0] >= 1.0
    assert server.times[2] - server.times[1] < 0.5


async def test_a_library_that_gives_up_while_it_waits_still_waits_the_next_time(server, kube):
    server.fault = answering(lambda: failure(503, "Later", **{"Retry-After": "1"}))
    async with kube.session() as session:
        url = f"{kube.server}{PODS}"
        await session.get(url)
        server.fault = None
        with pytest.raises(TimeoutError):
            await session.get(url, timeout=aiohttp.ClientTimeout(total=0.1))
        assert len(server.times) == 1
        await session.get(url)
    assert server.times[1] - server.times[0] >= 1.0


async def test_a_librarys_requests_take_turns_with_ours_and_watches_do_not_keep_theirs(server):
    under_way, most = 0, 0

    async def slow(_: web.Request) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1

    server.fault = slow
    async with server.kube(calls=2) as kube, kube.session() as session:

        async def ask() -> None:
            async with session.get(f"{kube.server}{PODS}") as answer:
                assert answer.status == 200

        async def watch() -> None:
            query = {"watch": "true", "resourceVersion": "100"}
            watches.append(await session.get(f"{kube.server}{PODS}", params=query))

        watches: list[aiohttp.ClientResponse] = []
        await asyncio.gather(*(watch() for _ in range(4)))
        await asyncio.gather(*(ask() for _ in range(4)), *(kube.call("GET", PODS) for _ in "abcd"))
        for one in watches:
            one.close()
    assert most == 2


async def test_a_librarys_requests_carry_the_token_of_the_moment(server, kube):
    async def current(configuration: client.Configuration) -> None:
        configuration.api_key["BearerToken"] = f"Bearer {next(tokens)}"

    tokens = iter(["one", "two"])
    kube._api.configuration.api_key["BearerToken"] = "to be read"
    kube._api.configuration.refresh_api_key_hook = current
    async with kube.session() as session:
        for _ in range(2):
            await session.get(f"{kube.server}{PODS}")
    sent = [request.headers["Authorization"] for request in server.requests]
    assert sent == ["Bearer one", "Bearer two"]
