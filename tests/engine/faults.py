"""What becomes of one real engine that is stopped, started again and killed under streams.

    PYTHONPATH=. python -m tests.engine.faults --record build/engine/engine-0.5.23-cpu-tp1.json \
        --port 31000 --prompts PAIR/prompts.json -- COMMAND ...

The command must start a server on that port, with the environment of this process. What is found
is added to the record as `faults`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine.client import Address, Engine, connected, ranks_of, until
from tests.engine.server import Server, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.engine.client import Answer

STREAMS = 4
TOKENS = 400
END_SECONDS = 90


class Trial:
    """One engine's command, started as often as it takes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.address = Address(options.port, options.port + 1, options.token, options.api_key)
        self.command: list[str] = options.command
        self.log: Path = options.record.with_suffix(".faults.log")
        kinds = json.loads(options.prompts.read_text())
        self.prompts = (kinds["easy"] + kinds["hard"])[:STREAMS]

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[tuple[Server, Engine]]:
        """Run the engine until it is ready."""
        environ = {**os.environ}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        async with running(self.command, environ, self.address, self.log) as server:
            await server.ready()
            async with connected(self.address) as engine:
                yield server, engine

    async def streams(self, engine: Engine) -> list[asyncio.Task[Answer]]:
        """Start streams; returns once all of them run."""
        tasks = [asyncio.create_task(engine.generate(text, TOKENS)) for text in self.prompts]

        async def all_run() -> bool:
            return ranks_of(await engine.read())[0]["running"] == len(tasks)

        await until(all_run, 30)
        return tasks

    async def stop(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """End it as the kubelet does, while streams run; returns that, and its last directive."""
        async with self.started() as (server, engine):
            await engine.order(mode="on", steps=3)
            directive = await engine.directive(mode="off")
            tasks = await self.streams(engine)
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
        return found, directive

    async def kill(self, stale: dict[str, Any]) -> dict[str, Any]:
        """Start it again, give it an order for the last process, and kill a scheduler."""
        async with self.started() as (server, engine):
            state = await engine.read()
            status, refusal = await engine.admin("PUT", stale)
            after = await engine.read()
            found: dict[str, Any] = {
                "otherBoot": state["bootID"] != stale["bootID"],
                "epochAfterRestart": state["epoch"],
                "orderForTheLastProcess": [status, refusal.get("code")],
                "changedByIt": after["epoch"] != state["epoch"],
            }
            assert found["otherBoot"], found
            assert found["orderForTheLastProcess"] == [412, "Rebooted"], found
            assert not found["changedByIt"], found
            tasks = await self.streams(engine)
            began = time.monotonic()
            os.kill(server.children()["scheduler"][0], signal.SIGKILL)

            async def not_ready() -> bool:
                return await engine.health() != 200

            found["notReadyAfterSeconds"] = round(await until(not_ready, 10, every=0.02), 2)
            found["exitStatus"] = await server.ended(END_SECONDS)
            found["exitAfterSeconds"] = round(time.monotonic() - began, 1)
            answers = await asyncio.gather(*tasks)
            found["requestsTakenForWhole"] = sum(answer.complete for answer in answers)
            assert found["requestsTakenForWhole"] == 0, found
            return found


async def main() -> None:
    """Run from the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--record", type=Path, required=True)
    cli.add_argument("--port", type=int, required=True)
    cli.add_argument("--token", default="tok")
    cli.add_argument("--api-key", default="USER")
    cli.add_argument("--prompts", type=Path, required=True)
    cli.add_argument("command", nargs="+")
    options = cli.parse_args()
    trial = Trial(options)
    stopped, directive = await trial.stop()
    killed = await trial.kill(directive)
    record = json.loads(options.record.read_text())
    record["faults"] = {"sigterm": stopped, "schedulerKilled": killed}
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["faults"], indent=1))


if __name__ == "__main__":
    asyncio.run(main())
