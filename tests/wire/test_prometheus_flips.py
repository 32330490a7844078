"""The second loop with real clients: Prometheus scrapes simulated engines, and they follow it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specserve import names, queries
from specserve.engine import EngineClient
from specserve.prometheus import PrometheusClient
from specserve.regulate import Regulator
from specserve.signals import MetricNames
from specserve_sim.engine import EngineConfig
from specserve_sim.launch import addresses, running_fleet
from tests.contract.engines import mount_tokens
from tests.integration.api import eventually, throughout
from tests.unit.engines import pod
from tests.unit.regulation import KEY, target
from tests.wire.prometheus_server import Target, prometheus

if TYPE_CHECKING:
    from specserve.target import Target as Steered
    from specserve_sim.engine import SimEngine

SCRAPED_SECONDS = 15.0
METRICS = MetricNames("sglang:num_running_reqs", "sglang:num_queue_reqs", "")


def steered(url: str, **fields: Any) -> Steered:
    asked = {"url": url, "scrapeIntervalSeconds": 1, **fields}
    given = target(source="Prometheus", prometheus=asked, samplePeriodMilliseconds=100)
    return replace(given, model="sim", policy=queries.paced(given.policy))


async def test_engines_follow_what_prometheus_sees_of_them(tmp_path):
    """Each pod by its own series; a wrong label and targets that are gone hold (O-C4, O-C5)."""
    mount_tokens(tmp_path / "tokens", "t")
    # Addresses of this process: other tests use the same ports.
    at = addresses(f"127.{100 + os.getpid() % 80}.9.1", 2)
    served = [
        Target(
            f"{address}:{names.PORT_SERVING}",
            {"namespace": KEY[0], "pod": f"{KEY[1]}-sim-{address}"},
        )
        for address in at
    ]
    async with (
        running_fleet(
            EngineConfig(),
            at,
            credentials=tmp_path / "tokens",
            port=names.PORT_SERVING,
            admin_port=names.PORT_ADMIN,
        ) as fleet,
        EngineClient(METRICS) as engines,
        PrometheusClient(METRICS, hosts=("127.0.0.1",)) as servers,
    ):
        busy, idle = fleet.engines.values()
        with prometheus(tmp_path / "prometheus", targets=served) as server:
            regulator = Regulator(
                engines, servers, holder="here", changed=lambda _: None, notice=lambda _: None
            )
            loop = asyncio.create_task(regulator.run())
            try:
                regulator.configure(steered(server.url))
                for address in at:
                    regulator.observe(None, pod(KEY, f"sim-{address}", address))
                busy.set_load(60, 5)
                idle.set_load(2, 0)
                await eventually(
                    lambda: [modes(busy), modes(idle)] == [["off"], ["on"]], SCRAPED_SECONDS
                )

                async def hold(code: str, words: str) -> None:
                    """All pods are blind for this reason, and none is switched by its load."""

                    def blind() -> bool:
                        errors = [one.sample_error for one in regulator.engines(KEY)]
                        return all(e and e[0] == code and words in e[1] for e in errors)

                    await eventually(blind, SCRAPED_SECONDS, code)
                    busy.set_load(2, 0)
                    idle.set_load(60, 5)
                    before = [modes(busy), modes(idle)]
                    await throughout(lambda: [modes(busy), modes(idle)] == before, 1.5)
                    busy.set_load(60, 5)
                    idle.set_load(2, 0)

                async def recovered() -> None:
                    """All pods are read again, and do as their load of now asks."""

                    def so() -> bool:
                        seen = not any(one.sample_error for one in regulator.engines(KEY))
                        return seen and (modes(busy)[-1], modes(idle)[-1]) == ("off", "on")

                    await eventually(so, SCRAPED_SECONDS)

                matchers = [{"name": "cluster", "value": "elsewhere"}]
                regulator.configure(steered(server.url, labelMatchers=matchers))
                await hold("NoSeries", 'cluster="elsewhere"')
                regulator.configure(steered(server.url))
                await recovered()

                server.watch([])
                await hold("NoSeries", "query: {__name__=")
                server.watch(served)
                await recovered()

                server.daemon.stop()
                await hold("PrometheusUnreachable", "Connection refused")
            finally:
                loop.cancel()
                await asyncio.gather(loop, return_exceptions=True)


def modes(engine: SimEngine) -> list[str]:
    """The modes that an engine was told, without repetitions."""
    told = [one.mode for one in engine.applied]
    return [mode for n, mode in enumerate(told) if n == 0 or told[n - 1] != mode]
