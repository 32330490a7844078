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
_LINKS = {
    "nvlink": " The GPUs reach each other's memory over NVLink; all-reduce by NCCL, without "
    "multicast (`--disable-custom-all-reduce`, fusion off).",
    "hostmem": " The same GPUs without peer memory (`NCCL_P2P_DISABLE=1`): NCCL goes through the "
    "host's, as on a box of PCIe cards that do not reach each other.",
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
    parts += dict.fromkeys(result["how"] for result in results)
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
            f"{result['traffic']['answerTokens']}.{_LINKS.get(result['link'], '')}"
        ),
        _worst(result),
        _table(result["cells"]),
        *_again(result),
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


def _again(result: Result) -> list[str]:
    cells = result.get("repeated", ())
    return ["The same cells by an earlier start of the servers:", _table(cells)] if cells else []


def _table(cells: Sequence[Mapping[str, Any]]) -> str:
    arms = (plan.BASE, plan.ON, plan.OFF, plan.DEFAULT, plan.SPECSERVE)
    rows = [
        (
            cell["c"],
            f"{cell['accept']:g}",
            *(_figure(cell[arm]) + (_star(cell) if arm == plan.BASE else "") for arm in arms),
            _ratio(cell["ratio"], cell["stderr"]),
            _ratio(cell["ratioToBase"]) + _star(cell),
            "/".join(str(len(cell["windows"][arm])) for arm in arms),
        )
        for cell in cells
    ]
    return report.table(
        (
            *("C", "acceptance", *(_WORDS[arm] for arm in arms)),
            *("SpecServe / max(on, off)", "SpecServe / max(on, no draft)", "windows"),
        ),
        rows,
    )


def _star(cell: Mapping[str, Any]) -> str:
    return " *" if cell["baseOfAnotherStart"] else ""


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
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def plot(results: Sequence[Result], path: Path) -> list[Path]:
    """Draw what each arm made of what held off made, over clients, for each acceptance."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [
        (result, accept, cells)
        for result in results
        for accept in sorted({cell["accept"] for cell in result["cells"]})
        if (cells := [cell for cell in result["cells"] if _drawn(cell, accept)])
    ]
    if not panels:
        return []
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(3.8 * columns, 3.2 * rows + 0.7),
        dpi=120,
        squeeze=False,
        layout="constrained",
    )
    arms: dict[str, Any] = {}
    for axes, (result, accept, cells) in zip(grid.flat, panels, strict=False):
        arms |= _draw(axes, cells)
        link = f", {result['link']}" if result["tp"] > 1 else ""
        axes.set_title(
            f"{result['tp']} x {result['gpu']}{link}: acceptance {accept:g}", fontsize=9
        )
        axes.set_xlabel("clients", fontsize=8)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for row in grid:
        row[0].set_ylabel("tokens per second / held off", fontsize=8)
    figure.legend(
        arms.values(),
        arms.keys(),
        loc="outside lower center",
        ncols=len(arms),
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path, facecolor="white")
    plt.close(figure)
    return [path]


def _drawn(cell: Mapping[str, Any], accept: float) -> bool:
    return bool(cell["accept"] == accept and cell[plan.OFF] is not None)


def _draw(axes: Any, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Draw a panel; returns the line of each arm by its name."""
    lines = {}
    places = {cell["c"]: place for place, cell in enumerate(cells)}
    for arm, colour in _COLOURS.items():
        known = [
            (places[cell["c"]], cell[arm] / cell[plan.OFF])
            for cell in cells
            if cell[arm] is not None
        ]
        if not known:
            continue
        ours = arm == plan.SPECSERVE
        [lines[_WORDS[arm]]] = axes.plot(
            *zip(*known, strict=True),
            marker="o",
            markersize=5 if ours else 3,
            linewidth=2.2 if ours else 1.2,
            color=colour,
            zorder=3 if ours else 2,
        )
    axes.set_xticks([*places.values()], [str(clients) for clients in places])
    axes.margins(x=0.08)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e6e9ed", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    return lines
