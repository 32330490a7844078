"""The processes of a cluster, seen from its owner."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

POLL_SECONDS = 0.05
"""Pause between two looks at a condition that nothing announces."""


class Keeper:
    """Starts processes that end with this one, however it ends (see keeper.py).

    Args:
        log: file for what the keeper itself has to say.
    """

    def __init__(self, log: Path) -> None:
        self._turn = threading.Lock()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )

    def start(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> int:
        """Starts a process and returns its id."""
        request = {"argv": list(argv), "log": str(log), "env": dict(env)}
        answer = self._ask({"start": request})
        if "error" in answer:
            raise ClusterError(f"starting {argv[0]}", answer["error"])
        return int(answer["pid"])

    def at_end(
        self,
        *,
        rmdir: Sequence[Path] = (),
        write: Sequence[tuple[Path, str]] = (),
        rmtree: Sequence[Path] = (),
    ) -> None:
        """Names what to clear up when all processes have ended, in this order.

        Args:
            rmdir: roots of trees of control groups.
            write: files to write, for settings to give back.
            rmtree: folders.
        """
        self._ask(
            {
                "at_end": {
                    "write": [(str(path), text) for path, text in write],
                    "rmdir": [str(path) for path in rmdir],
                    "rmtree": [str(path) for path in rmtree],
                }
            }
        )

    def close(self) -> None:
        """Kills what still runs, clears up, and returns when all of it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._turn:
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = b""
        if not line:
            raise ClusterError("talking to the keeper of the cluster's processes", "it has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(slots=True)
class Daemon:
    """One process of a cluster that can be stopped, frozen, killed and started again.

    Attributes:
        name: of the component, also of its log file.
        argv: its command line.
        log: what it prints goes here, over all its lives.
        inner: when the command only enters a namespace and forks, signals go to the child.
    """

    name: str
    argv: list[str]
    log: Path
    keeper: Keeper
    env: dict[str, str]
    inner: bool = False
    _pidfd: int = field(default=-1, init=False)
    _pid: int = field(default=0, init=False)

    @property
    def pid(self) -> int:
        """The id of the component's process; ClusterError when it does not run."""
        if not self.running:
            raise ClusterError(self.name, "does not run", self.tail())
        if not self.inner:
            return self._pid
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children")
        until(lambda: children.read_text().strip(), f"{self.name} to enter its namespace", 10)
        return int(children.read_text().split()[0])

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        if self._pidfd < 0:
            return False
        return not select.select([self._pidfd], [], [], 0)[0]

    def start(self) -> None:
        """Starts the process; nothing happens when it runs."""
        if self.running:
            return
        self._forget()
        self._pid = self.keeper.start(self.argv, self.log, self.env)
        with contextlib.suppress(ProcessLookupError):  # ended already: does not run
            self._pidfd = os.pidfd_open(self._pid)

    def stop(self, seconds: float = 20.0) -> None:
        """Asks the process to end and waits for that; kills it when it takes longer."""
        self.signal(signal.SIGTERM)
        if self.running and not select.select([self._pidfd], [], [], seconds)[0]:
            self.kill()

    def kill(self) -> None:
        """Ends the process as a crash would, and returns when it has ended."""
        self.signal(signal.SIGKILL)
        if self._pidfd >= 0:
            select.select([self._pidfd], [], [])

    def pause(self) -> None:
        """Freezes the process: it keeps its connections and answers nothing."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a frozen process go on."""
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process runs."""
        if not self.running:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.inner:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self._pidfd, number)

    def tail(self, lines: int = 15) -> str:
        """The end of the log, for error messages."""
        if not self.log.exists():
            return ""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return f"End of {self.log}:\n" + "\n".join(text)

    def _forget(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def until(
    condition: Callable[[], object],
    what: str,
    seconds: float,
    *,
    alive: Sequence[Daemon] = (),
) -> None:
    """Waits for a condition.

    Args:
        condition: asked until it returns something true; an OSError counts as not yet.
        what: names the condition in the error.
        seconds: the most that is waited.
        alive: processes without which there is nothing to wait for.

    Raises:
        ClusterError: the time ran out, or one of the processes ended.
    """
    deadline = time.monotonic() + seconds
    while True:
        seen: object = False
        with contextlib.suppress(OSError):
            seen = condition()
        if seen:
            return
        for daemon in alive:
            if not daemon.running:
                raise ClusterError(f"waiting for {what}", f"{daemon.name} ended", daemon.tail())
        if time.monotonic() > deadline:
            raise ClusterError(
                f"waiting for {what}",
                f"not within {seconds:g} s",
                "\n".join(daemon.tail() for daemon in alive),
            )
        time.sleep(POLL_SECONDS)
