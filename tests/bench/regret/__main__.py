"""What each strategy loses against the better of a live pod held on and one held off.

    python -m tests.bench.regret [--quick] [--only cells|more|traces|http] [--profile NAME]
        [--said FILE] [--out build/bench/regret.json]

In virtual time on simulated engines whose round times were measured on H200s: every cell of
concurrency and acceptance, and traces in which both move. Ten cells are run again in real time
over HTTP. `--quick` takes a few cells of each kind, for work on a policy.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench import report
from tests.bench.regret import compare, over_http, playing, show, steering, virtual

OUT = report.BUILD / "regret.json"
QUICK_CLIENTS = (1, 10, 70, 250)
QUICK_ACCEPTS = (1.0, 2.0, 3.0)


def _jobs(given: argparse.Namespace) -> list[compare.Cell | compare.Course]:
    chosen: list[compare.Cell | compare.Course] = [
        *(compare.courses() if given.only in (None, "traces") else []),
        *(compare.more_steps() if given.only in (None, "more") else []),
        *(compare.cells() if given.only in (None, "cells") else []),
    ]
    return [
        job
        for job in chosen
        if given.profile in (None, job.profile)
        and (
            not given.quick
            or isinstance(job, compare.Course)
            or (job.clients in QUICK_CLIENTS and job.accept in QUICK_ACCEPTS)
        )
    ]


def _order(row: dict[str, Any]) -> tuple[int, float, float]:
    return compare.PROFILES.index(row["profile"]), row.get("c", 0), row.get("accept", 0)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Play everything asked for; the result."""
    result = report.heading("regret")
    began = time.monotonic()
    jobs = _jobs(given)
    rows: dict[str, list[dict[str, Any]]] = {"cells": [], "moreSteps": [], "traces": []}
    words: list[str] = []
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for number, (kind, row, said) in enumerate(
            pool.imap_unordered(playing.play, jobs), start=1
        ):
            rows[kind].append(row)
            words += said
            if number % 20 == 0 or number == len(jobs):
                print(f"{number} of {len(jobs)} played, {time.monotonic() - began:.0f} s")
    for kind in ("cells", "moreSteps"):
        rows[kind].sort(key=_order)
        compare.fix_thresholds(rows[kind])
    rows["traces"].sort(key=_order)
    if given.said:
        given.said.write_text("\n".join(words) + "\n")
    checks = asyncio.run(over_http.check()) if given.only in (None, "http") else []
    return {
        **result,
        "seconds": round(time.monotonic() - began, 1),
        "settings": {
            "learningSeconds": compare.LEARNING_SECONDS,
            "windowSeconds": compare.WINDOW_SECONDS,
            "sampleSeconds": steering.SAMPLE_SECONDS,
            "readBackSeconds": steering.READ_BACK_SECONDS,
            "orderSeconds": steering.ORDER_SECONDS,
            "steps": list(compare.STEPS),
            "scatter": virtual.SCATTER,
            "switchSeconds": virtual.SWITCH_SECONDS,
            "moreSteps": list(compare.MORE_STEPS),
        },
        "strategies": compare.summary(rows["cells"], rows["traces"]),
        **rows,
        "httpCheck": checks,
    }


def main() -> int:
    """Entry point."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--only", choices=("cells", "more", "traces", "http"))
    options.add_argument("--profile", choices=compare.PROFILES)
    options.add_argument("--processes", type=int, default=os.cpu_count())
    options.add_argument("--said", type=Path, help="write every changed verdict, one JSON a line")
    options.add_argument("--out", type=Path, default=OUT)
    given = options.parse_args()
    result = run(given)
    report.write(result, given.out)
    print(show.tables(result))
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
