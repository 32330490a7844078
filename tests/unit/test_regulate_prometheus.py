"""The second loop under source Prometheus, in virtual time: whose word counts, and how long."""

import asyncio
import dataclasses
from typing import Any

import pytest

from specserve import queries
from specserve.observed import Key
from specserve.prometheus import PrometheusError
from specserve.signals import Reading
from specserve.target import Target
from tests.unit.regulation import KEY, World, gaps, target, world
from tests.unit.virtual_time import in_virtual_time, now

SCRAPE = 20


class Server:
    """What a server knows of each pod: load and time of the sample."""

    def __init__(self) -> None:
        self.load_of: dict[str, tuple[int, int]] = {}
        self.taken_at: dict[str, float] = {}
        self.error: PrometheusError | None = None
        self.asked: list[float] = []
        self.forgotten: list[Key] = []

    def scrape(self, pod: str, running: int, queued: int = 0) -> None:
        self.load_of[pod] = (running, queued)
        self.taken_at[pod] = now()

    async def load(self, _: Target, pod: str) -> Reading:
        self.asked.append(now())
        if self.error is not None:
            raise self.error
        running, queued = self.load_of[pod]
        at = self.taken_at[pod]
        # Its clock is not ours.
        return Reading(at + 5e8, running, queued, None, None, 1, age=now() - at)

    def forget(self, key: Key) -> None:
        self.forgotten.append(key)


def by_server(**fields: Any) -> Target:
    """A SpecServe whose load comes from the server, a decision at each tick."""
    asked = {"url": "http://prometheus", "scrapeIntervalSeconds": SCRAPE}
    given = target(source="Prometheus", prometheus=asked, **fields)
    return dataclasses.replace(given, policy=queries.paced(given.policy))


def served(server: Server) -> Any:
    return world(loads=server)


def add(w: World, server: Server, running: int = 0) -> Any:
    """An engine whose own word would be another one."""
    server.scrape("chat-u1", running)
    return w.add(running=999)


@in_virtual_time
async def test_the_server_is_asked_for_the_load_and_the_engine_for_the_rest():
    server = Server()
    async with served(server) as w:
        w.regulator.configure(by_server())
        engine = add(w, server)
        await asyncio.sleep(30)
        assert engine.mode == "on"
        server.scrape("chat-u1", 50)
        await asyncio.sleep(6)
        assert engine.mode == "off"
        assert w.engines.of("load") == []
        assert len(w.engines.of("read")) >= 2
        assert set(gaps(server.asked)) == {SCRAPE / queries.ASKED_PER_SCRAPE}


@in_virtual_time
@pytest.mark.parametrize("gpu", ["NVIDIA H200", ""])
async def test_an_engine_is_asked_for_its_gpu_once(gpu):
    server = Server()
    async with served(server) as w:
        w.regulator.configure(by_server(strategy="BreakEven"))
        engine = add(w, server)
        engine.gpu = gpu
        await asyncio.sleep(60)
        assert w.engine().gpu == gpu
        engine.boot()
        w.edit(boot="c2#1")
        await asyncio.sleep(60)
        assert w.engine().gpu == gpu
        assert len(w.engines.of("load")) == 1


@in_virtual_time
async def test_an_engine_whose_port_is_closed_to_the_operator_is_not_asked_for_ever():
    server = Server()
    async with served(server) as w:
        w.regulator.configure(by_server(strategy="BreakEven"))
        add(w, server).faults["load"] = "hang"
        await asyncio.sleep(40)
        assert len(w.engines.of("load")) == 3
        assert w.engine().sample_error is None
        assert w.engine().on
        await asyncio.sleep(600)
        assert len(w.engines.of("load")) == 3


@in_virtual_time
async def test_each_specserve_has_its_own_source():
    server = Server()
    async with served(server) as w:
        w.regulator.configure(by_server())
        add(w, server)
        other = ("team", "other")
        w.regulator.configure(target(other))
        w.add("u2", "10.0.0.2", key=other)
        await asyncio.sleep(20)
        assert {call.uid for call in w.engines.of("load")} == {"u2"}


@in_virtual_time
async def test_without_a_client_the_engines_are_asked():
    async with world() as w:
        w.regulator.configure(by_server())
        w.add()
        await asyncio.sleep(20)
        assert w.engines.of("load")


@in_virtual_time
async def test_a_sample_seen_again_confirms_nothing():
    """O-C6.2: another number with the time of the one before is no new evidence."""
    server = Server()
    async with served(server) as w:
        w.regulator.configure(by_server())
        engine = add(w, server)
        await asyncio.sleep(15)
        server.load_of["chat-u1"] = (50, 0)
        await asyncio.sleep(30)
        assert engine.mode == "on"
        server.taken_at["chat-u1"] = now()
        await asyncio.sleep(6)
        assert engine.mode == "off"


@in_virtual_time
async def test_a_sample_ages_from_when_it_was_taken():
    """O-C6.3: three scrape intervals, not counted from when it was fetched."""
    server = Server()
    async with served(server) as w:
        w.regulator.configure(by_server(onSignalLoss="Off"))
        engine = add(w, server)
        server.taken_at["chat-u1"] = now() - 50
        await asyncio.sleep(8)
        assert engine.mode == "on"
        assert w.engine().sample_error is None
        await asyncio.sleep(8)
        assert w.engine().sample_error == ("SamplesStale", "")
        assert engine.mode == "off"


@in_virtual_time
async def test_what_the_server_says_counts_at_once_and_the_way_to_it_after_three_tries():
    server = Server()
    async with served(server) as w:
        w.regulator.configure(by_server())
        engine = add(w, server)
        await asyncio.sleep(15)
        server.error = PrometheusError("Unauthorized", "401")
        await asyncio.sleep(6)
        assert w.engine().sample_error == ("Unauthorized", "401")
        server.error = None
        server.scrape("chat-u1", 0)
        await asyncio.sleep(6)
        assert w.engine().sample_error is None
        server.error = PrometheusError("PrometheusTimeout", "late", answered=False)
        await asyncio.sleep(9)
        assert w.engine().sample_error is None
        await asyncio.sleep(7)
        assert w.engine().sample_error == ("PrometheusTimeout", "late")
        await asyncio.sleep(300)
        assert engine.mode == "on"
        assert [body["mode"] for body in w.switches if body["mode"] != "on"] == []


@pytest.mark.parametrize("edit", [{"boot": "c1#1"}, {"ip": "10.0.0.9"}])
@in_virtual_time
async def test_a_sample_of_the_process_before_says_nothing(edit: dict[str, str]):
    """O-C9.2: what was scraped before the restart is not the load of the new engine."""
    server = Server()
    async with served(server) as w:
        w.regulator.configure(by_server())
        engine = add(w, server)
        await asyncio.sleep(15)
        assert engine.mode == "on"
        server.scrape("chat-u1", 500)
        engine.boot()
        w.engines.at["10.0.0.9"] = engine
        await asyncio.sleep(0.01)
        w.edit(**edit)
        await asyncio.sleep(30)
        assert engine.mode == "on"
        assert not w.engine().sampled
        server.scrape("chat-u1", 500)
        await asyncio.sleep(6)
        assert engine.mode == "off"


@in_virtual_time
async def test_a_specserve_that_goes_takes_its_connections_along():
    server = Server()
    async with served(server) as w:
        w.regulator.configure(by_server())
        add(w, server)
        await asyncio.sleep(1)
        w.regulator.release(KEY)
        assert server.forgotten == [KEY]
