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
        mode: acknowledged mode, in the engine's words.
        steps: draft steps of the latest decode round.
        acceptance: tokens won per verify while drafting; None before the first.
        flips: of the acknowledged mode.
        tokens_per_second: those of the last read-backs.
        problem: why it could not be read; empty if it could.
    """

    arm: ArmKey
    name: str
    in_flight: int | None = None
    mode: str = "?"
    steps: int | None = None
    acceptance: float | None = None
    flips: Flips = field(default_factory=Flips)
    tokens_per_second: float = 0.0
    problem: str = ""
    _previous: tuple[float, int] | None = None

    def take(self, at: float, read_back: Mapping[str, Any], on: bool | None, load: int) -> None:
        """Takes in a read-back and a load, `at` seconds into the run."""
        self.problem = ""
        self.in_flight = load
        self.mode = str(read_back.get("mode"))
        groups = read_back.get("groups") or []
        ranks = [rank for group in groups for rank in group.get("ranks") or []]
        self.steps = ranks[0].get("activeSteps") if ranks else None
        self.acceptance = acceptance(read_back)
        self.flips.observe(at, on, int(read_back.get("epoch") or 0))
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


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of the cluster: when, about which SpecServe, and its one line."""

    at: float
    reason: str
    name: str
    message: str


@dataclass(slots=True)
class Record:
    """A run so far.

    Attributes:
        plan: what it is about.
        ledgers: requests and tokens of each SpecServe.
        pods: as last seen.
        events: of the cluster, in order.
        at: seconds since it began.
        drained_in: seconds that the last answers took after its end; None before.
    """

    plan: Plan
    ledgers: dict[ArmKey, Ledger]
    pods: list[PodState]
    events: list[Happened] = field(default_factory=list)
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
            "offAbove": self.plan.off_above,
            "onBelow": self.plan.on_below,
            "load": [self.plan.curve.at(number * BIN_SECONDS) for number in range(bins)],
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
                {"at": event.at, "reason": event.reason, "message": event.message}
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
