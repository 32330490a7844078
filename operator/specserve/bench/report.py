"""The outcome of a benchmark as a table, as JSON and in words. Pure.

Ratios: `on/off` compares the two in one live server; `/base` compares with the second server;
`auto/best` says what the engine's own choice is worth beside the better of on and off.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specserve.bench.figures import Figures, Spread, crossings, verdict

Table = Mapping[int, Mapping[str, Figures]]
#: Members of a JSON report that change their meaning count this up.
FORMAT = 1
#: Reasons for lost requests that are said in words; servers put numbers into theirs.
MOST_PROBLEMS = 5


def ratios_of(table: Table) -> dict[str, dict[int, float]]:
    """Ratios by their name and level; a ratio with an arm that brought nothing is left out."""
    ratios: dict[str, dict[int, float]] = {}
    for level, arms in table.items():
        rates = {name: figures.rate for name, figures in arms.items() if figures.rate > 0}
        for name, (over, under) in _pairs(rates).items():
            ratios.setdefault(name, {})[level] = over / under
    return ratios


def _pairs(rates: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    pairs = {}
    if "on" in rates and "off" in rates:
        pairs["on/off"] = (rates["on"], rates["off"])
        if "auto" in rates:
            pairs["auto/best"] = (rates["auto"], max(rates["on"], rates["off"]))
    if "base" in rates:
        for name in ("server", "on", "off", "auto"):
            if name in rates:
                pairs[f"{name}/base"] = (rates[name], rates["base"])
    return pairs


def throughput_rows(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: tokens per second of each arm, then the ratios."""
    arms = _arms(table)
    ratios = ratios_of(table)
    header = ["C", *(f"{arm} tok/s" for arm in arms), *ratios]
    rows = []
    for level, figures in table.items():
        rates = [f"{figures[arm].rate:,.1f}" if arm in figures else "" for arm in arms]
        shown = [f"{by[level]:.2f}" if level in by else "" for by in ratios.values()]
        rows.append([str(level), *rates, *shown])
    return header, rows


def latency_rows(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the second table: latencies in milliseconds, acceptance, errors."""
    header = [
        "C",
        "",
        *("TTFT\np50 ms", "p99"),
        *("per token\np50 ms", "p99"),
        *("end to end\np50 ms", "p90", "p99"),
        *("accepted", "requests", "lost"),
    ]
    rows = [
        [
            str(level),
            arm,
            *_milliseconds(figures.first, "p50", "p99"),
            *_milliseconds(figures.between, "p50", "p99"),
            *_milliseconds(figures.whole, "p50", "p90", "p99"),
            "" if figures.accept_length is None else f"{figures.accept_length:.2f}",
            str(figures.requests),
            str(figures.lost),
        ]
        for level, arms in table.items()
        for arm, figures in arms.items()
    ]
    return header, rows


def _milliseconds(spread: Spread | None, *which: str) -> list[str]:
    if spread is None:
        return [""] * len(which)
    values = [getattr(spread, name) * 1e3 for name in which]
    return [f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in values]


def sentences(table: Table) -> list[str]:
    """What the table says, in words: where the arms cross, and what went wrong."""
    ratios = ratios_of(table)
    said = [
        verdict(by, over, under)
        for name, by in ratios.items()
        for over, under in (name.split("/"),)
        if under in {"off", "base"}
    ]
    for arm in _arms(table):
        problems: dict[str, int] = {}
        for arms in table.values():
            for problem, count in (arms[arm].problems if arm in arms else {}).items():
                problems[problem] = problems.get(problem, 0) + count
        known = sorted(problems.items(), key=lambda item: -item[1])
        said += [f"{arm}: {count} lost: {problem}" for problem, count in known[:MOST_PROBLEMS]]
        if others := known[MOST_PROBLEMS:]:
            count = sum(count for _, count in others)
            said.append(f"{arm}: {count} more lost, for {len(others)} other reasons")
    return said


def document(
    table: Table,
    *,
    at: str,
    settings: Mapping[str, Any],
    servers: Mapping[str, Any],
    complete: bool,
    version: str,
) -> dict[str, Any]:
    """The report as JSON.

    Args:
        table: What was measured.
        at: When it began, RFC 3339.
        settings: What was asked for.
        servers: What was measured, by `server` and `baseline`.
        complete: Whether all cells of the plan were measured.
        version: Of this program.
    """
    ratios = ratios_of(table)
    return {
        "format": FORMAT,
        "tool": f"specserve bench {version}",
        "at": at,
        "complete": complete,
        "settings": dict(settings),
        "servers": dict(servers),
        "levels": [
            {
                "inFlight": level,
                "arms": {arm: figures.to_json() for arm, figures in arms.items()},
                "ratios": {n: round(by[level], 4) for n, by in ratios.items() if level in by},
            }
            for level, arms in table.items()
        ],
        "crossovers": {
            name: [
                {
                    "inFlight": round(crossing.at, 1),
                    "between": list(crossing.between),
                    "above": "wins" if crossing.to_better else "loses",
                }
                for crossing in crossings(by)
            ]
            for name, by in ratios.items()
            if name != "auto/best"
        },
        "summary": sentences(table),
    }


def lost(table: Table) -> int:
    """Requests that brought no whole answer."""
    return sum(figures.lost for arms in table.values() for figures in arms.values())


def _arms(table: Table) -> Sequence[str]:
    """Names of the arms, in the order in which they first appear."""
    return list(dict.fromkeys(name for arms in table.values() for name in arms))
