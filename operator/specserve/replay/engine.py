"""An engine in mean values for made-up loads: no queue, no noise, no time for switches.

Its rounds take what a break-even curve says, in units of a plain round; drafts are accepted with
one chance at all positions. Good for seeing what the policy does, not for what a GPU would do.
"""

from dataclasses import dataclass, field

from specserve.policy import Accepted, Cell, Curve, Rounds, Setting
from specserve.policy.rounds import bucket_of

#: Seconds of a plain round at any batch: the curve knows quotients only.
PLAIN = 0.006
#: Steps that acceptance lengths of a load are stated for.
REFERENCE = 3


def survival(length: float, steps: int) -> tuple[float, ...]:
    """Chances of the first 1 ... `steps` drafts, for an acceptance length at 3 steps."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if 1 + sum(middle**position for position in range(1, REFERENCE + 1)) < length:
            low = middle
        else:
            high = middle
    return tuple(low**position for position in range(1, steps + 1))


@dataclass
class MeanEngine:
    """One engine under a made-up load.

    Attributes:
        curve: What its rounds take.
        tokens: Tokens made.
    """

    curve: Curve
    tokens: float = 0.0
    _cells: dict[tuple[int, int], Cell] = field(default_factory=dict)
    _counts: dict[int, tuple[float, list[float]]] = field(default_factory=dict)

    def rate(self, batch: int, length: float, steps: int) -> float:
        """Tokens per second."""
        won = 1 + sum(survival(length, steps))
        return batch * won / (PLAIN * self.curve.ratio(batch, steps))

    def run(self, now: float, seconds: float, batch: int, length: float, setting: Setting) -> None:
        """Make rounds from `now` on."""
        if not batch:
            return
        steps = setting.steps_for(batch)
        took = PLAIN * self.curve.ratio(batch, steps)
        rounds = seconds / took
        self.tokens += seconds * self.rate(batch, length, steps)
        bucket = bucket_of(batch)
        self._cells[bucket, steps] = Cell(
            bucket, steps, max(1, round(rounds)), took, now + seconds
        )
        if steps:
            verifies, accepted = self._counts.get(steps, (0.0, [0.0] * steps))
            won = [rounds * batch * chance for chance in survival(length, steps)]
            self._counts[steps] = (
                verifies + rounds * batch,
                [before + more for before, more in zip(accepted, won, strict=True)],
            )

    def rounds(self, now: float) -> Rounds:
        """What a read-back would say."""
        return Rounds(
            now,
            tuple(self._cells.values()),
            tuple(
                Accepted(steps, int(verifies), tuple(int(count) for count in accepted))
                for steps, (verifies, accepted) in sorted(self._counts.items())
            ),
            int(self.tokens),
        )
