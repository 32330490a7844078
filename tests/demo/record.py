"""What was seen of a run: the state the view shows, and what is left of it at the end. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.demo.ledger import BIN_SECONDS, Flips, Ledger
from tests.demo.plan import SPECSERVE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.demo.plan import ArmKey, Plan

RECENT_SECONDS = 3.0
"""Tokens per second are shown over as much."""


@dataclass(slots=True)
class PodState:
    """One pod as last seen.

    Attributes:
        arm: its SpecServe.
        name: its name.
        in_flight: requests that its engine says it has; None if it did not say.
        mode: what it does, `on`, `off` or `probe`; the engine's own word before it was steered.
        steered: whether the engine obeys an order.
        steps: draft steps of the latest decode round.
        acceptance: tokens won per verify while drafting; None before the first.
        flips: between on and off, probes left out.
        tokens_per_second: those of the last read-backs.
        problem: why it could not be read; empty if it could.
    """

    arm: ArmKey
    name: str
    in_flight: int | None = None
    mode: str = "?"
    steered: bool = False
    steps: int | None = None
    acceptance: float | None = None
    flips: Flips = field(default_factory=Flips)
    tokens_per_second: float = 0.0
    problem: str = ""
    _previous: tuple[float, int] | None = None

    def take(self, at: float, read_back: Mapping[str, Any], load: int) -> None:
        """Takes in a read-back and a load, `at` seconds into the run."""
        self.problem = ""
        self.in_flight = load
        self.steered = bool(read_back.get("epoch"))
        groups = read_back.get("groups") or []
        ranks = [rank for group in groups for rank in group.get("ranks") or []]
        self.steps = ranks[0].get("activeSteps") if ranks else None
        self.acceptance = acceptance(read_back)
        on = speculates(read_back) if self.steered else None
        probing = self.steered and probes(read_back)
        self.mode = str(read_back.get("mode"))
        if on is not None:
            self.mode = "probe" if probing else "on" if on else "off"
        self.flips.observe(at, None if probing else on)
        tokens = sum(group.get("tokensTotal") or 0 for group in groups)
        if self._previous is not None and at > self._previous[0]:
            rate = (tokens - self._previous[1]) / (at - self._previous[0])
            self.tokens_per_second += 0.4 * (max(0.0, rate) - self.tokens_per_second)
        self._previous = (at, tokens)


def acceptance(read_back: Mapping[str, Any]) -> float | None:
    """Tokens won per request and verify in the newest arm of the statistics that drafted."""
    arms = [
        arm
        for group in read_back.get("groups") or []
        for arm in group.get("stats") or []
        if arm.get("steps") and arm.get("acceptLength") is not None
    ]
    if not arms:
        return None
    return float(max(arms, key=lambda arm: arm["lastSeen"])["acceptLength"])


def speculates(read_back: Mapping[str, Any]) -> bool | None:
    """Whether an engine speculates; under a table by what its ranks ran, None before they did."""
    mode = read_back.get("mode")
    if mode in {"on", "off"}:
        return bool(mode == "on")
    steps = [
        rank["activeSteps"]
        for group in read_back.get("groups") or []
        for rank in group.get("ranks") or []
        if rank.get("decodeRounds") and rank.get("activeSteps") is not None
    ]
    return any(steps) if steps else None


def probes(read_back: Mapping[str, Any]) -> bool:
    """Whether an engine's order is a short look: the one that it falls back to is another.

    So it is under strategy BreakEven, whose table is its own fallback.
    """
    fallback = read_back.get("fallback") or {}
    return any(fallback.get(key) != read_back.get(key) for key in ("mode", "steps", "tiers"))


@dataclass(frozen=True, slots=True)
class Happened:
    """A decision of the operator.

    Attributes:
        at: when, in seconds of the run.
        code: why, for machines.
        pod: whose.
        message: why, in one line.
    """

    at: float
    code: str
    pod: str
    message: str


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the operator weighs, as its metrics tell, mean over the pods.

    Attributes:
        at: when it was read, in seconds of the run.
        acceptance: tokens won per verify, as far as it knows.
        break_even: how many make speculation pay at the present batch.
    """

    at: float
    acceptance: float
    break_even: float


@dataclass(slots=True)
class Record:
    """A run so far.

    Attributes:
        plan: what it is about.
        ledgers: requests and tokens of each SpecServe.
        pods: as last seen.
        events: decisions that changed what an engine does, in order.
        weighed: what they rest on, in order.
        verdict: reason of the last decision of all.
        at: seconds since it began.
        drained_in: seconds that the last answers took after its end; None before.
    """

    plan: Plan
    ledgers: dict[ArmKey, Ledger]
    pods: list[PodState]
    events: list[Happened] = field(default_factory=list)
    weighed: list[Weighed] = field(default_factory=list)
    verdict: str = ""
    at: float = 0.0
    drained_in: float | None = None

    def recent(self, arm: ArmKey) -> float:
        """Tokens per second of the last whole bins of the run."""
        end = min(self.at, self.plan.curve.seconds) // BIN_SECONDS * BIN_SECONDS
        begin = max(0.0, end - RECENT_SECONDS)
        return self.ledgers[arm].rate(begin, end) if end > begin else 0.0

    def so_far(self, arm: ArmKey) -> float:
        """Tokens per second since the run began."""
        end = min(self.at, self.plan.curve.seconds) // BIN_SECONDS * BIN_SECONDS
        return self.ledgers[arm].rate(0, end) if end else 0.0

    def to_json(self) -> dict[str, Any]:
        """What summary and plot are made from."""
        seconds = self.plan.curve.seconds
        bins = round(seconds / BIN_SECONDS)
        return {
            "seconds": seconds,
            "binSeconds": BIN_SECONDS,
            "slowMotion": self.plan.slow_motion,
            "load": [self.plan.curve.at(number * BIN_SECONDS) for number in range(bins)],
            "acceptance": [
                self.plan.curve.accepted(number * BIN_SECONDS) for number in range(bins)
            ],
            "breakEven": [
                self.plan.break_even(self.plan.curve.at(number * BIN_SECONDS))
                for number in range(bins)
            ],
            "drop": list(self.plan.curve.drop),
            "weighed": [
                {"at": seen.at, "acceptance": seen.acceptance, "breakEven": seen.break_even}
                for seen in self.weighed
            ],
            "arms": {
                key: {
                    "tokens": ledger.series(seconds),
                    "throughput": ledger.rate(0, bins * BIN_SECONDS),
                    "sent": ledger.sent,
                    "finished": ledger.finished,
                    "lost": dict(ledger.lost),
                }
                for key, ledger in self.ledgers.items()
            },
            "pods": [
                {
                    "name": pod.name,
                    "flips": [{"at": flip.at, "on": flip.on} for flip in pod.flips.seen],
                }
                for pod in self.pods
                if pod.arm == SPECSERVE
            ],
            "events": [
                {
                    "at": event.at,
                    "code": event.code,
                    "pod": event.pod,
                    "message": event.message,
                }
                for event in self.events
            ],
        }


def new_record(plan: Plan) -> Record:
    """The record of a run that has not begun."""
    return Record(
        plan,
        {arm.key: Ledger() for arm in plan.arms},
        [PodState(arm.key, pod.name) for arm in plan.arms for pod in arm.pods],
    )
