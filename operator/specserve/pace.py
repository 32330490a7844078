"""How many readings may start now: a rate that yields when the event loop falls behind. Pure."""

#: Readings that start in one go at most, as seconds of the full rate.
BURST_SECONDS = 0.05
#: Seconds behind time at which the loop counts as overloaded.
LATE_SECONDS = 0.25
#: Share of the rate that is left at least then.
LEAST_SHARE = 0.05
#: Seconds until all of it is back.
RECOVERY_SECONDS = 20.0
#: Seconds between two turns of the loop while readings wait for their turn.
SHORTEST_TURN = 0.01


class Pace:
    """How many readings may start now: a rate that yields when the event loop falls behind.

    The budget says what may be asked of engines, not what the processor has left. A starved
    process that starts calls at its full rate finishes none of them in time, and the lease is
    not renewed either; so the rate halves while the loop is late and comes back by and by. What
    is due meanwhile starts later, in the order in which it became due.

    Args:
        rate: Most readings a second.
        now: Monotonic seconds.
    """

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._burst = max(1.0, rate * BURST_SECONDS)
        self._allowance = self._burst
        self._at = now
        self.share = 1.0

    def turn(self, now: float, late: float) -> None:
        """Begin a turn of the loop that comes `late` seconds after it was due."""
        elapsed = now - self._at
        self._at = now
        if late > LATE_SECONDS:
            self.share = max(LEAST_SHARE, self.share / 2)
        else:
            self.share = min(1.0, self.share + elapsed / RECOVERY_SECONDS)
        self._allowance = min(self._burst, self._allowance + elapsed * self._rate * self.share)

    def take(self) -> bool:
        """Whether one more reading may start; counts it if so."""
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    def spend(self) -> None:
        """Count a call that starts in any case; later ones wait the longer."""
        self._allowance -= 1.0

    @property
    def pause(self) -> float:
        """Seconds until another one may start."""
        missing = 1.0 - self._allowance
        return max(SHORTEST_TURN, missing / (self._rate * self.share)) if missing > 0 else 0.0
