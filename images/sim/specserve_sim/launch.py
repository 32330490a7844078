"""Engines in this process, for the length of a `with` block: one on ports of its own, or a fleet.

A fleet is many engines at many addresses, all on the same two ports, behind one server. An idle
engine of a fleet has no task and no timer; its schedulers and its admin listener are made when
someone asks for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specserve_engine.auth import TokenFile
from specserve_engine.listener import bind
from specserve_sim.engine import EngineConfig, Pace, SimEngine
from specserve_sim.server import Site, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

WILDCARD = "0.0.0.0"


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine and where it listens; `admin_url` is of no use to an engine without tokens."""

    engine: SimEngine
    url: str
    admin_url: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines by address, and the ports that all of them share."""

    engines: Mapping[str, SimEngine]
    port: int
    admin_port: int

    def set_load(self, running: int, queued: int) -> dict[str, float]:
        """Have every engine report this load; return the monotonic times at which it began to."""
        return {
            address: engine.set_load(running, queued) for address, engine in self.engines.items()
        }


@contextlib.asynccontextmanager
async def running_engine(
    config: EngineConfig,
    *,
    credentials: Path | None = None,
    pod_uid: str = "sim",
    host: str = "127.0.0.1",
    port: int = 0,
    admin_host: str | None = None,
    admin_port: int = 0,
) -> AsyncIterator[RunningEngine]:
    """Run one engine; the block begins when it serves, its admin port answers before.

    Args:
        config: what it is started with.
        credentials: folder with the admin port's tokens; without it that port answers nobody.
        pod_uid: the pod it says it is in.
        host: to listen at; `::` takes both families.
        port: of the serving routes; 0 takes a free one.
        admin_host: of the admin port, if not `host`.
        admin_port: of the admin routes; 0 takes a free one.

    Raises:
        OSError: an address is in use or not of this machine.
    """
    tokens = None if credentials is None else TokenFile(credentials)
    async with contextlib.AsyncExitStack() as stack:
        admin = bind(admin_host or host, admin_port)
        admin_port = admin.getsockname()[1]
        engine = SimEngine(config, tokens, pod_uid=pod_uid)
        stack.callback(engine.close)
        site = Site({"*": engine}, admin_port)
        await stack.enter_async_context(serving(site, [admin]))
        await engine.loaded()
        socket = bind(host, port)
        port = socket.getsockname()[1]
        await stack.enter_async_context(serving(site, [socket]))
        name = "localhost" if host in ("::", WILDCARD) else host
        name = f"[{name}]" if ":" in name else name
        yield RunningEngine(engine, f"http://{name}:{port}", f"http://{name}:{admin_port}")


def addresses(first: str, count: int) -> list[str]:
    """Return `count` addresses in a row, leaving out those that end in 0 or 255."""
    found: list[str] = []
    address = ipaddress.ip_address(first)
    while len(found) < count:
        if int(address) & 0xFF not in (0, 0xFF):
            found.append(str(address))
        address += 1
    return found


@contextlib.asynccontextmanager
async def running_fleet(
    config: EngineConfig,
    at: Sequence[str],
    *,
    credentials: Path | None = None,
    port: int = 0,
    admin_port: int = 0,
    wildcard: bool = False,
) -> AsyncIterator[Fleet]:
    """Run an engine at each of several addresses, all on the same two ports.

    Args:
        config: what each of them is started with.
        at: local addresses; on Linux all of 127.0.0.0/8 are.
        credentials: folder with the tokens that all admin ports take.
        port: of the serving routes; 0 takes one that is free at the first address.
        admin_port: of the admin routes; the same.
        wildcard: listen at every address of the machine with two sockets, instead of with two
            for each engine; connections to an address without an engine are reset.

    Raises:
        OSError: an address is in use or not of this machine, or there are too few file handles.
    """
    tokens = None if credentials is None else TokenFile(credentials)
    pace = Pace()
    engines = {
        address: SimEngine(config, tokens, pod_uid=f"sim-{address}", pace=pace) for address in at
    }
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines.values():
            stack.callback(engine.close)
        hosts = [WILDCARD] if wildcard else list(at)
        sockets = []
        with contextlib.ExitStack() as bound:
            for host in hosts:
                pair = [bind(host, wanted) for wanted in (port, admin_port)]
                sockets += [bound.enter_context(socket) for socket in pair]
                port, admin_port = (each.getsockname()[1] for each in sockets[:2])
            bound.pop_all()
        await stack.enter_async_context(serving(Site(engines, admin_port), sockets))
        await asyncio.gather(*(engine.loaded() for engine in engines.values()))
        yield Fleet(engines, port, admin_port)
