"""What a time without drafting costs the draft afterwards, on real SGLang on a CPU.

    PYTHONPATH=operator:images/engine:. python -m tests.engine.recovery

Trains a pair whose draft must look 64 tokens back (`tests.engine.distant`), starts the newest
SGLang that is proved, takes speculation off while requests run and on again, and follows the
acceptance by the tokens that each request has gained since. Cold, warm and without any off, with
one request and with four; also of new requests afterwards, and of later ones that go on from the
tokens of the off time, as a next turn of a conversation does.

A gap in the draft's cache is not empty: it holds what the slot's last owner left there. So the
cold off is tried twice, in memory that is fresh (zeros, as SGLang makes it) and, like all the
rest, in memory that has been used all over, as that of any engine soon is.

Writes build/engine/recovery-SGLANG-cpu.json. Acceptance is the plugin's own count
(`groups[].acceptance` of the read-back), in tokens won per verify.

The engine has fixed ports, so all of it runs in a network namespace of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.measure import machine
from tests.engine import environment, trained
from tests.engine.client import connected, until
from tests.engine.install import REPOSITORY
from tests.engine.launch import rendered
from tests.engine.matrix import alone
from tests.engine.server import running

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.engine.client import Answer, Engine

OUT = REPOSITORY / "build/engine"
PAIR = "tests.engine.distant"
STEPS = 3
CONCURRENCIES = (1, 4)
KINDS = ("cold", "warm", None)
PROMPT, BEFORE, OFF, TOKENS = 72, 32, 72, 320
"""Tokens of each request's prompt, before the off, during it, and of its answer in all."""
LATER_TOKENS = 208
POOL_TOKENS = 16_384
"""What the engine's cache holds: `--max-total-tokens` of `environment.FLAGS`."""
FRESH_REPEATS = {1: 3, 4: 2}
"""How often a cold off fits into fresh memory, by requests."""
BIN = 16
"""Tokens of a request that one figure of the course covers."""
BACK = 0.9
"""The part of the drafts accepted before that must be accepted for it to be back."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The leader's counts at one moment between two batches.

    Attributes:
        tokens: Tokens emitted.
        verifies: Verifies with `STEPS` draft steps, once a request and round.
        accepted: Drafts accepted in them.
    """

    tokens: int
    verifies: int
    accepted: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Reading:
        """Take it from a read-back."""
        [group] = state["groups"]
        counts = [entry for entry in group["acceptance"] if entry["steps"] == STEPS]
        return cls(
            group["tokensTotal"],
            sum(entry["verifies"] for entry in counts),
            sum(sum(entry["accepted"]) for entry in counts),
        )


def accept_length(readings: Iterable[tuple[Reading, Reading]]) -> float | None:
    """Return tokens won per verify between the readings of each pair; None without a verify."""
    spans = list(readings)
    verifies = sum(late.verifies - early.verifies for early, late in spans)
    accepted = sum(late.accepted - early.accepted for early, late in spans)
    return 1 + accepted / verifies if verifies else None


def course(readings: Sequence[Reading], requests: int) -> dict[int, float]:
    """Return tokens per verify by the tokens that each request had gained, to the bin below.

    Args:
        readings: In order; the first one is where tokens are counted from.
        requests: How many ran side by side.
    """
    spans: dict[int, list[tuple[Reading, Reading]]] = {}
    for early, late in pairwise(readings):
        middle = ((early.tokens + late.tokens) / 2 - readings[0].tokens) / requests
        spans.setdefault(int(middle // BIN) * BIN, []).append((early, late))
    found = {start: accept_length(inside) for start, inside in sorted(spans.items())}
    return {start: length for start, length in found.items() if length is not None}


def back_after(lengths: Mapping[int, float], before: float) -> int | None:
    """Return the tokens after which acceptance stays at what it was; None if it never does.

    The drafts accepted are compared, not the token that each verify wins anyway.
    """
    enough = 1 + BACK * (before - 1)
    low = [start for start, length in lengths.items() if length < enough]
    after = max(low) + BIN if low else 0
    return after if any(start >= after for start in lengths) else None


class Study:
    """One engine, and prompts that it has not seen yet."""

    def __init__(self, engine: Engine, texts: Iterable[str]) -> None:
        self._engine = engine
        self._texts = iter(texts)

    async def fill(self) -> None:
        """Let every slot of the cache have had an owner."""
        filled = 0
        while filled < 2 * POOL_TOKENS:
            whole = [next(self._texts) for _ in range(4)]
            await asyncio.gather(*self.start(whole, 1))
            filled += sum(map(len, whole))

    async def reading(self) -> Reading:
        """Read the counts."""
        return Reading.of(await self._engine.read())

    async def reached(self, tokens: int) -> Reading:
        """Wait until that many tokens have been emitted in all."""
        last = await self.reading()

        async def enough() -> bool:
            nonlocal last
            last = await self.reading()
            return last.tokens >= tokens

        if last.tokens < tokens:
            await until(enough, 120, every=0.002)
        return last

    async def watched(
        self, requests: Sequence[asyncio.Task[Answer]]
    ) -> tuple[list[Reading], list[Answer]]:
        """Read as often as the engine answers, until all requests have ended."""
        readings = [await self.reading()]
        while not all(request.done() for request in requests):
            readings.append(await self.reading())
        readings.append(await self.reading())
        return readings, [await request for request in requests]

    def start(self, prompts: Sequence[str | list[int]], tokens: int) -> list[asyncio.Task[Answer]]:
        """Send requests."""
        return [asyncio.create_task(self._engine.generate(prompt, tokens)) for prompt in prompts]

    async def run(self, requests: int, draft_kv: str | None) -> dict[str, Any]:
        """Return one history: on, off, on, new requests, and later ones on the same prefix.

        Args:
            requests: How many run side by side.
            draft_kv: What the draft does during the off; None for no off at all.
        """
        engine = self._engine
        await engine.order(mode="on", steps=STEPS)
        texts = [next(self._texts) for _ in range(requests)]
        prompts = [text[:PROMPT] for text in texts]
        begin = await self.reading()
        tasks = self.start(prompts, TOKENS)
        before = await self.reached(begin.tokens + requests * BEFORE)
        if draft_kv is not None:
            await engine.order(mode="off", draftKv=draft_kv)
        await self.reached(before.tokens + requests * OFF)
        if draft_kv is not None:
            await engine.order(mode="on", steps=STEPS)
        readings, answers = await self.watched(tasks)
        until_on = (readings[0].tokens - begin.tokens) // requests
        new, _ = await self._accepted(
            [next(self._texts)[:PROMPT] for _ in range(requests)], TOKENS - BEFORE - OFF
        )
        later, reused = await self._accepted(
            [
                [*prompt.encode(), *answer.ids[:until_on]]
                for prompt, answer in zip(prompts, answers, strict=True)
            ],
            LATER_TOKENS,
        )
        reference = accept_length([(begin, before)])
        assert reference is not None
        assert all(answer.complete for answer in (*answers, *reused))
        running_on = course(readings, requests)
        return {
            "before": reference,
            "offFromToken": (before.tokens - begin.tokens) // requests,
            "onFromToken": until_on,
            "running": running_on,
            "runningBackAfter": back_after(running_on, reference),
            "new": new,
            "later": later,
            "laterBackAfter": back_after(later, reference),
            "laterVerifies": sorted(answer.verifies or 0 for answer in reused),
            "laterCachedTokens": sorted(answer.cached or 0 for answer in reused),
            "wrongTokens": sum(map(_wrong, answers, texts)),
        }

    async def _accepted(
        self, prompts: Sequence[str | list[int]], tokens: int
    ) -> tuple[dict[int, float], list[Answer]]:
        readings, answers = await self.watched(self.start(prompts, tokens))
        return course(readings, len(prompts)), answers


def _wrong(answer: Answer, text: str) -> int:
    """Return how many tokens are not what the language says, which is the target's own doing."""
    expected = text.encode()[PROMPT : PROMPT + len(answer.ids)]
    return sum(told != right for told, right in zip(answer.ids, expected, strict=True))


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return lowest, middle and highest of some figures."""
    found = sorted(values)
    return {
        "min": round(found[0], 2),
        "median": round(statistics.median(found), 2),
        "max": round(found[-1], 2),
    }


def summary(histories: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of some repeats of the same."""

    def by_bin(name: str) -> list[dict[str, float]]:
        starts = sorted({start for history in histories for start in history[name]})
        return [
            {
                "fromToken": start,
                "repeats": sum(start in history[name] for history in histories),
                **spread(h[name][start] for h in histories if start in h[name]),
            }
            for start in starts
        ]

    return {
        "repeats": len(histories),
        "before": spread(history["before"] for history in histories),
        **{name: by_bin(name) for name in ("running", "new", "later")},
        **{
            name: [history[name] for history in histories]
            for name in (
                *("runningBackAfter", "laterBackAfter", "offFromToken", "onFromToken"),
                *("laterVerifies", "laterCachedTokens", "wrongTokens"),
            )
        },
    }


def _figure(
    requests: int, off: str | None, memory: str, histories: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    figure = {"requests": requests, "off": off, "memory": memory, **summary(histories)}
    if requests > 1:
        # Those that are back outrun the others, so that they have no common axis.
        del figure["runningBackAfter"], figure["laterBackAfter"]
    return figure


async def measured(version: str, repeats: int) -> dict[str, Any]:
    """Start an engine and return the record of the study."""
    on = machine()
    made = environment.prepare(version)
    pair = trained.prepare(PAIR)
    asked = json.loads((pair / "prompts.json").read_text())
    OUT.mkdir(parents=True, exist_ok=True)
    log = OUT / f"recovery-{version}-cpu.start.log"
    with tempfile.TemporaryDirectory() as scratch:
        launch = rendered(made, pair, Path(scratch), 1)
        async with (
            running(launch.command, launch.environ, launch.address, log) as server,
            connected(launch.address) as engine,
        ):
            await server.ready()
            state = await engine.read()
            study = Study(engine, asked["texts"])
            figures = []
            for requests, times in FRESH_REPEATS.items():
                histories = [await study.run(requests, "cold") for _ in range(times)]
                figures.append(_figure(requests, "cold", "fresh", histories))
            await study.fill()
            for requests in CONCURRENCIES:
                found: dict[str | None, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
                for _ in range(repeats):
                    for kind, histories in found.items():
                        histories.append(await study.run(requests, kind))
                figures += [_figure(requests, kind, "used", each) for kind, each in found.items()]
    return {
        "study": "recovery",
        "sglang": state["versions"]["sglang"],
        "device": "cpu",
        "tp": 1,
        "steps": STEPS,
        "looksBack": asked["looksBack"],
        "tokens": {
            "prompt": PROMPT,
            "before": BEFORE,
            "off": OFF,
            "answer": TOKENS,
            "later": LATER_TOKENS,
            "bin": BIN,
        },
        "pair": asked["probe"],
        "figures": figures,
        "machine": on,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    """Run from the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--repeats", type=int, default=8, help="of each history")
    options = cli.parse_args()
    version = environment.VERSIONS[-1]
    # With the network, and before the engine takes the cores.
    environment.prepare(version)
    trained.prepare(PAIR)
    alone("tests.engine.recovery")
    # The engine is a session of its own: whoever ends this must not leave it behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = asyncio.run(measured(version, options.repeats))
    path = OUT / f"recovery-{version}-cpu.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
