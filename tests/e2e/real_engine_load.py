"""Clients of engine pods, run beside the node, told on standard input what to ask.

    python -m tests.e2e.real_engine_load PROMPTS.json

Each line is a JSON object: `{"phase": "on", "kind": "easy", "clients": 2, "pods": {"a": URL}}`.
From then on every engine of `pods` has so many clients, which ask one thing after the other;
others have none, and requests that are under way there are still waited for. What requests of a
phase with a name won in tokens for each verify round is counted. The end of the input ends the
load, and an account of all requests is printed, by the name that `pods` gave an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

from tests.demo.ledger import Answer

TOKENS = range(64, 129, 8)
"""Lengths of answers, in turn: with one alone, all of an engine's requests would end together."""

SILENT_SECONDS = 60.0
"""A stream that brings nothing for so long is lost; one that starts takes the others' cores."""

DRAIN_SECONDS = 90.0
AFTER_LOSS_SECONDS = 0.5


@dataclass(slots=True)
class Phase:
    """What engines won in a phase of the load."""

    tokens: int = 0
    rounds: int = 0


@dataclass(slots=True)
class Account:
    """What became of the requests to one engine."""

    sent: int = 0
    answered: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)


@dataclass(slots=True)
class Order:
    """One line of the input."""

    phase: str
    kind: str
    clients: int
    pods: dict[str, str]


class Load:
    """The clients of all engines."""

    def __init__(self, session: aiohttp.ClientSession, prompts: dict[str, list[str]]) -> None:
        self._session = session
        self._prompts = {kind: itertools.cycle(texts) for kind, texts in prompts.items()}
        self._lengths = itertools.cycle(TOKENS)
        self._order = Order("", "", 0, {})
        self._clients: dict[str, set[asyncio.Task[None]]] = {}
        self.accounts: dict[str, Account] = {}

    def obey(self, order: Order) -> None:
        """Bring the clients to what is wanted; who has a request under way ends it first."""
        self._order = order
        for engine in order.pods:
            self.accounts.setdefault(engine, Account())
            clients = self._clients.setdefault(engine, set())
            while len(clients) < order.clients:
                client = asyncio.create_task(self._client(engine))
                clients.add(client)
                client.add_done_callback(clients.discard)

    async def end(self) -> None:
        """Take no more, and wait for the answers under way; what is missing then is lost."""
        self._order = Order("", "", 0, {})
        clients = [client for each in self._clients.values() for client in each]
        if clients:
            _, late = await asyncio.wait(clients, timeout=DRAIN_SECONDS)
            for client in late:
                client.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _client(self, engine: str) -> None:
        clients = self._clients[engine]
        me = asyncio.current_task()
        account = self.accounts[engine]
        while engine in self._order.pods and len(clients) <= self._order.clients:
            account.sent += 1
            problem = "not answered in the end"
            try:
                problem = await self._ask(self._order.pods[engine], account)
            finally:
                if problem:
                    account.lost[problem] = account.lost.get(problem, 0) + 1
                else:
                    account.answered += 1
            if problem:
                await asyncio.sleep(AFTER_LOSS_SECONDS)
        clients.discard(me)

    async def _ask(self, url: str, account: Account) -> str:
        order, tokens = self._order, next(self._lengths)
        body = {
            "text": next(self._prompts[order.kind]),
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "stream": True,
        }
        answer, last = Answer(), b""
        try:
            async with self._session.post(f"{url}/generate", json=body) as response:
                if response.status != 200:
                    return f"HTTP {response.status}"
                async for line in response.content:
                    answer.feed(line)
                    last = line if line.startswith(b"data: {") else last
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{type(error).__name__} after {answer.tokens} tokens"
        if not (problem := answer.problem(tokens)) and order.phase:
            phase = account.phases.setdefault(order.phase, Phase())
            phase.tokens += tokens
            phase.rounds += json.loads(last[len(b"data: ") :])["meta_info"]["spec_verify_ct"]
        return problem


async def main(prompts: dict[str, list[str]]) -> None:
    """Follow the input to its end."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        load = Load(session, prompts)
        async for line in reader:
            load.obey(Order(**json.loads(line)))
        await load.end()
    print(json.dumps({name: asdict(each) for name, each in load.accounts.items()}), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
