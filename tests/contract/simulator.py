"""The simulated engine under the contract: its own admin path, its own ranks."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from specserve_engine import bind
from specserve_engine.auth import TokenFile
from specserve_sim.behaviour import WELL, Phase, RankFault
from specserve_sim.engine import EngineConfig, SimEngine
from specserve_sim.model import Request
from specserve_sim.server import Site, serving
from tests.contract.engines import EngineUnderTest, Plan, mount_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

AUTO_STEPS = 3
TIME_SCALE = 50.0
ENDLESS = 1_000_000


class SimulatorFaults:
    """What can be made to happen to a simulated engine."""

    def __init__(self, engine: SimEngine, credentials: Path) -> None:
        self._engine = engine
        self._credentials = credentials

    async def boot(self) -> None:
        self._engine.restart()

    def load(self) -> None:
        self._engine.load()

    def drain(self) -> None:
        self._engine.drain()

    def die(self) -> None:
        self._engine.die("the scheduler is gone")

    async def decode(self, rounds: int, batch: int) -> None:
        """Run rounds of the model itself, ahead of its clock, then wait until that has come."""
        for group in self._engine.groups:
            scheduler = group.scheduler
            requests = [Request(1, ENDLESS) for _ in range(batch)]
            for request in requests:
                scheduler.submit(request, scheduler.clock)
            until = scheduler.decode_rounds + rounds
            while scheduler.decode_rounds < until:
                scheduler.advance(scheduler.next_event)
            for request in requests:
                scheduler.abort(request, scheduler.clock)
        ahead = max(group.scheduler.clock for group in self._engine.groups) - self._engine.now()
        await asyncio.sleep(max(0, ahead / TIME_SCALE))

    def object(self, group: int, rank: int, message: str) -> None:
        self._tell(RankFault(group, rank, silent_in=frozenset(), objection=message))

    def hush(self, group: int, rank: int, *phases: str) -> None:
        assert set(phases) <= set(get_args(Phase))
        self._engine.ranks.hushed.clear()
        self._tell(RankFault(group, rank, silent_in=frozenset(phases)))

    async def hushed(self) -> None:
        await self._engine.ranks.hushed.wait()

    def heal(self) -> None:
        self._engine.behave(WELL)

    def mount_tokens(self, current: str, previous: str = "") -> None:
        mount_tokens(self._credentials, current, previous)

    def _tell(self, fault: RankFault) -> None:
        behaviour = self._engine.behaviour
        self._engine.behave(replace(behaviour, ranks=(*behaviour.ranks, fault)))


@contextlib.asynccontextmanager
async def simulated_engine(plan: Plan, credentials: Path) -> AsyncIterator[EngineUnderTest]:
    config = EngineConfig(
        tensor_parallel=plan.layout[0],
        data_parallel=len(plan.layout),
        algorithm="EAGLE3" if plan.controllable else "NGRAM",
        steps=plan.available_steps,
        max_running_requests=256 * len(plan.layout),
        time_scale=TIME_SCALE,
        startup_seconds=0 if plan.loaded else 3600,
        require_live=plan.require_live,
    )
    engine = SimEngine(config, TokenFile(credentials), pod_uid="pod-of-the-simulator")
    listening = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    try:
        async with serving(Site({"*": engine}, port), [listening]):
            yield EngineUnderTest(
                f"http://127.0.0.1:{port}",
                plan.token,
                AUTO_STEPS,
                faults=SimulatorFaults(engine, credentials),
            )
    finally:
        engine.close()
