"""Keeps engine processes running, as a kubelet keeps containers.

A process is started in a session of its own, so that Ctrl-C is not for it, and outlives this one
if this one is killed: the next one finds it by its record and takes it on. What becomes of it is
told to the loop as the status of a pod.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from specserve import names, observed
from specserve.engine import EngineClient
from specserve.local import logs
from specserve.local.files import write_whole
from specserve.local.launch import Launch, Probe
from specserve.local.news import Board
from specserve.observed import Key, Pod

#: Seconds between two looks at an engine that starts; its budget is that of the rendered probe.
LOOK: Final = 0.5
#: Seconds of pause before an engine is started again: the kubelet's, none at first, then these.
BACKOFF: Final = (10.0, 300.0)
#: Seconds of running after which an engine is not in a loop of crashes.
STEADY: Final = 600.0
FILE: Final = "processes.json"


class Process:
    """A process that leads a group of its own.

    Attributes:
        pid: Its id, which is also that of its group.
    """

    def __init__(self, pid: int, child: "subprocess.Popen[bytes] | None" = None) -> None:
        self.pid = pid
        self._child = child
        self._handle = os.pidfd_open(pid)
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._handle, self._ends)

    def _ends(self) -> None:
        self._loop.remove_reader(self._handle)
        self._over.set()

    @classmethod
    def start(cls, launch: Launch, inherited: Mapping[str, str], log: Path) -> Self:
        """Start an engine; what it writes goes to a file, that of the start before is kept.

        Raises:
            OSError: There is no such command, or it may not be run.
        """
        with logs.begun(log) as out:
            child = subprocess.Popen(  # noqa: S603 - the user's own command line
                launch.command,
                env=launch.environment(inherited),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return cls(child.pid, child)
        except OSError:
            # A kernel without handles of processes: none is left that nobody can wait for.
            child.kill()
            child.wait()
            raise

    async def ended(self) -> int | None:
        """Wait for its end; returns its exit code, None if only its parent could know it."""
        await self._over.wait()
        # What it has left behind, too: schedulers that outlive their server hold the GPU. Before
        # it is waited for, as its number is not given to another until then.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return None if self._child is None else self._child.wait()

    async def stop(self, grace: float, hurry: asyncio.Event) -> bool:
        """Ask it to end, and end its group by force after the grace, or when there is hurry.

        Returns:
            Whether it ended by itself.
        """
        if not self._over.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        waits = [asyncio.create_task(each.wait()) for each in (self._over, hurry)]
        await asyncio.wait(waits, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        by_itself = self._over.is_set()
        if not by_itself:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        await self.ended()
        return by_itself

    def close(self) -> None:
        """Let go of it; if it runs, it runs on."""
        self._loop.remove_reader(self._handle)
        os.close(self._handle)


class Records:
    """Which processes were started, for the one that comes after this.

    Args:
        folder: Where the record is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self._path.read_text(encoding="utf-8"))
            self._known = known if isinstance(known, dict) else {}

    def put(self, name: str, process: Process, launch: Launch) -> None:
        """Record a process that was started.

        Raises:
            OSError: The record could not be written.
        """
        born = _born(process.pid)
        self._known[name] = {"pid": process.pid, "born": born, "digest": launch.digest}
        write_whole(self._path, json.dumps(self._known, indent=1) + "\n")

    def find(self, name: str) -> tuple[Process, str] | None:
        """The recorded process if it still runs, and what it was started as."""
        entry = self._known.get(name)
        if not isinstance(entry, dict) or not isinstance(entry.get("pid"), int):
            return None
        try:
            process = Process(entry["pid"])
        except OSError:
            return None
        # Looked up through the handle's process: a number may have gone to another meanwhile.
        if _born(entry["pid"]) != entry.get("born"):
            process.close()
            return None
        return process, str(entry.get("digest"))


def _born(pid: int) -> str:
    """What tells a process from all that had its number, on this boot of this machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name in brackets may hold anything; the start is the 20th field after it.
    return f"{boot}/{stat.rpartition(')')[2].split()[19]}"


class Keeper:
    """Keeps one engine running.

    Args:
        launch: How to start it.
        key: The SpecServe it belongs to.
        client: Asks its probes.
        records: Which processes there are.
        folder: For its log.
        inherited: Variables of this process.
        board: Told what happens.
        show: Told the pod that it is to the loop.
    """

    def __init__(
        self,
        launch: Launch,
        key: Key,
        client: EngineClient,
        records: Records,
        folder: Path,
        inherited: Mapping[str, str],
        board: Board,
        show: Callable[[Pod], None],
    ) -> None:
        self.launch = launch
        self.log = folder / f"{launch.place.name}.log"
        self.process: Process | None = None
        self._key = key
        self._client = client
        self._records = records
        self._inherited = inherited
        self._board = board
        self._show = show
        self._starts = 0
        self._last: dict[str, Any] = {}
        self._never = asyncio.Event()

    @property
    def name(self) -> str:
        """What the engine is called."""
        return self.launch.place.name

    async def run(self) -> None:
        """Keep it running until cancelled; the process is left as it is then."""
        loop = asyncio.get_running_loop()
        pause = 0.0
        while True:
            began = loop.time()
            await self._live()
            if loop.time() - began >= STEADY:
                pause = 0.0
            if pause:
                self._board.say("note", self.name, f"started again in {pause:.0f} s")
                await asyncio.sleep(pause)
            pause = min(max(pause * 2, BACKOFF[0]), BACKOFF[1])

    async def end(self, hurry: asyncio.Event) -> bool:
        """End the process; returns whether it went by itself."""
        if self.process is None:
            return True
        by_itself = await self.process.stop(self.launch.grace, hurry)
        how = "ended" if by_itself else "ended by force"
        self._board.say("note" if by_itself else "warning", self.name, how)
        return by_itself

    async def _live(self) -> None:
        """One life of the process: from its start, or from finding it, to its end."""
        try:
            process = self.process = await self._begin()
        except OSError as error:
            self._gone(f"{error.filename or self.launch.command[0]}: {error.strerror}", 127)
            return
        self._told(ready=False)
        over = asyncio.create_task(process.ended())
        attended = asyncio.create_task(self._attend())
        bounded = asyncio.create_task(logs.bounded(self.log, self._say))
        try:
            await asyncio.wait({over, attended}, return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                why, grace = attended.result()
                self._board.say("warning", self.name, why)
                await process.stop(grace, self._never)
            code = await over
        finally:
            tasks = (over, attended, bounded)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        process.close()
        self.process = None
        self._gone(logs.last_words(self.log), code)

    async def _begin(self) -> Process:
        """Take on the process of an earlier run, or start one."""
        found = self._records.find(self.name) if not self._starts else None
        self._starts += 1
        if found is not None:
            process, digest = found
            if digest == self.launch.digest:
                self._board.say("note", self.name, f"process {process.pid} runs, and is taken on")
                return process
            self._board.say(
                "note",
                self.name,
                f"process {process.pid} is of another command line or configuration; it ends",
            )
            await process.stop(self.launch.grace, self._never)
            process.close()
        # Kept before anything else can fail: what runs must be ended by `end`.
        process = self.process = Process.start(self.launch, self._inherited, self.log)
        self._board.say("note", self.name, f"started as process {process.pid}, log {self.log}")
        try:
            self._records.put(self.name, process, self.launch)
        except OSError as error:
            self._board.say(
                "warning",
                self.name,
                f"process {process.pid} was not recorded: {error}; if it outlives this command, "
                "the next --start does not know it",
            )
        return process

    async def _attend(self) -> tuple[str, float]:
        """Probe it; returns why it must be ended and the seconds that it gets for it."""
        launch, loop = self.launch, asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(launch.startup.budget):
                await self._answers(launch.startup, LOOK)
        except TimeoutError:
            budget = f"{launch.startup.budget:.0f} s (engine.startupBudgetSeconds)"
            return f"not ready within {budget}; it is started again", launch.grace
        self._board.say("well", self.name, f"ready after {loop.time() - began:.0f} s")
        self._told(ready=True)
        readiness = asyncio.create_task(self._follow())
        try:
            await self._fails(launch.liveness)
        finally:
            readiness.cancel()
        silent = f"{launch.liveness.budget:.0f} s"
        grace = launch.grace if launch.liveness.grace is None else launch.liveness.grace
        return f"no answer to its health check for {silent}; it is started again", grace

    async def _follow(self) -> None:
        """Tell when it is no longer ready, and when it is again."""
        probe = self.launch.readiness
        while True:
            await self._fails(probe)
            self._board.say("warning", self.name, "not ready: it is not steered until it is")
            self._told(ready=False)
            await self._answers(probe, probe.period)
            self._board.say("well", self.name, "ready again")
            self._told(ready=True)

    async def _answers(self, probe: Probe, pause: float) -> None:
        """Return once a probe is answered as it should be."""
        while True:
            if await self._asked(probe):
                return
            await asyncio.sleep(pause)

    async def _fails(self, probe: Probe) -> None:
        """Return once a probe has failed as often in a row as counts."""
        failures = 0
        while failures < probe.failures:
            await asyncio.sleep(probe.period)
            failures = 0 if await self._asked(probe) else failures + 1

    def _say(self, well: bool, text: str) -> None:
        self._board.say("note" if well else "warning", self.name, text)

    async def _asked(self, probe: Probe) -> bool:
        return await self._client.healthy(probe.url, probe.timeout)

    def _gone(self, words: str, code: int | None) -> None:
        shown = 0 if code is None else code if code >= 0 else 128 - code
        self._last = {
            "exitCode": shown,
            "reason": "Completed" if shown == 0 else "Error",
            "message": words,
        }
        pod = self._told(ready=False)
        why = pod.trouble.message if shown and pod.trouble else f"it ended; log {self.log}"
        self._board.say("warning", self.name, why)

    def _told(self, *, ready: bool) -> Pod:
        """Tell the loop the pod that it would be in a cluster."""
        number = 0 if self.process is None else self.process.pid
        pod = observed.pod(
            {
                "metadata": {
                    "uid": self.name,
                    "name": self.name,
                    "namespace": self._key[0],
                    "labels": {names.LABEL_INSTANCE: self._key[1]},
                },
                "status": {
                    "phase": "Running",
                    "podIP": self.name,
                    "conditions": [{"type": "Ready", "status": str(ready)}],
                    "containerStatuses": [
                        {
                            "name": names.ENGINE_CONTAINER,
                            "containerID": f"process://{number}",
                            "restartCount": max(0, self._starts - 1),
                            "ready": ready,
                            "state": {"running": {}} if number else {"terminated": self._last},
                            "lastState": {"terminated": self._last} if self._last else {},
                        }
                    ],
                },
            }
        )
        if pod.trouble is not None:
            # There is no container: what ended is the engine's process.
            said = pod.trouble.message.removeprefix(f"container {names.ENGINE_CONTAINER} ")
            pod = replace(pod, trouble=replace(pod.trouble, message=said))
        self._show(pod)
        return pod
