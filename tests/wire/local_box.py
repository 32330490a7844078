"""A box without a cluster: simulated engines and `specserve local`, each a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

from tests.cluster import claims

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ROOT = Path(__file__).parents[2]
TOKEN = "local-token"
PATIENCE = 30.0
SIMULATOR = "from specserve_sim.cli import main; raise SystemExit(main())"


DRAWING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
"""What moves a terminal's cursor and colours its text."""


def manifest(name: str = "box", **policy: Any) -> str:
    """A SpecServe with a policy of a few seconds."""
    return yaml.safe_dump(
        {
            "apiVersion": "specserve.dev/v1alpha1",
            "kind": "SpecServe",
            "metadata": {"name": name},
            "spec": {
                "model": {"source": "hf://example-org/chat-8b", "servedName": "chat"},
                "draft": {
                    "method": "EAGLE3",
                    "source": "hf://example-org/chat-8b-eagle3",
                    "steps": [0, 3],
                },
                "policy": {
                    "threshold": {"offAbove": 20, "onBelow": 10},
                    "dwellOnSeconds": 0,
                    "dwellOffSeconds": 0,
                    "samplePeriodMilliseconds": 100,
                    "leaseSeconds": 15,
                    **policy,
                },
            },
        }
    )


@dataclass
class Engine:
    """A simulated engine in a process of its own."""

    url: str
    admin: str
    process: asyncio.subprocess.Process
    http: aiohttp.ClientSession
    token: str = TOKEN

    async def read(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token}"}
        async with self.http.get(f"{self.admin}/v1/speculation", headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def until(
        self, holds: Callable[[dict[str, Any]], bool], seconds: float = PATIENCE
    ) -> dict[str, Any]:
        """Read back until a condition holds: an engine tells nobody of a change by itself."""
        async with asyncio.timeout(seconds):
            while not holds(state := await self.read()):  # noqa: ASYNC110 - see above
                await asyncio.sleep(0.05)
        return state

    async def behave(self, **behaviour: Any) -> None:
        async with self.http.put(f"{self.url}/sim/v1/behaviour", json=behaviour) as answer:
            assert answer.status == 200, await answer.text()

    async def show(self, running: int, queued: int = 0) -> None:
        await self.behave(load={"running": running, "queued": queued})

    @contextlib.asynccontextmanager
    async def asked(self, clients: int, accept: float) -> AsyncIterator[None]:
        """Keep requests in flight."""

        async def ask() -> None:
            body = {
                "input_ids": list(range(16)),
                "sampling_params": {
                    "max_new_tokens": 400,
                    "custom_params": {"accept_length": accept},
                },
            }
            while True:
                async with self.http.post(f"{self.url}/generate", json=body) as answer:
                    await answer.read()

        tasks = [asyncio.create_task(ask()) for _ in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def engine(
    folder: Path, uid: str = "local", words: tuple[str, ...] = (), **fixed: Any
) -> AsyncIterator[Engine]:
    """Run an engine with more options; the block begins when it serves."""
    credentials = folder / "credentials"
    credentials.mkdir(exist_ok=True)
    (credentials / "plugin-token").write_text(TOKEN)
    port, admin = fixed.get("port") or claims.port(), fixed.get("admin") or claims.port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SIMULATOR, f"--port={port}"),
        *("--speculative-algorithm=EAGLE3", "--max-running-requests=256"),
        *("--served-model-name=chat", "--enable-metrics", *words),
        env=os.environ
        | {
            "SPECSERVE_POD_UID": uid,
            "SPECSERVE_STEPS": "0,3",
            "SPECSERVE_ADMIN_PORT": str(admin),
            "SPECSERVE_CREDENTIALS_DIR": str(credentials),
        },
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    reading = None
    try:
        async with asyncio.timeout(PATIENCE):
            while b"serving at" not in (line := await process.stderr.readline()):
                assert line, "the engine ended before it served"
        reading = asyncio.create_task(process.stderr.read())
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as http:
            yield Engine(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}", process, http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if reading is not None:
            await reading


@dataclass
class Local:
    """A running `specserve local`, its lines gathered."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    async def line(self, *words: str, seconds: float = PATIENCE) -> str:
        """Wait for the next line that has all these words."""
        try:
            async with asyncio.timeout(seconds):
                return await self._line(words)
        except TimeoutError:
            raise AssertionError(f"no line about {words}: {self.lines[-30:]}") from None

    async def _line(self, words: tuple[str, ...]) -> str:
        assert self.process.stdout is not None
        while True:
            raw = await self.process.stdout.readline()
            assert raw, f"it ended without a line about {words}: {self.lines[-30:]}"
            self.lines.append(DRAWING.sub("", raw.decode()).rstrip())
            if all(word in self.lines[-1] for word in words):
                return self.lines[-1]

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; returns the exit status once it is gone."""
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Return the exit status once it is gone; what it still said is in `lines`."""
        async with asyncio.timeout(PATIENCE):
            said, _ = await self.process.communicate()
        self.lines += said.decode().splitlines()
        assert self.process.returncode is not None
        return self.process.returncode


@contextlib.asynccontextmanager
async def local(
    folder: Path, cr: str, *options: str, terminal: bool = False, **environ: str
) -> AsyncIterator[Local]:
    """Run the command on a SpecServe with these options, its state below the folder."""
    (folder / "cr.yaml").write_text(cr)
    (folder / "token").write_text(TOKEN + "\n")
    words = [
        *(sys.executable, "-m", "specserve.cli", "local", "-f", str(folder / "cr.yaml")),
        *("--token-file", str(folder / "token"), "--state", str(folder / "state")),
        *options,
    ]
    if terminal:
        # `script` gives it a terminal and hands on what it draws, and its exit status.
        words = ["script", "-qefc", "stty cols 120; exec " + shlex.join(words), "/dev/null"]
    # Tests that run under nohup would hand their ignored SIGHUP on.
    words = ["env", "--default-signal=HUP", *words]
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "operator"), "TERM": "xterm", **environ},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Local(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def at(*engines: Engine) -> list[str]:
    """The options that name these engines."""
    return [word for one in engines for word in ("--engine", one.url, "--admin-url", one.admin)]


def decisions(path: Path) -> list[dict[str, Any]]:
    """The entries of a decision log."""
    return [json.loads(line) for line in path.read_text().splitlines()]
