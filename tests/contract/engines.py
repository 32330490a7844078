"""The engines that the contract is tried on, and what a test may do to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

HOLDER = "contract/specserve"
URL_VARIABLE = "SPECSERVE_ENGINE_URL"
TOKEN_VARIABLE = "SPECSERVE_ENGINE_TOKEN"


@dataclass(frozen=True)
class Plan:
    """The engine a test wants: `layout` has the tensor-parallel ranks of each group."""

    layout: tuple[int, ...] = (2,)
    available_steps: tuple[int, ...] = (0, 1, 3)
    controllable: bool = True
    loaded: bool = True
    require_live: bool = False
    token: str = "token-one"


class Faults(Protocol):
    """What can be made to happen to an engine that runs under the test's hands.

    The phases in which a rank can be hushed are `prepare`, `commit` (it obeys but does not say
    so), `lost` (it neither obeys nor says anything at the commit) and `read`. `hushed` waits until
    such a rank has been asked.
    """

    async def boot(self) -> None: ...
    def load(self) -> None: ...
    def drain(self) -> None: ...
    def die(self) -> None: ...
    async def decode(self, rounds: int, batch: int) -> None: ...
    def object(self, group: int, rank: int, message: str) -> None: ...
    def hush(self, group: int, rank: int, *phases: str) -> None: ...
    async def hushed(self) -> None: ...
    def heal(self) -> None: ...
    def mount_tokens(self, current: str, previous: str = "") -> None: ...


@dataclass(frozen=True)
class EngineUnderTest:
    """An admin endpoint. `auto_steps` are the steps of its own policy, if that is known."""

    url: str
    token: str
    auto_steps: int | None = None
    faults: Faults | None = None


class Launch(Protocol):
    """Starts an engine according to a plan, with its tokens mounted in a folder."""

    def __call__(
        self, plan: Plan, credentials: Path
    ) -> AbstractAsyncContextManager[EngineUnderTest]: ...


def launchable() -> dict[str, Launch]:
    """Return the engines that a test can start and do harm to."""
    from tests.contract.memory import memory_engine
    from tests.contract.simulator import simulated_engine

    return {"memory": memory_engine, "simulator": simulated_engine}


def external() -> EngineUnderTest | None:
    """Return the engine named in the environment, whatever it is."""
    url = os.environ.get(URL_VARIABLE)
    return EngineUnderTest(url.rstrip("/"), os.environ[TOKEN_VARIABLE]) if url else None


def mount_tokens(folder: Path, current: str, previous: str = "") -> None:
    """Write the token files as the kubelet does: a new folder, and a link swapped to it."""
    folder.mkdir(exist_ok=True)
    serial = len(list(folder.glob("..v*")))
    version = folder / f"..v{serial}"
    version.mkdir()
    for name, token in (("plugin-token", current), ("plugin-token-previous", previous)):
        (version / name).write_text(token)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    swap = folder / "..data_tmp"
    swap.symlink_to(version.name)
    swap.rename(folder / "..data")


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any
    headers: Any

    @property
    def code(self) -> str | None:
        return self.body.get("code")


class Admin:
    """The operator's side of the contract, as thin as can be."""

    def __init__(self, session: aiohttp.ClientSession, engine: EngineUnderTest) -> None:
        self._session = session
        self.engine = engine
        self.token = engine.token

    async def send(self, method: str, path: str = "/v1/speculation", **options: Any) -> Reply:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        headers |= options.pop("headers", {})
        async with self._session.request(
            method, self.engine.url + path, headers=headers, **options
        ) as answer:
            return Reply(answer.status, await answer.json(), answer.headers)

    async def read(self) -> dict[str, Any]:
        reply = await self.send("GET")
        assert reply.status == 200, reply
        return reply.body

    async def health(self) -> Reply:
        return await self.send("GET", "/health")

    async def directive(self, **fields: Any) -> dict[str, Any]:
        """Return the next directive after what is read back; None takes a field away."""
        state = await self.read()
        body = {
            "podUID": state["podUID"],
            "bootID": state["bootID"],
            "epoch": state["epoch"] + 1,
            "holder": HOLDER,
            "leaseSeconds": 60,
            "mode": "off",
            "fallback": {"mode": "auto"},
            "reason": "contract test",
        } | fields
        return {name: value for name, value in body.items() if value is not None}

    async def put(self, body: Any) -> Reply:
        return await self.send("PUT", json=body)

    async def order(self, **fields: Any) -> Reply:
        return await self.put(await self.directive(**fields))


async def until(
    admin: Admin, holds: Callable[[dict[str, Any]], bool], seconds: float = 12
) -> dict[str, Any]:
    """Read back until a condition holds: an engine tells nobody of a change by itself."""
    async with asyncio.timeout(seconds):
        while not holds(state := await admin.read()):  # noqa: ASYNC110 - there is no other way
            await asyncio.sleep(0.05)
    return state


@contextlib.asynccontextmanager
async def admin_of(engine: EngineUnderTest) -> AsyncIterator[Admin]:
    timeout = aiohttp.ClientTimeout(total=15)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Admin(session, engine)
