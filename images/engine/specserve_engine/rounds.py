"""Figures of the decode rounds, by batch size and draft steps: what a round takes and yields.

Pure and cheap: a round costs one deque append; medians are computed when read, and only for arms
that changed since.

Which rounds are timed. The time of a round is taken from result to result, so it is only that of
its batch if the round before had the same batch and steps and no prefill ran between; the first
rounds after a change of steps pay for the switch and are left out too. Every round counts for
tokens and acceptance. Medians, because single rounds stall: means were off by up to 48 %.

The window of an arm (one batch bucket at one step count) is its newest `WINDOW_ROUNDS` rounds no
more than `WINDOW_SECONDS` older than its last. An arm that is not in use keeps its figures, with
`last_seen` telling their age, until `ARM_SECONDS` have passed.

Acceptance by position is counted apart, by step count alone and without a window: it does not
depend on the batch, and of two readings of a count the difference is what came between.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW_ROUNDS: Final = 512
WINDOW_SECONDS: Final = 60.0
ARM_SECONDS: Final = 900.0
SETTLE_ROUNDS: Final = 3
"""Rounds after a change of steps that are not timed."""


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One cell of the read-back's `stats`: the rounds of one batch bucket at one step count.

    Attributes:
        batch_bucket: Largest batch of the bucket, see `bucket_of`.
        steps: Draft steps of these rounds.
        rounds: Rounds in the window.
        tokens: Tokens they emitted.
        median_round_seconds: Of the rounds fit for timing; None without any.
        p5: 5th percentile of the same, seconds.
        p95: 95th percentile of the same, seconds.
        accept_length: Tokens per request and round, the bonus token included.
        last_seen: When the newest of these rounds ended, seconds of the engine's monotonic clock.
    """

    batch_bucket: int
    steps: int
    rounds: int
    tokens: int
    median_round_seconds: float | None
    p5: float | None
    p95: float | None
    accept_length: float
    last_seen: float

    def to_json(self) -> dict[str, Any]:
        """Return the read-back's form."""
        return {
            "batchBucket": self.batch_bucket,
            "steps": self.steps,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "medianRoundSeconds": self.median_round_seconds,
            "p5": self.p5,
            "p95": self.p95,
            "acceptLength": self.accept_length,
            "lastSeen": self.last_seen,
        }


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many drafts were accepted at one step count, since the process began.

    Attributes:
        steps: Draft steps, above 0.
        verifies: Requests decoded with so many steps, counted once a round.
        accepted: For each draft position, in how many of them that draft was accepted; it never
            rises from one position to the next.
    """

    steps: int
    verifies: int
    accepted: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the read-back's form."""
        return {"steps": self.steps, "verifies": self.verifies, "accepted": list(self.accepted)}


def bucket_of(batch: int) -> int:
    """Return a batch size rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64 and so on.

    Powers of two and the middles between them. Rounded up, as engines pad a batch up to the next
    captured graph: sizes that share a graph share a cost.
    """
    power = 1 << (batch - 1).bit_length()
    middle = power - power // 4
    return middle if power >= 4 and batch <= middle else power


class _Round(NamedTuple):
    ended: float
    seconds: float | None  # None if not fit for timing
    batch: int
    tokens: int


class _Arm:
    """The window of one batch bucket at one step count."""

    __slots__ = ("_figures", "rounds")

    def __init__(self) -> None:
        self.rounds: deque[_Round] = deque(maxlen=WINDOW_ROUNDS)
        self._figures: ArmFigures | None = None

    def add(self, done: _Round) -> None:
        self.rounds.append(done)
        while self.rounds[0].ended < done.ended - WINDOW_SECONDS:
            self.rounds.popleft()
        self._figures = None

    def figures(self, bucket: int, steps: int) -> ArmFigures:
        if self._figures is None:
            timed = sorted(done.seconds for done in self.rounds if done.seconds is not None)
            tokens = sum(done.tokens for done in self.rounds)
            self._figures = ArmFigures(
                batch_bucket=bucket,
                steps=steps,
                rounds=len(self.rounds),
                tokens=tokens,
                median_round_seconds=_percentile(timed, 50),
                p5=_percentile(timed, 5),
                p95=_percentile(timed, 95),
                accept_length=tokens / sum(done.batch for done in self.rounds),
                last_seen=self.rounds[-1].ended,
            )
        return self._figures


class RoundStats:
    """Counts every decode round of one data-parallel group.

    Attributes:
        tokens_total: Tokens emitted since the process began.
        rounds_total: Decode rounds since the process began.
    """

    def __init__(self) -> None:
        self.tokens_total = 0
        self.rounds_total = 0
        self._arms: dict[tuple[int, int], _Arm] = {}
        # By steps: how many times 0, 1, 2 and so on drafts of a request were accepted in a round.
        self._accepted: dict[int, Counter[int]] = {}
        self._batch = 0
        self._steps = -1
        self._since_change = 0

    def observe(
        self,
        steps: int,
        seconds: float,
        accepted: Sequence[int],
        now: float,
        *,
        prefill_between: bool = False,
    ) -> None:
        """Record a decode round.

        Args:
            steps: Draft steps it was launched with.
            seconds: Time since the previous round's launch.
            accepted: Drafts accepted of each request in it, at least one request.
            now: When it ended, seconds of the engine's monotonic clock.
            prefill_between: Whether a prefill ran since the previous round.
        """
        batch = len(accepted)
        tokens = batch + sum(accepted)
        self.tokens_total += tokens
        self.rounds_total += 1
        self._since_change = self._since_change + 1 if steps == self._steps else 0
        timed = (
            batch == self._batch and self._since_change >= SETTLE_ROUNDS and not prefill_between
        )
        self._batch = batch
        self._steps = steps
        key = (bucket_of(batch), steps)
        arm = self._arms.get(key)
        if arm is None:
            arm = self._arms[key] = _Arm()
        arm.add(_Round(now, seconds if timed else None, batch, tokens))
        if steps:
            counts = self._accepted.get(steps)
            if counts is None:
                counts = self._accepted[steps] = Counter()
            counts.update(accepted)

    def acceptance(self) -> tuple[Acceptance, ...]:
        """Return what was accepted by position, for each step count that ran."""
        return tuple(
            Acceptance(
                steps,
                counts.total(),
                tuple(
                    sum(times for drafts, times in counts.items() if drafts > position)
                    for position in range(steps)
                ),
            )
            for steps, counts in sorted(self._accepted.items())
        )

    def figures(self, now: float) -> tuple[ArmFigures, ...]:
        """Return the figures of all arms seen of late, ordered by bucket and steps."""
        self._arms = {
            key: arm
            for key, arm in self._arms.items()
            if arm.rounds[-1].ended >= now - ARM_SECONDS
        }
        return tuple(arm.figures(*key) for key, arm in sorted(self._arms.items(), key=_by_key))


def _by_key(item: tuple[tuple[int, int], _Arm]) -> tuple[int, int]:
    return item[0]


def _percentile(ordered: list[float], percent: int) -> float | None:
    """Return the value at the nearest rank of an ascending list, None of an empty one."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
