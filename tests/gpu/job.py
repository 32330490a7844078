"""All that is to be found out on a GPU host, in one command and one time-box.

    PYTHONPATH=. python3 -m tests.gpu.job --out $OUT [--tp 2]

Needs the folder that `tests.gpu.bundle` packed. Starts three servers one after the other: the
8B shape without speculation, the same with EAGLE-3 and the plugin, and the trained pair with the
plugin. Writes OUT/gpu.json after each step, so that what was found is there even if time runs
out, and OUT/engine-VERSION-h200-tpN.json in the form that `tests.engine` writes.

Weights of the 8B shape are made up and its acceptance is simulated (2.5 tokens a round): round
times and latencies are real, texts are not. Texts are compared on the trained pair, whose drafts
are really verified.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine.client import Address, Engine, connected, ranks_of, until
from tests.engine.flips import Latencies, Load, flip, percentiles, switches
from tests.engine.server import Server, running
from tests.engine.suite import contract
from tests.gpu.host import ADMIN_PORT, BUNDLE, HOME, PORT, TOKEN, VERSION, Host, accelerators

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

STEPS = (0, 1, 3)
LEVELS = (1, 8, 64, 200)
ACCEPTANCE = "2.5"
PROMPT, TOKENS = 128, 256
GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 200, 224, 256)
FLIPS = 120
FLIP_SECONDS = 10.0
PAIR_TOKENS = 192


class OutOfTime(Exception):
    """The time-box is used up."""


class Job:
    """The steps, and what they have found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.host = Host(options.bundle, options.home)
        self.out: Path = options.out.resolve()
        self.tensor_parallel: int = options.tp
        self.until = time.monotonic() + options.seconds
        self.found: dict[str, Any] = {"sglang": VERSION, "tp": options.tp, "seconds": {}}
        self.address = Address(PORT, ADMIN_PORT, TOKEN)
        self.random = random.Random(5)

    # Frame

    @asynccontextmanager
    async def step(self, name: str, needs: float = 5.0) -> AsyncIterator[None]:
        """Time a step, and keep what was found so far whatever becomes of it."""
        left = self.until - time.monotonic()
        if left < needs:
            raise OutOfTime(f"{name} needs {needs:.0f} s, {left:.0f} s are left")
        began = time.monotonic()
        try:
            yield
        finally:
            self.found["seconds"][name] = round(time.monotonic() - began, 1)
            self.save()
            print(f"{name}: {self.found['seconds'][name]} s", flush=True)

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu.json").write_text(json.dumps(self.found, indent=1))

    async def run(self) -> None:
        """Take all steps; one that fails leaves the others their turn."""
        async with self.step("setup"):
            self.set_up()
        for name, needs, step in (
            ("plain", 120, self.plain),
            ("live", 90, self.live),
            ("pair", 60, self.pair),
        ):
            try:
                async with self.step(name, needs):
                    await step()
            except Exception as error:  # noqa: BLE001 - device time is short: go on
                self.found.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"
                print(f"{name} failed: {error}", flush=True)
        self.save()
        (self.out / f"engine-{VERSION}-h200-tp{self.tensor_parallel}.json").write_text(
            json.dumps(self.record(), indent=1)
        )

    # Servers

    def set_up(self) -> None:
        """Unpack the bundle, and write the adaptive configuration."""
        self.host.set_up()
        adaptive = {"update_interval": 100}
        adaptive |= {size: {"candidate_steps": list(STEPS)} for size in ("1", "8", "32", "128")}
        (self.host.home / "adaptive.json").write_text(json.dumps(adaptive))
        self.found["gpu"] = accelerators()

    def environ(self, *, live: bool, **more: str) -> dict[str, str]:
        """Return a server's environment."""
        steps = ",".join(map(str, STEPS))
        ours = {"SPECSERVE_REQUIRE_LIVE": "1", "SPECSERVE_STEPS": steps}
        return self.host.environ(live=live, **ours, **more)

    def command(self, model: Path, *flags: str) -> list[str]:
        """Return a server's command line."""
        parallel = ["--tp-size", str(self.tensor_parallel)]
        if self.tensor_parallel > 1:
            # Both ask for NVLink multicast otherwise, which shared hosts cannot bear.
            parallel += ["--enforce-disable-flashinfer-allreduce-fusion"]
            parallel += ["--disable-custom-all-reduce"]
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(PORT), *parallel),
            *("--context-length", "4096", "--mem-fraction-static", "0.7"),
            *("--max-running-requests", "256", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--cuda-graph-backend-prefill", "disabled"),
            *("--cuda-graph-bs-decode", *map(str, GRAPH_SIZES), "--enable-metrics"),
            *("--decode-log-interval", "20", *flags),
        ]

    def speculation(self, algorithm: str, draft: Path) -> list[str]:
        """Return the flags of live speculation."""
        return [
            *("--speculative-algorithm", algorithm),
            *("--speculative-draft-model-path", str(draft)),
            *("--speculative-num-steps", str(max(STEPS)), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(max(STEPS) + 1), "--speculative-adaptive"),
            *("--speculative-adaptive-config", str(self.host.home / "adaptive.json")),
        ]

    @asynccontextmanager
    async def server(
        self, name: str, command: Sequence[str], environ: dict[str, str], *, live: bool
    ) -> AsyncIterator[tuple[Server, Engine]]:
        """Run a server that is ready."""
        log = self.out / f"{name}.log"
        async with running(command, environ, self.address, log) as server:
            async with self.step(f"{name}: start"):
                seconds = min(260.0, self.until - time.monotonic())
                await server.ready(admin=live, seconds=seconds)
            async with connected(self.address) as engine:
                yield server, engine

    # Measurements

    def prompt(self, _: int = 0) -> list[int]:
        """Return token ids that no cache has seen."""
        return [self.random.randrange(1_000, 30_000) for _ in range(PROMPT)]

    async def throughput(self, engine: Engine, concurrency: int) -> float:
        """Return tokens per second of a closed loop, after a short warm-up."""
        await self.closed_loop(engine, concurrency, concurrency, 16)
        rounds = 1 if concurrency >= 64 else 3
        return await self.closed_loop(engine, concurrency, rounds * concurrency, TOKENS)

    async def closed_loop(
        self, engine: Engine, concurrency: int, requests: int, tokens: int
    ) -> float:
        prompts = [self.prompt() for _ in range(requests)]

        async def worker() -> int:
            count = 0
            while prompts:
                answer = await engine.generate(prompts.pop(), tokens, stream=False)
                count += len(answer.ids) if answer.complete else 0
            return count

        began = time.monotonic()
        counts = await asyncio.gather(*(worker() for _ in range(concurrency)))
        return round(sum(counts) / (time.monotonic() - began), 1)

    async def plain(self) -> None:
        """The 8B shape without speculation and without the plugin."""
        command = self.command(
            self.host.bundle / "target", "--load-format", "dummy", "--skip-tokenizer-init"
        )
        async with self.server("plain", command, self.environ(live=False), live=False) as (
            _,
            engine,
        ):
            self.found["plain"] = {c: await self.throughput(engine, c) for c in LEVELS}

    async def live(self) -> None:
        """The 8B shape with EAGLE-3 and the plugin: contract, flips, arms held."""
        command = self.command(
            self.host.bundle / "target",
            *("--load-format", "dummy", "--skip-tokenizer-init"),
            *self.speculation("EAGLE3", self.host.bundle / "draft"),
        )
        environ = self.environ(live=True, SGLANG_SIMULATE_ACC_LEN=ACCEPTANCE)
        async with self.server("live", command, environ, live=True) as (server, engine):
            async with self.step("contract", 30):
                self.found["contract"] = await contract(
                    self.address, self.out / "contract.xml", self.host.site
                )
            self.found["flips"] = {}
            for concurrency in LEVELS:
                async with self.step(f"flips at {concurrency}", 20):
                    self.found["flips"][concurrency] = await self.flips(engine, concurrency)
            self.found["held"] = {}
            for name, order in (
                ("off cold", {"mode": "off", "draftKv": "cold"}),
                ("off warm", {"mode": "off", "draftKv": "warm"}),
                ("on 3", {"mode": "on", "steps": 3}),
            ):
                async with self.step(f"held {name}", 25):
                    self.found["held"][name] = await self.held(engine, order)
            self.found["tail"] = server.tail()[-2000:]

    async def flips(self, engine: Engine, concurrency: int) -> dict[str, Any]:
        """Switch while requests run."""
        await engine.order(mode="on", steps=1)
        await self.closed_loop(engine, min(concurrency, 8), min(concurrency, 8), 8)
        before = switches(await engine.read())
        load = Load(engine, self.prompt, 2 * TOKENS, concurrency, stream=concurrency <= 8)
        async with load:
            await _running(engine, concurrency)
            count, latencies = await flip(engine, FLIPS, seconds=FLIP_SECONDS)
        after = switches(await engine.read())
        return {
            "count": count,
            "requests": len(load.answers),
            "requestsLost": load.lost,
            "switches": [new - old for new, old in zip(after, before, strict=True)],
            "latencies": vars(latencies),
            "directiveToStateMs": percentiles(latencies.state),
            "answeredMs": percentiles(latencies.answered),
            "seenMs": percentiles(latencies.seen),
        }

    async def held(self, engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
        """Hold one order; tokens per second by level, and what the rounds said of it."""
        await engine.order(**order, leaseSeconds=600)
        rates = {concurrency: await self.throughput(engine, concurrency) for concurrency in LEVELS}
        state = await engine.read()
        steps = order.get("steps", 0)
        cells = [cell for cell in state["groups"][0]["stats"] if cell["steps"] == steps]
        return {"tokensPerSecond": rates, "stats": cells}

    async def pair(self) -> None:
        """The trained pair: texts are compared with one request at a time."""
        command = self.command(
            self.host.bundle / "pair/target",
            *("--dtype", "bfloat16", "--skip-tokenizer-init", "--max-total-tokens", "100000"),
            *self.speculation("EAGLE", self.host.bundle / "pair/draft"),
        )
        async with self.server("pair", command, self.environ(live=True), live=True) as (
            _,
            engine,
        ):
            texts = json.loads((self.host.bundle / "pair/prompts.json").read_text())
            prompts = [list(text.encode()) for name in texts for text in texts[name][:8]]
            arms: dict[str, list[Any]] = {}
            for name, order in (
                ("off", {"mode": "off"}),
                ("on 1", {"mode": "on", "steps": 1}),
                ("on 3", {"mode": "on", "steps": 3}),
            ):
                async with self.step(f"pair {name}", 10):
                    await engine.order(**order)
                    arms[name] = [
                        await engine.generate(prompt, PAIR_TOKENS, stream=False)
                        for prompt in prompts
                    ]
            async with self.step("pair flipped", 10):
                load = Load(
                    engine, lambda n: prompts[n % len(prompts)], PAIR_TOKENS, 1, stream=False
                )
                async with load:
                    await _running(engine, 1)
                    count, latencies = await flip(engine, 300, seconds=25)
            reference = [answer.ids for answer in arms["off"]]
            self.found["equality"] = {
                "prompts": len(prompts),
                "tokens": PAIR_TOKENS,
                "accepted": {
                    name: [round(PAIR_TOKENS / (answer.verifies or 1), 2) for answer in answers]
                    for name, answers in arms.items()
                },
                "different": {
                    name: sum(
                        answer.ids != ids for answer, ids in zip(answers, reference, strict=True)
                    )
                    for name, answers in arms.items()
                },
                "flips": count,
                "flipped": len(load.answers),
                "flippedLost": load.lost,
                "flippedDifferent": sum(
                    answer.ids != reference[place % len(prompts)]
                    for place, answer in enumerate(load.answers)
                ),
                "directiveToStateMs": percentiles(latencies.state),
            }

    # Record

    def record(self) -> dict[str, Any]:
        """Return the findings in the form of `tests.engine`."""
        flips = self.found.get("flips", {}).values()
        states = sum((Latencies(**each["latencies"]) for each in flips), Latencies())
        found = {name: self.found.get(name) for name in ("gpu", "plain", "held", "equality")}
        return {
            "sglang": VERSION,
            "device": "h200",
            "tp": self.tensor_parallel,
            "contract": self.found.get("contract"),
            "flips": {
                "count": sum(each["count"] for each in flips),
                "requests": sum(each["requests"] for each in flips),
                "requestsLost": sum(each["requestsLost"] for each in flips),
                "directiveToStateMs": percentiles(states.state) if states.state else None,
                "seenMs": percentiles(states.seen) if states.seen else None,
                "byConcurrency": {
                    str(level): {
                        name: value for name, value in each.items() if name != "latencies"
                    }
                    for level, each in self.found.get("flips", {}).items()
                },
            },
            **found,
            "failed": self.found.get("failed", {}),
        }


async def _running(engine: Engine, concurrency: int) -> None:
    """Wait until nearly all requests of a load run."""

    async def most_run() -> bool:
        return ranks_of(await engine.read())[0]["running"] >= 0.9 * concurrency

    await until(most_run, 20, every=0.02)


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--bundle", type=Path, default=BUNDLE)
    cli.add_argument("--home", type=Path, default=HOME)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--tp", type=int, default=1)
    cli.add_argument("--seconds", type=float, default=570.0)
    asyncio.run(Job(cli.parse_args()).run())


if __name__ == "__main__":
    main()
