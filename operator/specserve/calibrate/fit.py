"""From round times to a break-even curve, with confidence intervals and in words. Pure.

`r_s(B)` is the time of a round with `s` draft steps over that of a round with none, at batch `B`.
Each repeat gives one ratio of two medians that were measured seconds apart; the curve holds the
geometric mean of the repeats, and half the width of its 95 % confidence interval by Student's t.
Nothing is assumed of the course over `B`: between two sizes the curve is interpolated in the
logarithm of the batch, and it may rise, fall and rise again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Final

from specserve.conditions import counted
from specserve.policy.curve import Curve, CurveDocument, Point, Provenance

#: Two runs are told to differ where their ratios are further apart.
AGREEMENT: Final = 0.15
#: Acceptance lengths that crossovers are told for.
ACCEPTANCES: Final = (1.5, 2.0, 2.5, 3.0, 3.5)
#: 97.5 % quantiles of Student's t by degrees of freedom; above the last, the normal one.
_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T_NORMAL: Final = 1.96


@dataclass(frozen=True, slots=True)
class Reading:
    """Round time of one visit.

    Attributes:
        batch: Requests held in the batch.
        steps: Draft steps held.
        repeat: Which repeat it belongs to.
        seconds: Median time of a round.
        rounds: Timed rounds behind it, in each data-parallel group.
    """

    batch: int
    steps: int
    repeat: int
    seconds: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """`r_s(B)` as measured.

    Attributes:
        batch: Requests in the batch.
        steps: Draft steps.
        mean: Geometric mean of the repeats.
        spread: Half width of its 95 % confidence interval; None from a single repeat.
        repeats: Each repeat's ratio.
        off_seconds: Time of a round without a draft, the mean of the repeats.
        rounds: Timed drafting rounds behind it.
        fewest: Timed rounds of the visit that has the fewest, with and without a draft.
    """

    batch: int
    steps: int
    mean: float
    spread: float | None
    repeats: tuple[float, ...]
    off_seconds: float
    rounds: int
    fewest: int

    @property
    def settled(self) -> bool:
        """Whether all repeats agree."""
        return max(self.repeats) <= (1 + AGREEMENT) * min(self.repeats)


def ratios(readings: Iterable[Reading]) -> list[Ratio]:
    """Pair each drafting visit with the plain one of its repeat; one without it is left out.

    Returns:
        Ascending by batch, then by steps.
    """
    by_cell: dict[tuple[int, int], dict[int, Reading]] = {}
    for reading in readings:
        by_cell.setdefault((reading.batch, reading.steps), {})[reading.repeat] = reading
    found = []
    for (batch, steps), drafting in sorted(by_cell.items()):
        plain = by_cell.get((batch, 0), {})
        pairs = [(drafting[repeat], plain[repeat]) for repeat in drafting if repeat in plain]
        if steps == 0 or not pairs:
            continue
        each = tuple(on.seconds / off.seconds for on, off in pairs)
        logs = [math.log(ratio) for ratio in each]
        mean = math.exp(fmean(logs))
        found.append(
            Ratio(
                batch=batch,
                steps=steps,
                mean=mean,
                spread=mean * _half_width(logs) if len(logs) > 1 else None,
                repeats=each,
                off_seconds=fmean(off.seconds for _, off in pairs),
                rounds=sum(on.rounds for on, _ in pairs),
                fewest=min(reading.rounds for pair in pairs for reading in pair),
            )
        )
    return found


def _half_width(values: Sequence[float]) -> float:
    freedom = len(values) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else _T_NORMAL
    return t * stdev(values) / math.sqrt(len(values))


def curve_of(measured: Sequence[Ratio], provenance: Provenance) -> Curve:
    """The curve that holds these ratios; at least one."""
    cells = [
        Point(
            batch=ratio.batch,
            steps=ratio.steps,
            ratio=round(ratio.mean, 4),
            spread=None if ratio.spread is None else round(ratio.spread, 4),
            rounds=ratio.rounds,
        )
        for ratio in measured
    ]
    return Curve(CurveDocument(provenance=provenance, cells=cells))


def unsettled(measured: Sequence[Ratio]) -> list[str]:
    """The cells whose own repeats do not agree, in words."""
    return [
        f"batch {ratio.batch}, {counted(ratio.steps, 'step')}: repeats from "
        f"{min(ratio.repeats):.2f} to {max(ratio.repeats):.2f}"
        for ratio in measured
        if not ratio.settled
    ]


def sparse(measured: Sequence[Ratio], fewest: int) -> list[str]:
    """The cells of which a visit has fewer timed rounds than it should, in words."""
    return [
        f"batch {ratio.batch}, {counted(ratio.steps, 'step')}: {ratio.fewest} timed in a "
        f"visit, below {fewest}; longer answers have more (--max-new-tokens)"
        for ratio in measured
        if ratio.fewest < fewest
    ]


def disagreements(new: Curve, old: Curve) -> list[str]:
    """The cells in which two curves are further apart than runs should be, in words."""
    before = {(point.batch, point.steps): point.ratio for point in old.document.cells}
    found = []
    for point in new.document.cells:
        known = before.get((point.batch, point.steps))
        if known is None:
            continue
        low, high = sorted((known, point.ratio))
        if high > (1 + AGREEMENT) * low:
            found.append(
                f"batch {point.batch}, {counted(point.steps, 'step')}: {point.ratio:.2f} now, "
                f"{known:.2f} then"
            )
    return found


def break_even_words(measured: Sequence[Ratio]) -> list[str]:
    """For each batch size, above which acceptance drafting pays."""
    by_batch: dict[int, list[Ratio]] = {}
    for ratio in measured:
        by_batch.setdefault(ratio.batch, []).append(ratio)
    return [
        f"at {batch} in flight it pays above "
        + ", ".join(f"{r.mean:.2f} with {counted(r.steps, 'step')}" for r in row)
        for batch, row in sorted(by_batch.items())
    ]


def crossover_words(measured: Sequence[Ratio]) -> list[str]:
    """For each step count and acceptance, at which batch sizes drafting pays."""
    rows: dict[int, dict[int, float]] = {}
    for ratio in measured:
        rows.setdefault(ratio.steps, {})[ratio.batch] = ratio.mean
    return [
        f"{counted(steps, 'step')} at acceptance {acceptance:g}: {_where(row, acceptance)}"
        for steps, row in sorted(rows.items())
        for acceptance in ACCEPTANCES
        if acceptance <= steps + 1
    ]


def paying(row: Mapping[int, float], acceptance: float) -> list[tuple[float, float]]:
    """The stretches of batch sizes over which `acceptance` is above break-even.

    Args:
        row: `r` of one step count by batch.
        acceptance: Tokens won a round.

    Returns:
        Pairs of first and last batch, ascending; ends within the measured range are interpolated.
    """
    stretches: list[tuple[float, float]] = []
    known = sorted(row.items())
    since: float | None = known[0][0] if acceptance > known[0][1] else None
    for (low, before), (high, after) in pairwise(known):
        if (acceptance > before) == (acceptance > after):
            continue
        share = (acceptance - before) / (after - before)
        at = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        if since is None:
            since = at
        else:
            stretches.append((since, at))
            since = None
    if since is not None:
        stretches.append((since, known[-1][0]))
    return stretches


def _where(row: Mapping[int, float], acceptance: float) -> str:
    stretches = paying(row, acceptance)
    smallest, largest = min(row), max(row)
    if not stretches:
        return "it pays nowhere"
    if stretches == [(smallest, largest)]:
        if smallest == largest:
            return f"it pays at {smallest} in flight"
        return f"it pays at every size from {smallest} to {largest} in flight"
    parts = []
    for first, last in stretches:
        if first == smallest:
            parts.append(f"up to about {last:.0f}")
        elif last == largest:
            parts.append(f"from about {first:.0f}")
        else:
            parts.append(f"from about {first:.0f} to about {last:.0f}")
    return f"it pays {' and '.join(parts)} in flight"
