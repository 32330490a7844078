"""The command: SGLang's options, the pod's environment, signals and exit statuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys

import aiohttp
import pytest

from specserve_engine.environ import settings_from
from specserve_sim.cli import BadCommandLine, config_from, main, parse, parser
from specserve_sim.launch import running_engine
from tests.cluster import claims

# What the operator renders for a pod, roughly: the simulated engine knows some of it.
RENDERED = [
    "--model-path=/models/target",
    "--served-model-name=llama",
    "--tp-size=2",
    "--dp-size=1",
    "--enable-metrics",
    "--decode-log-interval=5",
    "--mem-fraction-static=0.85",
    "--max-running-requests=256",
    "--speculative-algorithm=EAGLE3",
    "--speculative-draft-model-path=/models/draft",
    "--speculative-num-steps=3",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=4",
    "--speculative-adaptive",
    "--speculative-adaptive-config=/etc/specserve/adaptive.json",
    "--trust-remote-code",
    "--tool-call-parser",
    "llama3",
]
ENVIRONMENT = {"SPECSERVE_POD_UID": "uid-1", "SPECSERVE_STEPS": "0,1,3"}


def configure(*arguments, **environment):
    return config_from(parse(parser(), arguments), settings_from(ENVIRONMENT | environment))


def test_the_options_that_the_operator_renders_are_taken(caplog):
    caplog.set_level("INFO")
    config = configure(*RENDERED)
    assert (config.served_model_name, config.tensor_parallel, config.running_cap) == (
        "llama",
        2,
        256,
    )
    assert config.decode_log_interval == 5
    assert config.steps == (0, 1, 3)
    assert config.capability().controllable
    assert len(caplog.records) == 1
    assert "--mem-fraction-static" in caplog.text
    assert "--speculative-adaptive-config" in caplog.text
    assert "adaptive.json" not in caplog.text  # a value may be a secret
    assert "--tp-size" not in caplog.text


def test_without_a_limit_a_draft_caps_requests():
    assert configure("--speculative-algorithm=EAGLE3").running_cap == 48
    assert configure("--speculative-algorithm=EAGLE3", "--dp-size=8").running_cap == 48
    assert configure().running_cap == 2048
    assert configure("--context-length=1000").running_cap == 4096
    assert configure("--max-running-requests=256", "--max-total-tokens=100").running_cap == 50


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no draft"),
        (["--speculative-algorithm", "ngram"], "NGRAM"),
        (["--speculative-algorithm", "STANDALONE"], "STANDALONE"),
        (["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "4"], "topk"),
    ],
)
def test_what_cannot_be_controlled_says_why(arguments, reason):
    capability = configure(*arguments).capability()
    assert not capability.controllable
    assert reason in capability.reason
    assert capability.available_steps == ()


@pytest.mark.parametrize(("algorithm", "drafted"), [("NGRAM", True), ("NONE", False)])
async def test_an_engine_without_live_control_serves_with_the_steps_it_has(algorithm, drafted):
    # The operator prepares 0 only where nothing can be switched.
    config = configure(f"--speculative-algorithm={algorithm}", SPECSERVE_STEPS="0")
    async with running_engine(config) as running, aiohttp.ClientSession() as session:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 30}}
        async with session.post(f"{running.url}/generate", json=body) as answer:
            meta = (await answer.json())["meta_info"]
    assert meta["completion_tokens"] == 30
    assert (meta.get("spec_num_correct_drafts", 0) > 0) is drafted


def test_keys_come_from_a_file_and_the_command_line_wins(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("api-key: 'user'\nadmin_api_key: 12345\nport: 1\nenable-metrics: true\n")
    options = parse(parser(), [f"--config={file}", "--port=2"])
    assert (options.api_key, options.admin_api_key, options.port) == ("user", "12345", 2)
    assert options.enable_metrics


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "just words"])
def test_a_bad_file_is_named_and_its_text_is_not_shown(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(BadCommandLine, match=re.escape(str(file))) as caught:
        parse(parser(), [f"--config={file}"])
    assert text.strip() not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--sim-accept-length=9"], "acceptance length"),
        (["--sim-time-scale=0"], "time_scale"),
        (["--max-running-requests=0"], "max_running_requests"),
        (["--sim-profile=b200"], "b200"),
        (["--tp-size=0"], "tensor_parallel"),
    ],
)
def test_impossible_settings_end_with_status_2_and_a_reason(arguments, named, caplog):
    assert main(arguments) == 2
    assert named in caplog.text


def test_profiles_are_printed(capsys):
    assert main(["profiles"]) == 0
    shown = capsys.readouterr().out
    assert "h200x2-hostmem" in shown
    assert "modelled" in shown


# As a process


@pytest.fixture
def credentials(tmp_path):
    (tmp_path / "plugin-token").write_text("token")
    return tmp_path


@contextlib.asynccontextmanager
async def process(credentials, *arguments, admin_port):
    environment = os.environ | ENVIRONMENT
    environment |= {
        "SPECSERVE_ADMIN_PORT": str(admin_port),
        "SPECSERVE_CREDENTIALS_DIR": str(credentials),
    }
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from specserve_sim.cli import main; raise SystemExit(main())",
        *arguments,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def line_with(stream, word):
    async with asyncio.timeout(30):
        while word not in (line := (await stream.readline()).decode()):
            assert line, f"the process ended without a line about {word!r}"
    return line


async def test_sigterm_lets_streams_end_and_then_exits_with_0(credentials):
    port, admin_port = claims.port(), claims.port()
    arguments = [*RENDERED, "--host=0.0.0.0", f"--port={port}", "--sim-time-scale=4"]
    async with (
        process(credentials, *arguments, admin_port=admin_port) as engine,
        aiohttp.ClientSession() as session,
    ):
        await line_with(engine.stderr, "serving at")
        body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 2000}}
        async with session.post(f"http://127.0.0.1:{port}/generate", json=body) as stream:
            await stream.content.readuntil(b"\n\n")
            engine.send_signal(signal.SIGTERM)
            status = 200
            while status == 200:  # the signal is on its way
                async with session.get(f"http://127.0.0.1:{admin_port}/health") as health:
                    status = health.status
            assert status == 503
            rest = await stream.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(engine.wait(), 10) == 0


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
async def test_every_address_is_served_over_both_families(credentials, host):
    port, admin_port = claims.port(), claims.port()
    arguments = ["--host", host, f"--port={port}"]
    async with (
        process(credentials, *arguments, admin_port=admin_port) as engine,
        aiohttp.ClientSession() as session,
    ):
        await line_with(engine.stderr, "serving at")
        hosts = ["127.0.0.1", "127.0.0.9"]
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            hosts.append("[::1]")
        for name in hosts:
            for where in (port, admin_port):
                async with session.get(f"http://{name}:{where}/health") as answer:
                    assert answer.status == 200


async def test_a_crash_has_the_exit_status_asked_for(credentials):
    port = claims.port()
    async with (
        process(credentials, f"--port={port}", admin_port=claims.port()) as engine,
        aiohttp.ClientSession() as session,
    ):
        await line_with(engine.stderr, "serving at")
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"http://127.0.0.1:{port}/sim/v1/exit?code=7")
        assert await asyncio.wait_for(engine.wait(), 10) == 7


async def test_a_taken_port_ends_with_status_2(credentials):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with process(credentials, f"--port={port}", admin_port=claims.port()) as engine:
            assert await asyncio.wait_for(engine.wait(), 20) == 2


async def test_a_fleet_says_when_it_is_ready(credentials):
    arguments = [
        "fleet",
        "--count=3",
        "--first-address=127.78.0.1",
        f"--port={claims.port()}",
        "--speculative-algorithm=EAGLE3",
    ]
    async with (
        process(credentials, *arguments, admin_port=claims.port()) as fleet,
        aiohttp.ClientSession(headers={"Authorization": "Bearer token"}) as session,
    ):
        ready = json.loads(await line_with(fleet.stdout, "ready"))
        assert (ready["ready"], ready["last"]) == (3, "127.78.0.3")
        url = f"http://{ready['last']}:{ready['adminPort']}/v1/speculation"
        async with session.get(url) as answer:
            assert (await answer.json())["controllable"] is True
        fleet.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(fleet.wait(), 10) == 0
