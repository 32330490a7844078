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


@dataclass(frozen=True, slots=True)
class Time:
    """The time of a round.

    Attributes:
        seconds: Median.
        seen: When the newest round behind it ended, seconds on the operator's clock.
    """

    seconds: float
    seen: float


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
            old = self._known(cell.steps, cell.bucket)
            if old is None or cell.seen > old.seen:
                times.setdefault(cell.steps, {})[cell.bucket] = Time(cell.seconds, cell.seen)
        if not times:
            return self
        merged = dict(self.times)
        for steps, row in times.items():
            kept = {
                bucket: time
                for bucket, time in merged.get(steps, ())
                if time.seen > rounds.at - EXPIRY
            }
            merged[steps] = tuple(sorted((kept | row).items()))
        return replace(self, times=merged)

    def hear(self, acceptance: Acceptance | None) -> Self:
        """Take in one pod's acceptance, if it is newer."""
        if acceptance is None or (
            self.acceptance is not None and acceptance.at <= self.acceptance.at
        ):
            return self
        return replace(self, acceptance=acceptance)

    def time(self, batch: int, steps: int) -> Time | None:
        """The time of a round of a batch's bucket, interpolated if need be; None if not known."""
        bucket = bucket_of(batch)
        row = self.times.get(steps, ())
        right = bisect_left(row, bucket, key=_bucket)
        if right < len(row) and row[right][0] == bucket:
            return row[right][1]
        if right == 0 or right == len(row):
            return None
        (low, below), (high, above) = row[right - 1], row[right]
        if high > low * SPAN:
            return None
        share = math.log(bucket / low) / math.log(high / low)
        seconds = below.seconds ** (1 - share) * above.seconds**share
        return Time(seconds, min(below.seen, above.seen))

    def ratio(self, batch: int, steps: int) -> float | None:
        """Live `r_s(B)`; None unless both arms were timed at this batch or at one bucket near it.

        The two times are always of one bucket: of different ones they would compare batches.
        """
        bucket = bucket_of(batch)
        place = bisect_left(BUCKETS, bucket)
        beside = BUCKETS[max(place - 1, 0) : place + 2]
        for known in (bucket, *(each for each in beside if each != bucket)):
            on, off = self.time(known, steps), self.time(known, 0)
            if on is not None and off is not None:
                return on.seconds / off.seconds
        return None

    def exact(self, batch: int, steps: int) -> bool:
        """Whether `ratio` is of this very bucket, not of one beside it."""
        return self.time(batch, steps) is not None and self.time(batch, 0) is not None

    def _known(self, steps: int, bucket: int) -> Time | None:
        return dict(self.times.get(steps, ())).get(bucket)


def _bucket(entry: tuple[int, Time]) -> int:
    return entry[0]
