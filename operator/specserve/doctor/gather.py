"""Asks a live server for what it shows of itself; sends no generation and changes nothing."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specserve.bench import server, steering
from specserve.bench.client import Client, Reply, Unreachable
from specserve.bench.connection import REFUSALS, Connection, Refused
from specserve.doctor.evidence import Evidence

SERIES = (
    "sglang:num_retracted_requests_total",
    "sglang:spec_verify_calls_total",
    "sglang:cuda_graph_passes_total",
)


class NoAnswer(Exception):
    """Nothing at the address answers like a server of language models."""


async def gather(client: Client, connection: Connection) -> Evidence:
    """Ask for everything there is; what does not answer is missing in the evidence.

    Raises:
        NoAnswer: Nothing answers at all.
        Refused: The API key or the plugin token is.
    """
    url = f"{connection.url}/v1/models"
    try:
        models = await client.call("GET", url, bearer=connection.api_key)
    except Unreachable as error:
        raise NoAnswer(str(error)) from None
    if models.status in REFUSALS:
        raise Refused.key(url, connection.api_key)
    info = await _opened(client, "/server_info", connection)
    bare = await _reply(client, f"{connection.url}/server_info", None)
    loads = await _opened(client, "/v1/loads", connection)
    metrics = await _reply(client, f"{connection.url}/metrics", None)
    if models.status != 200 and not _told(info):
        raise NoAnswer(f"{connection.url}: neither /v1/models nor /server_info is there")
    plugin, why = await _plugin(client, connection)
    return Evidence(
        info=_told(info),
        open_to_all=None if bare is None else bare.status == 200,
        loads=[
            entry
            for entry in (loads.body.get("loads") if loads and loads.status == 200 else None) or []
            if isinstance(entry, dict)
        ],
        metrics=None if metrics is None else metrics.status,
        series=series_of(metrics.text) if metrics and metrics.status == 200 else {},
        plugin=plugin,
        no_plugin=why,
    )


async def _opened(client: Client, path: str, connection: Connection) -> Reply | None:
    url = connection.url + path
    reply = await _reply(client, url, connection.api_key)
    if reply is not None:
        server.refuse_wrong_key(url, reply, connection)
    return reply


async def _reply(client: Client, url: str, bearer: str | None) -> Reply | None:
    try:
        return await client.call("GET", url, bearer=bearer)
    except Unreachable:
        return None


def _told(info: Reply | None) -> Mapping[str, Any]:
    return info.body if info is not None and info.status == 200 else {}


async def _plugin(client: Client, connection: Connection) -> tuple[Mapping[str, Any], str]:
    if connection.token is None:
        return {}, "no plugin token was given"
    try:
        return await steering.read_back(client, connection), ""
    except (Unreachable, steering.NotSteerable) as error:
        return {}, str(error)


def series_of(text: str) -> dict[str, float]:
    """Sums of the series that the checks look at; those with a label `mode` apart by it."""
    wanted = tuple(SERIES)
    lines = [line for line in text.splitlines() if line.startswith(wanted)]
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                mode = sample.labels.get("mode")
                name = sample.name if mode is None else f"{sample.name}{{{mode}}}"
                sums[name] = sums.get(name, 0.0) + sample.value
    except ValueError:
        return {}
    return sums
