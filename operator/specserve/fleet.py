"""What the second loop knows of one SpecServe and of each of its pods. No IO, and no clock."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from specserve import api, policy
from specserve.decisions import Decision, Log, Switch, difference
from specserve.observed import Key, Pod
from specserve.policy import Context, Knowledge, Memory, Rounds, Sample, Verdict, directive
from specserve.status import Engine
from specserve.target import Target

#: Seconds after the last word of a probe for which its traces are still kept from the status.
QUIET: Final = 15.0
#: Seconds for which an engine must have followed its table to the other mode to be told of it.
FOLLOWED: Final = 30.0
#: Seconds for which the mean load of a fleet is taken as read.
DEMAND_TTL: Final = 0.5
#: Members of a read-back that are looked at later.
_KEPT: Final = (
    *("bootID", "epoch", "mode", "steps", "tiers", "draftKv", "fallback"),
    *("controllable", "reason", "availableSteps"),
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A directive that changes the setting, until the engine is seen to do as it says.

    Attributes:
        setting: What was wanted.
        epoch: Its fence.
        verdict: Why.
        before: Whether the engine speculated when it was sent.
        ours: Whether a directive was in force then; an engine that is taken over from its own
            policy has not flipped.
        announce: Whether the switch is news.
        tabled: Whether the engine followed a table already.
    """

    setting: dict[str, Any]
    epoch: int
    verdict: Verdict
    before: bool | None
    ours: bool
    announce: bool
    tabled: bool = False


@dataclass(slots=True)
class Steered:
    """One pod under regulation. Times are monotonic seconds unless named otherwise.

    Attributes:
        shown: Whether the engine speculates as it is told to the outside: probes left out.
        looking: Whether what the engine does was ordered by a probe, or as the way back from one.
        returned: When it came back from being aside, to be calibrated; None if it never did.
        epoch_shown: The largest epoch as it is told to the outside: probes left out.
        quiet_until: Until then a probe may still show in what the engine reports.
        strayed_at: When the engine began to follow its table to another mode than `shown`.
        born: When the engine process was found to be another one than before, 0 if it was not.
        gpu_asked: Times that the engine was asked for its GPU alone.
        key_refused: Whether SGLang refused the API key when the load was read last.
        rounds: Of the last read-back, until a decision has taken them in.
    """

    pod: Pod
    due: float
    memory: Memory = field(default_factory=Memory.start)
    sample: Sample | None = None
    sample_error: tuple[str, str] | None = None
    sample_failures: int = 0
    key_refused: bool = False
    ranks: int | None = None
    cache_tokens: int | None = None
    readback: dict[str, Any] | None = None
    born: float = 0.0
    returned: float | None = None
    rounds: Rounds | None = None
    astray: str | None = None
    read_at: float = 0.0
    read_wanted: bool = True
    lease_until: float = 0.0
    control_error: tuple[str, str] | None = None
    control_failures: int = 0
    untaken: bool = False
    retry_at: float = 0.0
    epoch: int = 0
    said: str = ""
    verdict: Verdict | None = None
    wanted: dict[str, Any] | None = None
    ticking: bool = False
    switching: asyncio.Task[None] | None = None
    unproved: Sent | None = None
    unsure: bool = False
    switched_at: float | None = None  # wall clock
    switched_why: str = ""
    shown: bool | None = None
    looking: bool = False
    epoch_shown: int = 0
    quiet_until: float = 0.0
    strayed_at: float | None = None
    accept: float | None = None
    sglang: str = ""
    plugin: str = ""
    gpu: str = ""
    gpu_asked: int = 0
    told: Engine | None = None

    def on(self, now: float) -> bool | None:
        """Whether the engine speculates, probes left out; None if that is not known."""
        if self.readback is None:
            return None
        if now < self.quiet_until or (self.looking and self.difference is not None):
            return self.shown
        wanted = self.wanted or {}
        if self.readback.get("mode") == wanted.get("mode") == "tiers":
            return self.shown  # which part of a table holds is a matter of the load
        return directive.is_on(self.readback)

    @property
    def difference(self) -> str | None:
        """First difference between the wanted setting and the read-back, None if none."""
        if self.readback is None or self.wanted is None:
            return None
        return directive.matches(self.readback, self.wanted) or self.astray

    def recover(self) -> None:
        """Take note of a call that went well."""
        self.control_error = None
        self.control_failures = 0
        self.untaken = False

    def restart(self, now: float, *, moved: bool = False) -> None:
        """Forget what the engine process before this one reported; keep what was decided.

        Args:
            now: The time.
            moved: Whether the pod was taken aside or came back; the process may be the same.
        """
        self.born = now
        if moved:
            self.returned = now
        self.readback = None
        self.rounds = None
        self.read_wanted = True
        self.sample = None
        self.sample_failures = 0
        self.key_refused = False
        self.cache_tokens = None
        self.control_failures = 0
        self.retry_at = 0.0
        self.epoch = self.epoch_shown = 0
        self.lease_until = 0.0
        self.unproved = None
        self.untaken = False
        self.ranks = None
        self.looking = False
        self.quiet_until = 0.0
        self.strayed_at = None
        self.memory = self.memory.reboot()

    def stale(self, patient: api.Policy, now: float) -> bool:
        """Whether there is a load reading that is too old."""
        age = self.memory.age(now)
        return age is not None and age > patient.stale_after_seconds

    def report(self, patient: api.Policy | None, now: float) -> Engine:
        """What the status is told of this pod.

        Args:
            patient: The policy in force, None if the SpecServe is let go of.
            now: The time.
        """
        readback, verdict, sample, memory = self.readback, self.verdict, self.sample, self.memory
        told = self.told if now < self.quiet_until else None
        stale = patient is not None and self.stale(patient, now)
        acceptance = memory.counts.acceptance
        limit = None if patient is None else patient.draft_guard.windows
        ineffective = limit is not None and memory.ineffective >= limit
        return Engine(
            name=self.pod.name,
            on=self.on(now),
            wanted=told.wanted if told else verdict.mode if verdict else None,
            code=told.code if told else verdict.code if verdict else "",
            difference=None if told else self.difference,
            controllable=None if readback is None else bool(readback.get("controllable")),
            control_reason="" if readback is None else str(readback.get("reason") or ""),
            control_error=self.control_error,
            sample_error=self.sample_error or (("SamplesStale", "") if stale else None),
            sampled=sample is not None,
            key_refused=self.key_refused,
            ranks=self.ranks,
            stalled=memory.stalled,
            unreachable=policy.unreachable(patient, sample.capacity)
            if patient is not None and sample is not None and sample.capacity is not None
            else None,
            epoch=self.epoch_shown,
            capacity=None if sample is None else sample.capacity,
            cache_tokens=self.cache_tokens,
            accept=None if self.accept is None else round(self.accept, 1),
            switched_at=self.switched_at,
            switched_why=self.switched_why,
            effective=False if ineffective else None if acceptance is None else True,
            crashed=memory.crashed,
            sglang=self.sglang,
            plugin=self.plugin,
            gpu=self.gpu,
        )

    def keep(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """What is looked at later of a read-back: a whole one is 5 kB and more for each pod."""
        groups = answer.get("groups") or []
        if answer.get("mode") != "auto":
            groups = [{"tokensTotal": group.get("tokensTotal")} for group in groups]
        kept = {name: answer[name] for name in _KEPT if name in answer}
        kept["groups"] = groups
        return kept


class Fleet:
    """The pods of one SpecServe, and what they have in common.

    Args:
        key: The SpecServe.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.pods: dict[str, Steered] = {}
        self.knowledge = Knowledge()
        #: Whether both arms of some batch were timed.
        self.live = False
        self.log = Log()
        #: Probes that were begun, and seconds that engines spent in them.
        self.probes = 0
        self.probe_seconds = 0.0
        self._prober: Steered | None = None
        self._policy: tuple[Target, object, api.Policy] | None = None
        self._demand: tuple[float, float] | None = None
        self._demand_at = float("-inf")

    @property
    def usable(self) -> list[Steered]:
        """The pods that may be read and switched."""
        return [steered for steered in list(self.pods.values()) if steered.pod.usable]

    @property
    def asked(self) -> bool:
        """Whether the load of every usable pod was asked for."""
        return all(s.sample is not None or s.sample_failures > 0 for s in self.usable)

    def forget(self) -> None:
        """Forget what was learnt of another draft or model."""
        self.knowledge = Knowledge()
        self.live = False

    def learn(self, rounds: Rounds) -> bool:
        """Take in round times; returns whether `live` has changed by it."""
        self.knowledge = self.knowledge.learn(rounds)
        before = self.live
        self.live = any(
            self.knowledge.ratio(bucket, steps) is not None
            for steps, row in self.knowledge.times.items()
            if steps
            for bucket, _ in row
        )
        return self.live is not before

    def in_force(
        self, target: Target, basis: object, make: Callable[[], api.Policy]
    ) -> api.Policy:
        """The policy in force, made anew only when its target or what else it is made of changes.

        Copies are the dearest part of a tick otherwise.
        """
        known = self._policy
        if known is None or known[0] is not target or known[1] != basis:
            known = self._policy = target, basis, make()
        return known[2]

    def context(
        self, steered: Steered, target: Target, patient: api.Policy, now: float
    ) -> Context:
        """What a decision about a pod rests on beside its own readings."""
        steps = (steered.readback or {}).get("availableSteps")
        return Context(
            steps=tuple(sorted(steps)) if steps else tuple(sorted(target.draft.steps)),
            ranks=target.ranks,
            curve=target.curve,
            knowledge=self.knowledge,
            may_probe=self._may_probe(steered),
            demand=self._mean(patient, now) if patient.scope == "Fleet" else None,
        )

    def _may_probe(self, steered: Steered) -> bool:
        """One at a time: a probe costs the requests of its pod."""
        other = self._prober
        return (
            other is None
            or other is steered
            or not other.pod.usable
            or other.memory.probing.active is None
        )

    def decided(
        self, steered: Steered, verdict: Verdict, now: float, *, wall: float, room: int
    ) -> Decision | None:
        """Take in a decision about a pod; returns the log's new entry, None if there is none.

        Args:
            steered: The pod; its memory is that after the decision.
            verdict: What was decided; the pod still holds the one before.
            now: The time.
            wall: The same on the wall clock.
            room: Entries of the log to keep.
        """
        before = steered.verdict
        steered.verdict = verdict
        self.knowledge = self.knowledge.hear(steered.memory.counts.acceptance)
        if verdict.probe:
            steered.quiet_until = now + QUIET
        elif verdict.flip:
            steered.quiet_until = 0.0
        active = steered.memory.probing.active
        if active is not None and self._prober is not steered:
            self._prober = steered
            self.probes += 1
        elif active is None and self._prober is steered:
            self._prober = None
        what = difference(before, verdict)
        if not what:
            return None
        decision = Decision(wall, steered.pod.name, verdict, what)
        self.log.add(decision, room)
        return decision

    def probed(self, seconds: float) -> None:
        """Count time that an engine spent in a probe."""
        self.probe_seconds += seconds

    def switched(self, steered: Steered, verdict: Verdict, *, on: bool, wall: float) -> None:
        """Take in that an engine has changed its mode."""
        steered.shown = on
        steered.strayed_at = None
        steered.switched_at = wall
        steered.switched_why = f"{steered.pod.name}: {verdict.reason}"
        mode = "On" if on else "Off"
        self.log.switched(Switch(wall, steered.pod.name, mode, verdict.reason))

    def _mean(self, patient: api.Policy, now: float) -> tuple[float, float] | None:
        """Requests running and queued in a pod, the mean over those whose load is known.

        A stalled engine and one that is not heard of say nothing about the demand.
        """
        if now - self._demand_at > DEMAND_TTL:
            self._demand_at = now
            known = [
                steered.sample
                for steered in self.usable
                if steered.sample is not None
                and not steered.memory.stalled
                and steered.memory.stalled_since is None
                and not steered.stale(patient, now)
            ]
            self._demand = (
                (
                    sum(sample.running for sample in known) / len(known),
                    sum(sample.queued for sample in known) / len(known),
                )
                if known
                else None
            )
        return self._demand


def accept_length(readback: Mapping[str, Any]) -> float | None:
    """Tokens won per request and verify step while on, weighted by rounds."""
    won = rounds = 0.0
    for group in readback.get("groups") or []:
        for stat in group.get("stats") or []:
            length = stat.get("acceptLength")
            if stat.get("steps") and stat.get("rounds") and isinstance(length, int | float):
                won += length * stat["rounds"]
                rounds += stat["rounds"]
    return won / rounds if rounds else None
