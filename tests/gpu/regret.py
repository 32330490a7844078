"""The policy on a GPU: what it keeps of the better arm held, cell by cell, in one time-box.

    python3 -m tests.gpu.host
    PYTHONPATH=.:operator:HOME/operator:HOME/site python3 -m tests.gpu.regret --out $OUT

HOME is the folder of `tests.gpu.host`, which unpacks there what `tests.gpu.bundle` packed; it also
prints that path. Starts the servers on one GPU and measures blocks of `tests.gpu.plan`, the most
important first. Each window is written down when it is over, in HOME and in OUT, so the same
command goes on where the last one stopped: on the same machine by itself (with `--keep` on the
servers, too), on another with `--before` and the record of the last.

Two GPUs of one host can have a fleet each: give every one a `--home`, a `--port-offset`, its
blocks and its GPU in CUDA_VISIBLE_DEVICES, all the same `--unpacked`, and say `--beside`.

`--engine simulated` tries all of this out on simulated engines. Its result says so, and is not
published.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import signal
import sys
import tarfile
import time
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve import names, signals
from tests.bench import measure, report
from tests.engine.client import Lost, connected, until
from tests.engine.install import mount_credentials
from tests.gpu import cells, fleet, plan
from tests.gpu.host import BUNDLE, HOME, TOKEN, VERSION, Host, accelerators
from tests.gpu.load import TOKENS, Clients
from tests.gpu.plugins import simulated_acceptance
from tests.gpu.steer import Hand
from tests.gpu.tally import rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.engine.client import Engine
    from tests.gpu.plan import Block

ORDERS: dict[str, dict[str, Any]] = {
    plan.ON: {"mode": "on", "steps": max(fleet.STEPS)},
    plan.OFF: {"mode": "off", "draftKv": "cold"},
}
CURVE = "h200-a"
"""The shipped curve of one H200 that the policy is given; only of one GPU."""
TOLERATED = 0.15
"""Between the acceptance asked for and the one that the plugin counts, in tokens a round."""
WRITE_SECONDS = 5.0
"""Kept for writing the results."""
IDLE_SECONDS = 10.0


class NotSimulated(Exception):
    """The acceptance in the running server is not the one that was asked for."""


class Regret:
    """One run: as much of the plan as fits into its time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.until = time.monotonic() + options.seconds
        self.out: Path = options.out.resolve()
        self.home: Path = options.home
        self.simulated: bool = options.engine == "simulated"
        self.record = self.home / "windows.jsonl"
        self.lines: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self.blocks = plan.blocks(options.blocks)
        self.acceptance = self.home / "acceptance"
        self.place: _Place | None = None
        self.warm: set[str] = set()
        self._stack = AsyncExitStack()

    @property
    def left(self) -> float:
        return self.until - time.monotonic() - WRITE_SECONDS

    async def run(self) -> None:
        """Measure until all is done or the time is over."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        before = [path for path in (self.record, *self.options.before) if path.exists()]
        self.lines = cells.read(before)
        for path in (self.record, self.out / "windows.jsonl"):
            path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        simulated_acceptance.write(self.acceptance, plan.DEFAULT_ACCEPT)
        self.fleet = self._fleet()
        try:
            await self._servers()
            for block in self.blocks:
                await self._try(block)
        finally:
            self.finish()
            await self._leave()
            if not self.options.keep:
                self.fleet.stop()

    def _fleet(self) -> fleet.Fleet:
        options = self.options
        if self.simulated:
            mount_credentials(self.home / "credentials", TOKEN)
            launches = {
                name: fleet.simulated(self.home, name, options.profile, options.port_offset)
                for name in self.servers
            }
            return fleet.Fleet(self.home, launches)
        host = Host(options.bundle, self.home, options.unpacked)
        host.set_up()
        variables = {"NCCL_P2P_DISABLE": "1"} if options.link == "hostmem" else {}
        launches = {
            name: fleet.rendered(host, name, options.tp, variables, options.port_offset)
            for name in self.servers
        }
        return fleet.Fleet(self.home, launches)

    @property
    def servers(self) -> list[str]:
        """Those that the blocks need, and the live one, which says what it is."""
        needed = {plan.LIVE, *(block.server for block in self.blocks)}
        return [name for name in fleet.SERVERS if name in needed]

    async def _servers(self) -> None:
        if await self.fleet.take_over():
            self.say(f"servers of start {self.fleet.id} are still up")
            windows = cells.windows_of(self.lines)
            self.warm |= {each["server"] for each in windows if each["fleet"] == self.fleet.id}
            return
        await self.fleet.start(min(fleet.START_SECONDS, self.left))
        async with connected(self.fleet.launches[plan.LIVE].address) as engine:
            versions = (await engine.read())["versions"]
        gpus = accelerators().splitlines()
        gpu = gpus[0].partition(",")[0] if gpus else "none"
        self.note(
            {
                "kind": cells.FLEET,
                "id": self.fleet.id,
                "at": _now(),
                "simulated": self.simulated,
                "gpu": f"simulated, profile {self.options.profile}" if self.simulated else gpu,
                "tp": self.options.tp,
                "link": self.options.link,
                "beside": self.options.beside,
                "clients": cells.TOGETHER,
                "sglang": "simulated" if self.simulated else VERSION,
                "machine": {**measure.machine(), "accelerator": "; ".join(gpus)},
                "versions": {"python": platform.python_version(), **versions},
                "curve": self.curve,
                "traffic": fleet.traffic(),
                "windowSeconds": self.options.window,
                "started": self.fleet.started,
                "failed": self.fleet.failed,
                "commands": {
                    name: list(launch.command) for name, launch in self.fleet.launches.items()
                },
            }
        )

    @property
    def curve(self) -> str | None:
        return CURVE if self.options.tp == 1 else None

    # Blocks

    async def _try(self, block: Block) -> None:
        """Measure what fits of a block; one that fails leaves the others their turn."""
        if not self.fleet.has(block.server):
            return
        left = block.left(cells.windows_of(self.lines), self.fleet.id)
        arms = plan.fitting(left, self.options.window, self._after_loading(block))
        if not arms:
            return
        self.say(f"{block.name}: {', '.join(arms)}; {self.left:.0f} s are left")
        try:
            await self._block(block, arms)
        except NotSimulated:
            raise
        except Exception as error:  # noqa: BLE001 - device time is short: go on
            self.failed[block.name] = f"{type(error).__name__}: {error}"
            self.say(f"{block.name} failed: {self.failed[block.name]}")
            await self._leave()

    def _loaded(self, block: Block) -> _Place | None:
        """The place of a block, if it is there already."""
        # Several ranks must draw alike, so their mean changes only while none of them decodes.
        stays = self.options.tp == 1 or self.simulated
        place = self.place
        there = place is not None and place.load_of == (block.server, block.clients)
        return place if there and stays else None

    def _after_loading(self, block: Block) -> float:
        """Seconds that are left for windows of a block."""
        return self.left - (0.0 if self._loaded(block) else plan.load_seconds(block.clients))

    async def _block(self, block: Block, arms: Sequence[str]) -> None:
        place = self._loaded(block)
        if place is None:
            await self._leave()
            address = self.fleet.launches[block.server].address
            engine = await self._stack.enter_async_context(connected(address))
            await self._accept(engine, block)
            load = await self._stack.enter_async_context(Clients(engine, block.clients))
            place = self.place = _Place(self, block, engine, load)
            if block.server not in self.warm:
                await place.warm_up()
                self.warm.add(block.server)
            await load.steady()
        else:
            await self._accept(place.engine, block)
        place.block = block
        try:
            for arm, each in groupby(arms):
                await place.windows(arm, len(list(each)))
        finally:
            await place.written()

    async def _leave(self) -> None:
        """End the load."""
        self.place = None
        await self._stack.aclose()

    async def _accept(self, engine: Engine, block: Block) -> None:
        if block.accept is None:
            return
        if self.simulated:
            await _put_behaviour(engine, block.accept)
            return

        async def idle() -> bool:
            return not await _requests(engine)

        if self.options.tp > 1:
            await until(idle, IDLE_SECONDS)
        simulated_acceptance.write(self.acceptance, block.accept)

    # Record

    def note(self, line: dict[str, Any]) -> None:
        """Write a line down, here and there."""
        self.lines.append(line)
        for path in (self.record, self.out / "windows.jsonl"):
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def say(self, text: str) -> None:
        spent = self.options.seconds - (self.until - time.monotonic())
        print(f"{spent:6.1f} s  {text}", flush=True)

    def finish(self) -> None:
        """Write the results so far, and bring what was said."""
        windows = cells.windows_of(self.lines)
        if windows:
            result = cells.document(self.lines)
            report.write(
                {**result, "failedBlocks": self.failed}, self.out / cells.file_name(result)
            )
            for cell in result["cells"]:
                print(json.dumps(cell), flush=True)
        for line in plan.missing(windows, self.blocks):
            print(f"missing: {line}", flush=True)
        logs = [self.fleet.log(name) for name in self.fleet.launches]
        # As one file: few may be brought back from a GPU host.
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as archive:
            for file in (*logs, self.home / "decisions.jsonl", self.home / "local.txt"):
                if file.exists():
                    archive.add(file, file.name)


class _Place:
    """A load, and the windows under it.

    Attributes:
        block: What is measured now.
        load_of: The server, and the number of clients.
    """

    def __init__(self, run: Regret, block: Block, engine: Engine, load: Clients) -> None:
        self.run = run
        self.block = block
        self.load_of = block.server, block.clients
        self.engine = engine
        self.load = load
        self.window: float = run.options.window
        self.began = time.monotonic()
        self.hand = Hand(run.home, self._specification(), engine)
        self._writing: list[asyncio.Task[None]] = []

    async def warm_up(self) -> None:
        """Have a server do all that it will do, untimed."""
        orders = list(ORDERS.values()) if self.block.server == plan.LIVE else [None]
        for order in orders:
            if order is not None:
                await self.hand.hold(order, plan.WARM_SECONDS)
            await asyncio.sleep(plan.WARM_SECONDS)

    async def windows(self, arm: str, count: int) -> None:
        """Measure windows of one arm, one after another."""
        began = time.monotonic()
        if arm in ORDERS:
            await self.hand.hold(ORDERS[arm], plan.HELD_SECONDS + count * self.window)
            await asyncio.sleep(plan.HELD_SECONDS)
            await self._windows(arm, count, time.monotonic() - began)
        elif arm == plan.SPECSERVE:
            async with self.hand.local():
                await self._windows(arm, count, time.monotonic() - began)
        else:
            await self._windows(arm, count, time.monotonic() - self.began)

    def _specification(self) -> dict[str, Any]:
        options = self.run.options
        spec = fleet.specification(options.bundle.resolve(), fleet.STEPS, options.tp)
        if self.run.curve is not None:
            spec["policy"]["breakEven"] = {"profile": self.run.curve}
        return spec

    async def _windows(self, arm: str, count: int, settled: float) -> None:
        live = self.block.server == plan.LIVE
        before = await self.engine.read() if live else None
        begin = time.monotonic()
        for _ in range(count):
            end = begin + self.window
            lost = self.load.lost
            await asyncio.sleep(end - time.monotonic())
            after = await self.engine.read() if live else None
            line = {
                "kind": cells.WINDOW,
                "fleet": self.run.fleet.id,
                "server": self.block.server,
                "c": self.block.clients,
                "accept": self.block.accept,
                "arm": arm,
                "at": _now(),
                "seconds": self.window,
                "settledSeconds": round(settled, 2),
                "loadSeconds": round(begin - self.began, 2),
                "lost": self.load.lost - lost,
                **(_counted(before, after) if before and after else {}),
            }
            self._writing.append(asyncio.create_task(self._write(line, begin, end)))
            begin, before = end, after

    async def _write(self, line: dict[str, Any], begin: float, end: float) -> None:
        # What came just before the end is told of a little later.
        await self.load.told(end)
        spans = self.load.tally.within(begin, end)
        plain = self.load.tally.between(begin, end) / (end - begin)
        wave = self.block.clients * TOKENS / plain
        # The clients must not wait for this.
        found = await asyncio.to_thread(rate, spans, begin, end, wave)
        line["tokensPerSecond"] = round(found, 2)
        line["plainTokensPerSecond"] = round(plain, 2)
        self.run.note(line)
        shown = (
            "plainTokensPerSecond",
            "engineTokensPerSecond",
            "acceptLength",
            "drafted",
            "switches",
            "lost",
        )
        told = ", ".join(f"{key} {line[key]}" for key in shown if line.get(key) is not None)
        self.run.say(f"  {line['arm']}: {line['tokensPerSecond']} tok/s; {told}")
        found = line.get("acceptLength")
        if line["arm"] == plan.ON and (
            found is None or abs(found - self.block.accept) > TOLERATED
        ):
            raise NotSimulated(f"acceptance {self.block.accept} was asked for, {found} counted")

    async def written(self) -> None:
        """Return once all windows are written down."""
        writing, self._writing = self._writing, []
        await asyncio.gather(*writing)


def _counted(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What the plugin counted between two read-backs."""
    old, new = before["groups"][0], after["groups"][0]
    verifies = _verifies(new) - _verifies(old)
    won = verifies + _accepted(new) - _accepted(old)
    tokens = new["tokensTotal"] - old["tokensTotal"]
    return {
        "engineTokensPerSecond": round(tokens / (new["at"] - old["at"]), 2),
        "acceptLength": round(won / verifies, 3) if verifies else None,
        "drafted": round(min(1.0, won / tokens), 4) if tokens else None,
        "switches": new["ranks"][0]["switches"] - old["ranks"][0]["switches"],
        "mode": after["mode"],
        "tiers": after.get("tiers"),
    }


def _verifies(group: Mapping[str, Any]) -> int:
    return sum(each["verifies"] for each in group["acceptance"])


def _accepted(group: Mapping[str, Any]) -> int:
    return sum(sum(each["accepted"]) for each in group["acceptance"])


async def _requests(engine: Engine) -> int:
    reading = signals.from_loads(await engine.get(names.PATH_LOADS))
    return reading.running + reading.queued


async def _put_behaviour(engine: Engine, accept: float) -> None:
    import aiohttp

    async with (
        aiohttp.ClientSession() as session,
        session.put(
            f"{engine.address.url}/sim/v1/behaviour", json={"acceptLength": accept}
        ) as answer,
    ):
        if answer.status != 200:
            raise Lost(f"/sim/v1/behaviour: {answer.status} {await answer.text()}")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def main() -> int:
    """Entry point; the exit status says whether all that was planned is measured."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--home", type=Path, default=HOME)
    cli.add_argument("--bundle", type=Path, default=BUNDLE)
    cli.add_argument("--seconds", type=float, default=560.0, help="when this process has to end")
    cli.add_argument("--window", type=float, default=10.0, help="seconds of a window")
    cli.add_argument("--blocks", default=plan.BLOCKS, help="what is measured, in order")
    cli.add_argument("--port-offset", type=int, default=0)
    cli.add_argument("--unpacked", type=Path, help="the home of `tests.gpu.host`, if another")
    cli.add_argument("--beside", type=int, default=0, help="fleets on other GPUs of the host")
    cli.add_argument("--before", type=Path, action="append", default=[], help="an earlier record")
    cli.add_argument("--keep", action="store_true", help="leave the servers to the next command")
    cli.add_argument("--tp", type=int, default=1)
    cli.add_argument("--link", default="none", help="of the GPUs: none, nvlink or hostmem")
    cli.add_argument("--engine", choices=("real", "simulated"), default="real")
    cli.add_argument("--profile", default="h200-a", help="of the simulated engine")
    run = Regret(cli.parse_args())
    # Whoever ends this finds the results so far written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asyncio.run(run.run())
    return 1 if run.failed or plan.missing(cells.windows_of(run.lines), run.blocks) else 0


if __name__ == "__main__":
    sys.exit(main())
