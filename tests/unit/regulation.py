"""A regulator in virtual time, with its engines in memory and what it tells."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from specserve import api
from specserve.observed import Key, Pod
from specserve.regulate import Regulator
from specserve.target import Notice, Target
from tests.unit.engines import FakeEngine, FakeEngines, pod

KEY: Key = ("team", "chat")
HOLDER = "specserve-system/specserve"
WALL = 1_900_000_000.0
POLICY: dict[str, Any] = {
    "threshold": {"offAbove": 10, "onBelow": 5},
    "dwellOnSeconds": 0,
    "dwellOffSeconds": 0,
    "leaseSeconds": 60,
    "samplePeriodMilliseconds": 500,
}


def target(key: Key = KEY, last_switch: float | None = None, **policy: Any) -> Target:
    return Target(
        key=key,
        policy=api.Policy.model_validate({**POLICY, **policy}),
        draft=api.Draft.model_validate({"method": "EAGLE", "source": "hf://a/b"}),
        tokens=("t",),
        api_key=None,
        model="m",
        last_switch=last_switch,
    )


class World:
    """One regulator, its engines, and what it tells."""

    def __init__(self, engines: FakeEngines | None = None, **settings: Any) -> None:
        self.engines = engines or FakeEngines()
        self.notices: list[Notice] = []
        self.changed: Counter[Key] = Counter()
        self.pods: dict[str, Pod] = {}
        loop = asyncio.get_running_loop()
        self.regulator = Regulator(
            self.engines,
            holder=HOLDER,
            changed=lambda key: self.changed.update([key]),
            notice=self.notices.append,
            clock=loop.time,
            wall=lambda: WALL + loop.time(),
            **settings,
        )

    def add(
        self, uid: str = "u1", ip: str = "10.0.0.1", key: Key = KEY, **load: Any
    ) -> FakeEngine:
        engine = self.engines.at[ip] = FakeEngine(uid, **load)
        self.show(pod(key, uid, ip))
        return engine

    def show(self, new: Pod) -> None:
        self.regulator.observe(self.pods.get(new.uid), new)
        self.pods[new.uid] = new
        self.engines.usable[new.uid] = new.usable

    def edit(self, uid: str = "u1", **changes: Any) -> None:
        self.show(dataclasses.replace(self.pods[uid], **changes))

    def vanish(self, uid: str = "u1") -> None:
        self.regulator.observe(self.pods.pop(uid), None)
        self.engines.usable[uid] = False

    def events(self, reason: str) -> list[Notice]:
        return [notice for notice in self.notices if notice.reason == reason]

    @property
    def switches(self) -> list[dict[str, Any]]:
        return [call.body for call in self.engines.of("switch")]

    def engine(self, key: Key = KEY):
        (only,) = self.regulator.engines(key)
        return only


@contextlib.asynccontextmanager
async def world(engines: FakeEngines | None = None, **settings: Any) -> AsyncIterator[World]:
    made = World(engines, **settings)
    task = asyncio.create_task(made.regulator.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert made.engines.violations == []


def gaps(times: list[float]) -> list[float]:
    return [round(b - a, 3) for a, b in itertools.pairwise(times)]
