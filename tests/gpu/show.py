"""The results of GPUs as one page and one picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.bench import report
from tests.gpu import plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Result = dict[str, Any]

TITLE = "What the policy keeps on a GPU"
GOAL = 0.97
_COLOURS = {
    plan.BASE: "#8a929c",
    plan.ON: "#e07a1f",
    plan.OFF: "#2b6cb0",
    plan.DEFAULT: "#7b3fa0",
    plan.SPECSERVE: "#0a7d4b",
}
_WORDS = {
    plan.BASE: "no draft",
    plan.ON: "held on",
    plan.OFF: "held off",
    plan.DEFAULT: "engine's own table",
    plan.SPECSERVE: "SpecServe",
}


def render(results: Sequence[Result]) -> str:
    """The page of all results, as Markdown."""
    parts = [
        f"# {TITLE}",
        (
            "Tokens per second of real SGLang servers on GPUs, by clients and acceptance length. "
            "Run it: `python -m tests.gpu.regret`."
        ),
        "![throughput of each arm](gpu-regret.png)",
    ]
    for result in results:
        parts += _one(result)
    return "\n\n".join(parts) + "\n"


def _one(result: Result) -> list[str]:
    on = result["machine"]
    link = f", link {result['link']}" if result["tp"] > 1 else ""
    curve = f"; curve {result['curve']}" if result["curve"] else "; no curve"
    versions = ", ".join(f"{name} {each}" for name, each in result["versions"].items())
    return [
        f"## {result['tp']} x {result['gpu']}{link}",
        (
            f"Measured {result['at']} with SGLang {result['sglang']} ({versions}) on "
            f"{on['cores']} cores of {on['processor']}{curve}. Windows of "
            f"{result['windowSeconds']:g} s; prompts of "
            f"{result['traffic']['promptTokens']} tokens, answers of "
            f"{result['traffic']['answerTokens']}."
        ),
        f"{result['how']}",
        _worst(result),
        _table(result),
        *_missing(result),
    ]


def _worst(result: Result) -> str:
    judged = [
        cell
        for cell in result["cells"]
        if None not in (cell["ratio"], cell[plan.ON], cell[plan.OFF])
    ]
    if not judged:
        return "No cell was measured with both arms."
    worst = min(judged, key=lambda cell: cell["ratio"])
    error = "" if worst["stderr"] is None else f" ± {worst['stderr']:.3f} (one standard error)"
    return (
        f"Worst cell of {len(judged)} measured with both arms: {worst['ratio']:.3f}{error} of the "
        f"better arm, at {worst['c']} clients and acceptance {worst['accept']:g}. The goal is "
        f"{GOAL:g} within two standard errors."
    )


def _table(result: Result) -> str:
    arms = (plan.BASE, plan.ON, plan.OFF, plan.DEFAULT, plan.SPECSERVE)
    rows = [
        (
            cell["c"],
            f"{cell['accept']:g}",
            *(_figure(cell[arm]) for arm in arms),
            _ratio(cell["ratio"], cell["stderr"]),
            _ratio(cell["ratioToBase"]),
            "/".join(str(cell["windows"][arm]) for arm in arms),
        )
        for cell in result["cells"]
    ]
    return report.table(
        (
            *("C", "acceptance", *(_WORDS[arm] for arm in arms)),
            *("SpecServe / max(on, off)", "SpecServe / max(on, no draft)", "windows"),
        ),
        rows,
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _ratio(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _missing(result: Result) -> list[str]:
    lines = [f"{name} did not start" for fleet in result["fleets"] for name in fleet["failed"]]
    lines += [f"{name}: {why}" for name, why in result.get("failedBlocks", {}).items()]
    lines += [f"not measured: {line}" for line in result["missing"]]
    lines += [
        f"left out: {each['windows']} windows that {each['why']}"
        for each in result.get("leftOut", ())
    ]
    lines += [
        (
            f"measured again: {cell['c']} clients at acceptance {cell['accept']:g}, ratio "
            f"{_ratio(cell['ratio'], cell['stderr'])} on another host"
        )
        for cell in result.get("repeated", ())
    ]
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def plot(results: Sequence[Result], path: Path) -> list[Path]:
    """Draw throughput over clients for each acceptance, a row for each result."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    accepts = sorted({cell["accept"] for result in results for cell in result["cells"]})
    if not accepts:
        return []
    figure, grid = plt.subplots(
        len(results),
        len(accepts),
        figsize=(3.6 * len(accepts) + 0.6, 3.4 * len(results) + 0.6),
        dpi=120,
        squeeze=False,
        layout="constrained",
    )
    for row, result in zip(grid, results, strict=True):
        for axes, accept in zip(row, accepts, strict=True):
            cells = [cell for cell in result["cells"] if cell["accept"] == accept]
            _draw(axes, cells)
            axes.set_title(f"acceptance {accept:g}", fontsize=9)
        link = f", {result['link']}" if result["tp"] > 1 else ""
        row[0].set_ylabel(f"{result['tp']} x {result['gpu']}{link}\ntokens per second")
    grid[0][-1].legend(fontsize=7, frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("clients")
    figure.savefig(path, facecolor="white")
    plt.close(figure)
    return [path]


def _draw(axes: Any, cells: Sequence[Mapping[str, Any]]) -> None:
    for arm, colour in _COLOURS.items():
        known = [(cell["c"], cell[arm]) for cell in cells if cell[arm] is not None]
        if known:
            width = 2.2 if arm == plan.SPECSERVE else 1.2
            axes.plot(
                *zip(*known, strict=True),
                marker="o",
                markersize=3,
                linewidth=width,
                color=colour,
                label=_WORDS[arm],
                zorder=3 if arm == plan.SPECSERVE else 2,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(color="#e6e9ed", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
