"""Clients: as many at each pod as the curve says, each sending one request after the other.

The load is closed: whoever has an answer asks again at once, so that all three SpecServes have the
same number of requests in flight, and tokens per second tell them apart. The n-th request to a
pod is of the same size in all of them. How many drafts are accepted is the prompt's own: requests
name it to the simulated engine, in place of text that is easier or harder to guess.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

from tests.demo.ledger import Answer, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from tests.demo.curve import Curve

TICK_SECONDS = 0.1
"""Time between two looks at the curve."""

DRAIN_SECONDS = 60.0
"""Bound on the last answers after the run; what is missing then is lost."""

SILENT_SECONDS = 30.0
"""A stream that brings nothing for so long is lost."""

AFTER_LOSS_SECONDS = 1.0
"""A client whose request was lost waits so long: an engine that refuses is not stormed."""

PROMPT_TOKENS = (64, 128)
NEW_TOKENS = (48, 112)
_TOKEN = "load"  # the simulated engine counts four characters as a token


@dataclass(slots=True)
class Crowd:
    """The clients of one pod.

    Attributes:
        url: the pod's serving port.
        ledger: of the pod's SpecServe.
        random: gives the sizes of requests; seeded alike in all SpecServes.
        wanted: how many clients there should be.
        clients: those there are, of which each has a request in flight.
    """

    url: str
    ledger: Ledger
    random: Random
    wanted: int = 0
    clients: set[asyncio.Task[None]] = field(default_factory=set)


class Load:
    """The load of a run.

    Args:
        session: to send with.
        crowds: one for each pod.
        curve: how many clients each has.
        clock: seconds.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        crowds: Sequence[Crowd],
        curve: Curve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._crowds = crowds
        self._curve = curve
        self._clock = clock
        self._began = clock()

    @property
    def at(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    @property
    def wanted(self) -> int:
        """Requests that each pod should have in flight now."""
        return self._curve.at(self.at)

    async def run(self) -> None:
        """Follows the curve to its end, then waits for the answers under way."""
        self._began = self._clock()
        try:
            while self.at < self._curve.seconds:
                wanted = self.wanted
                for crowd in self._crowds:
                    self._resize(crowd, wanted)
                await asyncio.sleep(TICK_SECONDS)
            for crowd in self._crowds:
                crowd.wanted = 0
            if clients := self._clients():
                await asyncio.wait(clients, timeout=DRAIN_SECONDS)
        finally:
            left = self._clients()
            for client in left:
                client.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _clients(self) -> list[asyncio.Task[None]]:
        return [client for crowd in self._crowds for client in crowd.clients]

    def _resize(self, crowd: Crowd, wanted: int) -> None:
        crowd.wanted = wanted
        while len(crowd.clients) < wanted:
            client = asyncio.create_task(self._client(crowd))
            crowd.clients.add(client)
            client.add_done_callback(crowd.clients.discard)

    async def _client(self, crowd: Crowd) -> None:
        me = asyncio.current_task()
        assert me is not None
        # Nobody is cut off when there are too many: who is first to end leaves.
        while len(crowd.clients) <= crowd.wanted:
            prompt = crowd.random.randint(*PROMPT_TOKENS)
            tokens = crowd.random.randint(*NEW_TOKENS)
            crowd.ledger.sent += 1
            problem = "not answered when the run ended"
            try:
                problem = await self._ask(crowd, prompt, tokens)
            finally:
                crowd.ledger.end(problem)
            if problem:
                await asyncio.sleep(AFTER_LOSS_SECONDS)
        crowd.clients.discard(me)

    async def _ask(self, crowd: Crowd, prompt: int, tokens: int) -> str:
        answer = Answer()
        body = {
            "text": _TOKEN * prompt,
            "sampling_params": {
                "max_new_tokens": tokens,
                "temperature": 0,
                "custom_params": {"accept_length": self._curve.accepted(self.at)},
            },
            "stream": True,
        }
        try:
            async with self._session.post(f"{crowd.url}/generate", json=body) as response:
                if response.status != 200:
                    return f"HTTP {response.status}"
                async for line in response.content:
                    if brought := answer.feed(line):
                        crowd.ledger.arrived(brought, self.at)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            name = type(error).__name__
            return f"{name} after {answer.tokens} tokens"
        return answer.problem(tokens)


def client_session() -> aiohttp.ClientSession:
    """A session without a bound on connections or on the length of an answer."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENT_SECONDS),
        trust_env=False,
    )
