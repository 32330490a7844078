"""What becomes of a real engine that is silenced, stopped, killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Protocol

from tests.engine.client import ranks_of, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.engine.client import Answer, Engine
    from tests.engine.server import Server

TOKENS = 400
BEGIN_SECONDS = 30
END_SECONDS = 90
LEASE_SECONDS = 5


class Stoppable(Protocol):
    """What an engine is ended by."""

    def terminate(self) -> None:
        """Ask it to end."""

    async def ended(self, seconds: float) -> int:
        """Wait for its end; returns the exit status."""


async def streams(engine: Engine, prompts: Sequence[str]) -> list[asyncio.Task[Answer]]:
    """Start streams; returns once each of them has begun."""
    begun = [asyncio.Event() for _ in prompts]
    tasks = [
        asyncio.create_task(engine.generate(text, TOKENS, begun=event))
        for text, event in zip(prompts, begun, strict=True)
    ]
    async with asyncio.timeout(BEGIN_SECONDS):
        await asyncio.gather(*(event.wait() for event in begun))
    return tasks


async def expired(engine: Engine, prompts: Sequence[str]) -> dict[str, Any]:
    """Let a lease run out while streams run; returns how late the fallback was in force."""
    before = await engine.read()
    body = await engine.directive(
        mode="on", steps=3, leaseSeconds=LEASE_SECONDS, fallback={"mode": "off"}
    )
    loads = [await streams(engine, prompts)]
    began = time.monotonic()
    status, state = await engine.admin("PUT", body)
    assert (status, state["mode"]) == (200, "on"), state

    async def fallen_back() -> bool:
        nonlocal state
        if all(task.done() for task in loads[-1]):
            loads.append(await streams(engine, prompts))
        state = await engine.read()
        return state["epoch"] == body["epoch"] + 1 and {
            rank["activeSteps"] for rank in ranks_of(state)
        } == {0}

    await until(fallen_back, LEASE_SECONDS + 15)
    late = time.monotonic() - began - LEASE_SECONDS
    assert state["lease"]["expirations"] == before["lease"]["expirations"] + 1
    assert (state["mode"], state["lastExpiryEpoch"]) == ("off", body["epoch"] + 1)
    status, refusal = await engine.admin("PUT", body)
    assert (status, refusal["code"]) == (409, "StaleEpoch"), refusal
    answers = [await task for load in loads for task in load]
    assert all(answer.complete for answer in answers)
    return {"requests": len(answers), "requestsLost": 0, "fallbackAfterMs": round(1e3 * late, 1)}


async def silenced(server: Server, engine: Engine, prompts: Sequence[str]) -> dict[str, Any]:
    """O-G3.4, O-G5.4: halt a rank while streams run; an order is not claimed, nor half obeyed."""
    await engine.order(mode="on", steps=3)
    tasks = await streams(engine, prompts)
    rank = server.children()["scheduler"][-1]
    body = await engine.directive(mode="off", deadlineMs=1000)
    os.kill(rank, signal.SIGSTOP)
    try:
        began = time.monotonic()
        status, refusal = await engine.admin("PUT", body)
        seconds = time.monotonic() - began
        assert (status, refusal.get("code")) == (504, "Timeout"), refusal
        assert seconds < 2, seconds  # the operator waits for a second longer than the deadline
    finally:
        os.kill(rank, signal.SIGCONT)

    async def settled() -> bool:
        state = await engine.read()
        return None not in {item["activeSteps"] for item in ranks_of(state)}

    back = await until(settled, 30)
    state = await engine.read()
    # It may have been obeyed by now or not, but by all alike.
    assert len({item["epoch"] for item in ranks_of(state)}) == 1, state
    assert state["epoch"] in {body["epoch"] - 1, body["epoch"]}, state
    again = await engine.order(mode="on", steps=1)
    assert {item["epoch"] for item in ranks_of(again)} == {again["epoch"]}
    assert again["unresolvedEpoch"] is None
    answers = await asyncio.gather(*tasks)
    assert all(answer.complete for answer in answers)
    return {
        "answeredAfterMs": round(1e3 * seconds, 1),
        "obeyed": state["epoch"] == body["epoch"],
        "readAgainAfterMs": round(1e3 * back, 1),
        "requestsLost": 0,
    }


async def stopped(
    server: Stoppable, engine: Engine, prompts: Sequence[str], holder: str
) -> dict[str, Any]:
    """End it as the kubelet does, while streams run; returns what became of all of that.

    Args:
        server: What is told to end.
        engine: The engine.
        prompts: Of the streams.
        holder: Whose directive is sent to it meanwhile.
    """
    directive = await engine.directive(mode="off", holder=holder)
    tasks = await streams(engine, prompts)
    began = time.monotonic()
    server.terminate()

    async def draining() -> bool:
        return await engine.health() == 503

    drained = await until(draining, 10)
    status, state = await engine.admin("PUT", directive)
    answers = await asyncio.gather(*tasks)
    found = {
        "requestsLost": sum(not answer.complete for answer in answers),
        "notReadyAfterSeconds": round(drained, 2),
        "orderWhileDraining": [status, state.get("code")],
        "exitStatus": await server.ended(END_SECONDS),
        "exitAfterSeconds": round(time.monotonic() - began, 1),
    }
    assert found["requestsLost"] == 0, found
    assert found["orderWhileDraining"] == [503, "Draining"], found
    return found


async def restarted(engine: Engine, stale: dict[str, Any]) -> dict[str, Any]:
    """O-G1, O-G2.1: give a new process an order that was meant for the last one in its pod."""
    state = await engine.read()
    status, refusal = await engine.admin("PUT", stale)
    after = await engine.read()
    found: dict[str, Any] = {
        "otherBoot": state["bootID"] != stale["bootID"],
        "epochAfterRestart": state["epoch"],
        "orderForTheLastProcess": [status, refusal.get("code")],
        "changedByIt": after["epoch"] != state["epoch"],
    }
    assert found == {
        "otherBoot": True,
        "epochAfterRestart": 0,
        "orderForTheLastProcess": [412, "Rebooted"],
        "changedByIt": False,
    }, found
    return found


async def killed(server: Server, engine: Engine, prompts: Sequence[str]) -> dict[str, Any]:
    """Kill a scheduler while streams run; returns how soon that shows."""
    tasks = await streams(engine, prompts)
    began = time.monotonic()
    os.kill(server.children()["scheduler"][0], signal.SIGKILL)

    async def not_ready() -> bool:
        return await engine.health() != 200

    found: dict[str, Any] = {
        "notReadyAfterSeconds": round(await until(not_ready, 10, every=0.02), 2),
        "exitStatus": await server.ended(END_SECONDS),
        "exitAfterSeconds": round(time.monotonic() - began, 1),
    }
    answers = await asyncio.gather(*tasks)
    found["requestsTakenForWhole"] = sum(answer.complete for answer in answers)
    assert found["requestsTakenForWhole"] == 0, found
    assert found["exitStatus"] != 0, found
    return found
