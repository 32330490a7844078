"""Clients that ask again as soon as they are answered, and count their tokens as these come.

All ask at once. A closed loop with answers of one length falls into step by itself: requests that
wait for the same prefill end together, and ask together again. Clients that start out of step are
prefilled one by one, each while all others wait, and take more than a minute to get there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import aiohttp

from tests.engine.client import Lost, until
from tests.gpu import plan
from tests.gpu.tally import Stream, Tally

if TYPE_CHECKING:
    from tests.engine.client import Engine

PROMPT, TOKENS = 128, 256
VOCABULARY = 1_000, 30_000
"""Between these, every token id is one like any other."""
INTERVAL = 8
"""Tokens that a stream has come at a time: thousands of clients' events a second would be a load
of their own."""
PAUSE = 0.2
"""Seconds before a client asks again that was not answered."""
LATE = 15.0
STEADY_SECONDS = 60.0


@dataclass
class Clients:
    """A load that lasts for the length of a `with` block.

    Attributes:
        engine: Who is asked.
        count: Requests in flight.
        lost: Requests that were not answered in full.
        tally: All tokens that came.
    """

    engine: Engine
    count: int
    lost: int = 0
    tally: Tally = field(default_factory=Tally)

    async def __aenter__(self) -> Self:
        self._random = random.Random()
        self._heard = [0.0] * self.count
        self._answers = [0] * self.count
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(self.count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Hang up, and have the engine let go of what it was asked."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # It notices by itself, but seconds later. The simulated engine has no such route; and one
        # that has ended is told of by whoever asked it last.
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            await self.engine.post("/abort_request", {"rid": "", "abort_all": True})

    async def told(self, moment: float) -> None:
        """Return once every stream has told something after a moment.

        Raises:
            Lost: One has told nothing for long.
        """

        async def all_have() -> bool:
            return min(self._heard) > moment

        try:
            await until(all_have, LATE)
        except TimeoutError:
            silent = sum(heard <= moment for heard in self._heard)
            raise Lost(f"{silent} of {self.count} streams were silent for {LATE} s") from None

    async def steady(self) -> None:
        """Return once every client has been answered a few times.

        Raises:
            Lost: That takes too long.
        """

        async def all_are() -> bool:
            return min(self._answers) >= plan.FULL_ANSWERS

        try:
            await until(all_are, STEADY_SECONDS)
        except TimeoutError:
            raise Lost(f"{self.count} clients: not steady after {STEADY_SECONDS} s") from None

    async def _ask(self, number: int) -> None:
        while True:
            # No cache has seen it.
            prompt = [self._random.randrange(*VOCABULARY) for _ in range(PROMPT)]
            stream = Stream(self.tally)

            def heard(count: int, stream: Stream = stream) -> None:
                self._heard[number] = now = time.monotonic()
                stream.heard(count, now)

            answer = await self.engine.generate(prompt, TOKENS, heard=heard, interval=INTERVAL)
            if answer.complete:
                self._answers[number] += 1
            else:
                self.lost += 1
                await asyncio.sleep(PAUSE)
