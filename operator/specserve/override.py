"""The kill switch: a ConfigMap beside the operator that sets one mode for all SpecServes.

Read every few seconds by its name. There is none as a rule; while it cannot be read, what was last
known of it holds, so that a failing API server neither frees nor stops a fleet.
"""

import asyncio
import datetime
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from specserve import telemetry
from specserve.cluster import Cluster
from specserve.kube import KubeError, KubeRefused, KubeUnreachable
from specserve.target import Override, Standing

log = logging.getLogger(__name__)

#: Seconds between two readings.
PERIOD = 3.0
#: Seconds between two tries to read it for the first time.
FIRST_PAUSE = 0.5
_MODES: tuple[Literal["On", "Off", "Observe"], ...] = ("On", "Off", "Observe")


class Unusable(ValueError):
    """The ConfigMap does not say what an override must say; the message names the key."""


def parse(data: Mapping[str, Any]) -> Override:
    """Read the data of the ConfigMap.

    Raises:
        Unusable: A key is missing, unknown or has another value than it may have.
    """
    unknown = sorted(data.keys() - {"mode", "until", "reason"})
    if unknown:
        raise Unusable(f"it has the key {unknown[0]}, and may have mode, until and reason")
    mode = next((known for known in _MODES if known == data.get("mode")), None)
    if mode is None:
        raise Unusable(f"its mode is {data.get('mode')!r}, not one of {', '.join(_MODES)}")
    until = data.get("until") or None
    if until is not None:
        try:
            moment = datetime.datetime.fromisoformat(until)
        except ValueError:
            raise Unusable(f"its until is {until!r}, not like 2030-01-31T12:00:00Z") from None
        if moment.tzinfo is None:
            raise Unusable(f"its until is {until!r}, without a time zone")
        until = moment.timestamp()
    reason = " ".join(str(data.get("reason") or "").split())[:200]
    return Override(mode, until, reason)


class OverrideReader:
    """Follows the ConfigMap.

    Args:
        cluster: Where to read it.
        namespace: Its namespace, the operator's own.
        name: Its name.
        take: Told what is known of it, at first and whenever that has changed.
        wall: Wall-clock seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        take: Callable[[Standing], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._where = (namespace, name)
        self._take = take
        self._wall = wall
        self._known: Override | None = None
        self._told: Standing | None = None

    async def run(self) -> None:
        """Read it for ever."""
        while True:
            await asyncio.sleep(PERIOD)
            await self.read()

    async def first(self) -> None:
        """Read it until the API server has an answer: nothing is steered past a kill switch."""
        while True:
            if await self.read():
                return
            await asyncio.sleep(FIRST_PAUSE)

    async def read(self) -> bool:
        """Read it once, and tell what is new; returns whether the API server had an answer."""
        problem, answered = "", True
        try:
            item = await self._cluster.get("ConfigMap", *self._where)
            self._known = None if item is None else parse(item.get("data") or {})
        except (KubeError, Unusable) as error:
            problem = f"ConfigMap {'/'.join(self._where)}: {error}"
            answered = not isinstance(error, KubeUnreachable) and (
                not isinstance(error, KubeRefused) or error.status in {401, 403}
            )
        self._tell(problem)
        return answered

    def _tell(self, problem: str) -> None:
        known = self._known
        over = known is not None and known.until is not None and self._wall() >= known.until
        standing = Standing(None if over else known, problem)
        if standing == self._told:
            return
        if problem and (self._told is None or self._told.problem != problem):
            log.warning("the override cannot be read, what was last known holds: %s", problem)
        if standing.override != (self._told.override if self._told else None):
            log.warning("override of all SpecServes: %s", words(standing.override))
        self._told = standing
        for mode in _MODES:
            in_force = standing.override is not None and standing.override.mode == mode
            telemetry.override.labels(mode).set(in_force)
        telemetry.override_unreadable.set(bool(problem))
        self._take(standing)


def words(override: Override | None) -> str:
    """An override for people."""
    if override is None:
        return "none"
    return override.mode + (f" ({override.reason})" if override.reason else "")
