"""Switching a real engine while requests run, and what that does to them."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tests.engine.client import Lost, ranks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.engine.client import Answer, Engine

ORDERS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"mode": "off"}, 0),
    ({"mode": "on", "steps": 3}, 3),
    ({"mode": "on", "steps": 1}, 1),
    ({"mode": "on", "steps": 3}, 3),
    ({"mode": "off"}, 0),
    ({"mode": "on", "steps": 1}, 1),
)
"""Orders in turn, each with the steps it must bring about; no two in a row are alike."""


@dataclass
class Load:
    """Requests that are kept in flight until it is closed.

    Attributes:
        answers: What came back, in the order of ending.
    """

    engine: Engine
    prompts: Callable[[int], str | list[int]]
    tokens: int
    concurrency: int
    stream: bool = True
    answers: list[Answer] = field(default_factory=list)
    _stopping: bool = False
    _serial: int = 0

    async def __aenter__(self) -> Self:
        self._workers = [asyncio.create_task(self._work()) for _ in range(self.concurrency)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let the requests in flight end; start no others."""
        self._stopping = True
        await asyncio.gather(*self._workers)

    async def _work(self) -> None:
        while not self._stopping:
            prompt = self.prompts(self._serial)
            self._serial += 1
            self.answers.append(
                await self.engine.generate(prompt, self.tokens, stream=self.stream)
            )

    @property
    def lost(self) -> int:
        return sum(not answer.complete for answer in self.answers)


@dataclass
class Latencies:
    """Milliseconds from the sending of a directive.

    Attributes:
        answered: Until its answer.
        state: Until every rank had launched a batch with the ordered steps, by the ranks' own
            stamps (one machine, one monotonic clock).
        seen: Until a read-back showed that.
    """

    answered: list[float] = field(default_factory=list)
    state: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)

    def __add__(self, other: Latencies) -> Latencies:
        return Latencies(
            self.answered + other.answered, self.state + other.state, self.seen + other.seen
        )


async def flip(
    engine: Engine, count: int, *, draft_kv: str = "cold", seconds: float = math.inf
) -> tuple[int, Latencies]:
    """Give `count` orders, each once the last one is obeyed by all ranks.

    Requests must be running all the while. Stops early when `seconds` have passed.

    Returns:
        How many were given, and how long they took.
    """
    latencies = Latencies()
    until = time.monotonic() + seconds
    body = await engine.directive()
    given = 0
    while given < count and time.monotonic() < until:
        order, steps = ORDERS[given % len(ORDERS)]
        fields = {name: body[name] for name in body if name not in {"mode", "steps"}}
        body = {**fields, **order, "draftKv": draft_kv, "epoch": body["epoch"] + (given > 0)}
        began = time.monotonic()
        status, state = await engine.admin("PUT", body)
        latencies.answered.append(1e3 * (time.monotonic() - began))
        if status != 200:
            raise Lost(f"epoch {body['epoch']}: {status} {state}")
        while not _obeyed(state, body["epoch"], steps):
            state = await engine.read()
        latencies.seen.append(1e3 * (time.monotonic() - began))
        stamps = [rank["obeyedAt"] for rank in ranks_of(state)]
        latencies.state.append(1e3 * (max(stamps) - began))
        given += 1
    return given, latencies


def _obeyed(state: dict[str, Any], epoch: int, steps: int) -> bool:
    return all(
        rank["epoch"] == epoch and rank["obeyedAt"] is not None and rank["activeSteps"] == steps
        for rank in ranks_of(state)
    )


def percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and the largest, rounded to 0.1 ms."""
    ordered = sorted(milliseconds)

    def at(percent: int) -> float:
        return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 1)

    return {"p50": at(50), "p99": at(99), "max": round(ordered[-1], 1)}


def switches(state: dict[str, Any]) -> list[int]:
    """Return how often each rank has changed its steps."""
    return [rank["switches"] for rank in ranks_of(state)]
