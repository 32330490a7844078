"""Looks at the engines and at what the operator decides while a run goes on; changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from specserve.engine import Endpoint, EngineClient, EngineError
from specserve.settings import Settings
from specserve.signals import MetricNames
from tests.demo.plan import SPECSERVE, STEPS
from tests.demo.record import Happened, Weighed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.demo.record import PodState, Record

LOOK_SECONDS = 0.5
"""Time between two looks at an engine: the precision of the flips' times."""

REACH_SECONDS = 15.0
"""Time in which every engine must have answered once."""

_PATIENCE = aiohttp.ClientTimeout(total=5)
_ACCEPTANCE = "specserve_policy_acceptance_length"
_BREAK_EVEN = "specserve_policy_break_even_ratio"
_SHOWN = frozenset({"mode", "probe"})


class PodsOutOfReach(Exception):
    """The pods' addresses don't answer from here; the message names one."""


class Watch:
    """Follows the engines and the decisions of a run into its record."""

    def __init__(
        self, record: Record, engines: EngineClient, session: aiohttp.ClientSession
    ) -> None:
        self._record = record
        self._engines = engines
        self._session = session
        self._known: set[tuple[str, ...]] = set()
        self._name = next(arm.name for arm in record.plan.arms if arm.key == SPECSERVE)
        self._decisions = f"decisions/{record.plan.namespace}/{self._name}"
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
                while not all(state.steered for state, _ in self._pods):
                    await self.look(0.0)
                    await asyncio.sleep(LOOK_SECONDS / 2)
        except TimeoutError:
            for state, end in self._pods:
                if not state.steered:
                    why = state.problem or f"it is in mode {state.mode}, nobody steers it"
                    raise PodsOutOfReach(f"pod {state.name} at {end.ip}: {why}") from None

    async def follow(self, now: Callable[[], float]) -> None:
        """Looks at everything until cancelled; `now` gives the seconds since the run began."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_engines(now))
            tasks.create_task(self._follow_policy(now))

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
        state.take(at, answer, load.running + load.queued)

    async def _follow_policy(self, now: Callable[[], float]) -> None:
        while True:
            # An operator that is late to tell is no reason to end the run.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                self._weigh(await self._ask("metrics"), now())
                self._take(json.loads(await self._ask(self._decisions)), now())
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask(self, path: str) -> str:
        url = f"http://127.0.0.1:{self._record.plan.operator_port}/{path}"
        async with self._session.get(url, timeout=_PATIENCE, raise_for_status=True) as answer:
            return await answer.text()

    def _weigh(self, text: str, at: float) -> None:
        seen = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels.get("name") == self._name and sample.labels.get("steps") == str(STEPS)
        }
        with contextlib.suppress(KeyError):  # not before the first verify
            self._record.weighed.append(Weighed(at, seen[_ACCEPTANCE], seen[_BREAK_EVEN]))

    def _take(self, decisions: list[dict[str, Any]], at: float) -> None:
        for each in decisions:
            mark = (each["time"], each["pod"], each["what"], each["reason"])
            if mark in self._known:
                continue
            self._known.add(mark)
            self._record.verdict = f"{each['pod']}: {each['reason']}"
            if each["what"] in _SHOWN:
                self._record.events.append(
                    Happened(at, each["code"], each["pod"], self._record.verdict)
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
