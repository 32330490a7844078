"""Which cells are measured, in which order, and how long what is left will take."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEFAULT_LEVELS = (1, 2, 5, 10, 30, 70, 100, 250)
#: Requests of a cell for each one in flight; large cells settle with fewer.
ROUNDS, ROUNDS_LARGE, LARGE = 3, 2, 100
#: A cell has at least so many requests.
FEWEST = 4


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things compared.

    Attributes:
        name: For the report: `on`, `off`, `auto`, `base` or `server`.
        setting: What the engine is ordered for it: the part of a directive that says mode, steps
            and draftKv; None leaves the server as it is.
        baseline: Whether it is measured on the second server.
    """

    name: str
    setting: Mapping[str, Any] | None = None
    baseline: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One stretch of measuring.

    Attributes:
        level: Requests in flight.
        arm: What is measured.
        visit: How often this level has seen this arm before.
    """

    level: int
    arm: Arm
    visit: int


def arms_of(
    *,
    flip: bool,
    baseline: bool,
    steps: int | None = None,
    draft_kv: str = "cold",
) -> list[Arm]:
    """The arms of a benchmark.

    Args:
        flip: Compare on, off and auto in one live server.
        baseline: Compare with a second server.
        steps: Draft steps of "on"; needed to flip.
        draft_kv: What "off" does to the draft's cache.
    """
    if flip:
        kept = {"draftKv": draft_kv}
        arms = [
            Arm("on", {"mode": "on", "steps": steps, **kept}),
            Arm("off", {"mode": "off", **kept}),
            Arm("auto", {"mode": "auto", **kept}),
        ]
    else:
        arms = [Arm("server")]
    return [*arms, Arm("base", baseline=True)] if baseline else arms


def cells_of(levels: Iterable[int], arms: Sequence[Arm], repeats: int) -> list[Cell]:
    """All cells in the order of their measurement, level by level.

    Arms are visited there and back again (on, off, off, on), `repeats` times over: a drift that is
    linear in time then adds the same to each of them. A single arm is visited `repeats` times.
    """
    cells = []
    for level in levels:
        seen: dict[str, int] = {}
        order = list(arms) if len(arms) == 1 else [*arms, *reversed(arms)]
        for arm in order * repeats:
            visit = seen.get(arm.name, 0)
            seen[arm.name] = visit + 1
            cells.append(Cell(level, arm, visit))
    return cells


def requests_of(level: int, rounds: int | None = None) -> int:
    """Requests that make a cell of so many in flight: enough for a stable figure."""
    each = rounds or (ROUNDS if level < LARGE else ROUNDS_LARGE)
    return max(FEWEST, level * each)


@dataclass(slots=True)
class Estimate:
    """How long the cells that are left will take, from those that are done.

    Attributes:
        left: Cells not done yet.
    """

    left: list[Cell]
    _seconds: dict[tuple[int, str], list[float]] = field(default_factory=dict)

    def done(self, cell: Cell, seconds: float) -> None:
        """Take note of a cell's duration, warm-up included."""
        self.left.remove(cell)
        self._seconds.setdefault((cell.level, cell.arm.name), []).append(seconds)

    def seconds_left(self) -> float | None:
        """Seconds for all that is left; None before the first cell is done.

        A cell takes what the same arm took at this level, else any arm at this level, else what
        the nearest level took, in proportion to the square root of the level: more requests run
        together, and each takes longer.
        """
        if not self._seconds:
            return None
        return sum(self._guess(cell) for cell in self.left)

    def _guess(self, cell: Cell) -> float:
        same = self._seconds.get((cell.level, cell.arm.name))
        if same:
            return sum(same) / len(same)
        nearest = min(
            {level for level, _ in self._seconds},
            key=lambda level: abs(level - cell.level),
        )
        known = [
            seconds
            for (level, _), each in self._seconds.items()
            if level == nearest
            for seconds in each
        ]
        return sum(known) / len(known) * math.sqrt(cell.level / nearest)
