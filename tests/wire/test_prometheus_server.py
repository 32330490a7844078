"""A real Prometheus server that scrapes pages as engines show them, and is asked by the client."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import aiohttp
import pytest
from aiohttp import web

from specserve import api, queries
from specserve.prometheus import PrometheusClient, PrometheusError
from specserve.signals import MetricNames
from specserve.target import Access, Target
from tests.cluster.pki import authority
from tests.cluster.processes import until
from tests.integration.api import eventually
from tests.wire import prometheus_server
from tests.wire.prometheus_server import prometheus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.wire.prometheus_server import PrometheusServer

NAMES = MetricNames("sglang:num_running_reqs", "sglang:num_queue_reqs", "")
SCRAPED_SECONDS = 15.0
PASSWORD = "correct horse"
#: Of PASSWORD; Prometheus takes bcrypt alone.
HASHED = "$2b$04$aJPo1KiRmurNlX//ThEKTucG92tr1UqsunKIXRo5qV2iU37A/ImUa"


def gauges(running: float, queued: float = 3, separator: str = ":", **labels: str) -> str:
    shown = ",".join(f'{name}="{value}"' for name, value in {"model_name": "m", **labels}.items())
    return (
        f"sglang{separator}num_running_reqs{{{shown}}} {running}\n"
        f"sglang{separator}num_queue_reqs{{{shown}}} {queued}\n"
    )


RANKS = {(0, 0): 10, (0, 1): 10, (1, 2): 14, (1, 3): 14}
PAGES = {
    "colon": gauges(40),
    "underscore": gauges(40, separator="_"),
    "both": gauges(40) + gauges(40, separator="_"),
    "longer": gauges(40) + 'sglang:num_running_reqs_offline{model_name="m"} 900\n',
    "foreign": 'vllm:num_requests_running{model_name="m"} 40\n',
    "half": 'sglang:num_running_reqs{model_name="m"} 40\n',
    "zero": gauges(0, 0),
    "nan": gauges(float("nan")),
    "copies": "".join(gauges(10, 0, tp_rank=str(rank)) for rank in range(4)),
    "shares": "".join(
        gauges(value, 0, dp_rank=str(dp), tp_rank=str(tp)) for (dp, tp), value in RANKS.items()
    ),
    "other-model": gauges(40).replace('"m"', '"n"'),
    "processes": gauges(24, pid="71") + gauges(2, pid="903"),
}


class Pages:
    """A web server whose pages are metrics, in a thread of its own."""

    def __init__(self) -> None:
        self.pages = dict(PAGES)
        pages = self.pages

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = pages.get(self.path.lstrip("/"))
                self.send_response(200 if body is not None else 404)
                self.end_headers()
                self.wfile.write((body or "").encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def targets(self) -> list[prometheus_server.Target]:
        """One for each page: a pod of that name."""
        address = f"127.0.0.1:{self._server.server_port}"
        return [
            prometheus_server.Target(
                address, {"namespace": "team", "pod": f"chat-{page}"}, f"/{page}"
            )
            for page in self.pages
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(pages: Pages, tmp_path_factory: Any) -> Iterator[PrometheusServer]:
    folder = tmp_path_factory.mktemp("prometheus") / "server"
    with prometheus(folder, targets=pages.targets()) as running:
        until(lambda: up(running) == len(PAGES), "all pages to be scraped", SCRAPED_SECONDS)
        yield running


def up(server: PrometheusServer) -> int:
    """How many targets have been scraped."""
    with urlopen(f"{server.url}/api/v1/query?query=count(up==1)") as answer:
        result = json.load(answer)["data"]["result"]
    return int(result[0]["value"][1]) if result else 0


@pytest.fixture
async def client() -> AsyncIterator[PrometheusClient]:
    async with PrometheusClient(NAMES, hosts=("127.0.0.1",)) as made:
        yield made


def target(url: str, access: Access = Access(), **fields: Any) -> Target:  # noqa: B008 - frozen
    policy = api.Policy.model_validate(
        {
            "source": "Prometheus",
            "prometheus": {"url": url, "scrapeIntervalSeconds": 1, **fields},
            "samplePeriodMilliseconds": 100,
        }
    )
    return Target(
        key=("team", "chat"),
        policy=queries.paced(policy),
        draft=api.Draft(),
        tokens=(),
        api_key=None,
        model="m",
        access=access,
    )


async def asked(client: PrometheusClient, wanted: Target, page: str = "colon") -> Any:
    """The reading of a pod, or why there is none, by an answer of now."""
    client.forget(wanted.key)

    async def answered() -> Any:
        try:
            return await client.load(wanted, f"chat-{page}")
        except PrometheusError as error:
            return None if error.code == "PrometheusTimeout" else error

    return await eventually(answered, 5)


async def scraped(client: PrometheusClient, wanted: Target, page: str = "colon") -> Any:
    """The first reading of a pod."""

    async def there() -> Any:
        found = await asked(client, wanted, page)
        assert not isinstance(found, PrometheusError), found
        return found

    return await eventually(there, SCRAPED_SECONDS, "the first scrape")


@pytest.mark.parametrize("page", ["colon", "underscore", "both", "longer"])
async def test_both_separators_and_both_at_once(server, client, page):
    """O-C1 (a) to (d)."""
    reading = await asked(client, target(server.url), page)
    assert (reading.running, reading.queued) == (40, 3)
    assert reading.age < 3.0


@pytest.mark.parametrize(
    ("page", "running", "ranks"), [("zero", 0, 1), ("copies", 10, 1), ("shares", 24, 2)]
)
async def test_zero_copies_and_shares(server, client, page, running, ranks):
    """O-C2, O-C4.3."""
    reading = await asked(client, target(server.url), page)
    assert (reading.running, reading.queued, reading.ranks) == (running, 0, ranks)


@pytest.mark.parametrize(
    ("page", "code", "words"),
    [
        ("foreign", "NoSamples", 'query: {__name__="sglang:num_running_reqs"'),  # O-C1 (e)
        ("half", "NoSeries", 'query: {__name__="sglang:num_queue_reqs"'),
        ("nan", "Unreadable", "running is nan"),
        ("other-model", "Unreadable", "of the model n, not m"),
        ("processes", "Unreadable", "label pid"),
    ],
)
async def test_what_is_no_reading_says_why(server, client, page, code, words):
    error = await asked(client, target(server.url), page)
    assert error.code == code
    assert words in str(error)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"labelMatchers": [{"name": "cluster", "value": "b"}]}, "NoSeries", 'cluster="b"'),
        ({"podLabel": "exported_pod"}, "NoSeries", "exported_pod=~"),
        ({"runningQuery": "sum(up)", "queuedQuery": "sum(up)"}, "NoSeries", "query: sum(up)"),
        ({"runningQuery": "sum(up"}, "QueryRefused", "bad_data"),
        ({"runningQuery": "42"}, "QueryRefused", "expected type instant vector"),
        ({"runningQuery": "up[5m]"}, "QueryRefused", "expected type instant vector"),
    ],
)
async def test_a_wrong_label_or_query_is_told_with_the_query(server, client, fields, code, words):
    error = await asked(client, target(server.url, **fields))
    assert error.code == code
    assert words in str(error)


async def test_a_query_of_ones_own(server, client):
    reading = await asked(
        client,
        target(
            server.url,
            runningQuery='max by (namespace, pod) ({__name__=~"sglang.num_running_reqs"}) # max',
            queuedQuery="sglang:num_queue_reqs",
        ),
    )
    assert (reading.running, reading.queued) == (40, 3)


async def test_a_target_that_is_gone_is_no_zero(server, client, pages):
    """O-C4.1: the others are read on."""
    left = [one for one in pages.targets() if one.path != "/zero"]
    server.watch(left)

    async def gone() -> Any:
        found = await asked(client, target(server.url), "zero")
        return found if isinstance(found, PrometheusError) else None

    try:
        error = await eventually(gone, SCRAPED_SECONDS)
        assert error.code == "NoSamples"
        assert (await asked(client, target(server.url))).running == 40
        del pages.pages["underscore"]  # still a target, and silent

        async def silent() -> Any:
            found = await asked(client, target(server.url), "underscore")
            return found if isinstance(found, PrometheusError) else None

        assert (await eventually(silent, SCRAPED_SECONDS)).code == "NoSamples"
    finally:
        pages.pages.update(PAGES)
        server.watch(pages.targets())
        await eventually(lambda: up(server) == len(PAGES), SCRAPED_SECONDS)


@contextlib.asynccontextmanager
async def querier(servers: dict[str, str]) -> AsyncIterator[str]:
    """A global view: asks all servers and adds the name of each, without removing duplicates."""

    async def take(request: web.Request) -> web.Response:
        result = []
        for name, url in servers.items():
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with aiohttp.request(
                    "GET",
                    f"{url}{request.path}",
                    params=request.query,
                    timeout=aiohttp.ClientTimeout(0.5),
                ) as answer:
                    for element in (await answer.json())["data"]["result"]:
                        element["metric"]["prometheus_replica"] = name
                        result.append(element)
        body = {"status": "success", "data": {"resultType": "vector", "result": result}}
        return web.json_response(body)

    app = web.Application()
    app.router.add_get("/{path:.*}", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_pair_of_servers_counts_once_and_the_one_that_is_ahead_wins(
    server, client, pages, tmp_path
):
    """O-C5, with two real servers; one of them stops scraping."""
    both = {"p-0": server.url}
    with prometheus(tmp_path / "second", targets=pages.targets()) as second:
        both["p-1"] = second.url
        async with querier(both) as url:
            await scraped(client, target(second.url))
            assert (await asked(client, target(url))).running == 40
            # From here on the second one sees nothing new, and its last samples are still found.
            second.watch([])
            await eventually(lambda: stopped(second), SCRAPED_SECONDS)
            pages.pages["colon"] = gauges(7)
            try:

                async def seen() -> bool:
                    found = await asked(client, target(url))
                    return getattr(found, "running", None) == 7

                await eventually(seen, 5)
                for _ in range(5):
                    assert (await asked(client, target(url))).running == 7
            finally:
                pages.pages.update(PAGES)


async def stopped(server: PrometheusServer) -> bool:
    async with aiohttp.request("GET", f"{server.url}/api/v1/targets") as answer:
        return not (await answer.json())["data"]["activeTargets"]


@pytest.fixture(scope="module")
def secured(pages: Pages, tmp_path_factory: Any) -> Iterator[tuple[PrometheusServer, str]]:
    """A server that asks for a login over TLS, and the authority of its certificate."""
    folder = tmp_path_factory.mktemp("secured")
    pki = authority(folder)
    certificate, key = pki.issue("server", "server", alternatives="IP:127.0.0.1")
    config = {
        "tls_server_config": {"cert_file": str(certificate), "key_file": str(key)},
        "basic_auth_users": {"reader": HASHED},
    }
    with prometheus(folder / "server", targets=pages.targets(), web=config) as running:
        yield running, pki.certificate.read_text()


CA = {"caSecretRef": {"name": "querier-ca"}}


async def test_login_and_authority(secured, client):
    """O-C7, against Prometheus's own login."""
    server, pem = secured
    login = Access(basic=("reader", PASSWORD), authorities=pem)
    assert (await scraped(client, target(server.url, login, **CA))).running == 40
    for access, code in (
        (Access(basic=("reader", "wrong"), authorities=pem), "Unauthorized"),
        (Access(authorities=pem), "Unauthorized"),
        (Access(token="some", authorities=pem), "Unauthorized"),
        (Access(basic=("reader", PASSWORD)), "CertificateRejected"),
    ):
        error = await asked(client, target(server.url, access))
        assert error.code == code
        assert PASSWORD not in str(error)
