"""The picture of a benchmark: throughput over concurrency, with the crossover marked.

matplotlib is imported only here, and only when a picture is asked for: the extra `plot` brings it.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MISSING = "a picture needs matplotlib: pip install 'specserve[plot]'"
COLOURS = {"on": "#e07a1f", "off": "#2b6cb0", "auto": "#7b5ea7", "base": "#8a929c"}
_MAIN, _TEXT, _LIGHT = "#0a7d4b", "#2a2f36", "#e6e9ed"


def available() -> bool:
    """Whether a picture can be drawn."""
    return find_spec("matplotlib") is not None


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Draw a report as PNG.

    Args:
        report: As `report.document` writes it.
        file: To write.
    """
    import matplotlib as mpl  # noqa: PLC0415 - see the module's docstring

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    settings: Any = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
    }
    with mpl.rc_context(settings):
        figure, axes = plt.subplots(figsize=(8, 4.6), dpi=150, layout="constrained")
        levels = [entry["inFlight"] for entry in report["levels"]]
        for arm in dict.fromkeys(name for entry in report["levels"] for name in entry["arms"]):
            _line(axes, report, arm)
        for crossing in report["crossovers"].get("on/off", []):
            _crossing(axes, crossing["inFlight"])
        axes.set_xscale("log")
        axes.set_xticks(levels, [str(level) for level in levels])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y", color=_LIGHT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("requests in flight")
        axes.set_ylabel("tokens per second")
        axes.set_title(_title(report), loc="left", fontsize=11)
        axes.legend(frameon=False)
        figure.savefig(file, format="png", facecolor="white")
        plt.close(figure)


def _line(axes: Any, report: Mapping[str, Any], arm: str) -> None:
    known = [entry for entry in report["levels"] if arm in entry["arms"]]
    rates = [entry["arms"][arm]["tokensPerSecond"] for entry in known]
    visits = [entry["arms"][arm]["visits"] for entry in known]
    levels = [entry["inFlight"] for entry in known]
    colour = COLOURS.get(arm, _MAIN)
    axes.plot(levels, rates, marker="o", markersize=4, linewidth=2, color=colour, label=arm)
    low, high = [min(each) for each in visits], [max(each) for each in visits]
    axes.fill_between(levels, low, high, color=colour, alpha=0.15, linewidth=0)


def _crossing(axes: Any, at: float) -> None:
    axes.axvline(at, color=_TEXT, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.text(
        at,
        1.0,
        f" {at:.0f}",
        transform=axes.get_xaxis_transform(),
        ha="left",
        va="top",
        fontsize=9,
    )


def _title(report: Mapping[str, Any]) -> str:
    facts = report["servers"].get("server", {})
    parts = [str(facts.get("servedModelName", "")), str(facts.get("engine", ""))]
    simulated = "simulated: times of a model, not of a GPU" if facts.get("simulated") else ""
    return ", ".join(part for part in (*parts, simulated) if part)
