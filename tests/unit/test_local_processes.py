"""Engines kept running: what a kubelet does with a container, done with a process."""

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from specserve.local import logs, processes
from specserve.local.launch import Launch, Probe
from specserve.local.news import Board
from specserve.local.places import Place
from specserve.local.processes import Keeper, Process, Records

PLACE = Place("chat-0", "http://127.0.0.1:1", "http://127.0.0.1:2")
KEY = ("team", "chat")
#: The middle process is a child that outlives its parent unless somebody minds it.
FAMILY = """import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
signal.pause()"""
#: Writes like an engine that logs each batch.
CHATTER = """import os, time
while True:
    os.write(1, b"chatter " * 100)
    time.sleep(0.001)"""
SLEEP = "import signal; signal.pause()"


def launch(code=SLEEP, **changes):
    def probe(path, failures=3):
        return Probe(f"http://127.0.0.1{path}", 0.02, 1.0, failures)

    made = Launch(
        place=PLACE,
        command=(sys.executable, "-c", code),
        environ={},
        startup=probe("/started", 500),
        readiness=probe("/ready"),
        liveness=probe("/live"),
        grace=5.0,
    )
    return replace(made, **changes)


@dataclass
class Client:
    """Answers probes as it is told to."""

    ill: set[str] = field(default_factory=set)

    async def healthy(self, url, _limit):
        return url.removeprefix("http://127.0.0.1") not in self.ill


@dataclass
class World:
    keeper: Keeper
    client: Client
    pods: list
    lines: list

    async def until(self, holds):
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110 - processes tell nobody
                await asyncio.sleep(0.01)

    async def says(self, words):
        await self.until(lambda: any(words in line.text for line in self.lines))
        self.lines.clear()


@contextlib.asynccontextmanager
async def kept(folder, made):
    lines, pods, client = [], [], Client()
    board = Board(lambda: 0.0, lines.append, None)
    keeper = Keeper(made, KEY, client, Records(folder), folder, os.environ, board, pods.append)
    task = asyncio.create_task(keeper.run())
    try:
        yield World(keeper, client, pods, lines)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        hurry = asyncio.Event()
        hurry.set()
        await keeper.end(hurry)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_an_engine_is_usable_once_it_is_ready_and_not_before(tmp_path):
    async with kept(tmp_path, launch()) as w:
        w.client.ill.add("/started")
        await w.says("started as process")
        assert [pod.usable for pod in w.pods] == [False]
        assert w.pods[-1].trouble.reason == "Loading"
        w.client.ill.clear()
        await w.until(lambda: w.pods[-1].usable)
        assert w.pods[-1].boot == w.pods[0].boot
        w.client.ill.add("/ready")
        await w.until(lambda: not w.pods[-1].usable)
        w.client.ill.clear()
        await w.says("ready again")
        assert w.pods[-1].usable
        assert len({pod.boot for pod in w.pods}) == 1


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ("/started", "not ready within 0 s (engine.startupBudgetSeconds); it is started again"),
        ("/live", "no answer to its health check for 0 s; it is started again"),
    ],
)
async def test_an_engine_that_does_not_get_or_stay_well_is_another_process(
    tmp_path, probe, words, monkeypatch
):
    monkeypatch.setattr(processes, "LOOK", 0.01)
    short = Probe("http://127.0.0.1/started", 0.01, 1.0, 10)
    async with kept(tmp_path, launch(startup=short)) as w:
        w.client.ill.add(probe)
        await w.until(lambda: w.keeper.process is not None)
        first = w.keeper.process.pid
        await w.says(words)
        w.client.ill.clear()
        await w.until(lambda: w.pods[-1].usable)
        assert w.keeper.process.pid != first
        assert not alive(first)


async def test_a_crash_is_a_trouble_with_the_last_words_and_pauses_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BACKOFF", (0.01, 0.02))
    async with kept(tmp_path, launch("raise SystemExit('CUDA out of memory')")) as w:
        await w.says("exit code 1: CUDA out of memory; lower engine.memFractionStatic")
        told = [pod.trouble.message for pod in w.pods if pod.trouble is not None]
        assert any(message.startswith("ended with Error, exit code 1: CUDA") for message in told)
        assert not any("container" in message for message in told)
        await w.says("started again in 0 s")
        assert w.pods[-1].trouble.reason == "OutOfGpuMemory"
        assert len({pod.boot for pod in w.pods}) > 2
        assert (tmp_path / "chat-0.previous.log").exists()


async def test_a_signal_has_the_exit_code_that_a_container_would_have(tmp_path):
    async with kept(tmp_path, launch("import os; os.kill(os.getpid(), 11)")) as w:
        await w.says("exit code 139")


async def test_a_command_that_is_gone_is_a_crash_too(tmp_path):
    async with kept(tmp_path, launch(command=("/nonexistent/engine",))) as w:
        await w.says("/nonexistent/engine: No such file or directory")


async def test_an_engine_that_cannot_be_recorded_is_kept_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(processes, "write_whole", refuse)
    async with kept(tmp_path, launch()) as w:
        await w.until(lambda: any(line.kind == "warning" for line in w.lines))
        pid = w.keeper.process.pid
        [warning] = [line.text for line in w.lines if line.kind == "warning"]
        assert warning.startswith(f"process {pid} was not recorded: [Errno 28] No space left")
        await w.until(lambda: w.pods[-1].usable)
        assert w.keeper.process.pid == pid
    assert not alive(pid)


async def test_where_nobody_could_wait_for_it_no_process_is_left(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    log = tmp_path / "log"
    with pytest.raises(OSError, match="Function not implemented"):
        Process.start(launch("import os; print(os.getpid(), flush=True)"), os.environ, log)
    assert not log.read_text().strip() or not alive(int(log.read_text()))


async def test_children_go_with_their_parent_however_that_ends(tmp_path):
    for ends in ("stop", "crash"):
        folder = tmp_path / ends
        folder.mkdir()
        async with kept(folder, launch(FAMILY)) as w:
            log = folder / "chat-0.log"
            await w.until(lambda log=log: log.exists() and log.read_text().strip())
            child = int(log.read_text())
            assert alive(child)
            if ends == "stop":
                assert await w.keeper.process.stop(5.0, asyncio.Event())
            else:
                os.kill(w.keeper.process.pid, 9)
            await w.until(lambda child=child: not alive(child))


async def test_a_log_that_grows_is_cut_while_the_engine_writes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LONGEST", 20_000)
    monkeypatch.setattr(logs, "LOOK", 0.01)
    log = tmp_path / "chat-0.log"
    older = logs.before(log)
    async with kept(tmp_path, launch(CHATTER)) as w:
        for _ in range(3):
            await w.says("the log has grown: the older part of it is")
        # What cannot be kept is said once, and the engine runs on.
        monkeypatch.setattr(logs, "before", lambda log: log / "nowhere")
        await w.says("the log is not kept within bounds: [Errno 20] Not a directory")
        size = log.stat().st_size
        await w.until(lambda: log.stat().st_size > size + 20_000)
        assert not w.lines
        # Where an engine goes on at its old place, the file begins with a hole.
        assert set(log.read_bytes().split()) == set(older.read_bytes().split()) == {b"chatter"}
        assert older.stat().st_size >= 20_000
        assert alive(w.keeper.process.pid)


async def test_a_record_is_of_one_process_and_not_of_its_number(tmp_path):
    process = Process.start(launch(), os.environ, tmp_path / "log")
    records = Records(tmp_path)
    records.put("chat-0", process, launch())
    found, digest = Records(tmp_path).find("chat-0")
    assert (found.pid, digest) == (process.pid, launch().digest)
    found.close()
    path = tmp_path / processes.FILE
    entry = json.loads(path.read_text())
    entry["chat-0"]["born"] += "9"
    path.write_text(json.dumps(entry))
    assert Records(tmp_path).find("chat-0") is None
    assert await process.stop(5.0, asyncio.Event())
    assert Records(tmp_path).find("chat-0") is None
    assert Records(tmp_path).find("chat-1") is None
    process.close()


@pytest.mark.parametrize("text", ["", "[]", '{"chat-0": 3}', '{"chat-0": {"pid": "x"}}'])
async def test_a_record_that_is_none_is_no_process(tmp_path, text):
    (tmp_path / processes.FILE).write_text(text)
    assert Records(tmp_path).find("chat-0") is None
