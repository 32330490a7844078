"""Looks at engines and events while a run goes on; changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime
from typing import TYPE_CHECKING, Any

from specserve.engine import Endpoint, EngineClient, EngineError
from specserve.kube import Kube, KubeError
from specserve.names import KIND
from specserve.policy import directive
from specserve.settings import Settings
from specserve.signals import MetricNames
from tests.demo.record import Happened

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.demo.record import PodState, Record

LOOK_SECONDS = 0.5
"""Time between two looks at an engine: the precision of the flips' times."""

REACH_SECONDS = 15.0
"""Time in which every engine must have answered once."""


class PodsOutOfReach(Exception):
    """The pods' addresses don't answer from here; the message names one."""


class Watch:
    """Follows the engines and the events of a run into its record."""

    def __init__(self, record: Record, engines: EngineClient, kube: Kube) -> None:
        self._record = record
        self._engines = engines
        self._kube = kube
        self._known: set[str] = set()
        ends = {
            pod.name: Endpoint(pod.ip, (arm.token,))
            for arm in record.plan.arms
            for pod in arm.pods
        }
        self._pods = [(state, ends[state.name]) for state in record.pods]

    async def reach(self) -> None:
        """Returns once every engine obeys an order.

        Raises:
            PodsOutOfReach: some don't answer, or nobody steers them.
        """
        try:
            async with asyncio.timeout(REACH_SECONDS):
                while not all(state.flips.on is not None for state, _ in self._pods):
                    await self.look(0.0)
                    await asyncio.sleep(LOOK_SECONDS / 2)
        except TimeoutError:
            for state, end in self._pods:
                if state.flips.on is None:
                    why = state.problem or f"it is in mode {state.mode}, nobody steers it"
                    raise PodsOutOfReach(f"pod {state.name} at {end.ip}: {why}") from None

    async def follow(self, now: Callable[[], float]) -> None:
        """Looks at everything until cancelled; `now` gives the seconds since the run began."""
        with contextlib.suppress(KubeError):
            await self._events(None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_engines(now))
            tasks.create_task(self._follow_events(now))

    async def look(self, at: float) -> None:
        """Reads every engine once."""
        await asyncio.gather(*(self._read(state, end, at) for state, end in self._pods))

    async def _follow_engines(self, now: Callable[[], float]) -> None:
        while True:
            await self.look(now())
            await asyncio.sleep(LOOK_SECONDS)

    async def _read(self, state: PodState, end: Endpoint, at: float) -> None:
        try:
            load, answer = await asyncio.gather(
                self._engines.load(end), self._engines.read_back(end)
            )
        except EngineError as error:
            state.problem = str(error)
            return
        state.take(at, answer, directive.is_on(answer), load.running + load.queued)

    async def _follow_events(self, now: Callable[[], float]) -> None:
        while True:
            # An API server that is late with events is no reason to end the run.
            with contextlib.suppress(KubeError):
                await self._events(now)
            await asyncio.sleep(1.0)

    async def _events(self, now: Callable[[], float] | None) -> None:
        """Takes in new events; without `now` those there are become known without a word."""
        path = f"/apis/events.k8s.io/v1/namespaces/{self._record.plan.namespace}/events"
        found = (await self._kube.call("GET", path))["items"]
        found = [each for each in found if each["metadata"]["uid"] not in self._known]
        for each in sorted(found, key=_time):
            self._known.add(each["metadata"]["uid"])
            about: dict[str, Any] = each.get("regarding") or {}
            if now is not None and about.get("kind") == KIND:
                self._record.events.append(
                    Happened(now(), each["reason"], about["name"], each.get("note", ""))
                )


def engine_client() -> EngineClient:
    """A client that reads engines as the operator does."""
    fields = Settings.model_fields
    return EngineClient(
        MetricNames(
            fields["metric_running"].default,
            fields["metric_queued"].default,
            fields["metric_tokens"].default,
        )
    )


def _time(event: dict[str, Any]) -> datetime:
    text = event.get("eventTime") or event["metadata"]["creationTimestamp"]
    return datetime.fromisoformat(text)
