"""The pictures of a result: ratios of all cells as heat maps, and what happened in the traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.bench.regret import arms, compare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SHOWN = (
    arms.ALWAYS_ON,
    arms.ALWAYS_OFF,
    arms.ENGINE_DEFAULT,
    arms.FIXED_THRESHOLD,
    arms.THRESHOLD,
    arms.BREAK_EVEN,
)
WORDS = {
    arms.ALWAYS_ON: "always on",
    arms.ALWAYS_OFF: "always off",
    arms.ENGINE_DEFAULT: "engine's default table",
    arms.FIXED_THRESHOLD: "best fixed threshold\nin hindsight",
    arms.THRESHOLD: "Threshold",
    arms.BREAK_EVEN: "BreakEven",
}
COLOURS = {arms.BREAK_EVEN: "#0a7d4b", arms.ALWAYS_ON: "#e07a1f", arms.ALWAYS_OFF: "#2b6cb0"}
LOWEST = 0.5
_GREY, _LIGHT, _TEXT = "#8a929c", "#e6e9ed", "#2a2f36"
_STYLE: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _TEXT,
    "text.color": _TEXT,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
}


def plot(result: Mapping[str, Any], path: Path) -> list[Path]:
    """Write the heat maps to `path` and the traces beside it, as PNG; the files written."""
    import matplotlib as mpl

    mpl.use("Agg")
    written = []
    with mpl.rc_context(_STYLE):
        if result["cells"]:
            _cells(result["cells"], path)
            written.append(path)
        if any("series" in trace for trace in result["traces"]):
            beside = path.with_name(f"{path.stem}-traces{path.suffix}")
            _traces(result["traces"], beside)
            written.append(beside)
    return written


def _cells(cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib import pyplot as plt

    profiles = [name for name in compare.PROFILES if any(c["profile"] == name for c in cells)]
    figure, grid = plt.subplots(
        len(SHOWN),
        len(profiles),
        figsize=(2.6 * len(profiles) + 1.4, 2.2 * len(SHOWN)),
        dpi=120,
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    image: Any = None
    for row, strategy in enumerate(SHOWN):
        for column, profile in enumerate(profiles):
            axes = grid[row][column]
            mine = {(c["c"], c["accept"]): c for c in cells if c["profile"] == profile}
            image = _map(axes, mine, strategy)
            if row == 0:
                axes.set_title(profile)
            if column == 0:
                axes.set_ylabel(f"{WORDS[strategy]}\n\nclients", fontsize=10)
            if row == len(SHOWN) - 1:
                axes.set_xlabel("acceptance length")
    bar = figure.colorbar(image, ax=grid, shrink=0.4, extend="min")
    bar.set_label("throughput over that of the better arm held")
    figure.suptitle(
        "What each strategy keeps of the better of a live pod held on and one held off",
        fontsize=14,
        weight="bold",
    )
    figure.savefig(path, facecolor="white")
    plt.close(figure)


def _map(axes: Any, mine: Mapping[tuple[int, float], Mapping[str, Any]], strategy: str) -> Any:
    clients = sorted({key[0] for key in mine})
    accepts = sorted({key[1] for key in mine})
    values = [[mine[each, accept][strategy] for accept in accepts] for each in clients]
    image = axes.imshow(
        values, vmin=LOWEST, vmax=1.0, cmap="RdYlGn", aspect="auto", origin="lower"
    )
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=6, color=_TEXT)
    axes.set_xticks(range(len(accepts)), accepts)
    axes.set_yticks(range(len(clients)), clients)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def _traces(traces: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib import pyplot as plt

    mine = [trace for trace in traces if "series" in trace]
    profile = compare.PROFILES[0]
    figure, rows = plt.subplots(
        len(mine), 1, figsize=(11, 2.0 * len(mine)), dpi=120, squeeze=False, layout="constrained"
    )
    for axes, trace in zip(rows[:, 0], mine, strict=True):
        for name in (arms.ALWAYS_ON, arms.ALWAYS_OFF, arms.BREAK_EVEN):
            rates = trace["series"][name]
            times = [(number + 0.5) * compare.SERIES_SECONDS for number in range(len(rates))]
            axes.plot(
                times,
                rates,
                color=COLOURS[name],
                linewidth=1.8 if name == arms.BREAK_EVEN else 1.1,
                label=f"{WORDS[name]} {trace[name]:.2f}",
            )
        axes.set_title(f"{trace['trace']}: {trace['what']}", loc="left", fontsize=9)
        axes.set_xlim(0, trace["seconds"])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y", color=_LIGHT, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none", ncols=3)
    rows[-1, 0].set_xlabel("seconds")
    figure.suptitle(
        f"Output tokens per second, {profile}; in the legend the ratio to the better arm held",
        fontsize=12,
    )
    figure.savefig(path, facecolor="white")
    plt.close(figure)
