"""From the first look at the engines to leaving them: the loop put together without a cluster."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specserve import api, curves, names, status
from specserve.curves import ConfigMapText
from specserve.engine import Endpoint, EngineClient, EngineError
from specserve.local.news import Board
from specserve.local.places import Engines, Place
from specserve.local.rows import Row, row
from specserve.local.state import SAVE_SECONDS, Remembered, State
from specserve.observed import Key, Pod
from specserve.policy import directive
from specserve.regulate import DEADLINE_MS, Loads, Regulator
from specserve.signals import MetricNames
from specserve.target import Notice, Target, target_of
from specserve.workload import UnusableSpec

#: SGLang's own series, for engines without `/v1/loads`.
METRICS = MetricNames(
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:generation_tokens_total"
)
#: Seconds between two read-backs of an engine: there are few, and the screen lives on them.
READ_BACK_SECONDS = 2.0
#: The shortest lease there is: who is in its fallback needs no more, and is soon free for others.
LAST_LEASE_SECONDS = 5
#: Longest name of a holder that engines take.
LONGEST_HOLDER = 320
#: Times that an engine is told to take its fallback, as an order under way may overtake it once.
LAST_TRIES = 3


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be done with which engines.

    Attributes:
        key: Namespace and name of the SpecServe.
        spec: Its spec.
        tokens: Plugin tokens, the current one first.
        api_key: Key of the serving port, None if it is open.
        curve: What stands for `policy.breakEven.curveConfigMap`, None if nothing does.
    """

    key: Key
    spec: api.SpecServeSpec
    tokens: tuple[str, ...]
    api_key: str | None
    curve: ConfigMapText | None

    def __repr__(self) -> str:
        """Keep tokens and keys out of tracebacks."""
        return f"Wish({'/'.join(self.key)})"


def holder_of(folder: Path) -> str:
    """The installation in directives: who holds this folder on this machine.

    One process at a time does, so the next one goes on with the leases of the last.
    """
    return f"{names.HOLDER_LOCAL}{socket.gethostname()}{folder.resolve()}"[-LONGEST_HOLDER:]


class Session:
    """The loop over a few engines.

    Args:
        client: How to talk to engines.
        places: Where they are.
        state: The held folder.
        wish: What is to be done.
        board: Told what is new.
        loads: Where loads come from under source Prometheus.
        wall: Wall-clock seconds.
    """

    def __init__(
        self,
        client: EngineClient,
        places: Iterable[Place],
        state: State,
        wish: Wish,
        board: Board,
        *,
        loads: Loads | None = None,
        wall: Callable[[], float],
    ) -> None:
        self.places = tuple(places)
        self.state = state
        self.board = board
        self.engines = Engines(client, self.places, state.clock)
        self.holder = holder_of(state.folder)
        self._wish = wish
        self._seen = curves.NOTHING_SEEN
        self._said_curve = self._said_unsaved = ""
        self._said_steps: set[tuple[str, tuple[int, ...]]] = set()
        self._soiled = asyncio.Event()
        self.regulator = Regulator(
            self.engines,
            loads,
            holder=self.holder,
            changed=self._changed,
            notice=self._notice,
            decided=self._decided,
            read_back_seconds=READ_BACK_SECONDS,
            # What is to be gone on with is in the state.
            resumes=False,
            clock=state.clock,
            wall=wall,
        )
        self.fleet = self.regulator.fleet(wish.key)
        self.fleet.knowledge = state.knowledge
        self.target = self._configure()

    def show(self, pod: Pod) -> None:
        """Take in an engine as a pod: that it is there, another process, or may not be steered."""
        known = self.fleet.pods.get(pod.uid)
        [place] = [place for place in self.places if place.name == pod.name]
        memory = self.state.memory(place.serving) if known is None else None
        self.regulator.observe(None if known is None else known.pod, pod, memory)

    async def run(self, *beside: Coroutine[Any, Any, None]) -> None:
        """Steer, and keep what is learnt, until cancelled.

        Args:
            beside: What is to run meanwhile.
        """
        async with asyncio.TaskGroup() as group:
            for work in (self.regulator.run(), self._keep(), *beside):
                group.create_task(work)

    def adopt(self, policy: api.Policy) -> None:
        """Go by another policy from now on.

        Raises:
            UnusableSpec: Its `modeUntil` is no time; the policy stays as it was.
        """
        before = self._wish
        spec = before.spec.model_copy(update={"policy": policy})
        self._wish = replace(before, spec=spec)
        try:
            self.target = self._configure()
        except UnusableSpec:
            self._wish = before
            raise
        if policy != before.spec.policy:
            self.board.say("note", "", "the policy has changed; it holds from now on")

    @property
    def wish(self) -> Wish:
        """What is done now."""
        return self._wish

    def adopt_keys(self, tokens: tuple[str, ...], api_key: str | None) -> None:
        """Send other tokens, the new one first, and another key from now on."""
        self._wish = replace(self._wish, tokens=tokens, api_key=api_key)
        self.target = self._configure()

    def rows(self) -> list[Row]:
        """What each engine does now."""
        now = self.state.clock()
        return [
            row(
                place,
                self.fleet.pods.get(place.name),
                self.engines.facts.get(place.name),
                self.target.policy,
                now,
            )
            for place in self.places
        ]

    def save(self) -> None:
        """Write down what is remembered; that it could not be is said."""
        remembered = {
            place.serving: Remembered(epoch=steered.epoch, memory=steered.memory)
            for place in self.places
            if (steered := self.fleet.pods.get(place.name)) is not None
        }
        try:
            self.state.save(self._wish.key[1], self._wish.spec, self.fleet.knowledge, remembered)
        except OSError as error:
            said = f"the state was not saved: {error}"
            if said != self._said_unsaved:
                self.board.say("warning", "", said)
            self._said_unsaved = said
        else:
            self._said_unsaved = ""

    async def leave(self) -> bool:
        """Have every engine take the fallback of its last order now.

        Its lease would bring it there within `policy.leaseSeconds`; told at once, the engines are
        what they stay when this process is gone, and free for another to steer in five seconds.

        Returns:
            Whether all of them took it.
        """
        left = await asyncio.gather(*(self._leave(place) for place in self.places))
        return all(left)

    async def _leave(self, place: Place) -> bool:
        if place.name not in self.engines.facts:
            return True  # it was never heard of, and has no order of this process
        endpoint = Endpoint(place.name, self._wish.tokens, self._wish.api_key)
        said = "it is not reached"
        remaining = 0.0
        for _ in range(LAST_TRIES):
            try:
                state = await self.engines.read_back(endpoint)
                lease = state.get("lease") or {}
                remaining = float(lease.get("remainingSeconds") or 0.0)
                if lease.get("holder") != self.holder or remaining <= 0:
                    return True  # it is not under an order of ours
                fallback = state.get("fallback") or {"mode": "auto"}
                await self.engines.switch(endpoint, self._last_order(state, fallback))
            except EngineError as error:
                said = f"{error.code}: {error}"
                continue
            self.board.say("note", place.name, f"left in its fallback: {words(fallback)}")
            return True
        when = f", which is in {remaining:.0f} s" if remaining else ""
        self.board.say(
            "warning",
            place.name,
            f"left under its last order ({said}); it takes the fallback when its lease is over"
            f"{when}",
        )
        return False

    def _last_order(self, state: dict[str, Any], fallback: dict[str, Any]) -> dict[str, Any]:
        return directive.body(
            {**fallback, "fallback": fallback},
            pod_uid=state["podUID"],
            boot_id=state["bootID"],
            epoch=int(state["epoch"]) + 1,
            holder=self.holder,
            lease_seconds=LAST_LEASE_SECONDS,
            deadline_ms=DEADLINE_MS,
            reason="specserve local ends: the fallback of the last order",
        )

    # -- what the loop tells --------------------------------------------------------------------

    def _decided(self, _: Key, decision: Any) -> None:
        self.board.decided(decision)
        self._soiled.set()

    def _notice(self, notice: Notice) -> None:
        # The others are told as decisions, switches and troubles.
        if notice.reason in {"EngineStalled", "FlipReverted", "CrashedWhileOn"}:
            engine, _, text = notice.message.partition(": ")
            self.board.say("warning", engine, f"{notice.reason}: {text}")

    def _compare_steps(self) -> None:
        """Say once of each engine which of the steps asked for it has not prepared."""
        for place in self.places:
            facts = self.engines.facts.get(place.name)
            if facts is None or not facts.prepared:
                continue
            missing = sorted(set(self._wish.spec.draft.steps) - set(facts.prepared))
            if missing and (place.name, facts.prepared) not in self._said_steps:
                self._said_steps.add((place.name, facts.prepared))
                self.board.say(
                    "warning",
                    place.name,
                    f"spec.draft.steps has {_listed(missing)}, and it has prepared "
                    f"{_listed(facts.prepared)} alone, by {names.ENV_STEPS} at its start",
                )

    def _changed(self, key: Key) -> None:
        self._compare_steps()
        for engine in self.regulator.engines(key):
            self.board.seen(engine)
        self.board.switched(self.regulator.switches(key))
        seen = status.reported(self.regulator.engines(key))
        if seen != self._seen:
            self._seen = seen
            self.target = self._configure()

    def _configure(self) -> Target:
        wish = self._wish
        target = target_of(
            wish.key,
            wish.spec,
            tokens=wish.tokens,
            api_key=wish.api_key,
            curve=self._curve(),
        )
        self.regulator.configure(target)
        return target

    def _curve(self) -> Any:
        if self._wish.spec.policy.strategy != "BreakEven":
            return None
        found = curves.find(self._wish.spec, self._wish.curve, self._seen)
        said = f"break-even curve: {found.message}"
        if found.curve is None:
            said += "; live rounds tell, and until then the threshold"
        if said != self._said_curve:
            self._said_curve = said
            unused = found.reason in {"Stale", "Unreadable"}
            self.board.say("warning" if unused else "note", "", said)
        return found.curve

    async def _keep(self) -> None:
        """Save at every decision, and now and then what was learnt in between."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_SECONDS):
                    await self._soiled.wait()
            self._soiled.clear()
            self.save()


def _listed(steps: Iterable[int]) -> str:
    return ", ".join(map(str, steps))


def words(setting: dict[str, Any]) -> str:
    """A setting of the wire for people."""
    if setting["mode"] == "tiers":
        return "by batch: " + ", ".join(
            f"from {tier['minBatch']}: " + (f"{tier['steps']} steps" if tier["steps"] else "off")
            for tier in setting["tiers"]
        )
    if setting["mode"] == "on":
        return f"on, {setting['steps']} steps"
    return "the engine's own policy" if setting["mode"] == "auto" else str(setting["mode"])
