"""What the pods of one SpecServe have learnt together: round times, and the traffic's acceptance.

They run the same model on the same kind of GPU and share one stream of requests, so a round timed
in one of them tells all, and one that speculates renews the acceptance for those that do not.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from specserve.policy.acceptance import Acceptance
from specserve.policy.rounds import BUCKETS, Rounds, bucket_of

#: Fewest rounds of a batch bucket and step count that are believed.
FEWEST_ROUNDS: Final = 8
#: Age in seconds at which a round time is forgotten: contexts and neighbours change.
EXPIRY: Final = 3600.0
#: Largest factor between two buckets between which a time is interpolated.
SPAN: Final = 2.0
#: Largest relative difference between two readings that bear each other out.
AGREED: Final = 0.2
#: Seconds between two such that make a time sure: longer than most disturbances.
SURE: Final = 20.0


@dataclass(frozen=True, slots=True)
class Time:
    """The time of a round.

    Attributes:
        seconds: Median.
        seen: When the newest round behind it ended, seconds on the operator's clock.
        batch: Mean batch of the rounds behind it.
        rounds: How many they are.
        since: When the first of the readings ended that have agreed ever since.
    """

    seconds: float
    seen: float
    batch: float
    rounds: int
    since: float

    @property
    def sure(self) -> bool:
        """Whether it was seen again later: one disturbance can lengthen all rounds of a look."""
        return self.seen - self.since >= SURE


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Round times by steps and bucket, and the newest acceptance.

    Attributes:
        times: For each step count the known buckets, ascending.
        acceptance: The newest of any pod, None before the first.
    """

    times: Mapping[int, tuple[tuple[int, Time], ...]] = field(default_factory=dict)
    acceptance: Acceptance | None = None

    def learn(self, rounds: Rounds) -> Self:
        """Take in the round times of a read-back; newer ones replace older ones."""
        times: dict[int, dict[int, Time]] = {}
        for cell in rounds.cells:
            if cell.rounds < FEWEST_ROUNDS or cell.seconds <= 0:
                continue
            old = self.of_bucket(cell.bucket, cell.steps)
            if old is None or cell.seen > old.seen:
                agrees = old is not None and abs(cell.seconds / old.seconds - 1) <= AGREED
                times.setdefault(cell.steps, {})[cell.bucket] = Time(
                    cell.seconds,
                    cell.seen,
                    cell.batch or float(cell.bucket),
                    cell.rounds,
                    old.since if old is not None and agrees else cell.seen,
                )
        if not times:
            return self
        merged = {}
        for steps in self.times.keys() | times.keys():
            row = dict(self.times.get(steps, ())) | times.get(steps, {})
            fresh = {b: time for b, time in row.items() if time.seen > rounds.at - EXPIRY}
            # Mean batches ascend with their buckets, so the order serves both.
            merged[steps] = tuple(sorted(fresh.items()))
        return replace(self, times=merged)

    def hear(self, acceptance: Acceptance | None) -> Self:
        """Take in one pod's acceptance, if it is newer."""
        if acceptance is None or (
            self.acceptance is not None and acceptance.at <= self.acceptance.at
        ):
            return self
        return replace(self, acceptance=acceptance)

    def time(self, batch: float, steps: int) -> Time | None:
        """The time of a round at a batch; None if it is not known.

        Interpolated between the mean batches of the rounds that were seen: within a bucket rounds
        grow with the batch, and two step counts may have been seen at different ends of it.
        """
        row = self.times.get(steps, ())
        right = bisect_left(row, batch, key=_batch)
        above = row[right][1] if right < len(row) else None
        below = row[right - 1][1] if right else None
        if above is not None and below is not None and above.batch <= below.batch * SPAN:
            share = math.log(batch / below.batch) / math.log(above.batch / below.batch)
            return Time(
                below.seconds ** (1 - share) * above.seconds**share,
                min(below.seen, above.seen),
                batch,
                min(below.rounds, above.rounds),
                max(below.since, above.since),
            )
        return self.of_bucket(bucket_of(math.ceil(batch)), steps)

    def ratio(self, batch: float, steps: int) -> float | None:
        """Live `r_s(B)`; None unless both arms were timed at this batch or at one bucket near it.

        The two times are always of one batch: of different ones they would compare batches.
        """
        bucket = bucket_of(math.ceil(batch))
        place = bisect_left(BUCKETS, bucket)
        beside = BUCKETS[max(place - 1, 0) : place + 2]
        for known in (batch, *(each for each in beside if each != bucket)):
            on, off = self.time(known, steps), self.time(known, 0)
            if on is not None and off is not None:
                return on.seconds / off.seconds
        return None

    def exact(self, batch: float, steps: int) -> bool:
        """Whether `ratio` is of this very bucket, not of one beside it."""
        return self.time(batch, steps) is not None and self.time(batch, 0) is not None

    def of_bucket(self, bucket: int, steps: int) -> Time | None:
        """The time of the rounds seen in one bucket, nothing interpolated."""
        row = self.times.get(steps, ())
        return next((time for known, time in row if known == bucket), None)


def _batch(entry: tuple[int, Time]) -> float:
    return entry[1].batch
