"""What a real engine answers and how fast it switches, while it stays up.

Prompts of both kinds are used: drafts of the easy ones are kept, those of the hard ones are not,
so that rejected drafts are met too. Texts are compared with those of the same engine while nothing
is switched; that makes sense with float32 only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.engine.client import ranks_of, until
from tests.engine.flips import Load, flip, percentiles, switches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.engine.client import Engine

MANY = 20
"""Requests at once that are more than the engine runs."""
SETTINGS: dict[int, dict[str, Any]] = {
    0: {"mode": "off"},
    1: {"mode": "on", "steps": 1},
    3: {"mode": "on", "steps": 3},
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """Beginnings of texts.

    Attributes:
        easy: The trained draft foretells how they go on.
        hard: It does not.
    """

    easy: tuple[str, ...]
    hard: tuple[str, ...]

    def both(self, count: int) -> list[str]:
        """Return a number of prompts, one half of each kind."""
        return [*self.easy[: count // 2], *self.hard[: count - count // 2]]


async def acceptance(engine: Engine, prompts: Prompts, tokens: int) -> dict[str, dict[str, float]]:
    """O-B3: return tokens per verify round by kind of prompt and steps, as SGLang counts them.

    Also makes sure that texts are the same at all steps, and that the plugin's own figures say the
    same as SGLang's. Each kind has a batch size of its own, as the figures are kept by that.
    """
    found: dict[str, dict[str, float]] = {}
    rounds = tokens - 1  # the first token comes of the prefill
    for kind, texts in (("easy", prompts.easy[:4]), ("hard", prompts.hard[:2])):
        answers = set()
        for steps, setting in SETTINGS.items():
            await engine.order(**setting)
            told = await asyncio.gather(*(engine.generate(text, tokens) for text in texts))
            assert all(answer.complete for answer in told), (kind, steps)
            answers.add(tuple(answer.ids for answer in told))
            verifies = sum(answer.verifies or 0 for answer in told)
            found.setdefault(kind, {})[str(steps)] = round(len(texts) * rounds / verifies, 2)
            told_by_plugin = _accept_length(await engine.read(), len(texts), steps)
            assert abs(told_by_plugin - found[kind][str(steps)]) < 0.25, (kind, steps)
        assert len(answers) == 1, f"{kind}: texts depend on the steps"
    assert found["easy"]["3"] > 2, found
    assert found["easy"]["1"] > 1.5, found
    assert found["hard"]["3"] < 1.5, found
    assert found["easy"]["0"] == found["hard"]["0"] == 1, found
    return found


async def idle(engine: Engine) -> None:
    """O-B3.3: a switch on an idle engine is accepted and not active, and counts nothing."""
    before = await engine.read()
    steps = ranks_of(before)[0]["activeSteps"]
    other = next(setting for count, setting in SETTINGS.items() if count != steps)
    after = await engine.order(**other)
    assert after["mode"] == other["mode"]
    assert {rank["activeSteps"] for rank in ranks_of(after)} == {steps}
    assert {rank["decodeRounds"] for rank in ranks_of(after)} == {0}
    for old, new in zip(before["groups"], after["groups"], strict=True):
        assert old["tokensTotal"] == new["tokensTotal"]
        assert old["stats"] == new["stats"]  # nothing seen is no acceptance of 0


async def flipped(
    engine: Engine, prompts: Sequence[str], *, count: int, tokens: int
) -> dict[str, Any]:
    """O-B1.4, O-G3.1: switch while streams run; returns what became of them, and how fast."""
    await engine.order(mode="on", steps=3)
    still = await asyncio.gather(*(engine.generate(text, tokens) for text in prompts))
    expected = {text: answer.ids for text, answer in zip(prompts, still, strict=True)}
    before = await engine.read()
    records = await record_lengths(engine)
    load = Load(engine, lambda n: prompts[n % len(prompts)], tokens, len(prompts))
    async with load:
        await running(engine, len(prompts))
        given, latencies = await flip(engine, count)
    after = await engine.read()
    known = set(expected.values())
    found = {
        "count": given,
        "requests": len(load.answers),
        "requestsLost": load.lost,
        "requestsDifferent": sum(answer.ids not in known for answer in load.answers),
        "streams": len(prompts),
        "tokens": tokens,
        "switches": [
            new - old for new, old in zip(switches(after), switches(before), strict=True)
        ],
        "recordLengths": [*zip(records, await record_lengths(engine), strict=True)],
        "directiveToStateMs": percentiles(latencies.state),
        "answeredMs": percentiles(latencies.answered),
        "seenMs": percentiles(latencies.seen),
    }
    assert found["count"] == count, found
    assert found["requestsLost"] == found["requestsDifferent"] == 0, found
    # Each order asks for other steps than the last one, and ranks that count otherwise have not
    # taken the same steps.
    assert {*found["switches"]} <= {count, count + 1}, found
    assert len({*found["switches"]}) == 1, found
    assert len({(rank["epoch"], rank["activeSteps"]) for rank in ranks_of(after)}) == 1, after
    # SGLang's own record has one entry for all of them.
    assert all(new <= old + 1 for old, new in found["recordLengths"]), found
    return found


async def crowded(engine: Engine, prompts: Prompts, tokens: int, orders: int) -> dict[str, Any]:
    """O-B1.4, O-G4, O-G5.5: order while requests queue, and hang up before some answers."""
    texts = [*prompts.easy, *prompts.hard][:MANY]
    await engine.order(mode="off")
    still = await asyncio.gather(*(engine.generate(text, tokens) for text in texts))
    before = switches(await engine.read())
    waiting = [asyncio.create_task(engine.generate(text, tokens)) for text in texts]

    async def queueing() -> bool:
        return ranks_of(await engine.read())[0]["queued"] > 0

    await until(queueing, 30)
    for number in range(orders):
        body = await engine.directive(**(SETTINGS[3] if number % 2 == 0 else SETTINGS[0]))
        if number % 3 == 2:
            await engine.abandon(body)
            # Whatever became of it, it can be sent again, and counts once.
        status, state = await engine.admin("PUT", body)
        assert (status, state["epoch"]) == (200, body["epoch"]), state

        async def obeyed(body: dict[str, Any] = body) -> bool:
            ranks = ranks_of(await engine.read())
            return all(rank["epoch"] == body["epoch"] and rank["obeyedAt"] for rank in ranks)

        await until(obeyed, 30)
    assert not all(task.done() for task in waiting)
    answers = await asyncio.gather(*waiting)
    assert all(answer.complete for answer in answers)
    assert [answer.ids for answer in answers] == [answer.ids for answer in still]
    after = switches(await engine.read())
    assert {new - old for new, old in zip(after, before, strict=True)} == {orders}
    return {"requests": len(texts), "orders": orders, "requestsLost": 0}


async def running(engine: Engine, count: int) -> None:
    """Wait until that many requests run."""

    async def all_run() -> bool:
        return ranks_of(await engine.read())[0]["running"] == count

    await until(all_run, 30)


async def record_lengths(engine: Engine) -> list[int]:
    """Return how many configuration changes each rank's SGLang remembers."""
    [*groups] = (await engine.get("/server_info"))["internal_states"]
    return [rank["records"] for group in groups for rank in group["specserve"]["ranks"]]


def _accept_length(state: dict[str, Any], batch: int, steps: int) -> float:
    [cell] = [
        cell
        for cell in state["groups"][0]["stats"]
        if (cell["batchBucket"], cell["steps"]) == (batch, steps)
    ]
    return float(cell["acceptLength"])
