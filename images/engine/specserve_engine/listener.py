"""The admin listener: HTTP in front of the control core, and the watchdog of its lease.

It runs in the engine's HTTP process, in whatever event loop hosts it, on a port of its own. One
order at a time is under way in an engine: directives wait for their turn, and so does the
fallback of a lease that ran out. A read-back waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from specserve_engine.control import Phase, Refusal, Renewed
from specserve_engine.ranks import (
    Result,
    Verdict,
    carry_out,
    groups_json,
    read_all,
    silent_groups,
    votes_json,
)
from specserve_engine.wire import (
    HEALTH_PATH,
    SPECULATION_PATH,
    Code,
    Directive,
    Invalid,
    decode,
    parse_directive,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from specserve_engine.auth import TokenFile
    from specserve_engine.control import Control, Order
    from specserve_engine.ranks import GroupState, Outcome, Ranks

MAX_BODY: Final = 65_536
BODY_SECONDS: Final = 2.0
"""For a request's body to arrive."""
READ_SECONDS: Final = 1.5
"""For the ranks to answer a read-back: the operator's own timeout is 2 s."""
LAST_READ_SECONDS: Final = 0.25
"""For the read-back after an order that took all of its time: the operator waits 1 s longer."""
EXPIRY_SECONDS: Final = 2.0
"""For the ranks to obey a fallback, and between attempts."""
TICK_SECONDS: Final = 1.0
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than the operator's renewals are apart, so its idle connections are not reset."""

_log = logging.getLogger(__name__)


class Answer(JSONResponse):
    """JSON in ASCII: whatever a client sent can be quoted back."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class Listener:
    """One engine's admin endpoint. Holds no global state: a process may host many.

    Attributes:
        app: The ASGI application; its lifespan runs the lease watchdog. Where an application is
            hosted without a lifespan, run `watching` around it instead.
    """

    def __init__(
        self,
        control: Control,
        ranks: Ranks,
        tokens: TokenFile,
        *,
        require_live: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Put HTTP in front of `control` and `ranks`.

        Args:
            control: The state machine; its phase is the host's to set.
            ranks: The way to the scheduler ranks.
            tokens: Who may read and order.
            require_live: Without live control the engine is not healthy.
            clock: Seconds of a monotonic clock, for leases; it must run as fast as the loop's.
        """
        self._control = control
        self._ranks = ranks
        self._tokens = tokens
        self._require_live = require_live
        self._clock = clock
        self._turn = asyncio.Lock()
        self._moved = asyncio.Event()
        self.app = Starlette(
            routes=[
                Route(SPECULATION_PATH, self._get, methods=["GET"]),
                Route(SPECULATION_PATH, self._put, methods=["PUT"]),
                Route(HEALTH_PATH, self._health, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error},
            lifespan=lambda _: self.watching(),
        )

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Run the lease watchdog for the length of a `with` block."""
        watchdog = asyncio.create_task(self._watch(), name="specserve lease watchdog")
        try:
            yield
        finally:
            watchdog.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watchdog

    async def _health(self, _: Request) -> Response:
        phase, capability = self._control.phase, self._control.capability
        status = str(phase)
        if phase is Phase.SERVING and self._require_live and not capability.controllable:
            status = "notControllable"
        return Answer(
            {
                "status": status,
                "controllable": capability.controllable,
                "reason": capability.reason,
            },
            status_code=200 if status == Phase.SERVING else 503,
        )

    async def _get(self, request: Request) -> Response:
        if not self._tokens.authorises(request.headers.get("authorization")):
            return _unauthorised()
        return Answer(await self._read_back(_loop_time() + READ_SECONDS))

    async def _put(self, request: Request) -> Response:
        arrived = _loop_time()
        if not self._tokens.authorises(request.headers.get("authorization")):
            return _unauthorised()
        try:
            directive = parse_directive(decode(await _body(request)))
        except Invalid as error:
            return _refused(Refusal(Code.INVALID, str(error), {"field": error.field}))
        deadline = arrived + directive.deadline_ms / 1000
        refusal = await self._obey(directive, deadline)
        if refusal:
            _log.info("refused epoch %d: %s", directive.epoch, refusal.message)
            return _refused(refusal)
        return Answer(
            await self._read_back(max(deadline, _loop_time() + LAST_READ_SECONDS)),
        )

    async def _obey(self, directive: Directive, deadline: float) -> Refusal | None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            return Refusal(
                Code.TIMEOUT,
                "another order was under way until the deadline; this one was not sent",
                {"epoch": self._control.epoch},
            )
        try:
            admission = self._control.admit(directive, self._clock())
            if isinstance(admission, Refusal):
                return admission
            if isinstance(admission, Renewed):
                self._moved.set()
                return None
            outcome = await self._carry(admission.order, deadline)
        finally:
            self._turn.release()
        if outcome.result is Result.APPLIED:
            _log.info(
                "epoch %d of %s: %s (%s)",
                directive.epoch,
                directive.holder,
                directive.setting,
                directive.reason,
            )
            return None
        return self._refusal_of(outcome)

    async def _carry(self, order: Order, deadline: float) -> Outcome:
        """Take an order to the ranks and tell the control core what came of it."""
        try:
            outcome = await carry_out(self._ranks, order, deadline)
        except BaseException:
            self._control.doubt(order)
            raise
        finally:
            self._moved.set()
        match outcome.result:
            case Result.APPLIED:
                self._control.commit(order)
            case Result.UNKNOWN:
                self._control.doubt(order)
            case Result.REFUSED | Result.SILENT:
                self._control.fail(order)
        return outcome

    def _refusal_of(self, outcome: Outcome) -> Refusal:
        carried = {"epoch": self._control.epoch, "ranks": votes_json(outcome.votes)}
        if outcome.result is Result.REFUSED:
            objection = next(vote for vote in outcome.votes if vote.verdict is Verdict.NO)
            message = f"rank {objection.rank} of group {objection.group}: {objection.message}"
            return Refusal(
                objection.code,
                f"applied by no rank; {message}",
                {
                    **carried,
                    "availableSteps": list(self._control.capability.available_steps),
                    "reason": message,
                },
            )
        silent = [vote for vote in outcome.votes if vote.verdict is not Verdict.YES]
        names = ", ".join(f"rank {vote.rank} of group {vote.group}" for vote in silent[:8])
        return Refusal(
            Code.TIMEOUT,
            f"outcome unknown, read back; no answer until the deadline from {names or 'anyone'}",
            carried,
        )

    async def _read_back(self, deadline: float) -> dict[str, Any]:
        doubtful = self._control.doubtful
        groups = await self._groups(deadline)
        # What was read tells nothing of an order that came to be in doubt meanwhile.
        if doubtful is not None and doubtful is self._control.doubtful:
            self._control.resolve(state.epoch for group in groups for state in group.ranks)
            self._moved.set()
        return {**self._control.read_back(self._clock()), "groups": groups_json(groups)}

    async def _groups(self, deadline: float) -> tuple[GroupState, ...]:
        match self._control.phase:
            case Phase.LOADING:
                return ()
            case Phase.DEAD:
                return silent_groups(self._ranks.layout, self._control.capability.reason)
            case Phase.SERVING | Phase.DRAINING:
                return await read_all(self._ranks, deadline)

    async def _watch(self) -> None:
        """Have the ranks obey the fallback whenever a lease runs out."""
        while True:
            await self._lease_end()
            try:
                settled = await self._fall_back()
            except Exception:  # noqa: BLE001 - a lease must not go unwatched after an error
                _log.exception("the fallback could not be ordered")
                settled = False
            if not settled:
                await asyncio.sleep(EXPIRY_SECONDS)

    async def _lease_end(self) -> None:
        while True:
            self._moved.clear()
            due = self._control.next_expiry()
            remaining = None if due is None else due - self._clock()
            if remaining is not None and remaining <= 0:
                return
            # Not wait_for: in Python 3.11 it loses a cancellation that meets the wake-up.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._moved.wait()

    async def _fall_back(self) -> bool:
        async with self._turn:
            order = self._control.expire(self._clock())
            if order is None:
                return True
            outcome = await self._carry(order, _loop_time() + EXPIRY_SECONDS)
        if outcome.result is Result.APPLIED:
            _log.warning("lease ran out: epoch %d, fallback %s", order.epoch, order.setting)
            return True
        _log.error(
            "lease ran out, but the ranks do not obey the fallback (epoch %d): %s",
            order.epoch,
            json.dumps(votes_json(outcome.votes)),
        )
        return False


def bind(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket.

    Args:
        host: An address. `::` takes both families, and becomes `0.0.0.0` where the machine has no
            IPv6: a pod's address may be of either family.
        port: 0 for any free one.

    Raises:
        OSError: The address is in use or is not this machine's.
    """
    if host != "::":
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return _bound(family, host, port)
    try:
        return _bound(socket.AF_INET6, host, port)
    except OSError as error:
        if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENOPROTOOPT}:
            raise
        return _bound(socket.AF_INET, "0.0.0.0", port)


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    # Only with the protocol named does asyncio turn Nagle's algorithm off, which costs 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        listening.bind((host, port))
        listening.listen(128)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


@contextlib.asynccontextmanager
async def serving(app: Starlette, listening: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on a socket for the length of a `with` block, leaving signals to the host.

    The socket is closed at the end. Its port answers once the block is entered.

    Raises:
        RuntimeError: The application did not start.
    """
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listening]), name="specserve listener")
    started = asyncio.create_task(server.up.wait())
    try:
        await asyncio.wait({running, started}, return_when=asyncio.FIRST_COMPLETED)
        if not server.up.is_set():
            raise RuntimeError("the admin listener did not start")
        yield
    finally:
        started.cancel()
        server.stop()
        await running


class _Server(uvicorn.Server):
    """A server beside another one: SIGTERM stays the engine's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        # Once a second, for the Date header, and at once when stopped: uvicorn's own loop wakes
        # ten times a second, which a process of a thousand engines would feel.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    def install_signal_handlers(self) -> None:
        pass

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.up.set()


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise Invalid("", f"the body has more than {MAX_BODY} bytes")
    except TimeoutError:
        raise Invalid("", f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise Invalid("", "the body was cut off") from None
    return bytes(body)


def _refused(refusal: Refusal) -> Response:
    return Answer(refusal.to_json(), status_code=refusal.status)


def _unauthorised() -> Response:
    refusal = Refusal(Code.UNAUTHORIZED, "no valid token")
    return Answer(
        refusal.to_json(), status_code=refusal.status, headers={"WWW-Authenticate": "Bearer"}
    )


async def _http_error(_: Request, error: Exception) -> Response:
    """Answer an unknown path or method in the shape of all other errors."""
    if not isinstance(error, HTTPException):
        raise error
    code = HTTPStatus(error.status_code).phrase.title().replace(" ", "")
    return Answer(
        {"code": code, "message": error.detail},
        status_code=error.status_code,
        headers=error.headers,
    )


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
