"""Edits of the file while engines are steered by it: none of them ends what steers."""

import asyncio
import contextlib

import pytest

from specserve.local import edits, plan
from specserve.local.news import Board
from specserve.target import target_of

FILE = """apiVersion: specserve.dev/v1alpha1
kind: SpecServe
metadata: {name: chat}
spec:
  model: {source: 'hf://a/b'}
  engine: {resources: {limits: {memory: 64Gi}}}
  policy: {mode: 'Off'}
"""
TYPOS = {
    "engine: {resources": "engine: {sharedMemory: 16GB, resources",
    "name: chat": "name: 123",
    "mode: 'Off'": "mode: 'Off', modeUntil: 2030-02-30T00:00:00Z",
    "policy:": "policy: &p {mode: 'Off'}\n  polcy:",
    "spec:": "spec: [",
}


class Work:
    """Takes policies as a session does."""

    def __init__(self):
        self.lines = asyncio.Queue()
        self.policies = asyncio.Queue()
        self.board = Board(lambda: 0.0, self.lines.put_nowait, None)
        self.asked = None

    def adopt(self, policy):
        spec = self.asked.spec.model_copy(update={"policy": policy})
        target_of(("default", "chat"), spec, tokens=("t",), api_key=None, curve=None)
        self.policies.put_nowait(policy)


@contextlib.asynccontextmanager
async def followed(path, monkeypatch):
    monkeypatch.setattr(edits, "LOOK", 0.005)
    path.write_text(FILE)
    work = Work()
    work.asked = plan.read(path)
    task = asyncio.create_task(edits.follow(path, work.asked, work))
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(5):
            yield work
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def is_followed(path, work):
    path.write_text(FILE.replace("'Off'", "Auto"))
    assert (await work.policies.get()).mode == "Auto"


@pytest.mark.parametrize("typo", TYPOS)
async def test_a_typo_is_said_and_the_next_edit_is_taken(tmp_path, monkeypatch, typo):
    path = tmp_path / "cr.yaml"
    async with followed(path, monkeypatch) as work:
        path.write_text(FILE.replace(typo, TYPOS[typo]))
        line = await work.lines.get()
        assert line.kind == "warning"
        assert line.text.endswith("; the policy stays as it was")
        await is_followed(path, work)


async def test_a_fault_in_reading_an_edit_ends_nothing(tmp_path, monkeypatch):
    path = tmp_path / "cr.yaml"
    async with followed(path, monkeypatch) as work:
        with monkeypatch.context() as broken:
            broken.setattr(edits, "read", lambda _: {}["nobody thought of it"])
            path.write_text(FILE + "\n")
            line = await work.lines.get()
        assert "KeyError: 'nobody thought of it'; the policy stays as it was" in line.text
        await is_followed(path, work)
