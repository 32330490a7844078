"""Holds a batch size and a step count in a live engine, and reads what its rounds take.

A visit orders the steps, sends waves of as many requests as the batch is to have, all of one
length, and reads the median of the engine's own round times, which leaves out prefill and the
moments in which the batch changes. A wave's requests run side by side from the first round on; in
a closed loop of large batches a request ends in nearly every round, and hardly one can be timed.

The engine's window holds the newest 512 rounds of a cell. A visit lasts until the window holds its
rounds alone, so that repeats are independent of each other, until enough of them are timed, and
until their mean batch is the one that was to be held. Where sending takes long beside the rounds,
or requests of a wave hardly run together, longer answers make up for it.
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
from specserve.conditions import counted
from specserve.policy.rounds import bucket_of

DEFAULT_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: About so many rounds of each arm predicted the throughput of an H200 within 5 %.
FEWEST_ROUNDS: Final = 100
#: Rounds after a change of steps that engines do not time.
SETTLE_ROUNDS: Final = 3
MOST_WAVES: Final = 30
#: A wave with fewer rounds of the whole batch is too short for its requests to be held.
FEWEST_TOGETHER: Final = 10
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
            most = counted(self.requests, "request")
            return f"batch {size}: at most {most} at once (--max-running-requests)"
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
        """Hold a cell until enough of its rounds are timed, or waves enough have been sent.

        Raises:
            NotMeasured: Requests fail, or the batch cannot be held.
            NotSteerable: The engine does not take the order, or does not follow it.
            Refused: The engine refuses the token by now.
            Unreachable: The plugin's listener does not answer.
        """
        setting = cell.arm.setting or {"mode": "off"}
        steps = int(setting.get("steps", 0))
        bucket = bucket_of(cell.level)
        others = bool(_cells(await self._hand.read(), bucket, steps))
        await self._hand.apply(setting)
        wish, whole = self._wish, Whole()
        held = 0.0
        longest = self._room.longest(cell.level, self._prompt_tokens)
        for _ in range(MOST_WAVES):
            verifies = await self._wave(cell.level, wish)
            await self._hand.settled()
            state = await self._hand.read()
            found = [
                stat
                for stat in _cells(state, bucket, steps)
                if stat["medianRoundSeconds"] is not None
            ]
            passed = max(
                rank["decodeRounds"] for group in state["groups"] for rank in group["ranks"]
            )
            together = whole.add(verifies, passed)
            everywhere = len(found) == len(state["groups"])
            held = min(map(mean_batch, found)) if everywhere else 0.0
            window = [stat["rounds"] for stat in found]
            short = held < HELD * cell.level
            alone = not others or whole.rounds >= max(window, default=0)
            if alone and not short and min(map(whole.timed_of, window)) >= FEWEST_ROUNDS:
                break
            if short or together < FEWEST_TOGETHER:
                wish = replace(wish, tokens=max(wish.tokens, min(longest, 2 * wish.tokens)))
        if held < HELD * cell.level:
            raise NotMeasured(
                f"batch {cell.level}, {counted(steps, 'step')}: the batch was {held:.0f} in "
                "the mean; is there other traffic, is this client too slow, or are the answers "
                "too short (--max-new-tokens)?"
            )
        return Reading(
            batch=cell.level,
            steps=steps,
            repeat=cell.visit,
            seconds=median(stat["medianRoundSeconds"] for stat in found),
            rounds=min(map(whole.timed_of, window)),
        )

    async def _wave(self, size: int, wish: Wish) -> list[int]:
        """Send a wave to its end; returns the rounds that each of its requests took part in."""
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
            raise NotMeasured(
                f"batch {size}: {counted(len(problems), 'request')} failed: {problems[0]}"
            )
        return [outcome.verifies or 0 for outcome in outcomes]


@dataclass(slots=True)
class Whole:
    """Counts the rounds of a visit in which its whole batch ran.

    Other rounds of the visit, in which requests come or have gone, are of smaller batches; those
    of the cell itself the engine counts together with rounds of earlier visits.

    Attributes:
        rounds: Rounds of the whole batch.
        timed: Those of them that the engine has timed: not the first after a change.
    """

    rounds: int = 0
    timed: int = -SETTLE_ROUNDS
    _passed: int = 0

    def timed_of(self, rounds: int) -> int:
        """How many of so many rounds of the visit are timed, by its share of them; hardly less."""
        return max(0, rounds * self.timed // max(1, self._passed))

    def add(self, verifies: Sequence[int], passed: int) -> int:
        """Take in a wave.

        Requests of a wave begin nearly together, and each runs without a gap. In a wave of `n`
        rounds of which the longest request took part in `v`, the last has begun by about round
        `n - v`; the shortest ends as many rounds after that as it took part in, less those.

        Args:
            verifies: Rounds that each of its requests took part in.
            passed: Decode rounds since the visit's order.

        Returns:
            Its rounds of the whole batch.
        """
        wave, self._passed = passed - self._passed, passed
        together = max(0, min(verifies) + max(verifies) - wave)
        self.rounds += together
        self.timed += max(0, together - 1)
        return together


def mean_batch(stat: Mapping[str, Any]) -> float:
    """Requests in the mean round of a cell of the read-back's statistics."""
    return float(stat["tokens"] / stat["acceptLength"] / stat["rounds"])


def _cells(state: Mapping[str, Any], bucket: int, steps: int) -> list[Mapping[str, Any]]:
    """The cell's figures of every group that has had a round of it."""
    return [
        stat
        for group in state["groups"]
        for stat in group.get("stats") or []
        if (stat["batchBucket"], stat["steps"]) == (bucket, steps)
    ]
