"""Ten cells once more, in real time: engine processes, clients and the operator's client on HTTP.

Virtual time leaves out what a machine adds: connections, JSON, an event loop that is late. Each
cell is played by both for the same `SECONDS`, learning included, with the same policy; what is
compared is the tokens that the engine's own read-back counts after `SETTLED_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from specserve import api, names, signals
from specserve.engine import Endpoint, EngineClient, EngineError
from specserve_sim.profile import load_profile
from tests.bench.regret import arms, compare
from tests.bench.regret.steering import Judge, Plugin, Steering
from tests.bench.regret.virtual import CAPACITY, NEW_TOKENS, VirtualEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CELLS = (
    *(compare.Cell("h200-a", 1, 2.5), compare.Cell("h200-a", 250, 2.0)),
    *(compare.Cell("h200-b", 10, 1.0), compare.Cell("h200-b", 70, 1.5)),
    *(compare.Cell("h200-b", 32, 3.0), compare.Cell("h200x2-nvlink", 1, 1.5)),
    *(compare.Cell("h200x2-nvlink", 70, 3.0), compare.Cell("h200x2-nccl", 32, 1.5)),
    *(compare.Cell("h200x2-hostmem", 1, 2.5), compare.Cell("h200x2-hostmem", 100, 2.5)),
)
SECONDS = 18.0
AT_A_TIME = 2
"""Neighbours in `CELLS`: few clients beside many."""

SETTLED_SECONDS = 5.0
PROMPT_TOKENS = 128
FIRST_HOST = 11
METRICS = signals.MetricNames("sglang:num_running_reqs", "sglang:num_queue_reqs", "")
"""Not asked for: the engines have `/v1/loads`."""

START_SECONDS = 30.0


async def check() -> list[dict[str, Any]]:
    """Play all cells over HTTP, `AT_A_TIME` of them, and in virtual time."""
    rows: list[dict[str, Any]] = []
    numbered = list(enumerate(CELLS, start=FIRST_HOST))
    for begin in range(0, len(numbered), AT_A_TIME):
        together = numbered[begin : begin + AT_A_TIME]
        rows += await asyncio.gather(
            *(_compared(cell, f"127.97.0.{host}") for host, cell in together)
        )
        print(f"{len(rows)} of {len(CELLS)} played over HTTP")
    return rows


async def _compared(cell: compare.Cell, host: str) -> dict[str, Any]:
    virtual = _virtual(cell)
    real = await _real(cell, host)
    return {
        "profile": cell.profile,
        "c": cell.clients,
        "accept": cell.accept,
        "strategy": arms.BREAK_EVEN,
        "httpTokensPerSecond": round(real, 1),
        "virtualTokensPerSecond": round(virtual, 1),
        "httpToVirtual": round(real / virtual, 4),
    }


def _judge() -> Judge:
    policy = api.Policy.model_validate({"strategy": arms.BREAK_EVEN})
    draft = api.Draft.model_validate({**arms.DRAFT, "steps": list(compare.STEPS)})
    return Judge(policy, draft, compare.STEPS)


def _virtual(cell: compare.Cell) -> float:
    engine = VirtualEngine(
        load_profile(cell.profile),
        compare.SEED,
        cell.accept,
        choose_steps=lambda _batch: 0,
        scatter=0.0,
        switch_seconds=0.0,
    )
    plugin = Plugin(engine, compare.STEPS)
    steering = Steering(_judge(), plugin)
    engine.load(cell.clients)
    counts = []
    for at in (SETTLED_SECONDS, SECONDS):
        steering.run(at)
        counts.append(plugin.read_back(at)["groups"][0]["tokensTotal"])
    return float((counts[1] - counts[0]) / (SECONDS - SETTLED_SECONDS))


async def _real(cell: compare.Cell, host: str) -> float:
    async with contextlib.AsyncExitStack() as stack:
        endpoint, uid = await stack.enter_async_context(_engine(cell, host))
        client = await stack.enter_async_context(EngineClient(METRICS))
        clients = await stack.enter_async_context(asyncio.TaskGroup())
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        )
        url = endpoint.url(names.PORT_SERVING, "/generate")
        asking = [
            clients.create_task(_client(session, url, number)) for number in range(cell.clients)
        ]
        try:
            return await _operate(client, endpoint, uid)
        finally:
            for task in asking:
                task.cancel()


async def _client(session: aiohttp.ClientSession, url: str, number: int) -> None:
    # The first answer is cut, so that clients are as spread as they are after a while.
    tokens = 1 + number * 97 % NEW_TOKENS
    while True:
        body = {
            "input_ids": list(range(PROMPT_TOKENS)),
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0},
        }
        async with session.post(url, json=body) as answer:
            answer.raise_for_status()
            await answer.read()
        tokens = NEW_TOKENS


async def _operate(client: EngineClient, endpoint: Endpoint, uid: str) -> float:
    """Steer one engine for the length of a check; tokens per second of its settled part."""
    judge = _judge()
    loop = asyncio.get_running_loop()
    began = loop.time()
    marks: list[tuple[float, int]] = []
    pending = [SETTLED_SECONDS, SECONDS]
    due = 0.0
    boot = ""
    while True:
        now = loop.time() - began
        read = judge.reads(now) or now >= pending[0]
        load = await client.load(endpoint)
        if read:
            answer = await client.read_back(endpoint)
            boot = answer["bootID"]
            group = answer["groups"][0]
            judge.take(answer, loop.time() - began)
            if now >= pending[0]:
                marks.append((group["at"], group["tokensTotal"]))
                if not pending[1:]:
                    break
                pending.pop(0)
        now = loop.time() - began
        stamp = now if load.stamp is None else load.stamp
        wait, wanted = judge.decide(now, stamp, load.running, load.queued)
        if wanted is not None:
            answer = await client.switch(endpoint, judge.order(wanted, uid, boot))
            judge.take(answer, loop.time() - began)
        due = min(now + wait, max(pending[0], now))
        await asyncio.sleep(max(0.0, due - (loop.time() - began)))
    (first, before), (last, after) = marks
    return (after - before) / (last - first)


@contextlib.asynccontextmanager
async def _engine(cell: compare.Cell, host: str) -> AsyncIterator[tuple[Endpoint, str]]:
    """A simulated engine in a process of its own, serving."""
    uid, token = f"regret-{host}", secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="specserve-regret-") as folder:
        (Path(folder) / names.KEY_PLUGIN_TOKEN).write_text(token)
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("specserve-sim")),
            *("serve", f"--host={host}", f"--port={names.PORT_SERVING}"),
            *("--speculative-algorithm=EAGLE3", f"--max-running-requests={CAPACITY}"),
            *(f"--sim-profile={cell.profile}", f"--sim-accept-length={cell.accept}"),
            env={
                names.ENV_CREDENTIALS_DIR: folder,
                names.ENV_STEPS: ",".join(map(str, cell.steps)),
                names.ENV_POD_UID: uid,
            },
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        endpoint = Endpoint(host, (token,))
        try:
            await _serving(endpoint, process)
            yield endpoint, uid
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _serving(endpoint: Endpoint, process: asyncio.subprocess.Process) -> None:
    began = time.monotonic()
    async with EngineClient(METRICS) as client:
        while True:
            try:
                await client.load(endpoint)
            except EngineError as error:
                if process.returncode is not None or time.monotonic() - began > START_SECONDS:
                    raise SystemExit(f"the engine at {endpoint.ip} does not serve") from error
                await asyncio.sleep(0.1)
            else:
                return
