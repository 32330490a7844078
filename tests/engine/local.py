"""`specserve local` as people start it, with a real engine: begun, left, steered, taken on, ended.

Each run is a process of its own, and the engine outlives all but the last of them. What they tell
is compared with the engine's own read-back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specserve import names
from tests.engine import faults
from tests.engine.client import ranks_of, until
from tests.engine.install import REPOSITORY
from tests.engine.launch import rendered, spec_of
from tests.engine.server import START_SECONDS
from tests.wire.local_box import Local, decisions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from tests.engine.client import Address, Engine
    from tests.engine.environment import Environment
    from tests.engine.launch import Launch

NAME = "tiny"
ENGINE = f"{NAME}-0"
#: Fewer than the streams that cross it.
OFF_ABOVE = 2
#: Longer than a test: whoever keeps it across a restart remembers.
DWELL = 600
POLICY = {
    "threshold": {"offAbove": OFF_ABOVE, "onBelow": 1},
    "dwellOnSeconds": 0,
    "samplePeriodMilliseconds": 200,
    "leaseSeconds": 15,
}
LINE_SECONDS = 30.0
TOKENS = 20


class Home:
    """A box with a SpecServe, its keys, and the state that runs of the command share.

    Args:
        environment: Where the engine is to run.
        pair: The folder of target and draft.
        ranks: Tensor-parallel ranks.
        folder: Takes all files.
    """

    def __init__(self, environment: Environment, pair: Path, ranks: int, folder: Path) -> None:
        self._pod = folder / "pod"
        self._pod.mkdir()
        self._launch = rendered(environment, pair, self._pod, ranks)
        self._environment = environment
        self._ranks = ranks
        self._spec = spec_of(pair, ranks)
        self._spec["engine"]["env"] = [
            {"name": name, "value": value} for name, value in environment.variables(ranks).items()
        ]
        self._file = folder / "cr.yaml"
        self._state = folder / "state"
        self._log = folder / "decisions.jsonl"
        self._token, self._key = folder / "token", folder / "key"
        self._token.write_text(self._launch.address.token + "\n")
        self._key.write_text(self._launch.address.api_key or "")
        #: All that runs have told.
        self.told: list[str] = []

    @property
    def launch(self) -> Launch:
        """The engine that was started, in the terms of one that a test starts."""
        credentials = self._engine / "credentials"
        return dataclasses.replace(
            self._launch,
            command=tuple(
                word.replace(str(self._pod), str(self._engine)) for word in self._launch.command
            ),
            admin_key=(credentials / names.KEY_ADMIN_KEY).read_text(),
            nonce=int((credentials / names.KEY_NONCE).read_text()),
        )

    @property
    def address(self) -> Address:
        """Where the engine is."""
        return self._launch.address

    @property
    def _engine(self) -> Path:
        return self._state / "engine"

    @property
    def log(self) -> Path:
        """The engine's log."""
        return self._engine / f"{ENGINE}.log"

    @property
    def decided(self) -> list[dict[str, Any]]:
        """The decision log: what changed a mode, and what a run began with."""
        return [each for each in decisions(self._log) if each["what"] in {"first", "mode"}]

    def pid(self) -> int:
        """Return the engine's process id."""
        record = json.loads((self._state / "processes.json").read_text())
        return int(record[ENGINE]["pid"])

    def words(self) -> tuple[str, ...]:
        """Return the command line that the engine runs by; empty once it has ended."""
        try:
            text = Path(f"/proc/{self.pid()}/cmdline").read_text()
        except OSError:
            return ()
        return tuple(text.split("\0")[:-1])

    def edit(self, **policy: Any) -> None:
        """Write the SpecServe with this policy."""
        document = {
            "apiVersion": f"{names.GROUP}/{names.VERSION}",
            "kind": names.KIND,
            "metadata": {"name": NAME},
            "spec": {**self._spec, "policy": POLICY | policy},
        }
        self._file.write_text(yaml.safe_dump(document))

    @contextlib.asynccontextmanager
    async def given(self) -> AsyncIterator[Local]:
        """Run the command on an engine that is given by its URL."""
        address = self._launch.address
        async with self._run("--engine", f"{address.url},{address.admin_url}") as run:
            yield run

    @contextlib.asynccontextmanager
    async def starting(self, *words: str) -> AsyncIterator[Local]:
        """Run the command with an engine that it starts, or takes on."""
        entry = shlex.join([str(self._environment.python), "-m", "sglang.launch_server"])
        async with self._run("--start", "--entry-point", entry, *words) as run:
            yield run

    @contextlib.asynccontextmanager
    async def _run(self, *words: str) -> AsyncIterator[Local]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specserve.cli", "local", "--file", str(self._file)),
            *("--state", str(self._state), "--log", str(self._log)),
            *("--token-file", str(self._token), "--api-key-file", str(self._key)),
            *words,
            # What the engine needs of these is in the SpecServe, as there is only that in a pod.
            env=self._environment.environ(self._ranks, PYTHONPATH=str(REPOSITORY / "operator")),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        run = Local(process)
        try:
            yield run
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
            self.told += run.lines
        secrets = (self._launch.address.token, self.launch.admin_key, self._key.read_text())
        assert not any(secret in line for secret in secrets for line in run.lines), words


@contextlib.contextmanager
def home(
    environment: Environment, pair: Path, ranks: int, folder: Path, log: Path
) -> Iterator[Home]:
    """Have a box for the length of a `with` block; no engine of it is left, and its log is kept.

    Args:
        environment: Where the engine is to run.
        pair: The folder of target and draft.
        ranks: Tensor-parallel ranks.
        folder: Takes all files.
        log: Where the engine's log and all that the runs have told is kept.
    """
    made = Home(environment, pair, ranks, folder)
    try:
        yield made
    finally:
        if made.words() and made.words() == made.launch.command:
            os.killpg(made.pid(), signal.SIGKILL)
        engine = made.log.read_text(errors="replace") if made.log.exists() else ""
        log.write_text("\n".join([*made.told, engine]))


async def started(box: Home, engine: Engine, text: str) -> dict[str, Any]:
    """Start an engine, only watch it, and leave it running; returns how it was started."""
    box.edit(mode="Observe")
    async with box.starting("--keep") as run:
        ready = await run.line(f"{ENGINE} well: ready after", seconds=START_SECONDS)
        assert box.words() == box.launch.command, box.words()
        answer = await engine.generate(text, TOKENS)
        assert answer.complete, answer
        assert await run.end() == 0, run.lines
    state = await engine.read()
    assert (state["controllable"], state["mode"], state["epoch"]) == (True, "auto", 0), state
    return {"ready": ready.partition("well: ")[2]}


async def steered(box: Home, engine: Engine, texts: Sequence[str]) -> dict[str, Any]:
    """Steer an engine that is given by its URL, across a threshold of requests; then leave it.

    Returns:
        What was decided, with the numbers.
    """
    known = len(box.decided)
    box.edit(dwellOffSeconds=DWELL)
    async with box.given() as run:
        await run.line(f"{ENGINE} switched: on, confirmed by the engine", seconds=LINE_SECONDS)
        on = await engine.read()
        assert on["mode"] == "on", on
        tasks = await faults.streams(engine, texts)
        await run.line(f"{ENGINE} decides: off: ", f"in flight above {OFF_ABOVE}")
        await run.line(f"{ENGINE} switched: off, confirmed by the engine")
        off = await engine.read()
        assert (off["mode"], off["epoch"] > on["epoch"]) == ("off", True), off

        async def obeyed() -> bool:
            ranks = ranks_of(await engine.read())
            return {(rank["activeSteps"], rank["epoch"]) for rank in ranks} == {(0, off["epoch"])}

        await until(obeyed, LINE_SECONDS)
        answers = await asyncio.gather(*tasks)
        assert all(answer.complete for answer in answers)
        await run.line(f"{ENGINE} decides: hold off: ", "dwell")
        assert await run.end() == 0, run.lines
    left = await engine.read()
    last = off["fallback"]
    assert last["mode"] == "tiers", off
    assert {name: left[name] for name in last} == last, (left, last)
    assert left["lease"]["holder"] == off["lease"]["holder"] == on["lease"]["holder"], left
    assert left["lease"]["remainingSeconds"] <= faults.LEASE_SECONDS, left
    first, flip = box.decided[known:]
    assert (first["mode"], flip["mode"], flip["code"]) == ("On", "Off", "AboveThreshold"), flip
    assert OFF_ABOVE < flip["numbers"]["running"] <= len(texts), flip
    return {"decided": [first["reason"], flip["reason"]]}


async def ended(box: Home, engine: Engine, texts: Sequence[str]) -> dict[str, Any]:
    """Take the engine on with what is remembered of it, turn it on by an edit, and end it.

    Returns:
        What was decided, and what became of streams at the end.
    """
    before, known = await engine.read(), len(box.decided)
    async with box.starting() as run:
        await run.line(f"{ENGINE} note: process {box.pid()} runs, and is taken on")
        await run.line(f"{ENGINE} decides: hold off: ", "dwell", f"of {DWELL} s left")

        async def off() -> bool:
            return bool((await engine.read())["mode"] == "off")

        await until(off, LINE_SECONDS)
        box.edit(dwellOffSeconds=0)
        await run.line("note: the policy has changed")
        await run.line(f"{ENGINE} switched: on, confirmed by the engine")
        state = await engine.read()
        assert (state["mode"], state["bootID"]) == ("on", before["bootID"]), state
        assert state["epoch"] > before["epoch"], state
        found = await faults.stopped(Ending(run), engine, texts, state["lease"]["holder"])
        assert found["exitStatus"] == 0, run.lines
    assert any(f"{ENGINE} note: ended" in line for line in run.lines), run.lines
    assert await engine.health() == 0
    decided = box.decided[known:]
    assert [each["mode"] for each in decided] == ["Off", "On"], decided
    return {**found, "decided": [each["reason"] for each in decided]}


class Ending:
    """An engine that is ended by ending who has started it."""

    def __init__(self, run: Local) -> None:
        self._run = run

    def terminate(self) -> None:
        """Ask the command to end."""
        self._run.process.send_signal(signal.SIGTERM)

    async def ended(self, seconds: float) -> int:
        """Wait for its end; returns its exit status."""
        async with asyncio.timeout(seconds):
            return await self._run.ended()
