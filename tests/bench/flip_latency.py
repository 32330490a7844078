"""How long from a threshold crossed at the engine to the directive in force there.

    python -m tests.bench.flip_latency [--pods 1,10,100,1000] [--repeats N] [--json FILE]

The load that every engine reports is scripted: it jumps from one side of the bounds to the other,
for all pods in one instant or for each at a moment of its own. The clock stops when the engine's
scheduler takes the order over; its answer is on its way then, and the operator's time for a whole
switch call is shown beside. Both ends are read off one machine's monotonic clock, in the process
of the engines. Dwell is 0, since a dwell is a wait that somebody asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import report
from tests.bench.bed import CALM, CROWDED, Bed, bed, together
from tests.bench.measure import Distribution

if TYPE_CHECKING:
    from collections.abc import Mapping

TITLE = "From a threshold crossed to the directive in force"
PODS_PER_RESOURCE = 10
POLICY = {"dwellOnSeconds": 0, "dwellOffSeconds": 0, "maxFlipsPerHour": 3600}
PERIOD_SECONDS = 0.5
#: Seconds over which the moments of a staggered crossing lie.
STAGGER_SECONDS = 10.0
REST_SECONDS = 20.0
LONGEST_SECONDS = 60.0
GOALS = {100: 1.0, 1000: 3.0}
NOTES = """\
Real Pod objects on a real API server, ten to a SpecServe; simulated engines, all in one process;
one operator with its own rights. The load that an engine reports jumps over a bound, and the clock
stops when its scheduler has taken the order over. Dwell is 0. `period` is the sample period in
force: half of it is the mean wait for the next reading. `others` is what everything but the
operator, the engines, the control plane and the benchmark took of the machine meanwhile."""
STRETCH = "specserve_sample_period_stretch_ratio"
SWITCH_SUM = "specserve_admin_request_duration_seconds_sum"
SWITCHES = ("specserve_admin_request_duration_seconds_count", SWITCH_SUM)


def _samples_wanted(pods: int) -> int:
    """Crossings of a size in all: enough for a p99, few enough for the large sizes."""
    return max(4, math.ceil(100 / pods))


async def grow(on: Bed, pods: int) -> None:
    """Have so many pods in all, ten to a SpecServe."""
    before = len(on.pods)
    for index in range(math.ceil(pods / PODS_PER_RESOURCE)):
        name = f"bench-{index}"
        replicas = min(PODS_PER_RESOURCE, pods - index * PODS_PER_RESOURCE)
        first = index * PODS_PER_RESOURCE
        if first >= before:
            await on.create(name, replicas, POLICY)
        elif before < first + replicas:
            await on.scale(name, replicas)
    await on.bring_up(pods, 120 + pods / 5)
    await on.settled(120)


async def crossing(on: Bed, *, crowded: bool, staggered: bool) -> list[float]:
    """Let every pod's load cross its bound; the seconds until each was switched."""
    behaviour = CROWDED if crowded else CALM
    mode = "off" if crowded else "on"
    here = list(on.pods.values())
    began: dict[str, float] = {}
    if staggered:

        async def later(address: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            began[address] = await on.behave_one(address, behaviour)

        await together(
            (later(address, random.uniform(0, STAGGER_SECONDS)) for address in here),
            most=len(here),
        )
    else:
        at = await on.behave(behaviour)
        began = dict.fromkeys(here, at)
    ended: dict[str, float] = {}

    async def all_switched() -> bool:
        for address, orders in (await on.applied()).items():
            if address not in began or address in ended:
                continue
            for order in orders:
                if order["at"] >= began[address] and order["mode"] == mode:
                    ended[address] = order["at"]
                    break
        return len(ended) == len(began)

    await on.until(all_switched, f"{len(began)} pods switched {mode}", LONGEST_SECONDS)
    return [ended[address] - began[address] for address in began]


async def crossings(on: Bed, repeats: int, *, staggered: bool) -> dict[str, Any]:
    """Cross back and forth, and sum up."""
    meter, writes, calls = on.meter(), sum(on.writes().values()), await on.metrics(*SWITCHES)
    latencies: list[float] = []
    for turn in range(repeats):
        # Crossings come at any phase of the sample period.
        await asyncio.sleep(PERIOD_SECONDS * random.uniform(1, 2))
        latencies += await crossing(on, crowded=turn % 2 == 0, staggered=staggered)
    used = meter.read()
    after = await on.metrics(*SWITCHES, STRETCH)
    return {
        "pods": len(on.pods),
        "pattern": "staggered" if staggered else "at once",
        "crossings": repeats,
        "seconds": Distribution.of(latencies).to_json(),
        "switchCallMeanSeconds": _mean_switch(calls, after),
        "samplePeriodSeconds": round(PERIOD_SECONDS * after[STRETCH], 3),
        "writes": sum(on.writes().values()) - writes,
        "used": used,
    }


def _mean_switch(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    count, total = (
        after[f"{name}{{call=switch,code=200}}"] - before[f"{name}{{call=switch,code=200}}"]
        for name in SWITCHES
    )
    return round(total / count, 4)


async def rest(on: Bed) -> dict[str, Any]:
    """Watch the operator while nothing crosses and the last crossing is written down."""
    await on.quiet()
    writes = on.writes()
    meter = on.meter()
    await asyncio.sleep(REST_SECONDS)
    used = meter.read()
    after = on.writes()
    return {
        "pods": len(on.pods),
        "used": used,
        "writes": sum(after.values()) - sum(writes.values()),
        "writesWithoutLease": sum(
            count - writes.get(what, 0) for what, count in after.items() if what != "leases"
        ),
    }


async def measure(sizes: list[int], repeats: int | None) -> dict[str, Any]:
    """Run the benchmark; the result as it is written to the file."""
    result = report.heading("flip_latency")
    result |= {
        "settings": {
            "podsPerSpecServe": PODS_PER_RESOURCE,
            "samplePeriodSeconds": PERIOD_SECONDS,
            "staggerSeconds": STAGGER_SECONDS,
            **POLICY,
        },
        "rows": [],
        "rest": [],
    }
    async with bed(max(sizes)) as on:
        on.start_operator()
        for pods in sizes:
            print(f"{pods} pods: bringing up", flush=True)
            await grow(on, pods)
            await crossings(on, 2, staggered=False)  # connections open, code paths warm
            turns = repeats or _samples_wanted(pods)
            for staggered in (False, True):
                # An even number, so that each pattern begins with calm engines.
                count = 4 if staggered else max(2, turns // 2 * 2)
                row = await crossings(on, count, staggered=staggered)
                result["rows"].append(row)
                print(f"{pods} pods {row['pattern']}: {row['seconds']}", flush=True)
            result["rest"].append(await rest(on))
    return result


def tables(result: Mapping[str, Any]) -> str:
    """The result for people."""
    flips = report.table(
        (
            *("pods", "crossing", "flips", "p50 s", "p90 s", "p99 s", "max s", "goal p99"),
            *("switch call ms", "period s", "operator cores", "MiB", "API writes per flip"),
            *("engines cores", "others cores"),
        ),
        [
            (
                *(row["pods"], row["pattern"], row["seconds"]["count"]),
                *(f"{row['seconds'][each]:.3f}" for each in ("p50", "p90", "p99", "max")),
                f"{GOALS[row['pods']]:g}" if row["pods"] in GOALS else "-",
                f"{row['switchCallMeanSeconds'] * 1000:.1f}",
                f"{row['samplePeriodSeconds']:.2f}",
                f"{row['used']['cores']['operator']:.2f}",
                f"{row['used']['residentMiB']['operator']:.0f}",
                f"{row['writes'] / row['seconds']['count']:.2f}",
                f"{row['used']['cores']['engines']:.2f}",
                f"{row['used']['othersCores']:.2f}",
            )
            for row in result["rows"]
        ],
    )
    resting = report.table(
        ("pods at rest", "seconds", "operator cores", "MiB", "writes", "of them not the lease"),
        [
            (
                row["pods"],
                f"{row['used']['seconds']:.0f}",
                f"{row['used']['cores']['operator']:.3f}",
                f"{row['used']['residentMiB']['operator']:.0f}",
                row["writes"],
                row["writesWithoutLease"],
            )
            for row in result["rest"]
        ],
    )
    return f"{NOTES}\n\n{flips}\n\n{resting}"


def main() -> None:
    """Entry point."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pods", default="1,10,100,1000", help="sizes, ascending")
    options.add_argument("--repeats", type=int, help="crossings of each size at once")
    options.add_argument("--json", type=Path, default=report.BUILD / "flip_latency.json")
    given = options.parse_args()
    sizes = sorted({int(each) for each in given.pods.split(",")})
    result = asyncio.run(measure(sizes, given.repeats))
    report.write(result, given.json)
    print(f"\n{report.provenance(result)}\n\n{tables(result)}\n\n{given.json}")


if __name__ == "__main__":
    main()
