"""What the outcomes of a cell amount to. Pure.

Throughput counts the tokens of whole answers only. Latencies are those of whole answers; the
percentiles are nearest-rank, none interpolated.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specserve.bench.dialects import Outcome

#: Ratios nearer to 1 than this are no difference: throughput repeats within about 2 %.
TIE = 0.02


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a latency, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """Those of the values; None if there is none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(*(ordered[max(0, math.ceil(q * len(ordered)) - 1)] for q in (0.5, 0.9, 0.99)))

    def to_json(self) -> dict[str, float]:
        """In the form of the report."""
        return {"p50": round(self.p50, 5), "p90": round(self.p90, 5), "p99": round(self.p99, 5)}


@dataclass(frozen=True, slots=True)
class Counters:
    """The engine's own counts over a cell, for servers whose answers do not tell rounds.

    Attributes:
        tokens: Tokens of the requests that ended.
        verifies: Decode rounds of these requests, added up.
    """

    tokens: float
    verifies: float


@dataclass(frozen=True, slots=True)
class Visit:
    """One visit of a cell.

    Attributes:
        seconds: From the first request to the last answer.
        outcomes: Of all requests.
        counters: What the engine counted meanwhile, None if unknown.
    """

    seconds: float
    outcomes: Sequence[Outcome]
    counters: Counters | None = None

    @property
    def rate(self) -> float:
        """Tokens per second of whole answers."""
        tokens = sum(each.tokens for each in self.outcomes if not each.problem)
        return tokens / self.seconds if self.seconds > 0 else 0.0

    def words(self) -> str:
        """What it brought, in one line."""
        lost = sum(1 for outcome in self.outcomes if outcome.problem)
        short = f"  {lost} of {len(self.outcomes)} lost" if lost else ""
        return f"{self.rate:>10,.1f} tok/s{short}"


@dataclass(frozen=True, slots=True)
class Figures:
    """All visits of one arm at one level, taken together.

    Attributes:
        rate: Tokens per second.
        rates: Of each visit.
        first: Time to the first token; None without streams.
        between: Time per output token after the first, of each request; likewise.
        whole: Time from sending to the last token.
        accept_length: Tokens won per decode round, the bonus token included; None if unknown.
        requests: Sent.
        lost: Those of them that brought no whole answer.
        problems: Why, and how many.
    """

    rate: float
    rates: tuple[float, ...]
    first: Spread | None
    between: Spread | None
    whole: Spread | None
    accept_length: float | None
    requests: int
    lost: int
    problems: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, visits: Sequence[Visit]) -> "Figures":
        """Sum up at least one visit."""
        outcomes = [outcome for visit in visits for outcome in visit.outcomes]
        whole = [outcome for outcome in outcomes if not outcome.problem]
        problems = Counter(outcome.problem for outcome in outcomes if outcome.problem)
        seconds = sum(visit.seconds for visit in visits)
        return cls(
            rate=sum(o.tokens for o in whole) / seconds if seconds > 0 else 0.0,
            rates=tuple(visit.rate for visit in visits),
            first=Spread.of(o.first - o.began for o in whole if o.first is not None),
            between=Spread.of(
                (o.ended - o.first) / (o.tokens - 1)
                for o in whole
                if o.first is not None and o.tokens > 1
            ),
            whole=Spread.of(o.ended - o.began for o in whole),
            accept_length=_accept_length(visits, whole),
            requests=len(outcomes),
            lost=len(outcomes) - len(whole),
            problems=dict(problems),
        )

    def to_json(self) -> dict[str, Any]:
        """In the form of the report."""

        def maybe(spread: Spread | None) -> dict[str, float] | None:
            return None if spread is None else spread.to_json()

        return {
            "tokensPerSecond": round(self.rate, 2),
            "visits": [round(rate, 2) for rate in self.rates],
            "timeToFirstTokenSeconds": maybe(self.first),
            "timePerOutputTokenSeconds": maybe(self.between),
            "endToEndSeconds": maybe(self.whole),
            "acceptLength": None if self.accept_length is None else round(self.accept_length, 3),
            "requests": self.requests,
            "lost": self.lost,
            "problems": dict(self.problems),
        }


def _accept_length(visits: Sequence[Visit], whole: Sequence[Outcome]) -> float | None:
    told = [o for o in whole if o.verifies]
    verifies = sum(o.verifies or 0 for o in told)
    if verifies:
        if all(o.accepted is not None for o in told):
            # Not tokens / rounds: the last round of an answer is cut at its length.
            return 1 + sum(o.accepted or 0 for o in told) / verifies
        return sum(o.tokens - 1 for o in told) / verifies
    counted = [(visit.counters, len(visit.outcomes)) for visit in visits if visit.counters]
    verifies_counted = sum(counters.verifies for counters, _ in counted)
    if verifies_counted <= 0:
        return None
    # The first token of each request comes from its prefill, not from a round.
    return sum(counters.tokens - ended for counters, ended in counted) / verifies_counted


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where one arm overtakes another, in requests in flight.

    Attributes:
        at: Interpolated between the two levels around it, in the logarithm of the level.
        between: These two levels.
        to_better: Whether the first arm wins above it.
    """

    at: float
    between: tuple[int, int]
    to_better: bool


def crossings(ratios: Mapping[int, float]) -> list[Crossing]:
    """Where a ratio over levels passes 1, in ascending order; nothing is assumed of its course."""
    found = []
    known = sorted((level, ratio) for level, ratio in ratios.items() if ratio > 0)
    for (low, before), (high, after) in pairwise(known):
        if (before < 1) == (after < 1):
            continue
        share = math.log(before) / (math.log(before) - math.log(after))
        at = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        found.append(Crossing(at, (low, high), to_better=after > before))
    return found


def verdict(ratios: Mapping[int, float], winner: str, loser: str) -> str:
    """Where one arm beats another, in words.

    Args:
        ratios: Of the first to the second, by level; at least one.
        winner: Name of the first.
        loser: Name of the second.
    """
    levels = sorted(ratios)
    where = f"at every level from {levels[0]} to {levels[-1]} in flight"
    if len(levels) == 1:
        where = f"at {levels[0]} in flight"
    if all(abs(ratio - 1) <= TIE for ratio in ratios.values()):
        return f"{winner} and {loser} are equal within {TIE:.0%} {where}"
    found = crossings(ratios)
    ahead = ratios[levels[0]] >= 1
    if not found:
        return f"{winner} beats {loser} {where}" if ahead else f"{loser} beats {winner} {where}"
    parts, since = [], f"{levels[0]}"
    for crossing in found:
        if ahead:
            parts.append(f"from {since} to about {crossing.at:.0f}")
        ahead, since = crossing.to_better, f"about {crossing.at:.0f}"
    if ahead:
        parts.append(f"from {since} to {levels[-1]}")
    return f"{winner} beats {loser} {' and '.join(parts)} in flight, and nowhere else measured"
