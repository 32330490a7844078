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

CHANGES = 2
"""How often a pod is to go off and back on: for the load, and for the acceptance."""

PROBING = "Probing"
"""Code of the decision that begins a probe."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run.

    Attributes:
        summary: content of summary.json: `pods` with the flips of each pod of the SpecServe in
            mode Auto, by its engine's own word, and the short looks that the operator had it
            take; `requests` of all three SpecServes;
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
            "probes": sum(
                event["code"] == PROBING and event["pod"] == pod["name"]
                for event in record["events"]
            ),
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
        f"pod {pod['name']} went {way} {pod[key]} times, not for the load and for the drop"
        for pod in pods
        for way, key in (("off", "flipsOff"), ("back on", "flipsOn"))
        if pod[key] < CHANGES
    ]
    failures += _untold(record)
    failures += [f"{count} requests lost, {problem}" for problem, count in lost.items()]
    if not pods:
        failures.append("no pod was watched")
    return Outcome(summary, tuple(failures))


def _untold(record: Mapping[str, Any]) -> list[str]:
    """What of the drop the operator did not answer."""
    begin, end = record["drop"]
    events = record["events"]
    missing = []
    if not any(
        begin <= event["at"] < end and "below break-even" in event["message"] for event in events
    ):
        missing.append("no decision named the acceptance that fell below break-even")
    if not any(event["at"] >= end and event["code"] == PROBING for event in events):
        missing.append("no probe looked whether the acceptance is back")
    return missing


def _note(record: Mapping[str, Any], throughput: Mapping[str, float]) -> str:
    pinned: tuple[ArmKey, ...] = ("alwaysOn", "alwaysOff")
    best = max(pinned, key=lambda key: throughput[key])
    if throughput[SPECSERVE] >= throughput[best]:
        return ""
    share = throughput[SPECSERVE] / throughput[best] if throughput[best] else 0.0
    late = _late(record)
    return (
        f"SpecServe made {share:.1%} of the tokens of {TITLES[best]}: its pods were in the wrong "
        f"mode for {late:.1f} s each of {record['seconds']:.0f} s, as a switch waits for evidence "
        "and for the dwell to end, and nobody sees the acceptance while off; the rest is what "
        "short phases, probes and a busy machine cost"
    )


def _late(record: Mapping[str, Any]) -> float:
    """Mean seconds that a pod was on below break-even or off above it, as measured."""
    total = 0.0
    for pod in record["pods"]:
        for number, (won, needed) in enumerate(
            zip(record["acceptance"], record["breakEven"], strict=True)
        ):
            if mode_at(pod["flips"], number * record["binSeconds"]) != (won > needed):
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
    for title in ("output tok/s", "to the slowest", "requests", "lost", "flips off/on", "probes"):
        shown.add_column(title, justify="right")
    for key, arm in record["arms"].items():
        rate = throughput[key]
        flips, looks = "pinned", ""
        if key == SPECSERVE:
            pods = result.summary["pods"]
            flips = ", ".join(f"{pod['flipsOff']}/{pod['flipsOn']}" for pod in pods)
            looks = ", ".join(str(pod["probes"]) for pod in pods)
        shown.add_row(
            Text(TITLES[key], STYLES[key]),
            f"{rate:,.0f}",
            f"{rate / worst:.2f}x",
            f"{arm['sent']:,}",
            f"{arm['sent'] - arm['finished']:,}",
            flips,
            looks,
        )
    return shown
