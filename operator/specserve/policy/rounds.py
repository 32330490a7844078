"""What an engine's decode rounds took and won, as one read-back tells it."""

from dataclasses import dataclass
from typing import Final

#: Largest batch that a tier can start at.
LARGEST_BATCH: Final = 65_536


def bucket_of(batch: int) -> int:
    """The bucket of a batch size: the next of 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on.

    The engine's own buckets; a test holds them equal.
    """
    power: int = 1 << (max(batch, 1) - 1).bit_length()
    middle = power - power // 4
    return middle if power >= 4 and batch <= middle else power


def _buckets() -> tuple[int, ...]:
    found = [1]
    while found[-1] < LARGEST_BATCH:
        found.append(bucket_of(found[-1] + 1))
    return tuple(found)


#: All buckets, each named by its largest batch.
BUCKETS: Final = _buckets()


def smallest(bucket: int) -> int:
    """The smallest batch of a bucket."""
    place = BUCKETS.index(bucket)
    return BUCKETS[place - 1] + 1 if place else 1


@dataclass(frozen=True, slots=True)
class Cell:
    """The rounds of one batch bucket at one step count.

    Attributes:
        bucket: Largest batch of the bucket.
        steps: Draft steps.
        rounds: Rounds in the engine's window.
        seconds: Median time of a round.
        seen: When the newest of them ended, seconds on the operator's clock.
        batch: Mean batch of the rounds, None if not known.
    """

    bucket: int
    steps: int
    rounds: int
    seconds: float
    seen: float
    batch: float | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """Drafts accepted at one step count since the engine process began.

    Attributes:
        steps: Draft steps.
        verifies: Rounds, counted once for each request in them.
        accepted: Of these, how many had their first, second ... draft accepted.
    """

    steps: int
    verifies: int
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rounds:
    """What one read-back says of an engine's decode rounds.

    Attributes:
        at: When it was read, seconds on the operator's clock.
        cells: Round times, where there are any.
        acceptance: One entry for each step count above 0 that ran.
        tokens_total: Tokens generated since the engine process began, None if not said.
        rounds_total: Decode rounds since then, likewise.
    """

    at: float
    cells: tuple[Cell, ...] = ()
    acceptance: tuple[Accepted, ...] = ()
    tokens_total: int | None = None
    rounds_total: int | None = None
