"""How many tokens a verify wins: measured by draft position, and what follows for other steps.

A round with `s` draft steps wins `1 + P1 + ... + Ps` tokens for a request, where `Pi` is the
chance that its first `i` drafts are all accepted. Up to the steps that were run the `Pi` are
counted, so the length at fewer steps is exact. Beyond, the chance of the last position, given the
one before, is taken to go on: with one chance `p` for all positions that is the
`(1 - p^(s+1)) / (1 - p)` of Leviathan, Kalman and Matias (2023, arXiv:2211.17192, equation 1).
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Self

from specserve.policy.rounds import Accepted, Rounds

#: Time constant in which counts fade, seconds of use: long enough for one percent of error at a
#: single request, short enough to follow traffic.
FADING: Final = 15.0
#: Age in seconds at which earlier counts say nothing about the traffic any more.
FORGOTTEN: Final = 60.0
#: Standard errors between a new reading and the counts so far that make it another traffic.
CHANGED: Final = 4.0
#: Fewest verifies that can contradict earlier ones or decide anything.
TELLING: Final = 40
#: Fewest rounds that can contradict earlier ones: requests of one round may be alike, so that its
#: verifies, however many, are hardly more than one.
SEVERAL: Final = 2


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance by draft position.

    Attributes:
        survival: Chance that the first 1, 2 ... drafts are all accepted; not empty.
        verifies: Verifies behind it, faded counts included.
        at: When the newest of them was read, seconds on the operator's clock.
        batch: The demand on a rank then, None if not known: at another load it may be another
            traffic.
    """

    survival: tuple[float, ...]
    verifies: float
    at: float
    batch: float | None = None

    def length(self, steps: int) -> float:
        """Tokens won per request and round with `steps` draft steps, from 1 to steps + 1."""
        known = self.survival[:steps]
        won = 1.0 + sum(known)
        if steps > len(known) and known[-1] > 0:
            chance = known[-1] / known[-2] if len(known) > 1 else known[-1]
            survival = known[-1]
            for _ in range(steps - len(known)):
                survival *= chance
                won += survival
        return won

    @property
    def counted(self) -> float:
        """Tokens won per request and round at the most steps that were run."""
        return self.length(len(self.survival))

    def error(self, steps: int) -> float:
        """Standard error of `length(steps)`, relative to it."""
        known = self.survival[:steps]
        mean = sum(known)
        square = sum((2 * position + 1) * chance for position, chance in enumerate(known))
        variance = max(square - mean * mean, 0.0)
        # One more verify of each kind: a few equal ones do not prove that there is no spread.
        return math.sqrt((variance + 1 / (self.verifies + 1)) / (self.verifies + 1)) / (1 + mean)


@dataclass(frozen=True, slots=True)
class Counts:
    """Faded counts of one engine's verifies.

    Attributes:
        base: The engine's counters at the last reading; the next is compared with them. None
            before the first, which says only what was long ago.
        rounds_total: The engine's count of rounds at the last reading, None if not said.
        at: When verifies were last counted, None before.
        batch: The demand on a rank then, None if not known.
        trials: Verifies that had a first, second ... draft.
        accepted: Of these, how many had it accepted.
    """

    base: tuple[Accepted, ...] | None = None
    rounds_total: int | None = None
    at: float | None = None
    batch: float | None = None
    trials: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()

    def learn(
        self, rounds: Rounds, *, judged: bool = True, batch: float | None = None
    ) -> tuple[Self, int]:
        """Take in a read-back.

        Args:
            rounds: The read-back.
            batch: The demand on a rank, None if not known.
            judged: Whether what was won since the last one says something about the draft; not
                so while it recovers from a cold off.

        Returns:
            The counts, and the verifies of the interval. A counter that went down begins a new
            base: that interval says nothing.
        """
        if self.base is None:
            return replace(self, base=rounds.acceptance, rounds_total=rounds.rounds_total), 0
        trials, accepted = _between(self.base, rounds.acceptance)
        based = replace(self, base=rounds.acceptance, rounds_total=rounds.rounds_total)
        if not judged or not trials or trials[0] <= 0:
            return based, 0
        contradicts = trials[0] >= TELLING and self._several(rounds)
        kept = self._kept(trials, accepted, rounds.at, contradicts=contradicts)
        return (
            replace(
                based,
                at=rounds.at,
                batch=batch,
                trials=_sum(trials, self.trials, kept),
                accepted=_sum(accepted, self.accepted, kept),
            ),
            round(trials[0]),
        )

    def _several(self, rounds: Rounds) -> bool:
        """Whether the interval had more than a round; so too where engines do not count them."""
        if self.rounds_total is None or rounds.rounds_total is None:
            return True
        return rounds.rounds_total - self.rounds_total >= SEVERAL

    def _kept(
        self,
        trials: tuple[float, ...],
        accepted: tuple[float, ...],
        now: float,
        *,
        contradicts: bool,
    ) -> float:
        """The share of the earlier counts that still counts beside a new interval."""
        if self.at is None or now - self.at >= FORGOTTEN:
            return 0.0
        before = _survival(self.trials, self.accepted)
        after = _survival(trials, accepted)
        shared = min(len(before), len(after))
        if shared and contradicts:
            old = Acceptance(before, self.trials[0], now)
            new = Acceptance(after, trials[0], now)
            length = old.length(shared)
            error = math.hypot(old.error(shared) * length, new.error(shared) * new.length(shared))
            if abs(new.length(shared) - length) > CHANGED * error:
                return 0.0
        return math.exp(-(now - self.at) / FADING)

    def verifies(self, steps: int) -> int:
        """Verifies at a step count up to the last reading."""
        return sum(entry.verifies for entry in self.base or () if entry.steps == steps)

    @property
    def acceptance(self) -> Acceptance | None:
        """What the counts say, None before the first verify."""
        if self.at is None or not self.trials:
            return None
        survival = _survival(self.trials, self.accepted)
        return Acceptance(survival, self.trials[0], self.at, self.batch)


def _between(
    before: tuple[Accepted, ...], after: tuple[Accepted, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Trials and successes by draft position between two readings."""
    known = {entry.steps: entry for entry in before}
    deepest = max((entry.steps for entry in after), default=0)
    trials = [0.0] * deepest
    accepted = [0.0] * deepest
    for entry in after:
        base = known.get(entry.steps) or Accepted(entry.steps, 0, (0,) * entry.steps)
        verifies = entry.verifies - base.verifies
        if verifies < 0:
            return (), ()
        for position in range(entry.steps):
            trials[position] += verifies
            accepted[position] += entry.accepted[position] - base.accepted[position]
    while trials and trials[-1] <= 0:
        trials.pop()
        accepted.pop()
    return tuple(trials), tuple(accepted)


def _sum(new: tuple[float, ...], old: tuple[float, ...], kept: float) -> tuple[float, ...]:
    longest = max(len(new), len(old) if kept else 0)
    return tuple(
        (new[i] if i < len(new) else 0.0) + kept * (old[i] if i < len(old) else 0.0)
        for i in range(longest)
    )


def _survival(trials: tuple[float, ...], accepted: tuple[float, ...]) -> tuple[float, ...]:
    """Chances by position; never more at a later one, since a draft needs those before it."""
    chances: list[float] = []
    for tried, won in zip(trials, accepted, strict=True):
        chance = won / tried if tried else 0.0
        chances.append(min([chance, *chances[-1:], 1.0]))
    return tuple(chances)
