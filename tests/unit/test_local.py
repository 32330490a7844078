"""The command of a box without a cluster: its options, its notes, and what it loads."""

import asyncio
import subprocess
import sys

import pytest
import yaml

from specserve import cli, document
from specserve.bench.connection import BadOption
from specserve.engine import Endpoint, EngineUnreachable
from specserve.local.notes import notes
from specserve.local.places import Engines, Place
from specserve.local.plan import places_of
from specserve.local.session import holder_of, words

#: What a GPU box need not have. The engine client's own library is there with every SGLang.
ABSENT = {
    *("kopf", "kubernetes", "prometheus_client", "prometheus_api_client", "requests", "urllib3"),
    *("rich", "matplotlib"),
}


def asked(**spec):
    body = {
        "apiVersion": "specserve.dev/v1alpha1",
        "kind": "SpecServe",
        "metadata": {"name": "chat"},
        "spec": {"model": {"source": "hf://a/b"}, **spec},
    }
    return document.read(yaml.safe_dump(body))


def said(document_, **facts):
    told = {"engines": 1, "started": False, "api_key": True, "curve": False}
    return list(notes(document_, **told | facts))


# -- what it loads ------------------------------------------------------------------------------


def test_it_runs_without_the_libraries_of_a_cluster():
    code = "import specserve.cli, specserve.local.conduct, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ABSENT & set(done.stdout.split())


def test_help_says_what_it_is_for_with_examples_and_exit_statuses(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["local", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "exit status:" in out


def test_it_runs_where_the_package_is_only_on_the_path():
    asked_ = [sys.executable, "-m", "specserve.local", "--help"]
    done = subprocess.run(asked_, capture_output=True, text=True, check=True)
    assert "specserve local" in done.stdout


# -- options ------------------------------------------------------------------------------------


def test_an_engine_has_its_plugin_beside_it_unless_it_is_said():
    found = places_of(["gpu-box:30000", "http://[::1]:30000,http://[::1]:9999"], [], "chat")
    assert found == (
        Place("chat-0", "http://gpu-box:30000", "http://gpu-box:9470"),
        Place("chat-1", "http://[::1]:30000", "http://[::1]:9999"),
    )
    apart = places_of(["a:1", "b:1"], ["a:2", "b:3"], "chat")
    assert [place.admin for place in apart] == ["http://a:2", "http://b:3"]


@pytest.mark.parametrize(
    ("engines", "admin", "why"),
    [
        (["a:1"], ["a:2", "a:3"], "--admin-url: 2 for 1"),
        (["a:1,a:2"], ["a:3"], "names another"),
        (["a:1", "a:1"], [], "share an address"),
        (["a:1", "a:2"], [], "share an address"),  # one plugin's port for both
        (["ftp://a"], [], "is no address like"),
    ],
)
def test_addresses_that_cannot_be_meant(engines, admin, why):
    with pytest.raises(BadOption, match=why):
        places_of(engines, admin, "chat")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "--engine: name at least one"),
        (["--start", "--engine", "http://a:1"], "these run already"),
        (["--engine", "http://a:1", "--keep"], "--keep: only with --start"),
        (["--start", "--port", "70000"], "--port: a port is from 1 to 65535"),
        (["--engine", "http://a:1", "--curve", "/nonexistent"], "--curve: /nonexistent"),
        (["--engine", "http://a:1"], "--token-file: the plugin's token is needed"),
    ],
)
def test_options_that_cannot_be_used_end_it_with_2(argv, why, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SPECSERVE_PLUGIN_TOKEN", raising=False)
    file = tmp_path / "cr.yaml"
    body = {"apiVersion": "specserve.dev/v1alpha1", "kind": "SpecServe"}
    file.write_text(yaml.safe_dump(body | {"spec": {"model": {"source": "hf://a/b"}}}))
    state = ["--state", str(tmp_path / "state")]
    assert cli.main(["local", "-f", str(file), *state, *argv]) == 2
    assert why in capsys.readouterr().err


# -- notes --------------------------------------------------------------------------------------


def test_of_a_plain_resource_there_is_nothing_to_say():
    assert said(asked(policy={"strategy": "BreakEven"}), curve=True) == []


@pytest.mark.parametrize(
    ("spec", "facts", "words"),
    [
        ({"replicas": 3}, {}, "spec.replicas is 3, engines given: 1"),
        ({"engine": {"image": "x"}}, {}, "spec.engine says how engines are started"),
        ({"pod": {"labels": {"a": "b"}}}, {}, "spec.pod says how engines are started"),
        ({"rollout": {"type": "Recreate"}}, {}, "spec.rollout replaces pods"),
        ({}, {"curve": True}, "--curve is not used: spec.policy.strategy is Threshold"),
        ({"engine": {"image": "x"}}, {"started": True}, "no container is run"),
        ({"pod": {"nodeSelector": {"a": "b"}}}, {"started": True}, "spec.pod.nodeSelector"),
        ({}, {"started": True, "api_key": False}, "open to all who reach this machine"),
    ],
)
def test_what_means_nothing_without_a_cluster_is_said(spec, facts, words):
    assert any(words in line for line in said(asked(**spec), **facts))


def test_the_grace_of_a_pod_holds_for_a_process_too():
    assert said(asked(pod={"terminationGracePeriodSeconds": 9}), started=True) == []


@pytest.mark.parametrize(
    "secret",
    [
        {"bearerTokenSecretRef": {"name": "s"}},
        {"basicAuthSecretRef": {"name": "s"}},
        {"caSecretRef": {"name": "s"}},
    ],
)
def test_a_prometheus_behind_secrets_is_refused(secret):
    policy = {"source": "Prometheus", "prometheus": {"url": "http://p:9090", **secret}}
    with pytest.raises(BadOption, match="there are no Secrets here"):
        said(asked(policy=policy))


def test_engines_that_should_have_a_key_are_not_started_without():
    document_ = asked(engine={"apiKeySecretRef": {"name": "s"}})
    with pytest.raises(BadOption, match="--api-key-file"):
        said(document_, started=True, api_key=False)
    assert said(document_, started=True) == []


# -- places -------------------------------------------------------------------------------------


class Client:
    """An engine that tells what it was asked."""

    def __init__(self):
        self.asked = []
        self.uid, self.boot, self.tokens = "uid-1", "boot-1", 100

    async def read_back(self, engine):
        self.asked.append(engine.url(9470, "/v1/speculation"))
        return self._answer()

    async def switch(self, engine, directive):
        self.asked.append((engine.url(9470, "/v1/speculation"), directive["podUID"]))
        return self._answer()

    async def load(self, engine):
        self.asked.append(engine.url(30000, "/v1/loads"))

    def _answer(self):
        ranks = [{"activeSteps": 3, "decodeRounds": 9}, {"activeSteps": 0, "decodeRounds": 0}]
        return {
            "podUID": self.uid,
            "bootID": self.boot,
            "mode": "on",
            "groups": [{"tokensTotal": self.tokens, "ranks": ranks}],
        }


@pytest.fixture
def world():
    client, clock = Client(), [10.0]
    place = Place("chat-0", "http://a:1", "https://b:2/x")
    return client, clock, Engines(client, [place], lambda: clock[0])


HERE = Endpoint("chat-0", ("secret-token",), api_key="secret-key")


def test_an_engine_goes_by_the_name_of_its_place_whatever_it_calls_itself(world):
    client, _, engines = world

    async def story():
        assert (await engines.read_back(HERE))["podUID"] == "chat-0"
        await engines.switch(HERE, {"podUID": "chat-0"})
        client.uid = "uid-2"
        await engines.read_back(HERE)
        await engines.switch(HERE, {"podUID": "chat-0"})
        await engines.load(HERE)

    asyncio.run(story())
    admin = "https://b:2/x/v1/speculation"
    assert client.asked == [
        *(admin, (admin, "uid-1"), admin, (admin, "uid-2"), "http://a:1/v1/loads"),
    ]


def test_nothing_is_sent_to_an_engine_that_was_never_heard_of(world):
    client, _, engines = world
    with pytest.raises(EngineUnreachable):
        asyncio.run(engines.switch(HERE, {"podUID": "chat-0"}))
    assert client.asked == []


def test_rates_are_between_two_reports_of_one_process(world):
    client, clock, engines = world

    def read(seconds, tokens, boot="boot-1"):
        clock[0] += seconds
        client.tokens, client.boot = tokens, boot
        asyncio.run(engines.read_back(HERE))
        return engines.facts["chat-0"].rate

    assert read(0, 100) is None
    assert read(2, 300) == 100
    assert read(0.1, 310) == 100  # too soon to tell
    assert read(1.9, 500) == 100
    assert read(2, 500) == 0
    assert read(2, 40, "boot-2") is None
    assert read(1, 50, "boot-2") == 10
    assert engines.facts["chat-0"].active == (3,)


def test_keys_are_in_no_text(world):
    _, _, engines = world
    assert "secret" not in repr(engines._at(HERE))


def test_a_holder_is_a_folder_of_a_machine(tmp_path):
    assert holder_of(tmp_path) == holder_of(tmp_path / "x" / "..")
    assert holder_of(tmp_path) != holder_of(tmp_path / "x")
    assert len(holder_of(tmp_path / ("x" * 200) / ("y" * 200))) <= 320


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"mode": "off"}, "off"),
        ({"mode": "on", "steps": 3}, "on, 3 steps"),
        ({"mode": "auto"}, "the engine's own policy"),
        (
            {
                "mode": "tiers",
                "tiers": [{"minBatch": 1, "steps": 3}, {"minBatch": 49, "steps": 0}],
            },
            "by batch: from 1: 3 steps, from 49: off",
        ),
    ],
)
def test_settings_in_words(setting, text):
    assert words(setting) == text
