"""How fast and how large the operator starts with many pods, and what it costs from then on.

    python -m tests.bench.startup [--resources 1000] [--pods 10000] [--rest 60] [--json FILE]

A first operator makes all objects, the Deployment controller makes the pods, and the bench brings
them up. Then the controllers are stopped and a second operator starts: nothing is left to apply,
so what is measured is reading. Every pod has a simulated engine behind its address, all in one
process, and all steady.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import report
from tests.bench.bed import Bed, bed, together
from tests.bench.measure import cpu_seconds, peak_mib, resident_mib

if TYPE_CHECKING:
    from collections.abc import Mapping

TITLE = "Start and rest with many pods"
WATCHED = "specserve_watched_objects"
STRETCH = "specserve_sample_period_stretch_ratio"
CALLS = "specserve_admin_request_duration_seconds_count"
READY_GOAL_SECONDS, MEMORY_GOAL_MIB = 10, 150
LONGEST_START_SECONDS = 300.0
LOOK_SECONDS = 0.1
#: SpecServes that are created in one go.
WAVE = 100


async def populate(on: Bed, resources: int, pods: int) -> dict[str, Any]:
    """Create everything with a first operator, from nothing to settled."""
    each = math.ceil(pods / resources)
    began = time.monotonic()
    # The API server and the controllers fill a small machine for minutes.
    on.start_operator(lease_seconds="60", renew_seconds="45", log_level="WARNING")
    for first in range(0, resources, WAVE):
        wave = range(first, min(first + WAVE, resources))
        await together(on.create(f"bench-{index}", each, {}) for index in wave)
        await on.created(wave.stop * each, 600)
        print(f"{wave.stop * each} pods created: {time.monotonic() - began:.0f} s", flush=True)
    assert on.operator is not None
    taken = {
        "createdSeconds": round(time.monotonic() - began, 1),
        "operatorCpuSeconds": round(cpu_seconds(on.operator.pid), 1),
        "operatorPeakMiB": round(peak_mib(on.operator.pid), 1),
        "writes": sum(on.writes().values()),
    }
    # Without it, so that the engines are not read while this process plays kubelet.
    on.stop_operator()
    await on.bring_up(resources * each, 1200)
    print(f"pods up: {time.monotonic() - began:.0f} s", flush=True)
    on.start_operator(lease_seconds="60", renew_seconds="45", log_level="WARNING")
    await on.settled(1200)
    await on.quiet(5, 600)
    print(f"settled: {time.monotonic() - began:.0f} s", flush=True)
    on.cluster.controller_manager.stop()
    on.stop_operator()
    return taken


async def start(on: Bed, resources: int, pods: int) -> dict[str, Any]:
    """Start the operator on what is there; when it had seen what, and at what cost."""
    writes = on.writes()
    began = time.monotonic()
    on.start_operator()
    operator = on.operator
    assert operator is not None
    meter = on.meter()
    marks: dict[str, dict[str, float]] = {}

    def mark(what: str) -> None:
        if what not in marks:
            marks[what] = {
                "seconds": round(time.monotonic() - began, 2),
                "cpuSeconds": round(cpu_seconds(operator.pid), 2),
                "residentMiB": round(resident_mib(operator.pid), 1),
            }
            print(f"{what}: {marks[what]}", flush=True)

    async def all_read() -> bool:
        try:
            seen = await on.metrics(WATCHED, CALLS)
        except OSError:  # does not listen yet
            return False
        if seen.get(f"{WATCHED}{{resource=pods}}", 0) >= pods:
            mark("all pods seen")
            if seen.get(f"{WATCHED}{{resource=specserves}}", 0) >= resources:
                mark("all pods and SpecServes seen")
        calls = {
            call: seen.get(f"{CALLS}{{call={call},code=200}}", 0) for call in ("loads", "read")
        }
        if calls["read"] >= pods and calls["loads"] >= pods:
            mark("every engine read")
        return "every engine read" in marks

    await on.until(all_read, "every engine read", LONGEST_START_SECONDS, LOOK_SECONDS)
    await on.quiet(5)
    return {
        "marks": marks,
        "writes": _written(writes, on.writes()),
        "failedCalls": {
            name: count
            for name, count in (await on.metrics(CALLS)).items()
            if "code=200" not in name
        },
        "used": meter.read(),
    }


async def rest(on: Bed, seconds: float) -> dict[str, Any]:
    """Watch the operator at work while nothing changes."""
    writes, calls, meter = on.writes(), await on.metrics(CALLS), on.meter()
    await asyncio.sleep(seconds)
    used, after = meter.read(), await on.metrics(CALLS, STRETCH)
    stretch = after.pop(STRETCH)
    assert on.operator is not None
    return {
        "peakMiB": round(peak_mib(on.operator.pid), 1),
        "used": used,
        "writes": _written(writes, on.writes()),
        "callsPerSecond": {
            name.partition("{")[2].rstrip("}"): round(
                (count - calls.get(name, 0)) / used["seconds"], 1
            )
            for name, count in after.items()
        },
        "samplePeriodSeconds": round(0.5 * stretch, 2),
    }


def _written(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    changes = {what: count - before.get(what, 0) for what, count in after.items()}
    return {what: count for what, count in changes.items() if count}


async def measure(resources: int, pods: int, seconds: float) -> dict[str, Any]:
    """Run the benchmark; the result as it is written to the file."""
    result = report.heading("startup")
    each = math.ceil(pods / resources)
    result["population"] = {"specserves": resources, "pods": resources * each}
    async with bed(resources * each) as on:
        result["creation"] = await populate(on, resources, pods)
        result["start"] = await start(on, resources, resources * each)
        result["rest"] = await rest(on, seconds)
    return result


def tables(result: Mapping[str, Any]) -> str:
    """The result for people."""
    begun, resting = result["start"], result["rest"]
    started = report.table(
        ("since the process began", "s", "CPU s", "MiB"),
        [
            (what, f"{at['seconds']:.1f}", f"{at['cpuSeconds']:.1f}", f"{at['residentMiB']:.0f}")
            for what, at in begun["marks"].items()
        ],
    )
    rested = report.table(
        (
            *("at rest for s", "cores", "MiB", "peak MiB", "each pod read every s"),
            *("API writes", "engines cores", "others cores"),
        ),
        [
            (
                f"{resting['used']['seconds']:.0f}",
                f"{resting['used']['cores']['operator']:.2f}",
                f"{resting['used']['residentMiB']['operator']:.0f}",
                f"{resting['peakMiB']:.0f}",
                f"{resting['samplePeriodSeconds']:g}",
                _words(resting["writes"]),
                f"{resting['used']['cores']['engines']:.2f}",
                f"{resting['used']['othersCores']:.2f}",
            )
        ],
    )
    of = result["population"]
    failed = _words(begun["failedCalls"])
    goals = f"Goals: all seen within {READY_GOAL_SECONDS} s, {MEMORY_GOAL_MIB} MiB."
    return "\n\n".join(
        (
            f"{of['specserves']} SpecServes with {of['pods']} pods. {goals}",
            started,
            f"Writes meanwhile: {_words(begun['writes'])}. Calls that failed: {failed}.",
            rested,
            f"Calls to engines a second at rest: {_words(resting['callsPerSecond'])}.",
            f"The first operator made all of it from nothing: {_words(result['creation'])}.",
        )
    )


def _words(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def main() -> None:
    """Entry point."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--resources", type=int, default=1000)
    options.add_argument("--pods", type=int, default=10_000)
    options.add_argument("--rest", type=float, default=60.0, help="seconds")
    options.add_argument("--json", type=Path, default=report.BUILD / "startup.json")
    given = options.parse_args()
    result = asyncio.run(measure(given.resources, given.pods, given.rest))
    report.write(result, given.json)
    print(f"\n{report.provenance(result)}\n\n{tables(result)}\n\n{given.json}")


if __name__ == "__main__":
    main()
