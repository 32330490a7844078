"""From windows to the table: what each arm made in each cell, and what the policy kept of it.

    python -m tests.gpu.cells windows.jsonl ... [--out build/bench]

Figures of one cell come from one start of the servers, on one machine; only the server without a
draft may be of another start, where that one did not come to it, and is then marked. An arm that
does not depend on the acceptance has the windows of all cells with as many clients.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import report
from tests.gpu import plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Line = dict[str, Any]

BENCHMARK = "gpu-regret"
FLEET, WINDOW = "fleet", "window"
TOGETHER = "together"
"""How clients start: at once, and windows begin when each was answered a few times."""
RAMP_SECONDS = 75.0
"""Where they start one after another, and nothing waits for a steady load."""
RAMP = (
    f"began less than {RAMP_SECONDS:g} s after their load. Its clients started out of step and "
    "were prefilled one by one; it takes a closed loop about so long to fall into step, and until "
    "then throughput rises by up to a half in every arm"
)
HOW = (
    "SGLang's servers of one cell ran at once on the same GPU, or GPUs, all but one of them idle. "
    "Where a host has several GPUs, each may have such a fleet of its own (beside); no cell mixes "
    "two. Clients "
    "start at once and ask again as soon as they are answered; windows begin when each was "
    "answered three times; tokens are counted as their streams tell of them, those "
    "told together spread over the time since the stream told of others. A window's rate is the "
    "mean over all windows within it that are one answer's time shorter (plain, where clients did "
    "not start at once): clients in step are prefilled together, and a window of few waves has by "
    "chance one prefill more or less. Acceptance is simulated "
    "and changed in the running server; steps are 0 and 3. `on` and `off` (cold) are the live "
    "server held there. `specserve` is that server under the BreakEven policy of `specserve "
    "local` with its defaults: started anew in each cell, with nothing but the shipped curve that "
    "is named, on a server that it finds on; its windows begin once the steps have not changed "
    "for three seconds and it does not wait to change them (settledSeconds since its start), and "
    "it reads the server's own figures of the last minute, round times of held windows among "
    "them. Its looks at steps that are not in use count where they fall into a window. "
    "`base` is a server without a draft (with a star: of another start, as it depends on neither "
    "acceptance nor policy); `engineDefault` one that follows SGLang's own table. "
    "`stderr` is that of specserve / max(on, off), from the spread of the windows."
)


def read(paths: Iterable[Path]) -> list[Line]:
    """The lines of some records; one that broke off in the middle is left out."""
    lines: dict[str, Line] = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            # Records of later runs hold those of earlier ones.
            lines.setdefault(json.dumps(line, sort_keys=True), line)
    return list(lines.values())


def windows_of(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == WINDOW]


def ramping(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """By start of the servers, the windows during which the load was not yet steady."""
    out_of_step = {
        each["id"] for each in lines if each["kind"] == FLEET and each.get("clients") != TOGETHER
    }
    found: dict[str, list[Line]] = {}
    loads: dict[str, tuple[Any, float]] = {}
    for window in sorted(windows_of(lines), key=lambda each: str(each["at"])):
        fleet, load = window["fleet"], (window["server"], window["c"])
        if fleet not in out_of_step:
            continue
        begin = datetime.datetime.fromisoformat(window["at"]).timestamp() - window["seconds"]
        known, since = loads.get(fleet, (None, 0.0))
        if known != load:
            loads[fleet] = load, (since := begin - window["settledSeconds"])
        if begin - since < RAMP_SECONDS:
            found.setdefault(fleet, []).append(window)
    return found


def cells(windows: Sequence[Line]) -> list[Line]:
    """The table, by clients and acceptance: of each cell the start of the servers to go by."""
    return [found[0] for found in _by_place(windows)]


def repeated(windows: Sequence[Line]) -> list[Line]:
    """Cells that other starts of the servers have measured with all of on, off and specserve."""
    return [each for found in _by_place(windows) for each in found[1:] if _is_whole(each)]


def _by_place(windows: Sequence[Line]) -> list[list[Line]]:
    """All that is known of each place; first what is whole, of that the newest."""
    places: dict[tuple[int, float], dict[str, str]] = {}
    for each in windows:
        if each["server"] == plan.LIVE:
            newest = places.setdefault((each["c"], each["accept"]), {})
            newest[each["fleet"]] = max(newest.get(each["fleet"], ""), each["at"])
    found = []
    for place in sorted(places):
        newest = places[place]
        mine = [_cell(windows, *place, fleet) for fleet in newest]
        mine.sort(
            key=lambda each: (_is_whole(each), each["repeats"] > 0, newest[each["fleet"]]),
            reverse=True,
        )
        found.append(mine)
    return found


def _is_whole(cell: Line) -> bool:
    return None not in (cell[plan.ON], cell[plan.OFF], cell[plan.SPECSERVE])


def _cell(windows: Sequence[Line], clients: int, accept: float, fleet: str) -> Line:
    mine = [each for each in windows if (each["c"], each["fleet"]) == (clients, fleet)]
    figures = {
        plan.BASE: _rates(mine, plan.BASE),
        plan.ON: _rates(mine, plan.ON, accept),
        plan.OFF: _rates(mine, plan.OFF),
        plan.DEFAULT: _rates(mine, plan.DEFAULT, accept),
        plan.SPECSERVE: _rates(mine, plan.SPECSERVE, accept),
    }
    borrowed = not figures[plan.BASE] and (others := _others(windows, clients))
    if borrowed:
        figures[plan.BASE] = others
    means = {arm: statistics.fmean(each) if each else None for arm, each in figures.items()}
    steered = [each for each in mine if (each["arm"], each["accept"]) == (plan.SPECSERVE, accept)]
    held = max((plan.ON, plan.OFF), key=lambda arm: means[arm] or 0.0)
    ratio = _over(means[plan.SPECSERVE], means[held])
    spread = [_relative_error(figures[arm]) for arm in (plan.SPECSERVE, held)]
    stderr = (
        None
        if ratio is None or None in spread
        else ratio * sum(each**2 for each in spread if each is not None) ** 0.5
    )
    return {
        "c": clients,
        "accept": accept,
        "repeats": len(figures[plan.SPECSERVE]),
        **{arm: _rounded(value, 1) for arm, value in means.items()},
        "stderr": _rounded(stderr, 4),
        "ratio": _rounded(ratio, 4),
        "ratioToBase": _rounded(
            _over(means[plan.SPECSERVE], _most(means[plan.ON], means[plan.BASE])), 4
        ),
        "windows": {arm: [round(rate, 1) for rate in each] for arm, each in figures.items()},
        "drafted": _rounded(_mean(each["drafted"] for each in steered), 3),
        "switches": sum(each["switches"] for each in steered),
        "settledSeconds": _rounded(_mean(each["settledSeconds"] for each in steered), 2),
        "baseOfAnotherStart": bool(borrowed),
        "lost": sum(each["lost"] for each in mine if each["accept"] in (accept, None)),
        "fleet": fleet,
    }


def _others(windows: Sequence[Line], clients: int) -> list[float]:
    """What the server without a draft made with as many clients at its newest start with any."""
    mine = [each for each in windows if each["c"] == clients and each["arm"] == plan.BASE]
    newest = max(mine, key=lambda each: str(each["at"]), default=None)
    return _rates(
        (each for each in mine if newest and each["fleet"] == newest["fleet"]), plan.BASE
    )


def _rates(windows: Iterable[Line], arm: str, accept: float | None = None) -> list[float]:
    return [
        each["tokensPerSecond"]
        for each in windows
        if each["arm"] == arm and accept in (None, each["accept"])
    ]


def _relative_error(rates: Sequence[float]) -> float | None:
    if len(rates) < 2:
        return None
    return statistics.stdev(rates) / len(rates) ** 0.5 / statistics.fmean(rates)


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _most(*values: float | None) -> float | None:
    # Without both nothing can be said.
    return None if None in values else max(each for each in values if each is not None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return statistics.fmean(known) if known else None


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def absent(table: Sequence[Line], tensor_parallel: int) -> list[str]:
    """What of the whole table was not measured, in words."""
    alone = tensor_parallel == 1
    places = (
        product(plan.CLIENTS, plan.ACCEPTS)
        if alone
        else product(plan.PARALLEL_CLIENTS, plan.PARALLEL_ACCEPTS)
    )
    known = {(cell["c"], cell["accept"]): cell for cell in table}
    found = []
    for clients, accept in places:
        wanted = [plan.ON, plan.OFF, plan.SPECSERVE, plan.BASE]
        if alone and accept == plan.DEFAULT_ACCEPT:
            wanted.append(plan.DEFAULT)
        cell = known.get((clients, accept), {})
        arms = [arm for arm in wanted if cell.get(arm) is None]
        if arms:
            found.append(f"{clients} clients at acceptance {accept:g}: {', '.join(arms)}")
    return found


def document(lines: Sequence[Line]) -> Line:
    """The whole result.

    Args:
        lines: Of one kind of machine, one parallel size and one link; they name a start of the
            servers at least.
    """
    ramps = ramping(lines)
    left_out = [id(each) for found in ramps.values() for each in found]
    windows = [each for each in windows_of(lines) if id(each) not in left_out]
    table, again = cells(windows), repeated(windows)
    used = {each["fleet"] for each in (*table, *again)}
    started = [line for line in lines if line["kind"] == FLEET]
    fleets = [line for line in started if line["id"] in used] or started
    last = fleets[-1]
    return {
        "benchmark": BENCHMARK,
        **{key: last[key] for key in ("gpu", "tp", "link", "sglang", "at", "machine", "versions")},
        "simulated": any(each["simulated"] for each in fleets),
        "how": HOW,
        "curve": last["curve"],
        "traffic": last["traffic"],
        "windowSeconds": last["windowSeconds"],
        "fleets": [
            {
                **{key: each[key] for key in ("id", "at", "gpu", "started", "failed")},
                "beside": each.get("beside", 0),
            }
            for each in fleets
        ],
        "leftOut": [
            {
                "fleet": fleet,
                "windows": len(found),
                "settleAfterLoadSeconds": RAMP_SECONDS,
                "why": RAMP,
                "of": _tallied(found),
            }
            for fleet, found in ramps.items()
        ],
        "missing": absent(table, last["tp"]),
        "cells": table,
        "repeated": again,
    }


def _tallied(windows: Iterable[Line]) -> list[Line]:
    """Windows by what they are of, with what they showed."""
    rates: dict[tuple[Any, ...], list[float]] = {}
    for each in windows:
        key = each["c"], each["accept"], each["arm"]
        rates.setdefault(key, []).append(each["tokensPerSecond"])
    return [
        {"c": c, "accept": accept, "arm": arm, "tokensPerSecond": found}
        for (c, accept, arm), found in rates.items()
    ]


def file_name(result: Mapping[str, Any]) -> str:
    """The name of a result's file."""
    kind = "simulated" if result["simulated"] else result["gpu"].split()[-1].lower()
    link = f"-{result['link']}" if result["tp"] > 1 else ""
    return f"{BENCHMARK}-{kind}-tp{result['tp']}{link}.json"


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("records", type=Path, nargs="+")
    cli.add_argument("--out", type=Path, default=report.BUILD)
    options = cli.parse_args()
    lines = read(options.records)
    result = document(lines)
    path = options.out / file_name(result)
    report.write(result, path)
    print(path)


if __name__ == "__main__":
    main()
