"""All that is tried on real engines, on a CPU.

    PYTHONPATH=operator:images/engine:. python -m tests.engine.matrix [--ci]

For each version that is proved, with one tensor-parallel rank and with two, a server is started by
the command line that the operator renders, and tried. Writes
build/engine/engine-SGLANG-cpu-tpN.json and ends with an error that names what failed. `--ci` is
the part that every commit is tried with.

Engines have fixed ports, so all of it runs in a network namespace of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve_engine.sglang import upstream
from tests.bench import report
from tests.cluster import packages as debian
from tests.cluster.progress import Progress
from tests.engine import commands, environment, faults, local, measure, secrecy, trained
from tests.engine.client import connected
from tests.engine.install import REPOSITORY
from tests.engine.launch import rendered
from tests.engine.measure import Prompts
from tests.engine.server import running
from tests.engine.skeleton import module_file
from tests.engine.suite import contract

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.engine.client import Engine
    from tests.engine.launch import Launch
    from tests.engine.server import Server

OUT = REPOSITORY / "build/engine"
ALONE = "SPECSERVE_TESTS_ALONE"
STREAMS = 4
TOKENS = 250
FEWER_TOKENS = 120
ORDERS = 10
REMOVED = upstream.SCHEDULER_GET
REFUSAL_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine to be tried.

    Attributes:
        version: SGLang's.
        ranks: Tensor-parallel ranks.
        flips: Orders to be given while streams run.
        faults: Whether it is also stopped, started again and killed.
    """

    version: str
    ranks: int
    flips: int = 200
    faults: bool = True

    @property
    def name(self) -> str:
        return f"engine-{self.version}-cpu-tp{self.ranks}"


NEWEST = environment.VERSIONS[-1]
FULL = tuple(Plan(version, ranks) for version in environment.VERSIONS for ranks in (1, 2))
CI = (Plan(NEWEST, 1), Plan(NEWEST, 2, flips=60, faults=False))


@dataclass
class Cases:
    """What was tried, in order, and what failed.

    Attributes:
        seconds: How long each case took.
        failed: Why, for each that failed.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Try one case; the next one is tried whatever becomes of it."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - told at the end
            self.failed[name] = f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        self.seconds[name] = round(time.monotonic() - began, 1)
        told = "FAILED" if name in self.failed else "ok"
        print(f"  {name:40} {told:6} {self.seconds[name]:6.1f} s", flush=True)


class Trial:
    """One plan, carried out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cases = Cases()
        self.environment = environment.prepare(plan.version)
        self.pair = trained.prepare()
        self.prompts = Prompts(
            **{
                kind: tuple(texts)
                for kind, texts in json.loads((self.pair / "prompts.json").read_text()).items()
            }
        )
        self.record: dict[str, Any] = {}

    async def run(self) -> dict[str, Any]:
        """Return the record of all cases."""
        print(f"SGLang {self.plan.version}, {self.plan.ranks} rank(s)", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            launch = rendered(self.environment, self.pair, Path(scratch), self.plan.ranks)
            async with self.started(launch, "start") as (server, engine):
                stale = await self.lively(server, engine, launch)
        if self.plan.faults:
            await self.alone(stale)
        cases = self.cases
        return {
            **self.record,
            "cases": {
                "passed": [name for name in cases.seconds if name not in cases.failed],
                "failed": cases.failed,
                "seconds": cases.seconds,
            },
            **report.stamp(),
            "seconds": round(time.monotonic() - began),
        }

    @contextlib.asynccontextmanager
    async def started(self, launch: Launch, name: str) -> AsyncIterator[tuple[Server, Engine]]:
        """Run the engine, ready by the probe of its pod."""
        log = OUT / f"{self.plan.name}.{name.replace(' ', '-')}.log"
        async with (
            running(launch.command, launch.environ, launch.address, log) as server,
            connected(launch.address) as engine,
        ):
            with self.cases(name):
                await server.ready()
            yield server, engine

    async def lively(
        self, server: Server, engine: Engine, launch: Launch
    ) -> dict[str, Any] | None:
        """Try what an engine survives, and then kill it; returns a directive for it."""
        case, prompts, record = self.cases, self.prompts, self.record
        streams = prompts.both(STREAMS)
        with case("version and ranks"):
            state = await engine.read()
            record["sglang"] = state["versions"]["sglang"]
            record["device"] = "cpu"
            record["tp"] = len(state["groups"][0]["ranks"])
            assert (record["sglang"], record["tp"]) == (self.plan.version, self.plan.ranks)
            assert state["versions"]["proved"]
            assert state["availableSteps"] == [0, 1, 3]
        with case("keys are shown nowhere"):
            await secrecy.hidden(server, engine, launch)
        with case("SGLang's own route gives no orders"):
            record["setInternalState"] = await secrecy.guarded(engine, launch)
        with case("doctor"), commands.box(engine, launch) as box:
            record["doctor"] = await commands.doctor(box)
        with case("contract"):
            record["contract"] = await contract(launch.address, OUT / f"{self.plan.name}.xml")
            assert record["contract"]["failed"] == 0, record["contract"]
        with case("acceptance"):
            record["acceptLength"] = await measure.acceptance(engine, prompts, FEWER_TOKENS)
        with case("an idle engine keeps its steps"):
            await measure.idle(engine)
        with case("flips under streams"):
            record["flips"] = await measure.flipped(
                engine, streams, count=self.plan.flips, tokens=TOKENS
            )
        with case("orders to a crowded engine"):
            record["crowded"] = await measure.crowded(engine, prompts, TOKENS, ORDERS)
        with case("a lease runs out"):
            record["leaseExpired"] = await faults.expired(engine, streams)
        with case("a silent rank"):
            record["silentRank"] = await faults.silenced(server, engine, streams)
        if not self.plan.faults:
            return None
        record["faults"] = {}
        stale = None
        with case("a scheduler is killed"):
            stale = await engine.directive(mode="off")
            # None of these is near its end yet when the scheduler is killed.
            record["faults"]["schedulerKilled"] = await faults.killed(
                server, engine, prompts.hard[:STREAMS]
            )
        return stale

    async def alone(self, stale: dict[str, Any] | None) -> None:
        """Try the commands of a box without a cluster, on an engine that one of them starts.

        Args:
            stale: A directive for the process before.
        """
        case, record, prompts = self.cases, self.record, self.prompts
        record["local"] = {}
        log = OUT / f"{self.plan.name}.local.log"
        with (
            tempfile.TemporaryDirectory() as scratch,
            local.home(self.environment, self.pair, self.plan.ranks, Path(scratch), log) as home,
        ):
            async with connected(home.address) as engine:
                with case("local: start"):
                    record["local"]["start"] = await local.started(home, engine, prompts.easy[0])
                with case("an order for the process before"):
                    assert stale is not None
                    here = {"podUID": (await engine.read())["podUID"]}
                    record["faults"]["restarted"] = await faults.restarted(engine, stale | here)
                # Nobody steers a new engine, and its window holds no rounds of others, which a
                # calibration would have to wait out.
                with commands.box(engine, home.launch) as box:
                    with case("calibrate"):
                        record["calibrate"] = await commands.calibrate(box)
                    with case("bench"):
                        record["bench"] = await commands.bench(box, prompts.easy)
                with case("local: steer"):
                    record["local"]["steer"] = await local.steered(
                        home, engine, prompts.hard[:STREAMS]
                    )
                with case("local: stop under streams"):
                    record["local"]["stop"] = await local.ended(
                        home, engine, prompts.hard[:STREAMS]
                    )


async def refusal(cases: Cases) -> None:
    """Start an SGLang that lacks a name which the plugin hooks: it must end and say which."""
    print(f"SGLang {NEWEST} without {REMOVED.path}", flush=True)
    made = environment.prepare(NEWEST)
    with tempfile.TemporaryDirectory() as scratch, cases("a missing hook target is named"):
        tree = Path(scratch) / "tree"
        shutil.copytree(made.path[0], tree, copy_function=os.symlink, symlinks=True)
        edited = module_file(tree, REMOVED.module)
        text = edited.read_text()
        edited.unlink()
        name = REMOVED.name.rpartition(".")[2]
        edited.write_text(re.sub(rf"def {name}\b", "def gone", text))
        lacking = dataclasses.replace(made, path=(tree, *made.path[1:]))
        launch = rendered(lacking, trained.prepare(), Path(scratch), 1)
        log = OUT / f"engine-{NEWEST}-refusal.log"
        async with running(launch.command, launch.environ, launch.address, log) as server:
            status = await server.ended(REFUSAL_SECONDS)
            said = server.tail()
        assert status == 1, (status, said)
        assert f"this SGLang is not supported: {REMOVED.path} is missing" in said, said


async def carry_out(plans: tuple[Plan, ...]) -> dict[str, str]:
    """Carry out all plans, one after another; returns what failed."""
    OUT.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    refused = Cases()
    await refusal(refused)
    failed |= refused.failed
    for plan in plans:
        trial = Trial(plan)
        record = await trial.run()
        (OUT / f"{plan.name}.json").write_text(json.dumps(record, indent=1) + "\n")
        failed |= {f"{plan.name}: {name}": why for name, why in trial.cases.failed.items()}
    return failed


def alone(module: str = "tests.engine.matrix") -> None:
    """Go on in a network namespace of its own, with the program that this process runs."""
    if ALONE in os.environ:
        return
    if shutil.which("ip") is None:
        debian.install(Progress(), ("iproute2",))
    words = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    again = [sys.executable, "-m", module, *sys.argv[1:]]
    os.execvpe(words[0], [*words, *inside, *again], {**os.environ, ALONE: "1"})


def main() -> None:
    """Run from the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--ci", action="store_true", help="the newest version only, and less of it")
    cli.add_argument(
        "--only", default="", help="names of plans as in the files, separated by commas"
    )
    options = cli.parse_args()
    plans = CI if options.ci else FULL
    if only := {*filter(None, options.only.split(","))}:
        plans = tuple(plan for plan in plans if plan.name in only)
    # With the network, and before engines take the cores.
    for version in {plan.version for plan in plans} | {NEWEST}:
        environment.prepare(version)
    trained.prepare()
    alone()
    # Engines are sessions of their own: whoever ends this must not leave them behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = asyncio.run(carry_out(plans))
    for name, why in failed.items():
        print(f"FAILED {name}: {why}", file=sys.stderr)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
