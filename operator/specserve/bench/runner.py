"""Runs a plan against live servers: closed loops, cell after cell.

A closed loop keeps its number of requests in flight: whoever has an answer asks again at once. The
engine sets the pace, so tokens per second are what it can do at that concurrency.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from specserve.bench.client import Client
from specserve.bench.connection import Connection, Refused
from specserve.bench.dialects import Outcome, Wish, refuses_key
from specserve.bench.figures import Counters, Figures, Visit
from specserve.bench.plan import Arm, Cell, Estimate, requests_of
from specserve.bench.prompts import Prompts
from specserve.bench.steering import Steering

WARM_UP_TOKENS = 16
#: Pause of a slot whose request failed: a server that refuses is not stormed.
AFTER_FAILURE_SECONDS = 0.5


class NothingCame(Exception):
    """No request of a warm-up was answered; the message holds the first problem."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the servers.

    Attributes:
        connection: Where it is.
        wish: What it is asked for.
        prompts: What it is asked, in token ids of its own if in any.
        has_draft: Whether it may speculate; its rounds are of interest only then.
    """

    connection: Connection
    wish: Wish
    prompts: Prompts
    has_draft: bool = True


@dataclass(slots=True)
class Measured:
    """What is measured so far; complete or not, it can be reported at any time."""

    visits: dict[tuple[int, str], list[Visit]] = field(default_factory=dict)

    def figures(self) -> dict[int, dict[str, Figures]]:
        """Figures by level and arm, levels ascending."""
        table: dict[int, dict[str, Figures]] = {}
        for (level, arm), visits in sorted(self.visits.items(), key=lambda item: item[0][0]):
            table.setdefault(level, {})[arm] = Figures.of(visits)
        return table


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told how it goes.

    Attributes:
        begins: A cell begins; with the estimate of what is left.
        ends: A visit is over; with what it brought, in words.
    """

    begins: Callable[[Cell, Estimate], None] = lambda _cell, _estimate: None
    ends: Callable[[Cell, str, Estimate], None] = lambda _cell, _brought, _estimate: None


class Runner:
    """Measures cells.

    Args:
        client: To send with.
        server: The server that is measured.
        baseline: A second one, for arms that are a baseline.
        hand: On the engine, for arms with a setting.
        rounds: Requests of a cell for each in flight, None for the plan's own.
        seconds: Instead of counting requests, start new ones for so long.
    """

    def __init__(
        self,
        client: Client,
        server: Side,
        *,
        baseline: Side | None = None,
        hand: Steering | None = None,
        rounds: int | None = None,
        seconds: float | None = None,
    ) -> None:
        self.measured = Measured()
        self._client = client
        self._server = server
        self._baseline = baseline
        self._hand = hand
        self._rounds = rounds
        self._seconds = seconds
        self._in_force: Arm | None = None

    async def run(self, cells: Sequence[Cell], watch: Watch) -> None:
        """Measure all cells, in this order.

        Raises:
            NothingCame: Nothing is answered at all.
            Refused: A server refuses the API key, or the plugin the token.
            NotSteerable: The engine does not take an order, or does not follow it.
            Unreachable: The plugin's listener does not answer.
        """
        estimate = Estimate(list(cells))
        for cell in cells:
            watch.begins(cell, estimate)
            began = time.perf_counter()
            visit = await self.visit(cell)
            self.measured.visits.setdefault((cell.level, cell.arm.name), []).append(visit)
            estimate.done(cell, time.perf_counter() - began)
            watch.ends(cell, visit.words(), estimate)

    async def visit(self, cell: Cell) -> Visit:
        """Put the arm in force, warm up, and measure."""
        side = self._baseline if cell.arm.baseline else self._server
        if side is None:
            raise ValueError("a baseline arm needs a second server")
        if self._hand is not None and cell.arm.setting is not None and cell.arm != self._in_force:
            await self._hand.apply(cell.arm.setting)
            self._in_force = cell.arm
        await self._warm_up(side, cell)
        before = await self._counters(side)
        began = time.perf_counter()
        outcomes = await self._loop(side, cell.level)
        ended = max((outcome.ended for outcome in outcomes), default=began)
        after = await self._counters(side)
        counters = (
            Counters(after.tokens - before.tokens, after.verifies - before.verifies)
            if before and after
            else None
        )
        return Visit(ended - began, outcomes, counters)

    async def _warm_up(self, side: Side, cell: Cell) -> None:
        wish = replace(side.wish, tokens=min(WARM_UP_TOKENS, side.wish.tokens))
        outcomes = await asyncio.gather(*(self._ask(side, wish) for _ in range(cell.level)))
        if all(outcome.problem for outcome in outcomes):
            if refuses_key(outcomes[0].problem):
                url = side.connection.url + side.wish.api.path
                raise Refused.key(url, side.connection.api_key)
            raise NothingCame(f"{side.connection.url}: {outcomes[0].problem}")
        if self._hand is not None and cell.arm.setting is not None:
            await self._hand.settled()

    async def _counters(self, side: Side) -> Counters | None:
        if not side.has_draft:
            return None
        return await self._client.counters(side.connection.url)

    async def _loop(self, side: Side, level: int) -> list[Outcome]:
        left = requests_of(level, self._rounds)
        until = None if self._seconds is None else time.perf_counter() + self._seconds

        def another() -> bool:
            nonlocal left
            if until is not None:
                return time.perf_counter() < until
            left -= 1
            return left >= 0

        return await closed_loop(lambda: self._ask(side, side.wish), level, another)

    def _ask(self, side: Side, wish: Wish) -> Awaitable[Outcome]:
        there = side.connection
        return self._client.generate(there.url, wish, side.prompts.draw(), bearer=there.api_key)


async def closed_loop(
    ask: Callable[[], Awaitable[Outcome]], level: int, another: Callable[[], bool]
) -> list[Outcome]:
    """Keep `level` requests in flight as long as there is another to send; return all outcomes."""
    outcomes: list[Outcome] = []

    async def slot() -> None:
        while another():
            outcome = await ask()
            outcomes.append(outcome)
            if outcome.problem:
                await asyncio.sleep(AFTER_FAILURE_SECONDS)

    async with asyncio.TaskGroup() as group:
        for _ in range(level):
            group.create_task(slot())
    return outcomes
