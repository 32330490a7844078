"""Loads and acceptances that move: what a policy that is right in a steady cell may still miss.

A trace is a list of (seconds, clients, acceptance length at 3 steps), each holding until the next
one begins. All are made here, by stated formulas and seeds; none is a recording.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specserve_sim.profile import REFERENCE_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from specserve_sim.profile import Profile

LEAST, MOST = 1.0, float(REFERENCE_STEPS + 1)


@dataclass(frozen=True, slots=True)
class Point:
    """From `at` seconds on: so many clients, and this acceptance."""

    at: float
    clients: int
    accept: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace.

    Attributes:
        name: in results.
        what: one line for people.
        seconds: its length.
        period: seconds after which it repeats, None if it never does.
        points: ascending, the first at 0.
        noise: whether nothing in it asks for a flip: its flips are what noise costs.
    """

    name: str
    what: str
    seconds: float
    period: float | None
    points: tuple[Point, ...]
    noise: bool = False


def _sampled(
    seconds: float, every: float, at: Callable[[float], tuple[float, float]]
) -> tuple[Point, ...]:
    """The trace of a formula, looked at every so many seconds; equal neighbours are one point."""
    points: list[Point] = []
    for number in range(math.ceil(seconds / every)):
        clients, accept = at(number * every)
        point = Point(
            number * every, max(0, round(clients)), round(min(MOST, max(LEAST, accept)), 3)
        )
        if not points or (points[-1].clients, points[-1].accept) != (point.clients, point.accept):
            points.append(point)
    return tuple(points)


def _square(first: float, second: float, period: float, t: float) -> float:
    return first if t % period < period / 2 else second


def _wave(low: float, high: float, period: float, t: float) -> float:
    """From `low` at 0 to `high` at half a period and back, evenly in the logarithm."""
    share = (1 - math.cos(2 * math.pi * t / period)) / 2
    return math.exp(math.log(low) + share * math.log(high / low))


def break_even(profile: Profile, batch: int) -> float:
    """Acceptance length at which 3 steps do as well as a live pod held off cold."""
    return min(MOST, profile.r(batch, REFERENCE_STEPS) / profile.r(batch, 0))


def traces(profile: Profile) -> tuple[Trace, ...]:
    """All traces; two lie on this profile's own break-even."""
    rng = np.random.default_rng(5)
    jitter = rng.normal(0.0, 1.0, 1000)

    def drawn(t: float, every: float) -> float:
        return float(jitter[int(t / every) % len(jitter)])

    even = break_even(profile, 32)
    return (
        Trace(
            "load square",
            "10 and 200 clients by turns, 90 s each; acceptance 2.2",
            900.0,
            180.0,
            _sampled(900, 90, lambda t: (_square(10, 200, 180, t), 2.2)),
        ),
        Trace(
            "load square, fast",
            "16 and 160 clients by turns, 15 s each; acceptance 2.2",
            600.0,
            30.0,
            _sampled(600, 15, lambda t: (_square(16, 160, 30, t), 2.2)),
        ),
        Trace(
            "acceptance square",
            "70 clients; acceptance 3.2 and 1.2 by turns, 120 s each",
            960.0,
            240.0,
            _sampled(960, 120, lambda t: (70, _square(3.2, 1.2, 240, t))),
        ),
        Trace(
            "load sawtooth",
            "1 to 250 clients evenly within 150 s, then at once back to 1; acceptance 2.5",
            900.0,
            150.0,
            _sampled(900, 1, lambda t: (1 + 249 * (t % 150) / 150, 2.5)),
        ),
        Trace(
            "noise on the threshold",
            "40 clients give or take 12 (normal), drawn anew every 3 s; acceptance 2.0",
            900.0,
            None,
            _sampled(900, 3, lambda t: (max(1, 40 + 12 * drawn(t, 3)), 2.0)),
            noise=True,
        ),
        Trace(
            "noise on the break-even",
            "32 clients; acceptance at this profile's break-even give or take 0.15 (normal), "
            "drawn anew every 5 s",
            900.0,
            None,
            _sampled(900, 5, lambda t: (32, even + 0.15 * drawn(t, 5))),
            noise=True,
        ),
        Trace(
            "collapse and recovery",
            "32 clients; acceptance 3.0, from 150 s to 300 s of every 450 s 1.0",
            1350.0,
            450.0,
            _sampled(1350, 150, lambda t: (32, 1.0 if 150 <= t % 450 < 300 else 3.0)),
        ),
        Trace(
            "diurnal",
            "2 to 240 clients and back within 600 s, evenly in the logarithm; acceptance 2.3",
            1200.0,
            600.0,
            _sampled(1200, 2, lambda t: (_wave(2, 240, 600, t), 2.3)),
        ),
        Trace(
            "both, opposed",
            "8 clients at acceptance 3.2 and 200 at 1.4 by turns, 100 s each",
            1000.0,
            200.0,
            _sampled(1000, 100, lambda t: (_square(8, 200, 200, t), _square(3.2, 1.4, 200, t))),
        ),
        Trace(
            "both, together",
            "8 clients at acceptance 1.3 and 128 at 3.2 by turns, 100 s each",
            1000.0,
            200.0,
            _sampled(1000, 100, lambda t: (_square(8, 128, 200, t), _square(1.3, 3.2, 200, t))),
        ),
        Trace(
            "both, out of step",
            "load 4 to 220 within 420 s, acceptance 1.3 to 3.3 within 300 s, both as waves",
            1260.0,
            None,
            _sampled(1260, 2, lambda t: (_wave(4, 220, 420, t), _wave(1.3, 3.3, 300, t))),
        ),
    )
