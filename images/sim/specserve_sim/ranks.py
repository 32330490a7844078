"""The ranks of a simulated engine: all in this process, and as reticent as they are told to be."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from specserve_engine.ranks import GroupState, RankState, Verdict, Vote
from specserve_engine.wire import Code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specserve_engine.control import Order
    from specserve_sim.engine import Group, SimEngine

MARGIN = 0.02
"""Seconds before its deadline at which an answer names its silent ranks."""


class SimRanks:
    """Carries orders to the groups of one process of an engine.

    A group's tensor-parallel ranks share one scheduler, so they differ only in what they answer:
    see `ranks` of a `Behaviour`. The scheduler does what rank 0 obeys.

    Attributes:
        hushed: set when an order or a read met a rank that keeps silent.
    """

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self.hushed = asyncio.Event()

    @property
    def layout(self) -> Sequence[int]:
        """The number of tensor-parallel ranks in each data-parallel group."""
        config = self._engine.config
        return (config.tensor_parallel,) * config.data_parallel

    async def prepare(self, order: Order, deadline: float) -> Sequence[Vote]:
        """Ask each rank whether it could obey."""
        behaviour = self._engine.behaviour
        capability = self._engine.config.capability()
        unknown = order.setting.needed_steps() - set(capability.available_steps)
        votes = []
        for group in self._engine.groups:
            for rank in range(self._engine.config.tensor_parallel):
                objection = behaviour.objection(group.index, rank)
                if behaviour.silent(group.index, rank, "prepare"):
                    votes.append(Vote(group.index, rank, Verdict.SILENT))
                elif not capability.controllable:
                    votes.append(_no(group, rank, capability.reason, Code.NOT_CONTROLLABLE))
                elif objection:
                    votes.append(_no(group, rank, objection, Code.NOT_CONTROLLABLE))
                elif unknown:
                    message = f"no state is built for {sorted(unknown)} steps"
                    votes.append(_no(group, rank, message, Code.UNKNOWN_STEPS))
                else:
                    votes.append(Vote(group.index, rank, Verdict.YES))
        await self._wait_for_the_silent(votes, deadline)
        return votes

    async def commit(self, order: Order, deadline: float) -> Sequence[Vote]:
        """Have each rank obey the order it keeps, from its next decode round on."""
        engine = self._engine
        engine.advance()
        votes = []
        for group in engine.groups:
            for rank in range(engine.config.tensor_parallel):
                lost = engine.behaviour.silent(group.index, rank, "lost")
                quiet = lost or engine.behaviour.silent(group.index, rank, "commit")
                if not lost:
                    group.obey(order, rank)
                    engine.took_over(group.index, rank, order)
                votes.append(Vote(group.index, rank, Verdict.SILENT if quiet else Verdict.YES))
        await self._wait_for_the_silent(votes, deadline)
        return votes

    async def abort(self, order: Order) -> None:
        """Nothing is kept between the phases here: there is nothing to forget."""

    async def read(self, deadline: float) -> Sequence[GroupState]:
        """Read each rank's state."""
        engine = self._engine
        engine.advance()
        states = [self._state(group) for group in engine.groups]
        if any("read" in fault.silent_in for fault in engine.behaviour.ranks):
            self.hushed.set()
            await _until(deadline)
        return states

    def _state(self, group: Group) -> GroupState:
        engine, scheduler = self._engine, group.scheduler
        behaviour = engine.behaviour
        running, queued = engine.counts(group)
        ranks = tuple(
            RankState(rank, last_error="no answer")
            if behaviour.silent(group.index, rank, "read")
            else RankState(
                rank=rank,
                epoch=group.epochs[rank],
                active_steps=scheduler.active_steps,
                decode_rounds=scheduler.decode_rounds - group.rounds_at_order,
                last_batch=scheduler.last_batch,
                switches=scheduler.switches,
                running=running,
                queued=queued,
                last_error=behaviour.objection(group.index, rank) or None,
            )
            for rank in range(engine.config.tensor_parallel)
        )
        if behaviour.silent(group.index, 0, "read"):
            return GroupState(ranks)
        now = engine.monotonic(engine.now())
        return GroupState(
            ranks=ranks,
            stats=group.stats.figures(now),
            tokens_total=group.stats.tokens_total,
            rounds_total=group.stats.rounds_total,
            at=now,
            acceptance=group.stats.acceptance(),
        )

    async def _wait_for_the_silent(self, votes: Sequence[Vote], deadline: float) -> None:
        if any(vote.verdict is Verdict.SILENT for vote in votes):
            self.hushed.set()
            await _until(deadline)


def _no(group: Group, rank: int, message: str, code: Code) -> Vote:
    return Vote(group.index, rank, Verdict.NO, message, code)


async def _until(deadline: float) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, deadline - MARGIN - loop.time()))
