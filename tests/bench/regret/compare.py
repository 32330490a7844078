"""Cells and traces: every strategy played, and its throughput over that of the best arm held.

A cell is steady: one number of clients, one acceptance. Its first `LEARNING_SECONDS` are told
apart, because a policy that is handed nothing has to see both arms first. The ratio is over the
`WINDOW_SECONDS` after them, in which probes and whatever else the policy does all count.

A trace is judged whole, from its first second, learning included.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specserve import curves
from specserve_sim.profile import REFERENCE_STEPS, load_profile
from tests.bench.regret import arms, traces
from tests.bench.regret.arms import (
    ALWAYS_OFF,
    ALWAYS_ON,
    BREAK_EVEN,
    BREAK_EVEN_CURVE,
    ENGINE_DEFAULT,
    FIXED_THRESHOLD,
    THRESHOLD,
    THRESHOLDS,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from specserve_sim.profile import Profile
    from tests.bench.regret.arms import Arm, Played

PROFILES = ("h200-a", "h200-b", "h200x2-nvlink", "h200x2-nccl", "h200x2-hostmem")
CLIENTS = (1, 2, 5, 10, 30, 32, 70, 100, 250)
ACCEPTS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
STEPS = (0, REFERENCE_STEPS)
MORE_STEPS = (0, 1, REFERENCE_STEPS, 5)
"""Of further runs on one profile; all but 0 and 3 rest on the modelled cost of a step."""

MORE_STEPS_PROFILE = "h200-b"

LEARNING_SECONDS = 60.0
WINDOW_SECONDS = 300.0
SERIES_SECONDS = 5.0
SEED = 7
CLAIRVOYANT = "Clairvoyant"
PLAIN = "Plain"


@dataclass(frozen=True, slots=True)
class Cell:
    """One steady cell to be played."""

    profile: str
    clients: int
    accept: float
    steps: tuple[int, ...] = STEPS


@dataclass(frozen=True, slots=True)
class Course:
    """One trace to be played."""

    profile: str
    trace: str


def modelled(profile: Profile, clients: int, steps: Sequence[int] = STEPS) -> list[str]:
    """What a cell rests on that was not measured on this profile."""
    found = []
    if clients not in profile.plain.sizes:
        found.append("batch")
    if "off.cold" in profile.modelled or clients not in profile.idle["cold"].sizes:
        found.append("off")
    if set(steps) - {0, REFERENCE_STEPS}:
        found.append("steps")
    return found


def _policies(profile: Profile) -> dict[str, Arm]:
    return {
        THRESHOLD: arms.steered(THRESHOLD),
        BREAK_EVEN: arms.steered(BREAK_EVEN),
        BREAK_EVEN_CURVE: arms.steered(BREAK_EVEN, curves.shipped(profile.name)),
    }


def play_cell(cell: Cell) -> tuple[dict[str, Any], dict[str, Played]]:
    """Play one cell with every strategy; its row of the result, and what was done."""
    profile = load_profile(cell.profile)
    points = [traces.Point(0.0, cell.clients, cell.accept)]
    looks = (0.0, LEARNING_SECONDS, LEARNING_SECONDS + WINDOW_SECONDS)
    drafting = [steps for steps in cell.steps if steps]
    lots: dict[str, Arm] = {
        **{f"{ALWAYS_ON}{steps}": arms.held(steps) for steps in drafting},
        ALWAYS_OFF: arms.held(0),
        PLAIN: arms.plain(),
        ENGINE_DEFAULT: arms.engine_default(cell.steps),
        **_policies(profile),
    }
    played = {
        name: arms.play(arm, profile, points, looks, cell.steps, SEED)
        for name, arm in lots.items()
    }
    rates = {
        name: (
            (done.tokens[1] - done.tokens[0]) / LEARNING_SECONDS,
            (done.tokens[2] - done.tokens[1]) / WINDOW_SECONDS,
        )
        for name, done in played.items()
    }
    deepest = f"{ALWAYS_ON}{max(drafting)}"
    played[ALWAYS_ON], rates[ALWAYS_ON] = played[deepest], rates[deepest]
    constant = [f"{ALWAYS_ON}{steps}" for steps in drafting] + [ALWAYS_OFF]
    best = max(constant, key=lambda name: rates[name][1])
    shown = [name for name in arms.STRATEGIES if name in rates]
    rests = modelled(profile, cell.clients, cell.steps)
    return {
        "profile": cell.profile,
        "c": cell.clients,
        "accept": cell.accept,
        "modelled": bool(rests),
        "modelledWhat": rests,
        "best": best,
        "bestTokensPerSecond": round(rates[best][1], 1),
        **{name: round(rates[name][1] / rates[best][1], 4) for name in shown},
        "learning": {name: round(rates[name][0] / rates[best][0], 4) for name in shown},
        "switches": {name: played[name].switches[2] - played[name].switches[1] for name in shown},
        "offToPlain": round(rates[ALWAYS_OFF][1] / rates[PLAIN][1], 4),
    }, played


def play_course(course: Course) -> tuple[dict[str, Any], dict[str, Played]]:
    """Play one trace with every strategy; its row of the result, and what was done."""
    profile = load_profile(course.profile)
    trace = next(each for each in traces.traces(profile) if each.name == course.trace)
    bins = round(trace.seconds / SERIES_SECONDS)
    looks = tuple(number * SERIES_SECONDS for number in range(bins + 1))
    lots: dict[str, Arm] = {
        ALWAYS_ON: arms.held(REFERENCE_STEPS),
        ALWAYS_OFF: arms.held(0),
        PLAIN: arms.plain(),
        ENGINE_DEFAULT: arms.engine_default(STEPS),
        CLAIRVOYANT: arms.Arm(clairvoyant=STEPS),
        **{str(least): arms.below(least, REFERENCE_STEPS) for least in THRESHOLDS},
        **_policies(profile),
    }
    played = {
        name: arms.play(arm, profile, trace.points, looks, STEPS, SEED)
        for name, arm in lots.items()
    }
    tokens = {name: done.tokens[-1] for name, done in played.items()}
    best = max((ALWAYS_ON, ALWAYS_OFF), key=lambda name: tokens[name])
    threshold = max(THRESHOLDS, key=lambda least: tokens[str(least)])
    played[FIXED_THRESHOLD] = played[str(threshold)]
    tokens[FIXED_THRESHOLD] = tokens[str(threshold)]
    shown = [*arms.STRATEGIES, CLAIRVOYANT]
    minutes = trace.seconds / 60
    rests = sorted({each for point in trace.points for each in modelled(profile, point.clients)})
    return {
        "profile": course.profile,
        "trace": trace.name,
        "what": trace.what,
        "seconds": trace.seconds,
        "period": trace.period,
        "noise": trace.noise,
        "modelled": bool(rests),
        "modelledWhat": rests,
        "best": best,
        "bestTokensPerSecond": round(tokens[best] / trace.seconds, 1),
        "fixedThreshold": threshold,
        **{name: round(tokens[name] / tokens[best], 4) for name in shown},
        "flipsPerMinute": {name: round(played[name].switches[-1] / minutes, 3) for name in shown},
        "offToPlain": round(tokens[ALWAYS_OFF] / tokens[PLAIN], 4),
        **_series(course, played),
    }, played


def _series(course: Course, played: Mapping[str, Played]) -> dict[str, Any]:
    """Tokens per second over time, of the profile that is drawn."""
    if course.profile != PROFILES[0]:
        return {}
    return {
        "series": {
            name: [
                round((after - before) / SERIES_SECONDS)
                for before, after in pairwise(played[name].tokens)
            ]
            for name in (ALWAYS_ON, ALWAYS_OFF, BREAK_EVEN)
        }
    }


def fix_thresholds(cells: Sequence[dict[str, Any]]) -> None:
    """Add to each cell what the fixed threshold does that is best in its profile's worst cell."""
    for profile in {cell["profile"] for cell in cells}:
        mine = [cell for cell in cells if cell["profile"] == profile]

        def ratio(cell: dict[str, Any], least: int) -> float:
            return float(cell[ALWAYS_ON] if cell["c"] < least else cell[ALWAYS_OFF])

        def worth(least: int, mine: Sequence[dict[str, Any]] = mine) -> tuple[float, float]:
            ratios = [ratio(cell, least) for cell in mine]
            return min(ratios), sum(ratios)

        best = max(THRESHOLDS, key=worth)
        for cell in mine:
            cell[FIXED_THRESHOLD] = ratio(cell, best)
            cell["fixedThreshold"] = best


def summary(
    cells: Sequence[dict[str, Any]], courses: Sequence[dict[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """The figures of each strategy over all cells and traces; None without any."""
    noise = [course for course in courses if course["noise"]]
    return {
        name: {
            "steadyWorst": _least(cell[name] for cell in cells),
            "steadyMean": _mean(cell[name] for cell in cells),
            "learningWorst": _least(
                cell["learning"][name] for cell in cells if name in cell["learning"]
            ),
            "tracesWorst": _least(course[name] for course in courses),
            "tracesMean": _mean(course[name] for course in courses),
            "noiseFlipsPerPodMinute": max(
                (course["flipsPerMinute"][name] for course in noise), default=None
            ),
        }
        for name in arms.STRATEGIES
    }


def _least(ratios: Iterable[float]) -> float | None:
    return min(ratios, default=None)


def _mean(ratios: Iterable[float]) -> float | None:
    found = list(ratios)
    return round(sum(found) / len(found), 4) if found else None


def cells() -> list[Cell]:
    """All steady cells."""
    return [
        Cell(profile, clients, accept)
        for profile in PROFILES
        for clients in CLIENTS
        for accept in ACCEPTS
    ]


def more_steps() -> list[Cell]:
    """The cells that are played again with further step counts prepared."""
    return [
        Cell(MORE_STEPS_PROFILE, clients, accept, MORE_STEPS)
        for clients in CLIENTS
        for accept in ACCEPTS
    ]


def courses() -> list[Course]:
    """All traces on all profiles."""
    return [
        Course(name, trace.name)
        for name in PROFILES
        for trace in traces.traces(load_profile(name))
    ]
