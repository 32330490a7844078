"""Figures of the decode rounds, by batch size and draft steps: what a round takes and yields.

Pure and cheap: one deque append a round; medians are computed when read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
        raise NotImplementedError


def bucket_of(batch: int) -> int:
    """Return the bucket of a batch size: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64 …, rounded up."""
    raise NotImplementedError


class RoundStats:
    """Counts every decode round of one data-parallel group."""

    tokens_total: int
    rounds_total: int

    def observe(
        self,
        batch: int,
        steps: int,
        seconds: float,
        tokens: int,
        now: float,
        *,
        prefill_between: bool = False,
    ) -> None:
        """Record a decode round that ended at `now`."""

    def figures(self, now: float) -> tuple[ArmFigures, ...]:
        """Return the figures of all arms seen of late, ordered by bucket and steps."""
        raise NotImplementedError
