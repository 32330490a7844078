"""Engines in memory for the regulation loop: real fencing and leases, faults on demand."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from specserve.engine import Endpoint, EngineRefused, EngineUnreachable
from specserve.observed import Key, Pod
from specserve.signals import Reading
from specserve_engine.control import Apply, Capability, Control, Identity, Refusal, Versions
from specserve_engine.rounds import RoundStats
from specserve_engine.wire import Invalid, parse_directive
from tests.unit.virtual_time import now

READ_LIMIT = 2.0
SWITCH_LIMIT = 3.0
STEPS = (0, 1, 3)
_boots = itertools.count(1)


@dataclass
class Decoding:
    """What decode rounds take and win.

    Attributes:
        accept: chance of each draft, its predecessors accepted.
        plain: seconds of a round without drafts.
        ratio: how many of these a round with 3 drafts takes; linear in between.
    """

    accept: float = 0.7
    plain: float = 0.02
    ratio: float = 1.5

    def seconds(self, steps: int) -> float:
        return self.plain * (1 + (self.ratio - 1) * steps / 3)

    def drafts(self, rng: Random, steps: int) -> int:
        accepted = 0
        while accepted < steps and rng.random() < self.accept:
            accepted += 1
        return accepted


@dataclass
class FakeEngine:
    """One engine process after another in one pod.

    `faults` maps a call (load, read, switch) to what goes wrong with it: hang, reset, refused,
    lost (the switch is applied, its answer is not sent), unproved (504: applied, not confirmed).
    With `decoding` the requests running are decoded, so that read-backs have rounds to tell of.
    """

    uid: str
    running: int = 0
    queued: int = 0
    capacity: int = 256
    ranks: int = 1
    tokens: int = 0
    stamp: float | None = None
    controllable: bool = True
    answer_seconds: float = 0.01
    rank_states: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    changes: list[tuple[int, str]] = field(default_factory=list)
    decoding: Decoding | None = None
    gpu: str = ""

    def __post_init__(self) -> None:
        self.boot()

    def boot(self) -> None:
        identity = Identity(self.uid, f"boot-{next(_boots)}")
        self.control = Control(identity, Versions("0.0.0", "0.1.0", proved=False))
        self.stats = RoundStats()
        self.decoded_to: float | None = None
        reason = "" if self.controllable else "no adaptive controller"
        self.control.serve(Capability(self.controllable, reason, STEPS))

    def lapse(self) -> None:
        """What the engine's own watchdog does."""
        order = self.control.expire(now())
        if order is not None:
            self.control.commit(order)

    def decode(self) -> None:
        """Run the rounds that time has been for since the last call."""
        if self.decoding is None:
            return
        at = now() if self.decoded_to is None or not self.running else self.decoded_to
        rng = Random(f"{self.uid}/{at}")
        steps = self.active_steps
        seconds = self.decoding.seconds(steps)
        while self.running and at + seconds <= now():
            at += seconds
            accepted = [self.decoding.drafts(rng, steps) for _ in range(self.running)]
            self.stats.observe(steps, seconds, accepted, at)
        self.decoded_to = at

    def read_back(self) -> dict[str, Any]:
        self.decode()
        self.lapse()
        told = {"stats": [], "tokensTotal": self.tokens}
        if self.decoding is not None:
            told = {
                "stats": [figures.to_json() for figures in self.stats.figures(now())],
                "acceptance": [counts.to_json() for counts in self.stats.acceptance()],
                "tokensTotal": self.stats.tokens_total,
                "at": now(),
            }
        groups = [{"ranks": self.rank_states, **told}]
        return {**self.control.read_back(now()), "groups": groups}

    def put(self, body: dict[str, Any]) -> dict[str, Any]:
        self.decode()
        self.lapse()
        try:
            admission = self.control.admit(parse_directive(body), now())
        except Invalid as error:
            raise EngineRefused("Invalid", str(error), 400, {}) from None
        if isinstance(admission, Refusal):
            raise EngineRefused(
                str(admission.code), admission.message, admission.status, admission.to_json()
            )
        if isinstance(admission, Apply):
            self.control.commit(admission.order)
            self.changes.append((body["epoch"], body["mode"]))
        return self.read_back()

    @property
    def active_steps(self) -> int:
        """Steps of a round with as many requests as run now."""
        state = self.control.read_back(now())
        if state["mode"] == "tiers":
            table = [tier for tier in state["tiers"] if tier["minBatch"] <= max(self.running, 1)]
            return int(table[-1]["steps"])
        return {"off": 0, "on": state["steps"]}.get(state["mode"], max(STEPS))

    @property
    def mode(self) -> str:
        return self.read_back()["mode"]

    def steer(self, mode: str, holder: str = "else/where", lease: int = 600, **more: Any) -> None:
        """What some other hand does."""
        setting = {"mode": mode, "draftKv": "cold", **({"steps": 3} if mode == "on" else {})}
        self.put(
            {
                **setting,
                "podUID": self.uid,
                "bootID": self.control.identity.boot_id,
                "epoch": self.control.epoch + 1,
                "holder": holder,
                "leaseSeconds": lease,
                "fallback": setting,
                "reason": "by hand",
                **more,
            }
        )


@dataclass(frozen=True)
class Call:
    at: float
    kind: str
    uid: str
    body: dict[str, Any] = field(default_factory=dict)


class FakeEngines:
    """All engines by address; counts what is asked of them."""

    def __init__(self) -> None:
        self.at: dict[str, FakeEngine] = {}
        self.calls: list[Call] = []
        self.usable: dict[str, bool] = {}
        #: Promises that the loop broke; raised in the loop they would only be logged.
        self.violations: list[str] = []
        self._switching: set[str] = set()
        self._epochs: dict[tuple[str, str], int] = {}
        self._held: dict[str, asyncio.Event] = {}

    def of(self, kind: str, uid: str | None = None) -> list[Call]:
        return [c for c in self.calls if c.kind == kind and uid in (None, c.uid)]

    def hold(self, kind: str) -> asyncio.Event:
        """Let calls of a kind wait until the event is set."""
        self._held[kind] = asyncio.Event()
        return self._held[kind]

    async def load(self, engine: Endpoint) -> Reading:
        target = await self._reach("load", engine, READ_LIMIT)
        stamp = now() if target.stamp is None else target.stamp
        return Reading(
            *(stamp, target.running, target.queued, target.capacity, None, target.ranks),
            gpu=target.gpu,
        )

    async def read_back(self, engine: Endpoint) -> dict[str, Any]:
        target = await self._reach("read", engine, READ_LIMIT)
        return target.read_back()

    async def switch(self, engine: Endpoint, directive: dict[str, Any]) -> dict[str, Any]:
        uid = directive["podUID"]
        if uid in self._switching:
            self.violations.append(f"two directives are under way for {uid}")
        if not self.usable.get(uid, True):
            self.violations.append(f"a directive went to {uid}, which is not usable")
        fence = (uid, directive["bootID"])
        if directive["epoch"] < self._epochs.get(fence, 0):
            self.violations.append(f"the epochs sent to {uid} decrease")
        self._epochs[fence] = directive["epoch"]
        self._switching.add(uid)
        try:
            return await self._switch(engine, directive)
        finally:
            self._switching.discard(uid)

    async def _switch(self, engine: Endpoint, directive: dict[str, Any]) -> dict[str, Any]:
        target = await self._reach("switch", engine, SWITCH_LIMIT, directive)
        answer = target.put(directive)
        if target.faults.get("switch") == "late":
            await asyncio.sleep(SWITCH_LIMIT)
            raise EngineUnreachable("EngineTimeout", "no answer in time")
        match target.faults.get("switch"):
            case "lost":
                raise EngineUnreachable("EngineConnectionReset", "closed after the request")
            case "unproved":
                raise EngineRefused("Timeout", "a rank is silent", 504, {"code": "Timeout"})
        return answer

    async def _reach(
        self, kind: str, engine: Endpoint, limit: float, body: dict[str, Any] | None = None
    ) -> FakeEngine:
        target = self.at.get(engine.ip)
        uid = target.uid if target else "?"
        self.calls.append(Call(now(), kind, uid, body or {}))
        if target is None:
            await asyncio.sleep(0.01)
            raise EngineUnreachable("EngineConnectionRefused", "nobody is there")
        match target.faults.get(kind):
            case "hang":
                await asyncio.sleep(limit)
                raise EngineUnreachable("EngineTimeout", "no answer in time")
            case "reset":
                await asyncio.sleep(0.001)
                raise EngineUnreachable("EngineConnectionReset", "connection reset")
            case "refused":
                await asyncio.sleep(0.001)
                raise EngineRefused("EngineHTTP500", "500 oops", 500, {})
        await asyncio.sleep(target.answer_seconds)
        if kind in self._held:
            await self._held[kind].wait()
        return target


def pod(key: Key, uid: str, ip: str | None, **changes: Any) -> Pod:
    fresh = Pod(
        uid=uid,
        key=key,
        name=f"{key[1]}-{uid}",
        ip=ip,
        usable=True,
        alive=True,
        leaving=False,
        boot="c1#0",
        trouble=None,
    )
    return dataclasses.replace(fresh, **changes)


@contextlib.contextmanager
def fault(engine: FakeEngine, **faults: str) -> Iterator[None]:
    engine.faults.update(faults)
    try:
        yield
    finally:
        for kind in faults:
            engine.faults.pop(kind, None)
