"""Engines at URLs of their own, in the terms of the loop: pods with addresses and uids.

A place is a pod to the loop: its name is the pod's name, uid and address. The identity that the
engine itself goes by is put in where a call leaves and taken out where an answer comes, so that an
engine which comes back under another one is the same place in a new process, and two engines that
were given the same one are told apart.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specserve import names, signals
from specserve.engine import Endpoint, EngineClient, EngineUnreachable
from specserve.observed import Key, Pod
from specserve.signals import Reading

#: Shortest time in seconds that a rate is taken over.
SHORTEST = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine is.

    Attributes:
        name: What it is called here.
        serving: URL of its serving routes, without a slash at its end.
        admin: URL of the plugin's listener, likewise.
    """

    name: str
    serving: str
    admin: str

    def endpoint(self, tokens: tuple[str, ...], api_key: str | None) -> "Elsewhere":
        """How to call the engine."""
        return Elsewhere(self.name, tokens, api_key, serving=self.serving, admin=self.admin)

    def pod(self, key: Key) -> Pod:
        """The pod that an engine which is always there is to the loop.

        Args:
            key: The SpecServe it belongs to.
        """
        return Pod(
            uid=self.name,
            key=key,
            name=self.name,
            ip=self.name,
            usable=True,
            alive=True,
            leaving=False,
            boot="",
            trouble=None,
        )


@dataclass(frozen=True, slots=True, repr=False)
class Elsewhere(Endpoint):
    """An engine that is not in a pod. Its `ip` is a name and no address.

    Attributes:
        serving: As in `Place`.
        admin: As in `Place`.
    """

    serving: str = ""
    admin: str = ""

    def url(self, port: int, path: str) -> str:
        """URL of a path that a pod would have on this port."""
        return f"{self.admin if port == names.PORT_ADMIN else self.serving}{path}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine's last read-back says for people.

    Attributes:
        at: When it was read, on the clock of the loop.
        uid: The identity it goes by.
        boot: Its process.
        mode: The mode it reports.
        active: Draft steps of its last rounds, those of each rank that differs; empty before any.
        tokens: Tokens made by this process, None if it does not say.
        rate: Tokens per second since the read-back before, None if that is not known.
        prepared: Step counts that it can be ordered to use; empty if it does not say.
    """

    at: float
    uid: str
    boot: str
    mode: str
    active: tuple[int, ...]
    tokens: int | None
    rate: float | None
    prepared: tuple[int, ...] = ()


class Engines:
    """What the loop asks of engines, at places.

    Args:
        client: The operator's own.
        places: Where they are.
        clock: The clock of the loop.
    """

    def __init__(
        self, client: EngineClient, places: Iterable[Place], clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._places = {place.name: place for place in places}
        self._clock = clock
        #: What each engine said last, by the name of its place; none before it is heard of.
        self.facts: dict[str, Facts] = {}

    async def load(self, engine: Endpoint) -> Reading:
        """Requests running and waiting."""
        return await self._client.load(self._at(engine))

    async def read_back(self, engine: Endpoint) -> dict[str, Any]:
        """What the engine does."""
        return self._take(engine.ip, await self._client.read_back(self._at(engine)))

    async def switch(self, engine: Endpoint, directive: dict[str, Any]) -> dict[str, Any]:
        """Send a directive; the read-back acknowledges it."""
        known = self.facts.get(engine.ip)
        if known is None:
            raise EngineUnreachable("EngineUnreachable", f"{engine.ip} was never heard of")
        body = {**directive, "podUID": known.uid}
        return self._take(engine.ip, await self._client.switch(self._at(engine), body))

    def _at(self, engine: Endpoint) -> Elsewhere:
        place = self._places[engine.ip]
        return Elsewhere(
            engine.ip,
            engine.tokens,
            engine.api_key,
            engine.model,
            engine.reuse,
            place.serving,
            place.admin,
        )

    def _take(self, name: str, answer: dict[str, Any]) -> dict[str, Any]:
        self.facts[name] = _facts(answer, self.facts.get(name), self._clock())
        return {**answer, "podUID": name}


def _facts(answer: Mapping[str, Any], before: Facts | None, now: float) -> Facts:
    at, tokens, rate = now, signals.tokens_total(answer), None
    boot = str(answer["bootID"])
    if before is not None and before.boot == boot:
        if now - before.at < SHORTEST:
            at, tokens, rate = before.at, before.tokens, before.rate
        elif tokens is not None and before.tokens is not None:
            rate = (tokens - before.tokens) / (now - before.at)
    active = {
        int(rank["activeSteps"])
        for group in answer.get("groups") or ()
        for rank in group.get("ranks") or ()
        if rank.get("decodeRounds") and rank.get("activeSteps") is not None
    }
    return Facts(
        at=at,
        uid=str(answer["podUID"]),
        boot=boot,
        mode=str(answer["mode"]),
        active=tuple(sorted(active)),
        tokens=tokens,
        rate=rate,
        prepared=tuple(
            sorted(one for one in answer.get("availableSteps") or () if isinstance(one, int))
        ),
    )
