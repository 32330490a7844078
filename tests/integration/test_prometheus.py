"""Load by way of a real Prometheus server that scrapes simulated engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from specserve import names
from tests.cluster.pki import authority
from tests.integration.api import eventually, path, throughout
from tests.integration.stage import HIGH, LOW
from tests.wire.prometheus_server import PrometheusServer, Target, prometheus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.integration.kubelet import PlayedPod
    from tests.integration.stage import Stage

#: The server takes up to five seconds to notice targets; then the first scrape.
SCRAPED_SECONDS = 20.0
CALLS = "specserve_admin_request_duration_seconds"
PASSWORD, OTHER = "correct horse", "battery staple"
#: The two in bcrypt, which is all that Prometheus takes.
HASHED = {
    PASSWORD: "$2b$04$aJPo1KiRmurNlX//ThEKTucG92tr1UqsunKIXRo5qV2iU37A/ImUa",
    OTHER: "$2b$04$eXFuVI30mZf95C08rdvMp.HsM9gggXw.EuIrW453EFo3LeGRG13vy",
}


def targets(pods: Iterable[PlayedPod]) -> list[Target]:
    return [
        Target(
            f"{pod.address}:{names.PORT_SERVING}",
            {"namespace": pod.item["metadata"]["namespace"], "pod": pod.name},
        )
        for pod in pods
    ]


def policy(server: PrometheusServer, **fields: Any) -> dict[str, Any]:
    asked = {"url": server.url, "scrapeIntervalSeconds": 1, **fields}
    return {"source": "Prometheus", "prometheus": asked}


async def started(stage: Stage, server: PrometheusServer, **spec: Any) -> list[PlayedPod]:
    """A SpecServe whose engines are scraped and speculate."""
    made = await stage.create(**spec)
    pods = await stage.kubelet.running("chat", made["spec"]["replicas"])
    server.watch(targets(pods))
    await stage.ready(within=SCRAPED_SECONDS)
    return pods


@pytest.fixture
async def operator(start_operator):
    """An operator that may call the servers of this test."""
    process = start_operator(prometheus_hosts="127.0.0.1", read_back_seconds="2")
    await process.leads()
    return process


@pytest.fixture
def server(tmp_path) -> Iterator[PrometheusServer]:
    with prometheus(tmp_path / "prometheus") as running:
        yield running


async def test_flips_follow_prometheus_and_its_silence_holds(operator, stage, server):
    """O-C4, O-C5.3: each pod by its own series; wrong labels and lost targets are no load of 0."""
    pods = await started(stage, server, replicas=2, policy=policy(server))
    busy, idle = (pod.engine for pod in pods)
    busy.set_load(*HIGH)
    idle.set_load(*LOW)
    await stage.summary("Mixed (1 on, 1 off)")
    assert busy.modes == ["on", "off"]
    assert (
        await operator.value("specserve_admin_request_duration_seconds_count", call="loads") == 0
    )

    async def held() -> None:
        """No engine is switched, whatever its load."""
        modes = [list(busy.modes), list(idle.modes)]
        busy.set_load(*LOW)
        idle.set_load(*HIGH)
        await throughout(lambda: [busy.modes, idle.modes] == modes, 1.5)
        busy.set_load(*HIGH)
        idle.set_load(*LOW)

    wrong = [{"name": "cluster", "value": "elsewhere"}]
    await stage.edit(policy={"prometheus": {"labelMatchers": wrong}})
    blind = await stage.has("MetricsFresh", "False", "NoSeries")
    assert 'query: {__name__="sglang:num_running_reqs"' in blind["message"]
    assert 'cluster="elsewhere"' in blind["message"]
    await stage.event("NoSeries")
    await held()
    await stage.edit(policy={"prometheus": {"labelMatchers": None}})
    await stage.has("MetricsFresh", "True")
    await eventually(lambda: (busy.modes[-1], idle.modes[-1]) == ("off", "on"), 5)

    server.watch([])
    await stage.has("MetricsFresh", "False", "NoSeries", within=SCRAPED_SECONDS)
    await held()
    server.watch(targets(pods))
    await stage.has("MetricsFresh", "True", within=SCRAPED_SECONDS)
    busy.set_load(*LOW)
    await stage.summary("On 2/2")


async def test_a_login_that_is_renewed_and_a_server_that_is_gone(operator, stage, tmp_path):
    """O-C7.3: 401 is no empty answer; the renewed Secret is read without an edit."""
    pki = authority(tmp_path)
    certificate, key = pki.issue("server", "server", alternatives="IP:127.0.0.1")
    login = {
        "tls_server_config": {"cert_file": str(certificate), "key_file": str(key)},
        "basic_auth_users": {"reader": HASHED[PASSWORD]},
    }
    secrets = {
        "reader": {"username": "reader", "password": PASSWORD},
        "querier-ca": {"ca.crt": pki.certificate.read_text()},
    }
    for name, data in secrets.items():
        await stage.api.post(
            path("secrets", stage.namespace), {"metadata": {"name": name}, "stringData": data}
        )
    refs = {
        "basicAuthSecretRef": {"name": "reader"},
        "caSecretRef": {"name": "querier-ca"},
    }
    with prometheus(tmp_path / "prometheus", web=login) as server:
        (pod,) = await started(stage, server, policy=policy(server, **refs))
        pod.engine.set_load(*HIGH)
        await stage.summary("Off 1/1")

        login["basic_auth_users"] = {"reader": HASHED[OTHER]}
        (server.folder / "web.yml").write_text(yaml.safe_dump(login))
        refused = await stage.has("MetricsFresh", "False", "Unauthorized")
        assert "401" in refused["message"]
        pod.engine.set_load(*LOW)
        await throughout(lambda: pod.engine.modes == ["on", "off"], 1.5)
        await stage.api.merge(stage.at("secrets", "reader"), {"stringData": {"password": OTHER}})
        await stage.summary("On 1/1", within=30)

        await asyncio.to_thread(server.daemon.stop)
        await stage.has("MetricsFresh", "False", "PrometheusUnreachable")
        pod.engine.set_load(*HIGH)
        await throughout(lambda: pod.engine.modes == ["on", "off", "on"], 1.5)
        server.daemon.start()
        await stage.summary("Off 1/1", within=SCRAPED_SECONDS)
    said = "\n".join(operator.lines())
    assert PASSWORD not in said
    assert OTHER not in said
    seen = str(await stage.get()) + str(await stage.events())
    assert PASSWORD not in seen
    assert OTHER not in seen
