"""What a run showed: the summary file, the table, and whether the demo held what it says. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from tests.demo.plan import SPECSERVE, TITLES
from tests.demo.view import STYLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from tests.demo.plan import ArmKey


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run.

    Attributes:
        summary: content of summary.json: `pods` with the flips of each pod of the SpecServe in
            mode Auto, by its engine's own word; `requests` of all three SpecServes;
            `throughput` in output tokens per second over the whole run; and `note`, which says
            why, where SpecServe was not the fastest, and is empty otherwise.
        failures: what the demo promises and this run did not show; empty if all is well.
    """

    summary: dict[str, Any]
    failures: tuple[str, ...]


def outcome(record: Mapping[str, Any]) -> Outcome:
    """Judges a record, as `Record.to_json` gives it."""
    arms = record["arms"]
    pods = [
        {
            "name": pod["name"],
            "flipsOff": sum(not flip["on"] for flip in pod["flips"]),
            "flipsOn": sum(flip["on"] for flip in pod["flips"]),
        }
        for pod in record["pods"]
    ]
    lost = {
        f"{TITLES[key]}: {problem}": count
        for key, arm in arms.items()
        for problem, count in arm["lost"].items()
    }
    throughput: dict[str, float] = {
        key: round(arms[key]["throughput"], 1) for key in ("alwaysOn", "alwaysOff", SPECSERVE)
    }
    summary = {
        "pods": pods,
        "requests": {
            "sent": sum(arm["sent"] for arm in arms.values()),
            "lost": sum(arm["sent"] - arm["finished"] for arm in arms.values()),
        },
        "throughput": throughput,
        "note": _note(record, throughput),
    }
    failures = [
        f"pod {pod['name']} went {way} not once"
        for pod in pods
        for way, key in (("off", "flipsOff"), ("back on", "flipsOn"))
        if not pod[key]
    ]
    failures += [f"{count} requests lost, {problem}" for problem, count in lost.items()]
    if not pods:
        failures.append("no pod was watched")
    return Outcome(summary, tuple(failures))


def _note(record: Mapping[str, Any], throughput: Mapping[str, float]) -> str:
    pinned: tuple[ArmKey, ...] = ("alwaysOn", "alwaysOff")
    best = max(pinned, key=lambda key: throughput[key])
    if throughput[SPECSERVE] >= throughput[best]:
        return ""
    share = throughput[SPECSERVE] / throughput[best] if throughput[best] else 0.0
    late = _late(record)
    return (
        f"SpecServe made {share:.1%} of the tokens of {TITLES[best]}: its pods were in the wrong "
        f"mode for {late:.1f} s each of {record['seconds']:.0f} s, as a switch waits for a "
        "reading beyond the bound and for the dwell to end, and requests end after the load has "
        "fallen; the rest is what short waves and a busy machine cost"
    )


def _late(record: Mapping[str, Any]) -> float:
    """Mean seconds that a pod was on above the upper bound or off below the lower one."""
    total = 0.0
    for pod in record["pods"]:
        for number, load in enumerate(record["load"]):
            at = number * record["binSeconds"]
            on = mode_at(pod["flips"], at)
            if (on and load > record["offAbove"]) or (not on and load < record["onBelow"]):
                total += record["binSeconds"]
    return total / max(1, len(record["pods"]))


def mode_at(flips: list[dict[str, Any]], at: float) -> bool:
    """Whether a pod was on at a moment; before its first flip it was what that flip ended."""
    before = [flip for flip in flips if flip["at"] <= at]
    if before:
        return bool(before[-1]["on"])
    return not flips[0]["on"] if flips else True


def table(record: Mapping[str, Any], result: Outcome) -> RenderableType:
    """The summary for people."""
    throughput = result.summary["throughput"]
    worst = min(throughput.values()) or 1.0
    shown = Table(
        title=f"The same load for {record['seconds']:.0f} s, simulated engines",
        box=box.ROUNDED,
        title_style="bold",
    )
    shown.add_column("")
    for title in ("output tok/s", "to the slowest", "requests", "lost", "flips off/on"):
        shown.add_column(title, justify="right")
    for key, arm in record["arms"].items():
        rate = throughput[key]
        flips = "pinned"
        if key == SPECSERVE:
            pods = result.summary["pods"]
            flips = ", ".join(f"{pod['flipsOff']}/{pod['flipsOn']}" for pod in pods)
        shown.add_row(
            Text(TITLES[key], STYLES[key]),
            f"{rate:,.0f}",
            f"{rate / worst:.2f}x",
            f"{arm['sent']:,}",
            f"{arm['sent'] - arm['finished']:,}",
            flips,
        )
    return shown
