"""One job of the benchmark, as a process of the pool does it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.bench.regret import arms, compare

if TYPE_CHECKING:
    from tests.bench.regret.arms import Played


def play(job: compare.Cell | compare.Course) -> tuple[str, dict[str, Any], list[str]]:
    if isinstance(job, compare.Cell):
        kind = "cells" if job.steps == compare.STEPS else "moreSteps"
        row, played = compare.play_cell(job)
    else:
        kind = "traces"
        row, played = compare.play_course(job)
    return kind, row, _words(row, played)


def _words(row: dict[str, Any], played: dict[str, Played]) -> list[str]:
    """The verdicts of the policies, for whoever asks why."""
    about = {key: row[key] for key in ("profile", "c", "accept", "trace", "best") if key in row}
    return [
        json.dumps({**about, "strategy": name, "ratio": row[name], "at": round(said.at, 2)})[:-1]
        + ", "
        + json.dumps(
            {"tiers": said.tiers, "probe": said.probe, "code": said.code, "reason": said.reason}
        )[1:]
        for name in (arms.BREAK_EVEN, arms.BREAK_EVEN_CURVE, arms.THRESHOLD)
        for said in played[name].said
    ]
