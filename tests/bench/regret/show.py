"""The result as Markdown and as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.bench import report
from tests.bench.regret import arms, compare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TITLE = "What each strategy loses"
WORST = 12
GOALS = {"steadyWorst": 0.97, "tracesWorst": 0.90, "noiseFlipsPerPodMinute": 1.0}


def render(result: Mapping[str, Any]) -> str:
    """The page of a result, as Markdown: how it was made, the pictures, the tables."""
    parts = [_method(result["settings"]) + "\n" + _notes(result)]
    if result["cells"]:
        parts.append("![ratios of all cells](regret.png)")
    if any("series" in trace for trace in result["traces"]):
        parts.append("![throughput over the traces](regret-traces.png)")
    return "\n\n".join((*parts, tables(result)))


def _notes(result: Mapping[str, Any]) -> str:
    return f"""- The whole run took {result["seconds"] / 60:.0f} minutes on this machine.
- Flips on noise count what a table has the engine do by itself, too. On traces that ask for
  changes (diurnal) it steps along the table several times a minute, which no flip budget limits:
  each step costs a millisecond. Threshold dwells 10 s, so noise on its bounds can flip it six
  times a minute until the hour's budget is spent."""


def tables(result: Mapping[str, Any]) -> str:
    """All tables of a result, as Markdown."""
    parts = [_strategies(result)]
    if result["cells"]:
        parts += [_worst(result["cells"]), *_matrices(result["cells"]), _off(result["cells"])]
    if result["moreSteps"]:
        parts.append(_more(result))
    if result["traces"]:
        parts.append(_traces(result["traces"]))
    if result["httpCheck"]:
        parts.append(_http(result["httpCheck"]))
    return "\n\n".join(parts)


def _method(settings: Mapping[str, Any]) -> str:
    steps = ", ".join(map(str, settings["steps"]))
    return f"""\
Simulated engines in virtual time. Their round times are those measured with real SGLang on H200s
(`images/sim/specserve_sim/profiles`), each prompt 128 tokens and each answer 256. A number of
clients asks again as soon as it is answered; the engine has steps {steps} prepared and runs 256
requests at most.

- **Ratio of a cell**: tokens per second over those of the better of a live pod held on and one
  held off (cold), with the same luck. The first {settings["learningSeconds"]:g} s are told apart
  as learning; the ratio is over the {settings["windowSeconds"]:g} s after them, probes included.
- **Ratio of a trace**: tokens of the whole trace, from its first second, over those of the better
  arm held all through it. The clairvoyant knows acceptance and round times at every moment.
- **FixedThreshold**: of all batch sizes to stop drafting at, the one that is best in hindsight: in
  the worst cell of a profile, and for each trace.
- **BreakEven** is given nothing: it reads load each {settings["sampleSeconds"]:g} s and the
  plugin's figures each {settings["readBackSeconds"]:g} s, and its orders take
  {settings["orderSeconds"] * 1000:g} ms. **BreakEvenCurve** has the shipped curve of its profile.
- Round times scatter ({settings["scatter"] * 100:g} %), and each change of the step count costs
  {settings["switchSeconds"] * 1000:g} ms, as measured. Flips are changes of the step count that an
  engine made, probes included.
- What rests on modelled values has a star: a batch size between measured ones, a cold off that was
  measured on another host or link, step counts other than 3."""


def _strategies(result: Mapping[str, Any]) -> str:
    columns = {
        "steadyWorst": "worst cell",
        "steadyMean": "mean cell",
        "learningWorst": "worst while learning",
        "tracesWorst": "worst trace",
        "tracesMean": "mean trace",
        "noiseFlipsPerPodMinute": "flips a pod and minute on noise",
    }
    rows = [
        [name, *("-" if row[key] is None else f"{row[key]:.3f}" for key in columns)]
        for name, row in result["strategies"].items()
    ]
    goals = ["goal", *(f"{GOALS[key]:g}" if key in GOALS else "" for key in columns)]
    return report.table(["strategy", *columns.values()], [*rows, goals])


def _mark(row: Mapping[str, Any]) -> str:
    return " *" if row["modelled"] else ""


def _worst(cells: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            cell["profile"] + _mark(cell),
            cell["c"],
            cell["accept"],
            cell["best"],
            f"{cell[arms.BREAK_EVEN]:.3f}",
            f"{cell[arms.BREAK_EVEN_CURVE]:.3f}",
            f"{cell[arms.THRESHOLD]:.3f}",
            f"{cell['learning'][arms.BREAK_EVEN]:.3f}",
            cell["switches"][arms.BREAK_EVEN],
        ]
        for cell in sorted(cells, key=lambda cell: cell[arms.BREAK_EVEN])[:WORST]
    ]
    return "## The worst cells of BreakEven\n\n" + report.table(
        [
            "profile",
            "C",
            "acceptance",
            "best arm",
            "BreakEven",
            "with curve",
            "Threshold",
            "while learning",
            "switches in the window",
        ],
        rows,
    )


def _matrices(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for profile in compare.PROFILES:
        mine = [cell for cell in cells if cell["profile"] == profile]
        if not mine:
            continue
        accepts = sorted({cell["accept"] for cell in mine})
        by_place = {(cell["c"], cell["accept"]): cell for cell in mine}
        rows = [
            [clients, *(_place(by_place.get((clients, accept))) for accept in accepts)]
            for clients in sorted({cell["c"] for cell in mine})
        ]
        found.append(
            f"## {profile}: BreakEven, Threshold in brackets\n\n"
            + report.table(["C", *(f"acceptance {accept}" for accept in accepts)], rows)
        )
    return found


def _place(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    return f"{cell[arms.BREAK_EVEN]:.3f} ({cell[arms.THRESHOLD]:.2f}){_mark(cell)}"


def _off(cells: Sequence[Mapping[str, Any]]) -> str:
    clients = sorted({cell["c"] for cell in cells})
    rows = []
    for profile in compare.PROFILES:
        mine = [cell for cell in cells if cell["profile"] == profile]
        if mine:
            shares = [
                [cell["offToPlain"] for cell in mine if cell["c"] == each] for each in clients
            ]
            rows.append([profile, *(f"{sum(each) / len(each):.2f}" for each in shares)])
    return "## A live pod held off (cold) over a pod without a draft\n\n" + report.table(
        ["profile", *(f"C={each}" for each in clients)], rows
    )


def _more(result: Mapping[str, Any]) -> str:
    cells = result["moreSteps"]
    names = [
        arms.ALWAYS_ON,
        arms.ALWAYS_OFF,
        arms.THRESHOLD,
        arms.BREAK_EVEN,
        arms.BREAK_EVEN_CURVE,
    ]
    rows = [
        [
            name,
            f"{min(cell[name] for cell in cells):.3f}",
            f"{sum(cell[name] for cell in cells) / len(cells):.3f}",
        ]
        for name in names
    ]
    worst = min(cells, key=lambda cell: cell[arms.BREAK_EVEN])
    return (
        f"## {cells[0]['profile']} with steps {', '.join(map(str, compare.MORE_STEPS))} prepared "
        "(modelled)\n\n"
        + report.table(["strategy", "worst cell", "mean cell"], rows)
        + f"\n\nBreakEven's worst: C={worst['c']}, acceptance {worst['accept']}, best arm "
        f"{worst['best']}."
    )


def _traces(traces: Sequence[Mapping[str, Any]]) -> str:
    names = [*arms.STRATEGIES, compare.CLAIRVOYANT]
    rows = [
        [
            trace["trace"],
            trace["profile"] + _mark(trace),
            trace["best"],
            *(f"{trace[name]:.3f}" for name in names),
            f"{trace['flipsPerMinute'][arms.BREAK_EVEN]:.2f}",
        ]
        for trace in sorted(traces, key=lambda trace: (trace["trace"], trace["profile"]))
    ]
    return "## Traces\n\n" + report.table(
        ["trace", "profile", "best held", *names, "BreakEven's flips a minute"], rows
    )


def _http(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            check["profile"],
            check["c"],
            check["accept"],
            check["httpTokensPerSecond"],
            check["virtualTokensPerSecond"],
            f"{check['httpToVirtual']:.3f}",
        ]
        for check in checks
    ]
    return "## Over HTTP, in real time\n\n" + report.table(
        ["profile", "C", "acceptance", "tok/s over HTTP", "in virtual time", "ratio"], rows
    )
