"""Real SGLang servers as child processes of a test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.engine.client import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from tests.engine.client import Address, Engine

START_SECONDS = 300
LAST_LINES = 40


class DidNotStart(Exception):
    """A server ended, or was not ready in time; the message has the end of its log."""


class Server:
    """One server process with its children, in a session of its own."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], address: Address, log: Path
    ) -> None:
        self.address = address
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def ready(self, *, admin: bool = True, seconds: float = START_SECONDS) -> float:
        """Wait until it serves; returns the seconds since it was called.

        Args:
            admin: By the admin listener's health, the pod's readiness probe; otherwise by the
                line that SGLang logs.
            seconds: How long to wait.

        Raises:
            DidNotStart: It ended or took too long.
        """
        began = time.monotonic()
        async with connected(self.address) as engine:
            while not await self._serves(engine, admin=admin):
                if self.process.poll() is not None:
                    raise DidNotStart(f"exit status {self.process.returncode}\n{self.tail()}")
                if time.monotonic() - began > seconds:
                    raise DidNotStart(f"not ready after {seconds} s\n{self.tail()}")
                await asyncio.sleep(0.2)
        return time.monotonic() - began

    async def _serves(self, engine: Engine, *, admin: bool) -> bool:
        if admin:
            return await engine.health() == 200
        return "ready to roll" in self.log.read_text(errors="replace")

    def tail(self) -> str:
        """Return the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join(line[:400] for line in lines)

    def processes(self) -> list[int]:
        """Return the process ids of all that it consists of."""
        return [self.process.pid, *sorted(_descendants(self.process.pid))]

    def children(self) -> dict[str, list[int]]:
        """Return the process ids of its descendants by what SGLang calls them."""
        found: dict[str, list[int]] = {}
        for status in sorted(_descendants(self.process.pid)):
            title = _title(status)
            kind = next((name for name in ("scheduler", "detokenizer") if name in title), "other")
            found.setdefault(kind, []).append(status)
        return found

    def terminate(self) -> None:
        """Ask it to end, as the kubelet does."""
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, seconds: float) -> int:
        """Wait for its end; returns the exit status, negative for a signal."""
        async with asyncio.timeout(seconds):
            while self.process.poll() is None:  # noqa: ASYNC110 - a child of another session
                await asyncio.sleep(0.05)
        return int(self.process.returncode)

    def kill(self) -> None:
        """End all of its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str], environ: Mapping[str, str], address: Address, log: Path
) -> AsyncIterator[Server]:
    """Run a server for the length of a `with` block."""
    server = Server(command, environ, address, log)
    try:
        yield server
    finally:
        server.kill()


def _descendants(root: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = (entry / "stat").read_text(errors="replace")
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    grown = {root}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown} - found
        found |= grown
    return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""
