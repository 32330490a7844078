"""What a round takes by the clock: prefills, joins and all, from counts between two read-backs.

Round times are medians of rounds that nothing disturbed; in a large batch of short answers hardly
any round is undisturbed, and what disturbs them is not the same with and without drafts. A pace
is the other measure: time times requests over the request-rounds counted in it. Two paces compare
what two step counts win by the clock, so where both have been kept up long enough their quotient
is the break-even that counts; until then undisturbed rounds tell sooner.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Self

from specserve.policy.rounds import Rounds, bucket_of

#: Seconds after a change of steps that are not counted: the engine is still taking it over.
TURNING: Final = 0.2
#: Largest relative change of the batch within an interval that is counted.
STEADY: Final = 0.15
#: Largest relative difference between the batches of two paces that are compared.
ALIKE: Final = 0.1
#: Seconds that a pace remembers.
MEMORY: Final = 20.0
#: Seconds behind both paces from which their quotient is taken before that of round times.
TRUSTED: Final = 4.0
#: Seconds between the newest of both up to which it is whatever round times say: a pace that is
#: not kept up takes in nothing new, and they do.
TOGETHER: Final = 120.0
#: Largest relative difference of round times that still bear out a clock not kept up: at 250
#: requests on H200s prefills alone set the two 0.12 apart.
BORNE_OUT: Final = 0.15
#: Age in seconds at which a pace is begun anew: what it took in then may have been disturbed.
BROKEN: Final = 30.0
#: Age in seconds at which a pace is compared with no newer one.
EXPIRY: Final = 900.0
#: Most paces that are kept.
KEPT: Final = 24


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of one batch bucket and step count.

    Attributes:
        bucket: Batch bucket of one data-parallel rank.
        steps: Draft steps.
        seconds: Time of a round.
        behind: Seconds of decoding behind it, at most `MEMORY`.
        seen: When it was last measured.
        batch: Mean of the requests running meanwhile, in the pod.
    """

    bucket: int
    steps: int
    seconds: float
    behind: float
    seen: float
    batch: float


@dataclass(frozen=True, slots=True)
class Compared:
    """What two paces of one bucket say.

    Attributes:
        ratio: `r_s(B)` by the clock.
        trusted: Whether enough is behind both.
        together: Whether both are of about one time.
    """

    ratio: float
    trusted: bool
    together: bool


@dataclass(frozen=True, slots=True)
class Base:
    """Where the present interval began.

    Attributes:
        at: When.
        running: Requests running then.
        steps: Steps in force.
        count: Request-rounds counted until then.
    """

    at: float
    running: int
    steps: int
    count: int


@dataclass(frozen=True, slots=True)
class Paces:
    """The paces of one engine.

    Attributes:
        base: Where the present interval began, None if it must begin anew.
        known: The paces, the newest last.
    """

    base: Base | None = None
    known: tuple[Pace, ...] = ()

    def learn(self, rounds: Rounds, running: int, steps: int, ranks: int, turned: float) -> Self:
        """Take in a read-back.

        Args:
            rounds: The read-back.
            running: Requests running in the pod.
            steps: Steps in force.
            ranks: Data-parallel ranks that share the requests.
            turned: When the steps last changed.
        """
        count = _count(rounds, steps)
        if count is None or running == 0 or rounds.at < turned + TURNING:
            return replace(self, base=None)
        base, begin = self.base, Base(rounds.at, running, steps, count)
        if (
            base is None
            or base.steps != steps
            or base.at < turned + TURNING
            or count <= base.count
            or abs(running / base.running - 1) > STEADY
        ):
            return replace(self, base=begin)
        lasted = rounds.at - base.at
        batch = (running + base.running) / 2
        seconds = lasted * batch / (count - base.count)
        bucket = bucket_of(-(-running // max(ranks, 1)))
        others = [p for p in self.known if (p.bucket, p.steps) != (bucket, steps)]
        old = find(self.known, bucket, steps)
        if old is not None and rounds.at - old.seen > BROKEN:
            old = None
        behind = lasted if old is None else min(MEMORY, old.behind + lasted)
        if old is not None:
            share = min(1.0, lasted / behind)
            seconds = old.seconds + (seconds - old.seconds) * share
            batch = old.batch + (batch - old.batch) * share
        new = Pace(bucket, steps, seconds, behind, rounds.at, batch)
        return replace(self, base=begin, known=(*others[-KEPT + 1 :], new))


def find(known: Iterable[Pace], bucket: int, steps: int) -> Pace | None:
    """The pace of a bucket and step count, None if it is not known."""
    return next((p for p in known if (p.bucket, p.steps) == (bucket, steps)), None)


def compared(known: Iterable[Pace], bucket: int, steps: int) -> Compared | None:
    """The pace of a step count over that of off.

    None unless both paces are known, of one time and of like loads: contexts change, and rounds
    grow with the batch in a bucket.
    """
    paces = tuple(known)
    on, off = find(paces, bucket, steps), find(paces, bucket, 0)
    if on is None or off is None or abs(on.seen - off.seen) > EXPIRY:
        return None
    if abs(on.batch / off.batch - 1) > ALIKE:
        return None
    return Compared(
        on.seconds / off.seconds,
        trusted=min(on.behind, off.behind) >= TRUSTED,
        together=abs(on.seen - off.seen) <= TOGETHER,
    )


def _count(rounds: Rounds, steps: int) -> int | None:
    """Request-rounds so far: verifies while on; off wins a token in each."""
    if not steps:
        return rounds.tokens_total
    return next((entry.verifies for entry in rounds.acceptance if entry.steps == steps), None)
