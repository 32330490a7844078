"""What goes into a decision and what comes out of it."""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

Mode = Literal["On", "Off"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one pod's load, its data-parallel ranks added up.

    Attributes:
        at: When the operator got it, seconds on the caller's clock.
        stamp: The engine's own timestamp. Only tells readings apart: clocks are never compared.
        running: Requests in the running batch.
        queued: Requests waiting.
        capacity: Most requests that the engine runs at once, None if it does not say.
        tokens_total: Monotonic count of generated tokens, None if it does not say.
    """

    at: float
    stamp: float
    running: int
    queued: int
    capacity: int | None = None
    tokens_total: int | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What the policy remembers of one engine; `reboot` when its process is a new one.

    Attributes:
        mode: Mode in force by the policy, None before its first decision.
        since: When `mode` came into force; the dwell counts from here.
        flips: Times of the flips of the last hour, oldest first, pins included.
        stamp: Engine timestamp of the latest reading.
        heard: When `stamp` was first seen, None before the first reading.
        waiting: When a decision was first asked for without any reading.
        stalled_since: First reading with requests queued, none running and no token made.
        stalled: Whether that lasted long enough to call the engine stalled.
        tokens: Latest known token count; the base for the next comparison.
    """

    mode: Mode | None = None
    since: float = -math.inf
    flips: tuple[float, ...] = ()
    stamp: float | None = None
    heard: float | None = None
    waiting: float | None = None
    stalled_since: float | None = None
    stalled: bool = False
    tokens: int | None = None

    @classmethod
    def start(cls) -> Self:
        """Memory of an engine that nobody has steered yet."""
        return cls()

    @classmethod
    def resume(cls, mode: Mode | None, since: float | None) -> Self:
        """Memory after an operator restart.

        Args:
            mode: What the engine's read-back says, None if it does not say.
            since: Last recorded switch on the caller's clock, None if none is on record.
        """
        if mode is None or since is None:
            return cls(mode=mode)
        # Earlier flips are lost with the old process; the one on record still counts.
        return cls(mode=mode, since=since, flips=(since,))

    def reboot(self) -> Self:
        """Memory for the next process of the same engine: decisions stay, readings do not."""
        return replace(
            self,
            stamp=None,
            heard=None,
            waiting=None,
            stalled_since=None,
            stalled=False,
            tokens=None,
        )

    def age(self, now: float) -> float | None:
        """Seconds since the latest new reading, None before the first one."""
        return None if self.heard is None else max(0.0, now - self.heard)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One decision.

    Attributes:
        mode: Mode to be in, None to leave the engine as it is because nothing is known yet.
        code: Machine reason; flows unchanged into condition, event, log and metric label.
        reason: The same for people: one line with the numbers.
        flip: Whether this decision changed a mode that was known before.
    """

    mode: Mode | None
    code: str
    reason: str
    flip: bool
