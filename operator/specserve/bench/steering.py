"""Switches a live engine through the plugin's listener, and puts it back as it was found.

A directive holds for a lease of a minute, which is renewed while it is needed, and names what was
found as its fallback: if this process dies, the engine returns there by itself.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from specserve import names
from specserve.bench.client import Client, Reply, Unreachable
from specserve.bench.connection import REFUSALS, Connection, Refused
from specserve.policy import directive

LEASE_SECONDS = 60
RENEWAL_SECONDS = 20.0
#: The shortest lease there is; after a restoration nothing renews it, and its fallback is itself.
LAST_LEASE_SECONDS = 5
DEADLINE_MS = 5_000
SETTLE_SECONDS = 10.0
_PAUSE_SECONDS = 0.02
_SETTING = ("mode", "steps", "tiers", "draftKv")


class NotSteerable(Exception):
    """The engine cannot be switched from here; the message says why and what would do."""


class Steering:
    """The hand on one engine. Made by `steering`.

    Attributes:
        found: The read-back at the beginning.
    """

    def __init__(
        self,
        client: Client,
        connection: Connection,
        found: Mapping[str, Any],
        holder: str | None = None,
    ) -> None:
        self.found = found
        self._client = client
        self._connection = connection
        self._holder = holder or f"specserve/{socket.gethostname()}-{os.getpid()}"[:320]
        self._last: dict[str, Any] | None = None
        self._lock = asyncio.Lock()

    @property
    def available_steps(self) -> Sequence[int]:
        """Step counts that the engine has prepared, 0 among them."""
        return tuple(self.found["availableSteps"])

    async def apply(self, setting: Mapping[str, Any]) -> None:
        """Order a setting; it holds from the next decode batch on.

        Raises:
            NotSteerable: The engine did not take it.
            Refused: The token does not fit any more.
            Unreachable: No answer.
        """
        wanted = {**setting, "fallback": self._as_found()}
        async with self._lock:
            await self._put(wanted, LEASE_SECONDS)

    async def renew(self) -> None:
        """Extend the lease of the last order, for ever."""
        while True:
            await asyncio.sleep(RENEWAL_SECONDS)
            async with self._lock:
                if self._last is not None:
                    with contextlib.suppress(Unreachable):  # three renewals fit into a lease
                        await self._send(self._last)

    async def settled(self) -> None:
        """Return once every rank runs what was ordered; requests have to be running.

        Raises:
            NotSteerable: They still do otherwise after ten seconds.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLE_SECONDS
        while (stray := directive.astray(await self.read())) is not None:
            if loop.time() > until:
                raise NotSteerable(f"the engine does not follow its order: {stray}")
            await asyncio.sleep(_PAUSE_SECONDS)

    async def read(self) -> Mapping[str, Any]:
        """Return the read-back of this moment."""
        return await read_back(self._client, self._connection)

    async def restore(self) -> None:
        """Put the engine back to what was found."""
        async with self._lock:
            if self._last is not None:
                found = self._as_found()
                await self._put({**found, "fallback": found}, LAST_LEASE_SECONDS)
                self._last = None

    def _as_found(self) -> dict[str, Any]:
        return {
            name: self.found[name] for name in _SETTING if self.found.get(name) not in (None, [])
        }

    async def _put(self, wanted: Mapping[str, Any], lease_seconds: int) -> None:
        now = await self.read()
        body = directive.body(
            wanted,
            pod_uid=now["podUID"],
            boot_id=now["bootID"],
            epoch=now["epoch"] + 1,
            holder=self._holder,
            lease_seconds=lease_seconds,
            deadline_ms=DEADLINE_MS,
            reason=f"measuring: {wanted['mode']}",
        )
        self._last = body
        await self._send(body)

    async def _send(self, body: Mapping[str, Any]) -> None:
        reply = await self._client.call(
            "PUT",
            self._connection.admin_url + names.PATH_SPECULATION,
            bearer=self._connection.token,
            body=body,
            seconds=DEADLINE_MS / 1000 + 1,
        )
        _check(reply, self._connection)


@contextlib.asynccontextmanager
async def steering(
    client: Client, connection: Connection, *, holder: str | None = None
) -> AsyncIterator[Steering]:
    """Hold an engine for the length of a `with` block; what was found is put back at its end.

    Args:
        client: To call with.
        connection: Where the engine is.
        holder: In whose name to steer; a lease of his own is no objection, as he has let go of
            the engine. A name of this process if None.

    Raises:
        NotSteerable: There is no plugin, the engine has no live control, or somebody else steers
            it.
        Refused: The token does not fit.
        Unreachable: Nobody listens at the admin address.
    """
    found = await read_back(client, connection)
    if not found.get("controllable"):
        raise NotSteerable(f"the engine cannot be switched live: {found.get('reason')}")
    if 0 < _remaining(found) <= LAST_LEASE_SECONDS:
        # Nobody renews it any more: an earlier run has put the engine back.
        await asyncio.sleep(_remaining(found) + _PAUSE_SECONDS)
        found = await read_back(client, connection)
    lease = found.get("lease") or {}
    if _remaining(found) > 0 and lease.get("holder") != holder:
        raise NotSteerable(
            f"{lease.get('holder')} steers this engine for {lease['remainingSeconds']:.0f} s "
            f"more; {_release(str(lease.get('holder')))}, or measure an engine of your own"
        )
    hand = Steering(client, connection, found, holder)
    renewal = asyncio.create_task(hand.renew())
    try:
        yield hand
    except BaseException as error:
        try:
            await _put_back(hand, renewal)
        except NotSteerable as failure:
            # What ended the work comes first: this is often its consequence.
            error.add_note(str(failure))
        raise
    await _put_back(hand, renewal)


async def _put_back(hand: Steering, renewal: "asyncio.Task[None]") -> None:
    """Put the engine back, however its renewals ended.

    Raises:
        NotSteerable: It was not put back.
    """
    renewal.cancel()
    await asyncio.gather(renewal, return_exceptions=True)
    try:
        await asyncio.shield(hand.restore())
    except (NotSteerable, Refused, Unreachable) as error:
        raise NotSteerable(
            f"the engine was not put back: {error}; if it lives, it goes back by itself within "
            f"{LEASE_SECONDS} s"
        ) from None


async def read_back(client: Client, connection: Connection) -> Mapping[str, Any]:
    """Ask the plugin what the engine does.

    Raises:
        NotSteerable: There is no plugin, or it does not tell.
        Refused: The token does not fit.
        Unreachable: No answer.
    """
    url = connection.admin_url + names.PATH_SPECULATION
    reply = await client.call("GET", url, bearer=connection.token)
    _check(reply, connection)
    if "bootID" not in reply.body:
        raise NotSteerable(_why(reply))
    return reply.body


def _release(holder: str) -> str:
    """What has another let go of an engine."""
    # What follows is a host and a path: more slashes than an installation of that namespace has.
    if holder.startswith(names.HOLDER_LOCAL) and holder.count("/") > 1:
        return "end the `specserve local` that does"
    return "set its SpecServe to mode Observe and wait"


def _remaining(state: Mapping[str, Any]) -> float:
    return float((state.get("lease") or {}).get("remainingSeconds") or 0)


def _check(reply: Reply, connection: Connection) -> None:
    if reply.status in REFUSALS:
        raise Refused.token(connection.admin_url, connection.token)
    if reply.status != 200:
        raise NotSteerable(_why(reply))


def _why(reply: Reply) -> str:
    if reply.status in {404, 405} or not reply.body:
        return f"no SpecServe plugin answers at the admin address (HTTP {reply.status})"
    code, message = reply.body.get("code"), reply.body.get("message") or reply.body.get("reason")
    return f"the engine refused: {code or reply.status} {message or ''}".strip()
