"""Holds a batch size and a step count in a live engine, and reads what its rounds take.

A visit orders the steps, sends waves of as many requests as the batch is to have, all of one
length, and reads the median of the engine's own round times, which leaves out prefill and the
moments in which the batch changes. A wave's requests run side by side from the first round on; in
a closed loop of large batches a request ends in nearly every round, and hardly one can be timed.

The engine's window holds the newest 512 rounds. A visit lasts until the window holds its rounds
alone, so that repeats are independent of each other, and until their mean batch is the one that
was to be held: where sending takes long beside the rounds, longer answers make up for it.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from specserve.bench.client import Client
from specserve.bench.connection import Connection
from specserve.bench.dialects import Wish
from specserve.bench.plan import Arm, Cell
from specserve.bench.prompts import Prompts
from specserve.bench.steering import Steering
from specserve.calibrate.fit import Reading
from specserve.policy.rounds import bucket_of

DEFAULT_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: About so many rounds of each arm predicted the throughput of an H200 within 5 %.
FEWEST_ROUNDS: Final = 100
MOST_WAVES: Final = 30
#: The mean batch may fall short of the wanted one by so much; `r` hardly moves over it.
HELD: Final = 0.97
LONGEST_ANSWER: Final = 4096


class NotMeasured(Exception):
    """A cell could not be measured; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine has room for, in one data-parallel group.

    Attributes:
        requests: Most that run at once, None if not told.
        tokens: Size of the KV cache, None if not told.
        groups: Data-parallel groups.
        context: Most tokens of one request, prompt and answer together; None if not told.
    """

    requests: int | None
    tokens: int | None
    groups: int
    context: int | None = None

    @classmethod
    def of(cls, loads: Sequence[Mapping[str, Any]], context: int | None = None) -> "Room":
        """Read the entries of `/v1/loads`."""
        caps = [load.get("max_running_requests") for load in loads]
        sizes = [load.get("max_total_num_tokens") for load in loads]
        return cls(
            requests=min((cap for cap in caps if cap), default=None),
            tokens=min((size for size in sizes if size), default=None),
            groups=max(1, len(loads)),
            context=context,
        )

    def longest(self, size: int, prompt_tokens: int) -> int:
        """Longest answers that a batch of this size has room for, within reason."""
        whole = [LONGEST_ANSWER + prompt_tokens]
        whole += [self.tokens // size] if self.tokens is not None else []
        whole += [self.context] if self.context is not None else []
        return max(0, min(whole) - prompt_tokens)

    def objection(self, size: int, tokens_each: int) -> str:
        """Why a batch of this size cannot be held; empty if it can."""
        if self.requests is not None and size > self.requests:
            return f"batch {size}: {self.requests} requests run at most (--max-running-requests)"
        if self.tokens is not None and size * tokens_each > self.tokens:
            return f"batch {size}: needs {size * tokens_each} tokens of a cache of {self.tokens}"
        if self.context is not None and tokens_each > self.context:
            return (
                f"batch {size}: prompt and answer of {tokens_each} tokens, of which a request may "
                f"have {self.context} (--context-length)"
            )
        return ""


def cells_of(sizes: Iterable[int], steps: Sequence[int], repeats: int) -> list[Cell]:
    """All visits in their order: size by size, and the steps there and back from repeat to repeat.

    The visits that a ratio is made of are next to each other in time.
    """
    arms = [
        Arm(
            f"{count} steps",
            {"mode": "on", "steps": count, "draftKv": "cold"}
            if count
            else {"mode": "off", "draftKv": "cold"},
        )
        for count in sorted({0, *steps})
    ]
    return [
        Cell(size, arm, repeat)
        for size in sizes
        for repeat in range(repeats)
        for arm in (arms if repeat % 2 == 0 else reversed(arms))
    ]


class Sweep:
    """Makes visits to one engine.

    Args:
        client: To send with.
        connection: Where the engine is.
        hand: On the engine.
        wish: What every request asks for.
        prompts: What is asked.
        prompt_tokens: Length of each prompt.
        room: What the engine has room for; each of its data-parallel groups gets a batch.
    """

    def __init__(
        self,
        client: Client,
        connection: Connection,
        hand: Steering,
        wish: Wish,
        prompts: Prompts,
        prompt_tokens: int,
        room: Room,
    ) -> None:
        self._client = client
        self._connection = connection
        self._hand = hand
        self._wish = wish
        self._prompts = prompts
        self._prompt_tokens = prompt_tokens
        self._room = room

    async def visit(self, cell: Cell) -> Reading:
        """Hold a cell until enough of its rounds are timed.

        Raises:
            NotMeasured: Requests fail, or the batch cannot be held for long enough.
            NotSteerable: The engine does not take the order, or does not follow it.
            Unreachable: The plugin's listener does not answer.
        """
        setting = cell.arm.setting or {"mode": "off"}
        steps = int(setting.get("steps", 0))
        bucket = bucket_of(cell.level)
        await self._hand.apply(setting)
        wish, held = self._wish, 0.0
        longest = self._room.longest(cell.level, self._prompt_tokens)
        for _ in range(MOST_WAVES):
            await self._wave(cell.level, wish)
            await self._hand.settled()
            state = await self._hand.read()
            found = _cells(state, bucket, steps)
            since = min(
                rank["decodeRounds"] for group in state["groups"] for rank in group["ranks"]
            )
            held = min((mean_batch(stat) for stat in found), default=0.0)
            if held < HELD * cell.level:
                wish = replace(wish, tokens=max(wish.tokens, min(longest, 2 * wish.tokens)))
            elif since >= max(FEWEST_ROUNDS, *(stat["rounds"] for stat in found)):
                return Reading(
                    batch=cell.level,
                    steps=steps,
                    repeat=cell.visit,
                    seconds=median(stat["medianRoundSeconds"] for stat in found),
                    rounds=sum(stat["rounds"] for stat in found),
                )
        raise NotMeasured(
            f"batch {cell.level}, {steps} steps: the batch was {held:.0f} in the mean, or too few "
            "rounds were timed; is there other traffic, is this client too slow, or are the "
            "answers too short (--max-new-tokens)?"
        )

    async def _wave(self, size: int, wish: Wish) -> None:
        outcomes = await asyncio.gather(
            *(
                self._client.generate(
                    self._connection.url,
                    wish,
                    self._prompts.draw(),
                    bearer=self._connection.api_key,
                )
                for _ in range(size * self._room.groups)
            )
        )
        problems = [outcome.problem for outcome in outcomes if outcome.problem]
        if problems:
            raise NotMeasured(f"batch {size}: {len(problems)} requests failed: {problems[0]}")


def mean_batch(stat: Mapping[str, Any]) -> float:
    """Requests in the mean round of a cell of the read-back's statistics."""
    return float(stat["tokens"] / stat["acceptLength"] / stat["rounds"])


def _cells(state: Mapping[str, Any], bucket: int, steps: int) -> list[Mapping[str, Any]]:
    """The cell's figures of every group that has timed a round of it."""
    return [
        stat
        for group in state["groups"]
        for stat in group.get("stats") or []
        if (stat["batchBucket"], stat["steps"]) == (bucket, steps)
        and stat["medianRoundSeconds"] is not None
    ]
