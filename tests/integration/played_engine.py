"""A simulated engine in a played pod: it notes who calls it, and can lose or delay its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from starlette.responses import PlainTextResponse

from specserve import names
from specserve_engine.auth import TokenFile
from specserve_engine.environ import settings_from
from specserve_engine.listener import bind
from specserve_sim import cli
from specserve_sim.engine import EngineConfig, SimEngine
from specserve_sim.server import Site, _cut, _gone, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from specserve_sim.behaviour import Side

logging.getLogger("specserve_sim").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Door(Site):
    """Where one engine is; counts connections and requests by side."""

    visits: Counter[str] = field(default_factory=Counter)

    def find(self, local: tuple[str, int | None] | None) -> tuple[SimEngine, Side] | None:
        found = super().find(local)
        if found is not None:
            self.visits[found[1]] += 1
        return found


class _Admin:
    """The admin listener, with a notebook in front and a bad line behind."""

    def __init__(self, engine: PlayedEngine, inner: Any) -> None:
        self._engine = engine
        self._inner = inner
        self.watching = inner.watching

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        engine = self._engine
        if engine.meshed:
            text = "upstream connect error or disconnect/reset before headers"
            return await PlainTextResponse(text, 503, {"server": "envoy"})(scope, receive, send)
        if scope["method"] != "PUT":
            return await self._inner.app(scope, receive, send)
        body = bytearray()
        said: list[Any] = []

        async def hear() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def say(message: Any) -> None:
            said.append(message)

        engine.under_way += 1
        engine.most_under_way = max(engine.most_under_way, engine.under_way)
        try:
            await self._inner.app(scope, hear, say)
            if said[0]["status"] == 401:
                engine.strangers += 1
            else:
                engine.orders.append(Order(json.loads(body), said[0]["status"]))
            if engine.answers_to_lose:
                engine.answers_to_lose -= 1
                _cut(scope)
                return await _gone(receive)
            if engine.answer_after:
                await asyncio.sleep(engine.answer_after)
        finally:
            engine.under_way -= 1
        for message in said:
            await send(message)
        return None


@dataclass(frozen=True)
class Order:
    """A directive that reached the admin listener, and the HTTP status it answered."""

    body: Mapping[str, Any]
    status: int


class PlayedEngine(SimEngine):
    """A simulated engine.

    Attributes:
        orders: All directives that reached its admin listener, renewals too.
        answers_to_lose: So many directives are carried out and not answered: the line breaks.
        answer_after: Seconds between carrying a directive out and answering it.
        strangers: Directives that came without a valid token.
        most_under_way: Most directives that were under way at one moment.
        meshed: A mesh's proxy answers on the admin port, and lets nothing through.
    """

    def __init__(self, config: EngineConfig, tokens: TokenFile, *, pod_uid: str) -> None:
        self.orders: list[Order] = []
        self.answers_to_lose = self.strangers = 0
        self.answer_after = 0.0
        self.under_way = self.most_under_way = 0
        self.meshed = False
        super().__init__(config, tokens, pod_uid=pod_uid)

    @property
    def listener(self) -> Any:
        inner = super().listener
        return _Admin(self, inner)

    @property
    def modes(self) -> list[str]:
        """The modes that were taken over, one for each epoch, oldest first."""
        found: dict[int, str] = {}
        for one in self.applied:
            found.setdefault(one.epoch, one.mode)
        return list(found.values())


def config_of(pod: Any, mounted: Path) -> EngineConfig:
    """What the engine of a pod is started with: its arguments and environment are read."""
    container = next(c for c in pod["spec"]["containers"] if c["name"] == names.ENGINE_CONTAINER)
    environment = {item["name"]: item.get("value", "") for item in container.get("env", ())}
    environment[names.ENV_POD_UID] = pod["metadata"]["uid"]
    words = [
        str(mounted / names.KEY_CONFIG) if word == names.ENGINE_CONFIG else word
        for word in container["args"]
    ]
    return cli.config_from(cli.parse(cli.parser(), words), settings_from(environment))


@dataclass
class Running:
    """An engine that listens at a pod's address."""

    engine: PlayedEngine
    door: Door

    @classmethod
    @contextlib.asynccontextmanager
    async def at(
        cls, address: str, config: EngineConfig, mounted: Path, pod_uid: str
    ) -> AsyncIterator[Self]:
        """Run an engine at an address, for the length of a `with` block."""
        ports = (names.PORT_SERVING, names.PORT_ADMIN)
        with contextlib.ExitStack() as bound:
            sockets = [bound.enter_context(bind(address, port)) for port in ports]
            bound.pop_all()
        engine = PlayedEngine(config, TokenFile(mounted), pod_uid=pod_uid)
        door = Door({"*": engine}, names.PORT_ADMIN)
        try:
            async with serving(door, sockets):
                yield cls(engine, door)
        finally:
            engine.close()
