"""The picture of a run: throughput of the three, the traffic, and where SpecServe flipped."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.demo.outcome import PROBING, mode_at
from tests.demo.plan import SPECSERVE, TITLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

COLOURS = {"specserve": "#0a7d4b", "alwaysOn": "#e07a1f", "alwaysOff": "#2b6cb0"}
SMOOTH_SECONDS = 4.0
_GREY, _LIGHT, _TEXT = "#8a929c", "#e6e9ed", "#2a2f36"


def smooth(values: Sequence[float], bins: int) -> list[float]:
    """Centred means over up to this many bins; fewer at the ends, where they stay centred."""
    half = bins // 2
    means = []
    for number in range(len(values)):
        reach = min(half, number, len(values) - 1 - number)
        window = values[number - reach : number + reach + 1]
        means.append(sum(window) / len(window))
    return means


def spans(flips: list[dict[str, Any]], seconds: float) -> list[tuple[float, float, bool]]:
    """The stretches of a pod's run as (begin, end, on)."""
    edges = [0.0, *(min(flip["at"], seconds) for flip in flips), seconds]
    return [(a, b, mode_at(flips, (a + b) / 2)) for a, b in pairwise(edges) if b > a]


def draw(record: Mapping[str, Any], file: Path) -> None:
    """Writes the picture as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    seconds = record["seconds"]
    settings: Any = {
        "font.size": 11,
        "font.family": "DejaVu Sans",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _GREY,
        "axes.labelcolor": _TEXT,
        "text.color": _TEXT,
        "xtick.color": _GREY,
        "ytick.color": _GREY,
        "xtick.labelcolor": _TEXT,
        "ytick.labelcolor": _TEXT,
    }
    with mpl.rc_context(settings):
        figure, (rates, load, weighed, modes) = plt.subplots(
            4,
            1,
            figsize=(11, 8.8),
            dpi=150,
            sharex=True,
            height_ratios=(5, 1.5, 2, 0.35 * max(1, len(record["pods"]))),
            layout="constrained",
        )
        _draw_rates(rates, record)
        _draw_load(load, record)
        _draw_weighed(weighed, record)
        _draw_modes(modes, record)
        for axes in (rates, load, weighed, modes):
            _shade(axes, record)
            axes.set_xlim(0, seconds)
        modes.set_xlabel("seconds")
        figure.savefig(file, facecolor="white")
        plt.close(figure)


def _times(record: Mapping[str, Any]) -> list[float]:
    return [(number + 0.5) * record["binSeconds"] for number in range(len(record["load"]))]


def _draw_rates(axes: Any, record: Mapping[str, Any]) -> None:
    width = record["binSeconds"]
    bins = max(1, round(SMOOTH_SECONDS / width))
    times = _times(record)
    arms = record["arms"]
    for key in ("alwaysOn", "alwaysOff", SPECSERVE):
        rates = smooth([tokens / width for tokens in arms[key]["tokens"]], bins)
        main = key == SPECSERVE
        axes.plot(
            times,
            rates,
            color=COLOURS[key],
            linewidth=3.0 if main else 1.8,
            zorder=4 if main else 3,
            label=f"{TITLES[key]}   {arms[key]['throughput']:,.0f} tok/s over the whole run",
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=_LIGHT, linewidth=0.8, zorder=0)
    axes.tick_params(length=0)
    axes.set_title(
        "Speculation on exactly while it pays", loc="left", fontsize=18, weight="bold", pad=50
    )
    axes.text(
        0,
        1.03,
        "Output tokens per second of three SpecServes under the same load; simulated engines with "
        f"round times\nmeasured on an H200, {record['slowMotion']:g} times slower. Shaded: "
        "speculation is off in SpecServe's pods; diamonds: short probes.",
        transform=axes.transAxes,
        fontsize=11,
        linespacing=1.4,
        color="#5d6670",
    )
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(
        range(len(labels)),
        key=lambda i: -arms[("alwaysOn", "alwaysOff", SPECSERVE)[i]]["throughput"],
    )
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="upper right",
        frameon=True,
        framealpha=0.92,
        edgecolor="none",
    )
    axes.set_ylabel(f"tok/s, mean of {SMOOTH_SECONDS:g} s")


def _draw_load(axes: Any, record: Mapping[str, Any]) -> None:
    axes.fill_between(_times(record), record["load"], color="#c9d1da", linewidth=0, zorder=2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("in flight\nper pod")
    axes.tick_params(length=0)


def _draw_weighed(axes: Any, record: Mapping[str, Any]) -> None:
    axes.plot(
        _times(record),
        record["acceptance"],
        color=_GREY,
        linewidth=1.2,
        linestyle=(0, (4, 3)),
        drawstyle="steps-mid",
        label="acceptance of the prompts",
    )
    seen = record["weighed"]
    times = [each["at"] for each in seen]
    for key, colour, text in (
        ("acceptance", COLOURS[SPECSERVE], "as SpecServe knows it"),
        ("breakEven", "#b3261e", "break-even at the batch"),
    ):
        axes.plot(times, [each[key] for each in seen], color=colour, linewidth=2.0, label=text)
    axes.set_ylim(1, 2.9)  # the legend fits above
    axes.set_ylabel("tokens\nper verify")
    axes.tick_params(length=0)
    axes.legend(
        loc="upper right", ncols=3, fontsize=9, frameon=True, framealpha=0.92, edgecolor="none"
    )


def _draw_modes(axes: Any, record: Mapping[str, Any]) -> None:
    for row, pod in enumerate(record["pods"]):
        for begin, end, on in spans(pod["flips"], record["seconds"]):
            colour = COLOURS[SPECSERVE] if on else "#b9c0c9"
            axes.barh(row, end - begin, left=begin, height=0.72, color=colour, zorder=2)
            if end - begin > record["seconds"] * 0.04:
                axes.text(
                    (begin + end) / 2,
                    row,
                    "on" if on else "off",
                    ha="center",
                    va="center",
                    color="white" if on else _TEXT,
                    fontsize=9,
                    weight="bold",
                    zorder=3,
                )
        looks = [
            event["at"]
            for event in record["events"]
            if event["code"] == PROBING and event["pod"] == pod["name"]
        ]
        axes.plot(
            looks,
            [row] * len(looks),
            linestyle="none",
            marker="D",
            markersize=6,
            color="#c02f8f",
            markeredgecolor="white",
            zorder=4,
        )
    rows = range(len(record["pods"]))
    axes.set_yticks(rows, [f"pod {row + 1}" for row in rows])
    axes.set_ylim(-0.6, len(record["pods"]) - 0.4)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _shade(axes: Any, record: Mapping[str, Any]) -> None:
    pods = record["pods"]
    alpha = 0.10 / max(1, len(pods))
    for pod in pods:
        for begin, end, on in spans(pod["flips"], record["seconds"]):
            if not on:
                axes.axvspan(begin, end, color="#2b6cb0", alpha=alpha, linewidth=0, zorder=0)
        for flip in pod["flips"]:
            if flip["at"] <= record["seconds"]:
                axes.axvline(flip["at"], color=_GREY, linewidth=0.7, alpha=0.7, zorder=1)
