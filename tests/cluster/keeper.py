"""Parent of a cluster's processes, so that they end with the cluster's owner.

Run as a script of its own, with nothing but the standard library. It takes one JSON object a line
on its standard input and answers each with one on its standard output:

    {"start": {"argv": [...], "log": path, "env": {...}, "cwd": path}}  ->  {"pid": 123}
    {"at_end": {"write": [[path, text], ...], "rmdir": [...], "rmtree": [...]}}  ->  {}

When the input ends, or the process that started it does (even by kill -9), it kills and reaps
all of its children and clears up what `at_end` names. A keeper that is itself killed takes the
children along, by the parent death signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLEAR_UP_SECONDS = 30.0

_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Keeper:
    """Children and what is to be cleared up after them."""

    def __init__(self) -> None:
        self.children: set[int] = set()
        self.write: list[tuple[str, str]] = []
        self.rmdir: list[str] = []
        self.rmtree: list[str] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carries out one request."""
        if "start" in request:
            return self._start(**request["start"])
        wanted = request["at_end"]
        self.write += wanted.get("write", ())
        self.rmdir += wanted.get("rmdir", ())
        self.rmtree += wanted.get("rmtree", ())
        return {}

    def _start(
        self, argv: list[str], log: str, env: dict[str, str], cwd: str | None = None
    ) -> dict[str, Any]:
        try:
            with open(log, "ab") as output:  # noqa: PTH123 - fewer imports, a faster start
                child = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=env,
                    cwd=cwd,
                    start_new_session=True,
                    # One thread and no locks of others: safe here, unlike in the owner.
                    preexec_fn=_die_with_parent,  # noqa: PLW1509
                )
        except OSError as error:
            return {"error": str(error)}
        self.children.add(child.pid)
        child.returncode = 0  # reaped below, not by the Popen object
        return {"pid": child.pid}

    def reap(self) -> None:
        """Collects what has ended, so that process ids in use are only of the living."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self.children.discard(pid)

    def end(self) -> None:
        """Kills all children, then clears up."""
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        deadline = time.monotonic() + _CLEAR_UP_SECONDS
        for root in self.rmdir:
            # A control group is busy until the kernel has let go of its last process.
            while not _remove_groups(root) and time.monotonic() < deadline:
                time.sleep(0.02)
        for path, text in self.write:
            with contextlib.suppress(OSError), open(path, "w") as file:  # noqa: PTH123
                file.write(text)
        for root in self.rmtree:
            shutil.rmtree(root, ignore_errors=True)


def _remove_groups(root: str) -> bool:
    for folder, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # noqa: PTH106
    return not os.path.exists(root)  # noqa: PTH110


def main() -> None:
    """Serves until the owner is done or gone."""
    keeper = Keeper()
    # Grandchildren whose parent is killed come here and are reaped.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child_ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    owner = os.pidfd_open(os.getppid())
    pending = b""
    while True:
        ready, _, _ = select.select([0, owner, child_ended], [], [])
        if child_ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(child_ended, 4096)
            keeper.reap()
        if 0 in ready:
            received = os.read(0, 1 << 16)
            if not received:
                break
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                os.write(1, json.dumps(keeper.answer(json.loads(line))).encode() + b"\n")
        elif owner in ready:
            break
    keeper.end()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the owner ended between a request and its answer
        sys.exit(1)
