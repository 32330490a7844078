"""The checklist on what servers show: problems with evidence, and silence where none is shown."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import replace

import pytest

from specserve.bench import connection
from specserve.bench.client import Client
from specserve.bench.steering import steering
from specserve.doctor import command
from specserve.doctor.checks import findings
from specserve.doctor.evidence import Evidence
from specserve.doctor.gather import series_of
from specserve_sim.engine import EngineConfig
from specserve_sim.launch import running_engine

TOKEN = "a-plugin-token"
# What SGLang 0.5.23 shows of an EAGLE server on one GPU, as far as it matters here.
INFO = {
    "version": "0.5.23",
    "device": "cuda",
    "tp_size": 1,
    "dp_size": 1,
    "max_running_requests": 256,
    "attention_backend": "fa3",
    "decode_attention_backend": None,
    "speculative_algorithm": "EAGLE3",
    "speculative_eagle_topk": 1,
    "speculative_draft_attention_backend": None,
    "speculative_adaptive": True,
    "speculative_adaptive_config": "/etc/adaptive.json",
    "disable_cuda_graph": False,
    "disable_custom_all_reduce": False,
    "cuda_graph_config": {"decode": {"backend": "full", "max_bs": 256, "bs": [1, 8, 256]}},
    "api_key": "user",
    "admin_api_key": None,
    "internal_states": [{"effective_max_running_requests_per_dp": 256}],
}
LOADS = [{"max_running_requests": 256, "speculative": {"accept_length": 2.5}}]
PLUGIN = {
    "mode": "tiers",
    "draftKv": "cold",
    "controllable": True,
    "availableSteps": [0, 1, 3],
    "groups": [{"stats": [{"steps": 3, "rounds": 400, "acceptLength": 2.5}]}],
}
HEALTHY = Evidence(
    info=INFO,
    open_to_all=False,
    loads=LOADS,
    metrics=200,
    series={"sglang:num_retracted_requests_total": 0.0},
    plugin=PLUGIN,
)


def seen(evidence):
    return {finding.check: finding for finding in findings(evidence)}


def verdicts(evidence):
    return {name: finding.verdict for name, finding in seen(evidence).items()}


def changed(*, info=None, **more):
    return replace(HEALTHY, info=INFO | (info or {}), **more)


def test_a_healthy_server_has_no_problem_and_hides_only_its_links():
    found = verdicts(HEALTHY)
    assert "problem" not in found.values()
    assert "unknown" not in found.values()
    assert {name for name, verdict in found.items() if verdict == "not applicable"} == {
        "peer-access",
        "all-reduce",
    }


@pytest.mark.parametrize(
    ("check", "evidence", "words"),
    [
        (
            "request-cap",
            changed(info={"internal_states": [{"effective_max_running_requests_per_dp": 48}]}),
            "48 requests",
        ),
        (
            "request-cap",
            changed(
                info={"internal_states": [], "dp_size": 8, "enable_dp_attention": True},
                loads=[{"max_running_requests": 6}],
            ),
            "6 requests run at once in each of 8 groups",
        ),
        (
            "request-cap",
            changed(
                info={"internal_states": [], "dp_size": 8}, loads=[{"max_running_requests": 48}]
            ),
            "48 requests run at once in each of 8 groups",
        ),
        (
            "acceptance",
            changed(
                plugin=PLUGIN
                | {"groups": [{"stats": [{"steps": 3, "rounds": 400, "acceptLength": 1.02}]}]}
            ),
            "1.02 tokens",
        ),
        (
            "acceptance",
            changed(
                info={"speculative_adaptive": False},
                loads=[{"speculative": {"accept_length": 1.01}}],
                series={"sglang:spec_verify_calls_total": 5000.0},
                plugin={},
            ),
            "since the server began",
        ),
        ("cuda-graphs", changed(info={"disable_cuda_graph": True}), "switched off"),
        (
            "cuda-graphs",
            changed(info={"cuda_graph_config": {"decode": {"bs": [1, 160]}}}),
            "up to a batch of 160, while 256 may run",
        ),
        (
            "cuda-graphs",
            changed(info={"internal_states": [{"decode_cuda_graph_bs": [1, 32]}]}),
            "up to a batch of 32",
        ),
        (
            "cuda-graphs",
            changed(
                series={
                    "sglang:cuda_graph_passes_total{decode_full}": 900.0,
                    "sglang:cuda_graph_passes_total{decode_none}": 300.0,
                }
            ),
            "25% of 1,200",
        ),
        (
            "live-control",
            changed(plugin={"controllable": False, "reason": "a fixed width", "mode": "auto"}),
            "a fixed width",
        ),
        ("live-control", changed(plugin=PLUGIN | {"availableSteps": [1, 3]}), "cannot be off"),
        (
            "live-control",
            changed(info={"speculative_adaptive": False}, plugin={}),
            "not built",
        ),
        (
            "live-control",
            changed(info={"speculative_algorithm": "NGRAM"}, plugin={}),
            "NGRAM",
        ),
        (
            "built-in-table",
            changed(info={"speculative_adaptive_config": None}, plugin=PLUGIN | {"mode": "auto"}),
            "nobody steers",
        ),
        ("topk", changed(info={"speculative_eagle_topk": 4}), "4 branches"),
        (
            "draft-attention",
            changed(info={"speculative_draft_attention_backend": "triton"}),
            "triton for the draft, fa3 for the target",
        ),
        (
            "warm-off",
            changed(plugin=PLUGIN | {"mode": "off", "draftKv": "warm"}),
            "draft warm",
        ),
        (
            "all-reduce",
            changed(info={"tp_size": 2, "disable_custom_all_reduce": True}),
            "switched off",
        ),
        ("retractions", changed(series={"sglang:num_retracted_requests_total": 3.0}), "3 since"),
        ("metrics", changed(metrics=404), "404"),
        ("admin-key-shown", changed(info={"admin_api_key": "TOPSECRET"}), "a user's key"),
        (
            "admin-key-shown",
            changed(info={"internal_states": [{"admin_api_key": "TOPSECRET"}]}, open_to_all=True),
            "anybody",
        ),
    ],
)
def test_a_problem_is_shown_with_what_was_seen(check, evidence, words):
    finding = seen(evidence)[check]
    assert finding.verdict == "problem"
    assert words in finding.seen
    assert finding.cost
    assert finding.remedy
    assert "TOPSECRET" not in str(finding.to_json())


@pytest.mark.parametrize(
    ("check", "evidence"),
    [
        ("acceptance", changed(plugin={})),
        (
            "acceptance",
            changed(plugin=PLUGIN | {"groups": [{"stats": []}]}),
        ),
        (
            "acceptance",
            changed(info={"speculative_adaptive": False}, plugin={}),
        ),
        ("live-control", changed(plugin={})),
        ("built-in-table", changed(plugin=PLUGIN | {"mode": "auto"})),
        ("built-in-table", changed(info={"speculative_adaptive_config": None}, plugin={})),
        ("peer-access", changed(info={"tp_size": 2})),
        ("warm-off", changed(plugin={}, no_plugin="no plugin token was given")),
        ("metrics", changed(metrics=None)),
        ("metrics", changed(metrics=401)),
        ("retractions", changed(series={})),
    ],
)
def test_what_cannot_be_seen_is_not_guessed(check, evidence):
    assert seen(evidence)[check].verdict == "unknown"


def test_a_server_that_shows_nothing_has_no_problem_but_is_not_called_healthy():
    found = verdicts(Evidence(no_plugin="no plugin token was given"))
    assert set(found.values()) == {"unknown"}


def test_what_only_a_draft_can_get_wrong_is_left_out_without_one():
    found = verdicts(changed(info={"speculative_algorithm": None}, plugin={}))
    assert found["request-cap"] == found["topk"] == "not applicable"
    assert found["metrics"] == "ok"


@pytest.mark.parametrize("blank", [None, "", "***", "<redacted>"])
def test_a_key_that_was_taken_out_is_no_leak(blank):
    evidence = changed(
        info={"admin_api_key": blank, "internal_states": [{"admin_api_key": blank}]}
    )
    assert verdicts(evidence)["admin-key-shown"] == "ok"


def test_a_cpu_has_no_graphs():
    assert verdicts(changed(info={"device": "cpu"}))["cuda-graphs"] == "not applicable"


def test_acceptance_is_weighed_by_rounds_and_leaves_out_those_without_a_draft():
    stats = [
        {"steps": 0, "rounds": 9000, "acceptLength": 1.0},
        {"steps": 1, "rounds": 300, "acceptLength": 1.5},
        {"steps": 3, "rounds": 100, "acceptLength": 3.5},
    ]
    finding = seen(changed(plugin=PLUGIN | {"groups": [{"stats": stats}]}))["acceptance"]
    assert finding.verdict == "ok"
    assert finding.seen.startswith("2.00 tokens")


def test_series_are_added_up_apart_by_mode():
    text = (
        'sglang:cuda_graph_passes_total{mode="decode_none",tp_rank="0"} 3\n'
        'sglang:cuda_graph_passes_total{mode="decode_full",tp_rank="0"} 4\n'
        "sglang:num_retracted_requests_total 2\n"
        'other{mode="x"} broken\n'
    )
    assert series_of(text) == {
        "sglang:cuda_graph_passes_total{decode_none}": 3.0,
        "sglang:cuda_graph_passes_total{decode_full}": 4.0,
        "sglang:num_retracted_requests_total": 2.0,
    }
    assert series_of("sglang:num_retracted_requests_total{ 2") == {}


# The whole command


def options_of(*given):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["doctor", *given])


@contextlib.asynccontextmanager
async def engine(tmp_path, **config):
    (tmp_path / "plugin-token").write_text(TOKEN)
    settings = EngineConfig(time_scale=50.0, **config)
    async with running_engine(settings, credentials=tmp_path) as running:
        yield running


async def examine(running, capsys, *given, token=TOKEN):
    options = options_of("--url", running.url, "--admin-url", running.admin_url, *given)
    environ = {connection.ENV_TOKEN: token}
    code = await command.examine(options, connection.connection_of(options, environ))
    return code, capsys.readouterr().out


async def test_the_silent_cap_of_a_live_server_is_found(tmp_path, capsys):
    async with engine(tmp_path) as running:
        code, out = await examine(running, capsys, "--json")
    assert code == 1
    report = json.loads(out)
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert by_check["request-cap"]["verdict"] == "problem"
    assert "--max-running-requests" in by_check["request-cap"]["remedy"]
    assert by_check["live-control"]["verdict"] == "ok"
    assert report["problems"] == 1


async def test_a_draft_that_is_never_right_is_found(tmp_path, capsys):
    async with engine(tmp_path, max_running_requests=64, accept_length=1.0) as running:
        place = connection.Connection(running.url, running.admin_url, token=TOKEN)
        async with Client() as client, steering(client, place) as hand:
            await hand.apply({"mode": "on", "steps": 3, "draftKv": "cold"})
            body = {"text": "a", "sampling_params": {"max_new_tokens": 300}}
            await client.call("POST", f"{running.url}/generate", body=body)
        code, out = await examine(running, capsys)
    assert code == 1
    assert "PROBLEM acceptance of the draft: 1.00 tokens" in " ".join(out.split())


async def test_a_plain_server_is_fine(tmp_path, capsys):
    async with engine(tmp_path, algorithm=None) as running:
        code, out = await examine(running, capsys, token="")
    assert code == 0
    assert "0 problems" in out


@pytest.mark.parametrize(
    ("key", "token", "words"),
    [
        ("user", "wrong", "refuses the plugin token: give the engine's own with --token-file"),
        ("wrong", TOKEN, "refuses the API key: give the server's own with --api-key-file"),
        ("", TOKEN, "wants an API key: give the server's own with --api-key-file"),
    ],
)
async def test_what_a_refused_key_hides_is_not_called_invisible(
    tmp_path, capsys, key, token, words
):
    environ = {connection.ENV_API_KEY: key, connection.ENV_TOKEN: token}
    async with engine(tmp_path, api_key="user") as running:
        options = options_of("--url", running.url, "--admin-url", running.admin_url, "--json")
        code = await command.examine(options, connection.connection_of(options, environ))
    assert code == 3
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out


@pytest.mark.parametrize("given", [(), ("--json",)])
async def test_a_reader_that_has_gone_ends_it_without_a_word(tmp_path, given):
    reads, writes = os.pipe()
    os.close(reads)
    async with engine(tmp_path) as running:
        addresses = ("--url", running.url, "--admin-url", running.admin_url)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specserve.cli", "doctor", *addresses, *given),
            env={**os.environ, connection.ENV_TOKEN: TOKEN, "PYTHONUNBUFFERED": "1"},
            stdout=writes,
            stderr=asyncio.subprocess.PIPE,
        )
        os.close(writes)
        _, said = await process.communicate()
    assert (process.returncode, said) == (128 + signal.SIGPIPE, b"")


async def test_nothing_at_the_address_is_said(tmp_path, capsys):
    async with engine(tmp_path) as running:
        options = options_of("--url", running.url)
    code = await command.examine(options, connection.connection_of(options, {}))
    assert code == 2
    assert "no connection" in capsys.readouterr().err
