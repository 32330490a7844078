"""Judges one real engine that is up: the contract, then orders given while requests run.

    PYTHONPATH=. python -m tests.engine.measure --sglang 0.5.23 --device cpu --port 31000 \
        --prompts PAIR/prompts.json

Writes build/engine/engine-SGLANG-DEVICE-tpN.json, in the same form for every device. The trained
pair's prompts of both kinds are used: drafts of the easy ones are kept, those of the hard ones are
not, so that rejected drafts are met too. Texts are compared with those of the same engine while
nothing is switched; that makes sense with float32 only.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
from pathlib import Path
from typing import Any

from tests.bench.measure import machine
from tests.engine.client import Address, connected, ranks_of, until
from tests.engine.flips import Load, flip, percentiles, switches
from tests.engine.install import REPOSITORY
from tests.engine.suite import contract

STREAMS = 4
OUT = REPOSITORY / "build/engine"


async def flipped(
    address: Address, prompts: list[str], *, count: int, tokens: int
) -> dict[str, Any]:
    """Switch while streams run; returns what became of the requests, and how fast it went."""
    async with connected(address) as engine:
        await engine.order(mode="on", steps=3)
        still = await asyncio.gather(*(engine.generate(text, tokens) for text in prompts))
        expected = {text: answer.ids for text, answer in zip(prompts, still, strict=True)}
        before = switches(await engine.read())

        async def all_run() -> bool:
            return ranks_of(await engine.read())[0]["running"] == len(prompts)

        load = Load(engine, lambda n: prompts[n % len(prompts)], tokens, len(prompts))
        async with load:
            await until(all_run, 30)
            given, latencies = await flip(engine, count)
        after = switches(await engine.read())
        known = set(expected.values())
        return {
            "count": given,
            "requests": len(load.answers),
            "requestsLost": load.lost,
            "requestsDifferent": sum(answer.ids not in known for answer in load.answers),
            "streams": len(prompts),
            "tokens": tokens,
            "acceptLength": [round(tokens / (answer.verifies or 1), 2) for answer in still],
            "switches": [new - old for new, old in zip(after, before, strict=True)],
            "directiveToStateMs": percentiles(latencies.state),
            "answeredMs": percentiles(latencies.answered),
            "seenMs": percentiles(latencies.seen),
        }


async def measure(options: argparse.Namespace) -> int:
    """Write the engine's record; returns the exit status."""
    address = Address(options.port, options.port + 1, options.token, options.api_key)
    kinds = json.loads(options.prompts.read_text())
    prompts = kinds["easy"][: STREAMS // 2] + kinds["hard"][: STREAMS // 2]
    async with connected(address) as engine:
        state = await engine.read()
    OUT.mkdir(parents=True, exist_ok=True)
    name = f"engine-{options.sglang}-{options.device}-tp{options.tp}"
    record = {
        "sglang": state["versions"]["sglang"],
        "at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "versions": state["versions"],
        "device": options.device,
        "tp": len(state["groups"][0]["ranks"]),
        "contract": await contract(address, OUT / f"{name}.xml"),
        "flips": await flipped(address, prompts, count=options.flips, tokens=options.tokens),
    }
    (OUT / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    flips = record["flips"]
    faults = [
        record["sglang"] != options.sglang,
        record["tp"] != options.tp,
        record["contract"]["failed"],
        flips["requestsLost"],
        flips["requestsDifferent"],
        # Ranks that count otherwise have not taken the same steps.
        len(set(flips["switches"])) != 1,
    ]
    return int(any(faults))


def main() -> None:
    """Run from the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--sglang", required=True, help="the version it must say it is")
    cli.add_argument("--device", required=True, choices=("cpu", "h200"))
    cli.add_argument("--tp", type=int, default=1)
    cli.add_argument("--port", type=int, required=True, help="serving; the next one is admin's")
    cli.add_argument("--token", default="tok")
    cli.add_argument("--api-key", default="USER")
    cli.add_argument("--prompts", type=Path, required=True)
    cli.add_argument("--flips", type=int, default=200)
    cli.add_argument("--tokens", type=int, default=250)
    raise SystemExit(asyncio.run(measure(cli.parse_args())))


if __name__ == "__main__":
    main()
