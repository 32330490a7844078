"""HTTP of the simulated engine: the serving port, the admin port, and the simulator's own knobs.

One application serves any number of engines: the local address of a connection says which engine
is meant, the local port says whether its serving or its admin side. Routes below `/sim/` exist
in the simulator only; they need no key, and faults never concern them.

A stream gets its first and its last chunk at once, and between them at most one each 20 ms or so
(`engine.Pace`): under load a chunk holds the tokens of several rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import socket
import struct
import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specserve_sim import openai
from specserve_sim.answers import (
    SECTIONS,
    Generation,
    loads_body,
    loads_text,
    metrics_text,
    models_body,
    server_info_body,
)
from specserve_sim.behaviour import PROXY_BODY, behaviour_from
from specserve_sim.model import Request as ModelRequest
from specserve_sim.profile import REFERENCE_STEPS
from specserve_sim.text import prompt_length

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Iterator,
        Mapping,
        Sequence,
    )

    from starlette.types import Receive, Scope, Send

    _Handler = Callable[["SimEngine", Request], Response]

    from specserve_sim.behaviour import Fault, Side
    from specserve_sim.engine import SimEngine, Ticket

OPEN_PREFIXES: Final = ("/health", "/metrics", "/ready", "/sim/")
DEFAULT_NEW_TOKENS: Final = 128
KEEP_ALIVE_SECONDS: Final = 75
TRANSPORT: Final = "specserve_sim.transport"
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_STREAM_HEADERS: Final = [(b"content-type", b"text/event-stream; charset=utf-8")]


class BadRequest(ValueError):
    """A generation request that the engine refuses; the message says why."""


@dataclass(frozen=True, slots=True)
class Site:
    """Which engines are here, and at which ports.

    Attributes:
        engines: by local address; `*` stands for every other address.
        admin_port: of all of them; any other port is a serving port.
    """

    engines: Mapping[str, SimEngine]
    admin_port: int

    def find(self, local: tuple[str, int | None] | None) -> tuple[SimEngine, Side] | None:
        """Return whom a connection to this local address meets; None if nobody is there."""
        if local is None:
            return None
        engine = self.engines.get(local[0]) or self.engines.get("*")
        if engine is None:
            return None
        return engine, "admin" if local[1] == self.admin_port else "serving"


class App:
    """The ASGI application of a site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.closing = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        found = self.site.find(scope["server"])
        if found is None:
            _cut(scope)
            return await _gone(receive)
        engine, side = found
        path: str = scope["path"]
        own = side == "serving" and path.startswith("/sim/")
        fault = None if own else engine.behaviour.fault_for(side, path)
        if fault is not None and not await self._suffer(fault, scope, receive, send):
            return None
        if own:
            return await self._control(engine, scope, receive, send)
        if side == "admin":
            if scope["method"] == "PUT":
                engine.watch_leases()
            return await engine.listener.app(scope, receive, send)
        if engine.loading:
            _cut(scope)
            return await _gone(receive)
        return await _serve(engine, scope, receive, send)

    async def _suffer(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> bool:
        """Let a fault happen; True if the request goes on after it."""
        match fault.kind:
            case "slow":
                await asyncio.sleep(fault.seconds)
                return True
            case "status":
                response = PlainTextResponse(PROXY_BODY, fault.status)
                await response(scope, receive, send)
            case "hang":
                await _first(_gone(receive), self.closing.wait())
            case "reset" | "refuse":
                _cut(scope)
                await _gone(receive)
        return False

    async def _control(
        self, engine: SimEngine, scope: Scope, receive: Receive, send: Send
    ) -> None:
        request = Request(scope, receive)
        match scope["method"], scope["path"]:
            case "GET", "/sim/v1/behaviour":
                response: Response = JSONResponse(engine.behaviour.to_json())
            case "PUT", "/sim/v1/behaviour":
                response = await _behave([engine], request)
            case "PUT", "/sim/v1/fleet/behaviour":
                response = await _behave(list(self.site.engines.values()), request)
            case "GET", "/sim/v1/applied":
                response = JSONResponse({"now": time.monotonic(), "applied": _applied(engine)})
            case "GET", "/sim/v1/fleet/applied":
                response = JSONResponse(
                    {
                        "now": time.monotonic(),
                        "applied": {
                            address: _applied(each) for address, each in self.site.engines.items()
                        },
                    }
                )
            case "PUT", "/sim/v1/fleet/pods":
                response = await self._adopt(request)
            case "POST", "/sim/v1/restart":
                engine.restart()
                response = JSONResponse({"bootID": engine.boot_id})
            case "POST", "/sim/v1/exit":
                code = request.query_params.get("code", "1")
                os._exit(int(code) if code.isdigit() else 1)
            case _:
                response = JSONResponse({"detail": "Not Found"}, 404)
        await response(scope, receive, send)

    async def _adopt(self, request: Request) -> Response:
        """Tell engines which pods they are in: `{address: pod UID}`."""
        try:
            pods = await request.json()
            unknown = sorted(set(pods) - set(self.site.engines))
        except (TypeError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 400)
        if unknown:
            return JSONResponse({"error": f"no engine at {unknown[0]}"}, 400)
        for address, pod_uid in pods.items():
            self.site.engines[address].adopt(str(pod_uid))
        return JSONResponse({"adopted": len(pods)})


async def _behave(engines: Sequence[SimEngine], request: Request) -> Response:
    try:
        behaviour = behaviour_from(await request.json())
    except (ValueError, RecursionError) as error:
        return JSONResponse({"error": str(error)}, 400)
    at = time.monotonic()
    for engine in engines:
        engine.behave(behaviour)
    return JSONResponse({"at": at, "behaviour": behaviour.to_json()})


def _applied(engine: SimEngine) -> list[dict[str, Any]]:
    return [
        {
            "group": entry.group,
            "epoch": entry.epoch,
            "mode": entry.mode,
            "steps": entry.steps,
            "at": entry.at,
        }
        for entry in engine.applied
    ]


# Serving routes


async def _serve(engine: SimEngine, scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    request = Request(scope, receive)
    if not path.startswith(OPEN_PREFIXES) and not _authorised(engine, request):
        await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        return
    route = _ROUTES.get(path)
    if route is None:
        response: Response = JSONResponse({"detail": "Not Found"}, 404)
    elif scope["method"] not in route[0]:
        response = JSONResponse({"detail": "Method Not Allowed"}, 405)
    elif route[1] is None:  # written bit by bit
        await _generate(engine, request, send)
        return
    else:
        response = route[1](engine, request)
    await response(scope, receive, send)


def _authorised(engine: SimEngine, request: Request) -> bool:
    key = engine.config.api_key
    if key is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.encode("utf-8", "surrogateescape"), key.encode()
    )


def _health(engine: SimEngine, _: Request) -> Response:
    return Response(status_code=503 if engine.draining else 200)


def _loads(engine: SimEngine, request: Request) -> Response:
    if engine.behaviour.loads_gone:
        return JSONResponse({"detail": "Not Found"}, 404)
    include = frozenset(filter(None, request.query_params.get("include", "").split(",")))
    if include - SECTIONS:
        return PlainTextResponse("Internal Server Error", 500)
    if request.query_params.get("format") == "prometheus":
        return PlainTextResponse(loads_text(engine, include), media_type=_PROMETHEUS)
    return JSONResponse(loads_body(engine, include))


def _metrics(engine: SimEngine, _: Request) -> Response:
    if not engine.config.metrics or engine.behaviour.metrics == "gone":
        return JSONResponse({"detail": "Not Found"}, 404)
    return PlainTextResponse(metrics_text(engine), media_type=_PROMETHEUS)


def _models(engine: SimEngine, _: Request) -> Response:
    return JSONResponse(models_body(engine))


def _server_info(engine: SimEngine, _: Request) -> Response:
    return JSONResponse(server_info_body(engine))


_READ: Final = frozenset({"GET", "HEAD"})
_ROUTES: Final[dict[str, tuple[frozenset[str], _Handler | None]]] = {
    "/health": (_READ, _health),
    "/health_generate": (_READ, _health),
    "/ready": (_READ, _health),
    "/v1/loads": (_READ, _loads),
    "/metrics": (_READ, _metrics),
    "/v1/models": (_READ, _models),
    "/server_info": (_READ, _server_info),
    "/get_server_info": (_READ, _server_info),
    "/generate": (frozenset({"POST", "PUT"}), None),
    openai.COMPLETIONS: (frozenset({"POST"}), None),
    openai.CHAT: (frozenset({"POST"}), None),
}


# Generation


@dataclass(frozen=True, slots=True)
class _Order:
    """What a body asks for; `ask` is how an OpenAI route is answered, None on /generate."""

    requests: list[ModelRequest]
    rids: list[str]
    single: bool
    stream: bool
    ask: openai.Ask | None = None


async def _generate(engine: SimEngine, request: Request, send: Send) -> None:
    received = time.time()
    scope, receive = request.scope, request.receive
    try:
        body = await _json_object(request)
    except BadRequest as error:
        await _error(openai.error_text(str(error), "Bad Request"))(scope, receive, send)
        return
    except ClientDisconnect:
        return
    path = scope["path"]
    try:
        order = (
            _openai_order(engine, path, body) if path in openai.ROUTES else _order(engine, body)
        )
    except openai.Refused as error:
        await _error(openai.error_text(str(error), error.kind))(scope, receive, send)
        return
    except BadRequest as error:
        await _refuse(str(error), body.get("stream") is True, scope, receive, send)
        return
    tickets = [engine.submit(each, stream=order.stream) for each in order.requests]
    writers = [
        Generation(engine, ticket, rid, received)
        for ticket, rid in zip(tickets, order.rids, strict=True)
    ]
    gone = asyncio.ensure_future(_gone(receive))
    for ticket in tickets:
        gone.add_done_callback(partial(_wake, ticket))
    try:
        if order.stream:
            ask = order.ask
            events = writers[0].events if ask is None else openai.Events(ask, writers[0])
            finished = await _stream(tickets[0], events, gone, send)
        else:
            finished = await _whole(tickets, partial(_text, order, writers), gone, send)
    finally:
        for ticket in tickets:
            engine.leave(ticket)
        gone.cancel()
    if not finished:
        _cut(scope)
        await _gone(receive)


def _wake(ticket: Ticket, _: object) -> None:
    ticket.news.set()


async def _stream(
    ticket: Ticket,
    events: Callable[[], Iterator[str]],
    gone: asyncio.Future[None],
    send: Send,
) -> bool:
    """Send a stream to its end; False if it was cut off."""
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    shown = 0
    while True:
        await ticket.news.wait()
        ticket.news.clear()
        if ticket.lost or gone.done():
            return False
        finished = ticket.request.state == "finished"
        if ticket.request.tokens > shown or finished:
            shown = ticket.request.tokens
            await send(_chunk("".join(f"data: {event}\n\n" for event in events())))
        if finished:
            await send(_chunk("data: [DONE]\n\n", more=False))
            return True


async def _whole(
    tickets: Sequence[Ticket],
    write: Callable[[], str],
    gone: asyncio.Future[None],
    send: Send,
) -> bool:
    """Send the answers once all are there; False if that came to nothing."""
    for ticket in tickets:
        while ticket.request.state != "finished":
            await ticket.news.wait()
            ticket.news.clear()
            if ticket.lost or gone.done():
                return False
    text = write()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(text)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send(_chunk(text, more=False))
    return True


def _text(order: _Order, writers: Sequence[Generation]) -> str:
    if order.ask is not None:
        return openai.whole(order.ask, writers)
    parts = [writer.body() for writer in writers]
    return parts[0] if order.single else f"[{','.join(parts)}]"


def _error(text: str) -> Response:
    return Response(text, 400, media_type="application/json")


def _chunk(text: str, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode("ascii"), "more_body": more}


async def _refuse(
    message: str, streaming: bool, scope: Scope, receive: Receive, send: Send
) -> None:
    if not streaming:
        await JSONResponse({"error": {"message": message}}, 400)(scope, receive, send)
        return
    error = {
        "message": message,
        "type": "invalid_request_error",
        "code": 400,
        "retryable": False,
    }
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    await send(_chunk(f"data: {json.dumps({'error': error}, separators=(',', ':'))}\n\n"))
    await send(_chunk("data: [DONE]\n\n", more=False))


async def _json_object(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    text = body.get("text")
    if text is not None and not isinstance(text, str | list):
        raise BadRequest("text: a string or a list of strings")
    return body


def _order(engine: SimEngine, body: Mapping[str, Any]) -> _Order:
    lengths, single = _prompts(body)
    stream = body.get("stream") is True
    if stream and not single:
        raise BadRequest("the simulated engine streams single prompts only")
    parameters = body.get("sampling_params") or {}
    each = parameters if isinstance(parameters, list) else [parameters] * len(lengths)
    if len(each) != len(lengths) or not all(isinstance(item, dict) for item in each):
        raise BadRequest("sampling_params: an object, or one for each prompt")
    rid = body.get("rid")
    if rid is None:
        rid = [uuid.uuid4().hex for _ in lengths]
    rids = rid if isinstance(rid, list) else [rid]
    if len(rids) != len(lengths) or not all(isinstance(item, str) for item in rids):
        raise BadRequest("rid: a string for each prompt")
    requests = [
        _model_request(engine, length, item) for length, item in zip(lengths, each, strict=True)
    ]
    return _Order(requests, rids, single, stream)


def _openai_order(engine: SimEngine, route: str, body: Mapping[str, Any]) -> _Order:
    ask = openai.ask_from(route, body)
    try:
        requests = [
            _model_request(engine, length, ask.parameters)
            for length in ask.prompts
            for _ in range(ask.choices)
        ]
    except BadRequest as error:
        raise openai.Refused(str(error)) from error
    rid = uuid.uuid4().hex
    return _Order(requests, [rid] * len(requests), single=True, stream=ask.stream, ask=ask)


def _prompts(body: Mapping[str, Any]) -> tuple[list[int], bool]:
    """Return the lengths of the prompts in tokens, and whether there is just one, not a list."""
    text, ids = body.get("text"), body.get("input_ids")
    if isinstance(text, str):
        return [prompt_length(text)], True
    if isinstance(text, list) and text and all(isinstance(item, str) for item in text):
        return [prompt_length(item) for item in text], False
    if isinstance(ids, list) and ids:
        if all(isinstance(item, int) for item in ids):
            return [len(ids)], True
        if all(isinstance(item, list) and item for item in ids):
            return [len(item) for item in ids], False
    raise BadRequest("a request needs text or input_ids")


def _model_request(engine: SimEngine, prompt: int, parameters: Mapping[str, Any]) -> ModelRequest:
    temperature = parameters.get("temperature", 0)
    if not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise BadRequest(f"temperature: a finite number from 0 on, not {temperature}")
    if parameters.get("n", 1) != 1:
        raise BadRequest("n: the simulated engine gives one answer to a prompt")
    new = parameters.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if isinstance(new, bool) or not isinstance(new, int) or new < 0:
        raise BadRequest(f"max_new_tokens: a whole number from 0 on, not {new}")
    longest = engine.config.context_length
    if prompt + new > longest:
        raise BadRequest(
            f"{prompt} prompt tokens and {new} new ones exceed the context length of {longest}"
        )
    custom = parameters.get("custom_params") or {}
    accept_length = custom.get("accept_length") if isinstance(custom, dict) else None
    if accept_length is not None and not (
        isinstance(accept_length, int | float) and 1 <= accept_length <= REFERENCE_STEPS + 1
    ):
        raise BadRequest(
            f"custom_params.accept_length: from 1 to {REFERENCE_STEPS + 1}, not {accept_length}"
        )
    return ModelRequest(prompt, new, accept_length)


# Connections


def _cut(scope: Scope) -> None:
    """Reset the connection of a request."""
    transport = scope["extensions"][TRANSPORT]["transport"]
    _reset(transport)


def _reset(transport: asyncio.Transport) -> None:
    raw = transport.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):  # gone already
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def _gone(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(*waits: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _protocol(site: Site) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol, with faults of connections, and the transport in the scope."""

    class Protocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            found = site.find(self.server)
            if found is None or found[0].behaviour.refuses(found[1]):
                _reset(transport)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["extensions"] = {TRANSPORT: {"transport": self.transport}}

    return Protocol


class _Server(uvicorn.Server):
    """A server that leaves signals to its host, and tells when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self.down = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        # The one of uvicorn wakes up ten times a second, to renew a date that is not sent here.
        await self.on_tick(0)
        await self.down.wait()


@contextlib.asynccontextmanager
async def serving(site: Site, sockets: Sequence[socket.socket]) -> AsyncIterator[App]:
    """Serve a site on listening sockets for the length of a `with` block; they are closed then."""
    app = App(site)
    config = uvicorn.Config(
        app,
        http=_protocol(site),
        ws="none",
        interface="asgi3",
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        log_config=None,
        access_log=False,
        backlog=1024,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=list(sockets)), name="specserve-sim")
    up = asyncio.create_task(server.up.wait())
    await asyncio.wait({running, up}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield app
    finally:
        app.closing.set()
        up.cancel()
        server.down.set()
        await running
