"""An engine that is nothing but its control core: ranks in memory, decode rounds on demand."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specserve_engine import Capability, Control, Identity, Listener, Versions, bind, serving
from specserve_engine.auth import TokenFile
from specserve_engine.control import Order
from specserve_engine.ranks import GroupState, RankState, Verdict, Vote
from specserve_engine.rounds import RoundStats
from specserve_engine.wire import AUTO
from tests.contract.engines import EngineUnderTest, Plan, mount_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

POD_UID = "5e6b0c7c-6a1f-4d53-9f0e-3d9f1f3f0a11"
AUTO_STEPS = 3
ROUND_SECONDS = 0.02
NONE_YET = Order(0, AUTO)


@dataclass
class MemoryRank:
    group: int
    rank: int
    obeyed: Order = NONE_YET
    kept: Order | None = None
    active_steps: int = AUTO_STEPS
    decode_rounds: int = 0
    last_batch: int = 0
    switches: int = 0
    objection: str = ""
    silent_in: set[str] = field(default_factory=set)

    def decode(self, batch: int) -> int:
        forced = self.obeyed.setting.steps_for(batch)
        steps = AUTO_STEPS if forced is None else forced
        self.switches += steps != self.active_steps
        self.active_steps = steps
        self.last_batch = batch
        self.decode_rounds += 1
        return steps


class MemoryRanks:
    """Ranks that answer at once, or not at all."""

    def __init__(self, layout: Sequence[int]) -> None:
        self.layout = tuple(layout)
        self.groups = [
            [MemoryRank(group, rank) for rank in range(size)] for group, size in enumerate(layout)
        ]
        self.stats = [RoundStats() for _ in layout]
        self.running = 0
        self.hushed = asyncio.Event()

    @property
    def ranks(self) -> list[MemoryRank]:
        return [rank for group in self.groups for rank in group]

    def decode(self, rounds: int, batch: int) -> None:
        self.running = batch
        for _ in range(rounds):
            for group, stats in zip(self.groups, self.stats, strict=True):
                steps = {rank.decode(batch) for rank in group}.pop()
                now = asyncio.get_running_loop().time()
                stats.observe(steps, ROUND_SECONDS, [steps] * batch, now)

    async def prepare(self, order: Order, deadline: float) -> list[Vote]:
        votes = []
        for rank in await self._answering({"prepare"}, deadline):
            if not rank.objection:
                rank.kept = order
            verdict = Verdict.NO if rank.objection else Verdict.YES
            votes.append(Vote(rank.group, rank.rank, verdict, rank.objection))
        return votes

    async def commit(self, order: Order, deadline: float) -> list[Vote]:
        # A rank that says nothing has the message all the same, and obeys it.
        for rank in self.ranks:
            assert rank.kept == order
            if "lost" in rank.silent_in:
                continue
            rank.obeyed, rank.kept, rank.decode_rounds = order, None, 0
        return [
            Vote(rank.group, rank.rank, Verdict.YES)
            for rank in await self._answering({"commit", "lost"}, deadline)
        ]

    async def abort(self, order: Order) -> None:
        for rank in self.ranks:
            if rank.kept == order:
                rank.kept = None

    async def read(self, deadline: float) -> list[GroupState]:
        answering = await self._answering({"read"}, deadline)
        now = asyncio.get_running_loop().time()
        return [
            GroupState(
                tuple(self._state(rank, answers=rank in answering) for rank in group),
                stats.figures(now),
                stats.tokens_total,
                stats.rounds_total,
                now,
                stats.acceptance(),
            )
            for group, stats in zip(self.groups, self.stats, strict=True)
        ]

    def _state(self, rank: MemoryRank, *, answers: bool) -> RankState:
        if not answers:
            return RankState(rank.rank, last_error="silent")
        return RankState(
            rank.rank,
            rank.obeyed.epoch,
            rank.active_steps,
            rank.decode_rounds,
            rank.last_batch,
            rank.switches,
            self.running,
            0,
            rank.objection or None,
        )

    async def _answering(self, phases: set[str], deadline: float) -> list[MemoryRank]:
        answering = [rank for rank in self.ranks if not phases & rank.silent_in]
        if len(answering) < len(self.ranks):
            self.hushed.set()
            await asyncio.sleep(deadline - asyncio.get_running_loop().time())
        return answering


class MemoryFaults:
    """What can be made to happen to a memory engine."""

    def __init__(self, plan: Plan, credentials: Path) -> None:
        self._plan = plan
        self._credentials = credentials
        self._hosted = contextlib.AsyncExitStack()
        self.port = 0

    async def boot(self) -> None:
        """Start the process, or another one on the same address."""
        await self._hosted.aclose()
        self.ranks = MemoryRanks(self._plan.layout)
        self.control = Control(
            Identity(POD_UID, str(uuid.uuid4())), Versions("0.0.0", "0.1.0", proved=False)
        )
        if self._plan.loaded:
            self.load()
        listener = Listener(
            self.control,
            self.ranks,
            TokenFile(self._credentials),
            require_live=self._plan.require_live,
        )
        listening = bind("127.0.0.1", self.port)
        self.port = listening.getsockname()[1]
        await self._hosted.enter_async_context(serving(listener.app, listening))

    async def stop(self) -> None:
        await self._hosted.aclose()

    def load(self) -> None:
        controllable = self._plan.controllable
        self.control.serve(
            Capability(
                controllable=controllable,
                reason="" if controllable else "no adaptive controller",
                available_steps=self._plan.available_steps if controllable else (),
            )
        )

    def drain(self) -> None:
        self.control.drain()

    def die(self) -> None:
        self.control.die("the scheduler is gone")

    async def decode(self, rounds: int, batch: int) -> None:
        self.ranks.decode(rounds, batch)

    def object(self, group: int, rank: int, message: str) -> None:
        self.ranks.groups[group][rank].objection = message

    def hush(self, group: int, rank: int, *phases: str) -> None:
        self.ranks.groups[group][rank].silent_in = set(phases)
        self.ranks.hushed.clear()

    async def hushed(self) -> None:
        await self.ranks.hushed.wait()

    def heal(self) -> None:
        for rank in self.ranks.ranks:
            rank.objection = ""
            rank.silent_in = set()

    def mount_tokens(self, current: str, previous: str = "") -> None:
        mount_tokens(self._credentials, current, previous)


@contextlib.asynccontextmanager
async def memory_engine(plan: Plan, credentials: Path) -> AsyncIterator[EngineUnderTest]:
    faults = MemoryFaults(plan, credentials)
    await faults.boot()
    try:
        yield EngineUnderTest(
            f"http://127.0.0.1:{faults.port}", plan.token, AUTO_STEPS, faults=faults
        )
    finally:
        await faults.stop()
