"""How many requests are in flight at a moment of the run."""

from __future__ import annotations

from dataclasses import dataclass

RISE, HIGH, FALL, REST = 0.28, 0.40, 0.66, 0.80
"""Where a wave begins to rise, is up, begins to fall and is down again, as shares of its length.

A wave ends low for a fifth of its length, so that its last requests end and speculation comes back
while the run still lasts.
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """A load that rises and falls.

    Attributes:
        seconds: length of the run.
        low: requests in flight in each pod between the waves.
        high: likewise on top of a wave.
        waves: how often it rises.
    """

    seconds: float
    low: int
    high: int
    waves: int

    def at(self, seconds: float) -> int:
        """Requests wanted in flight in each pod; 0 before and after the run."""
        if not 0 <= seconds < self.seconds:
            return 0
        phase = seconds * self.waves / self.seconds % 1.0
        if phase < HIGH:
            share = _smooth((phase - RISE) / (HIGH - RISE))
        else:
            share = 1 - _smooth((phase - FALL) / (REST - FALL))
        return round(self.low + (self.high - self.low) * share)


def _smooth(share: float) -> float:
    held = min(1.0, max(0.0, share))
    return held * held * (3 - 2 * held)
