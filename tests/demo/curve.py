"""The traffic at a moment of the run: how many requests are in flight, and how predictable."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Curve:
    """Traffic that changes.

    Attributes:
        seconds: length of the run.
        load: corners of the load as (second, requests in flight in each pod), ascending.
        acceptance: (second, tokens won per verify by requests sent from then on), ascending, the
            first from second 0.
    """

    seconds: float
    load: tuple[tuple[float, int], ...]
    acceptance: tuple[tuple[float, float], ...]

    def at(self, seconds: float) -> int:
        """Requests wanted in flight in each pod; 0 before and after the run."""
        if not 0 <= seconds < self.seconds:
            return 0
        for (begin, before), (end, after) in pairwise(self.load):
            if begin <= seconds < end:
                return round(
                    before + (after - before) * _smooth((seconds - begin) / (end - begin))
                )
        return self.load[-1][1]

    def accepted(self, seconds: float) -> float:
        """Tokens won per verify, at 3 draft steps, by a request sent at a moment."""
        return [length for since, length in self.acceptance if since <= max(0.0, seconds)][-1]

    @property
    def low(self) -> int:
        """Fewest requests in flight."""
        return min(count for _, count in self.load)

    @property
    def high(self) -> int:
        """Most requests in flight."""
        return max(count for _, count in self.load)

    @property
    def drop(self) -> tuple[float, float]:
        """From when to when fewer tokens are won than in the beginning."""
        first = self.acceptance[0][1]
        fallen = [at for at, length in self.acceptance if length < first]
        if not fallen:
            return (self.seconds, self.seconds)
        back = [at for at, length in self.acceptance if at > fallen[0] and length >= first]
        return (fallen[0], back[0] if back else self.seconds)


def curve_from(document: Mapping[str, Any]) -> Curve:
    """Reads a curve back from JSON."""
    return Curve(
        document["seconds"],
        tuple((at, count) for at, count in document["load"]),
        tuple((at, length) for at, length in document["acceptance"]),
    )


def _smooth(share: float) -> float:
    return share * share * (3 - 2 * share)
