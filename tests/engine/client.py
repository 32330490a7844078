"""A client of one real engine: its serving port as users see it, its admin port as we do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

HOLDER = "tests/engine"


@dataclass(frozen=True)
class Address:
    """Where an engine is, and what opens it."""

    port: int
    admin_port: int
    token: str
    api_key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"


@dataclass(frozen=True)
class Answer:
    """One generation.

    Attributes:
        ids: Token ids that came back.
        complete: The answer ended as it should; a stream without its last word is a lost request,
            though its status was 200.
        seconds: From the request to the end of its answer.
        verifies: Verify rounds it took; None without speculation.
        cached: Tokens of its prompt that were in the engine's cache; None if it was cut short.
    """

    ids: tuple[int, ...]
    complete: bool
    seconds: float
    verifies: int | None = None
    cached: int | None = None


class Lost(Exception):
    """A request that was not answered, or an admin call that was not obeyed."""


class Engine:
    """One engine under test."""

    def __init__(self, address: Address, session: aiohttp.ClientSession) -> None:
        self.address = address
        self._session = session
        self._epoch = 0

    # Serving port

    async def generate(
        self,
        prompt: str | list[int],
        tokens: int,
        *,
        stream: bool = True,
        begun: asyncio.Event | None = None,
        heard: Callable[[int], None] | None = None,
        interval: int | None = None,
    ) -> Answer:
        """Generate greedily, exactly `tokens` tokens. Whatever breaks makes it incomplete.

        Args:
            prompt: Text or token ids.
            tokens: How many to generate.
            stream: Whether to take them as they come.
            begun: Set when the first of a stream have come.
            heard: Told how many of a stream have come, each time that some do.
            interval: Tokens that a stream has come at a time, about; None leaves it to the engine.
        """
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        if interval is not None:
            sampling["stream_interval"] = interval
        body: dict[str, Any] = {
            "sampling_params": sampling,
            "stream": stream,
            "text" if isinstance(prompt, str) else "input_ids": prompt,
        }
        began = time.monotonic()
        last: dict[str, Any] = {}
        ids: list[int] = []
        done = False
        try:
            async with self._session.post(
                f"{self.address.url}/generate", json=body, headers=self._headers(), timeout=LONG
            ) as reply:
                if reply.status != 200:
                    raise Lost(f"/generate: {reply.status} {(await reply.text())[:200]}")
                if stream:
                    async for event in _events(reply):
                        done = event == "[DONE]"
                        if begun is not None:
                            begun.set()
                        if not done:
                            last = json.loads(event)
                            ids = _joined(ids, last)
                            if heard is not None:
                                heard(len(ids))
                else:
                    last, done = await reply.json(content_type=None), True
                    ids = last["output_ids"]
        except (aiohttp.ClientError, OSError, TimeoutError):
            done = False
        return Answer(
            tuple(ids),
            done and len(ids) == tokens,
            time.monotonic() - began,
            last.get("meta_info", {}).get("spec_verify_ct"),
            last.get("meta_info", {}).get("cached_tokens"),
        )

    async def get(self, path: str) -> Any:
        """Return a JSON answer of the serving port."""
        async with self._session.get(
            self.address.url + path, headers=self._headers(), timeout=SHORT
        ) as reply:
            return await reply.json(content_type=None)

    async def text(self, path: str) -> str:
        """Return a text answer of the serving port."""
        async with self._session.get(
            self.address.url + path, headers=self._headers(), timeout=SHORT
        ) as reply:
            return await reply.text()

    async def post(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, str]:
        """Post to the serving port; returns status and text."""
        headers = {"Authorization": f"Bearer {key}"} if key else self._headers()
        async with self._session.post(
            self.address.url + path, json=body, headers=headers, timeout=SHORT
        ) as reply:
            return reply.status, await reply.text()

    # Admin port

    async def admin(
        self, method: str, body: Any = None, token: str | None = None
    ) -> tuple[int, Any]:
        """Call the admin endpoint; returns status and JSON."""
        token = self.address.token if token is None else token
        async with self._session.request(
            method,
            f"{self.address.admin_url}/v1/speculation",
            json=body,
            headers={"Authorization": f"Bearer {token}"},
            timeout=SHORT,
        ) as reply:
            return reply.status, await reply.json()

    async def abandon(self, body: Any) -> None:
        """Send a directive and hang up without waiting for its answer."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.address.admin_port)
        text = json.dumps(body)
        writer.write(
            (
                "PUT /v1/speculation HTTP/1.1\r\nHost: engine\r\n"
                f"Authorization: Bearer {self.address.token}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}"
            ).encode()
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def health(self) -> int:
        """Return the status of the admin port's health; 0 if nobody answers."""
        try:
            async with self._session.get(
                f"{self.address.admin_url}/health", timeout=SHORT
            ) as reply:
                return reply.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0

    async def read(self) -> dict[str, Any]:
        """Read back."""
        status, state = await self.admin("GET")
        if status != 200:
            raise Lost(f"read-back: {status} {state}")
        return dict(state)

    async def directive(self, **fields: Any) -> dict[str, Any]:
        """Return the next directive, with a lease of 60 s and the engine's own policy after it."""
        state = await self.read()
        return {
            "podUID": state["podUID"],
            "bootID": state["bootID"],
            "epoch": max(state["epoch"], state["unresolvedEpoch"] or 0) + 1,
            "holder": HOLDER,
            "leaseSeconds": 60,
            "mode": "off",
            "fallback": {"mode": "auto"},
            "deadlineMs": 10_000,
        } | fields

    async def order(self, **fields: Any) -> dict[str, Any]:
        """Give the next directive, which must be obeyed; returns the read-back."""
        status, state = await self.admin("PUT", await self.directive(**fields))
        if status != 200:
            raise Lost(f"order {fields}: {status} {state}")
        return dict(state)

    def _headers(self) -> dict[str, str]:
        key = self.address.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}


LONG = aiohttp.ClientTimeout(total=600)
SHORT = aiohttp.ClientTimeout(total=15)


def ranks_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every rank of a read-back."""
    return [rank for group in state["groups"] for rank in group["ranks"]]


@contextlib.asynccontextmanager
async def connected(address: Address) -> AsyncIterator[Engine]:
    """Speak to an engine for the length of a `with` block."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Engine(address, session)


async def until(
    condition: Callable[[], Awaitable[bool]], seconds: float, every: float = 0.05
) -> float:
    """Await a condition that nobody announces; returns the seconds it took."""
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(every)
    return time.monotonic() - began


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the data of a stream of server-sent events. Lines can be longer than a chunk."""
    rest = b""
    async for chunk in reply.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].decode()


def _joined(ids: list[int], event: dict[str, Any]) -> list[int]:
    """Return all ids so far: a stream's events repeat them from the start, or go on."""
    count = event["meta_info"]["completion_tokens"]
    new = event["output_ids"]
    return new if len(new) >= count else ids + new
