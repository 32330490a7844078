"""The API key was renewed and the engine still has the one before: its plugin tells the load."""

import contextlib
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from specserve import names
from specserve.engine import Endpoint, EngineClient, EngineRefused, EngineUnreachable
from specserve.signals import MetricNames, Reading
from specserve_sim.behaviour import WELL, Fault
from specserve_sim.engine import EngineConfig
from specserve_sim.launch import running_engine

NAMES = MetricNames(
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:generation_tokens_total"
)
TOKEN = "sesame-token"
LAYOUTS = {
    "one rank": EngineConfig(api_key="earlier"),
    "copies": EngineConfig(api_key="earlier", tensor_parallel=2),
    "shares": EngineConfig(api_key="earlier", data_parallel=2),
    "shares of copies": EngineConfig(api_key="earlier", tensor_parallel=2, data_parallel=2),
}


@contextlib.asynccontextmanager
async def running(monkeypatch, folder, config):
    (folder / names.KEY_PLUGIN_TOKEN).write_text(TOKEN)
    async with running_engine(config, credentials=folder) as made:
        monkeypatch.setattr(names, "PORT_SERVING", urlsplit(made.url).port)
        monkeypatch.setattr(names, "PORT_ADMIN", urlsplit(made.admin_url).port)
        yield made.engine


@pytest.fixture
async def client():
    async with EngineClient(NAMES) as made:
        yield made


def here(api_key: str | None, *tokens: str) -> Endpoint:
    return Endpoint("127.0.0.1", tokens or (TOKEN,), api_key=api_key)


def counts(reading: Reading) -> tuple[int, int, int]:
    return reading.running, reading.queued, reading.ranks


@pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)
async def test_the_plugin_tells_what_sglang_would(monkeypatch, tmp_path, client, config):
    async with running(monkeypatch, tmp_path, config) as engine:
        engine.set_load(60, 5)
        with_key = await client.load(here("earlier"))
        assert (counts(with_key)[:2], with_key.key_refused) == ((60, 5), False)
        for key in ("renewed", None):
            without = await client.load(here(key))
            assert counts(without) == counts(with_key)
            assert without.key_refused
            assert without.stamp is not None
            assert without.tokens_total is not None


SERVING = Fault(side="serving", kind="status", paths=(names.PATH_LOADS,), status=403)
CLOSED = Fault(side="admin", kind="reset")
TROUBLES = {
    "its token is another": ("another", EngineRefused, "Unauthorized", WELL),
    "it is a proxy that refuses": (
        *(TOKEN, EngineRefused, "Unauthorized"),
        replace(WELL, faults=(SERVING,)),
    ),
    # A call that may go well at the next reading is no certain loss of the load.
    "it is silent": (
        *(TOKEN, EngineUnreachable, "EngineConnectionReset"),
        replace(WELL, faults=(CLOSED,)),
    ),
}


@pytest.mark.parametrize(("token", "kind", "code", "behaviour"), TROUBLES.values(), ids=TROUBLES)
async def test_where_the_plugin_does_not_tell_the_refusal_is_said(
    monkeypatch, tmp_path, client, token, kind, code, behaviour
):
    async with running(monkeypatch, tmp_path, LAYOUTS["one rank"]) as engine:
        engine.behave(behaviour)
        with pytest.raises(kind) as caught:
            await client.load(here("renewed", token))
        assert caught.value.code == code
        assert f"{names.PATH_LOADS}: 40" in str(caught.value)
        assert "renewed" not in str(caught.value)
