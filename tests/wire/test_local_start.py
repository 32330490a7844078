"""`specserve local --start`: engines as the operator would have them, and what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import sys
from pathlib import Path

import aiohttp
import yaml

from specserve import names
from specserve.api import SpecServeSpec
from specserve.workload import Owner, desired
from tests.cluster import claims
from tests.wire.local_box import PATIENCE, TOKEN, Engine, local, manifest

ENTRY = shlex.join(
    [sys.executable, "-c", "from specserve_sim.cli import main; raise SystemExit(main())"]
)
DEAF = """import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
signal.pause()"""
STUBBORN = shlex.join([sys.executable, "-c", DEAF])


def cr(replicas=1, **engine):
    document = yaml.safe_load(manifest())
    document["spec"] |= {
        "replicas": replicas,
        "engine": {"startupBudgetSeconds": 30, **engine},
        "pod": {"terminationGracePeriodSeconds": 5},
    }
    return yaml.safe_dump(document)


@contextlib.asynccontextmanager
async def running(folder, document, *options, **environ):
    port, admin = claims.port(), claims.port()
    async with (
        local(
            folder,
            document,
            *("--start", "--entry-point", ENTRY, f"--port={port}", f"--admin-port={admin}"),
            *options,
            **environ,
        ) as box,
        aiohttp.ClientSession(trust_env=False) as http,
    ):
        yield box, Engine(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}", None, http)


def processes(folder):
    return json.loads((folder / "state" / "processes.json").read_text())


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def keeps_secrets(pid, credentials):
    """Whether no key shows where every user of the machine, or a child, could read it."""
    shown = b"".join(Path(f"/proc/{pid}/{what}").read_bytes() for what in ("cmdline", "environ"))
    secrets = [file.read_bytes() for file in credentials.iterdir()] + [TOKEN.encode()]
    return not any(secret in shown for secret in secrets if secret)


async def gone(pid):
    async with asyncio.timeout(PATIENCE):
        while alive(pid):  # noqa: ASYNC110 - nobody tells of a process that is not a child
            await asyncio.sleep(0.05)


# -- the command line --------------------------------------------------------------------------


async def test_print_is_what_the_operator_renders_with_the_paths_of_this_box(tmp_path):
    document = cr(args=["--attention-backend", "triton"], memFractionStatic="0.8")
    async with local(tmp_path, document, "--print") as box:
        assert await box.ended() == 0
    told = shlex.split("\n".join(box.lines[1:]).replace("\\\n", ""))
    assert box.lines[0] == "# box-0"
    assert told[0] == "env"
    first = told.index("python3")
    assert told[first : first + 3] == ["python3", "-m", "sglang.launch_server"]
    folder = tmp_path / "state" / "engine"
    places = {
        names.ENGINE_CONFIG: str(folder / "config.yaml"),
        names.ADAPTIVE_CONFIG: str(folder / "adaptive.json"),
        names.CREDENTIALS_DIR: str(folder / "credentials"),
    }
    spec = SpecServeSpec.model_validate(
        yaml.safe_load(document)["spec"]
        | {"engine": {**yaml.safe_load(document)["spec"]["engine"], "image": "x"}}
    )
    [template] = [
        each["spec"]["template"]
        for each in desired(Owner("box", "default", "uid"), spec)
        if each["kind"] == "Deployment"
    ]
    [container] = template["spec"]["containers"]

    def here(word):
        for there, path in places.items():
            word = word.replace(there, path)
        return word

    assert told[first + 3 :] == [here(word) for word in container["args"]]
    variables = dict(word.split("=", 1) for word in told[1:first])
    for variable in container["env"]:
        if "value" in variable:
            assert variables.pop(variable["name"]) == here(variable["value"])
    assert set(variables) == {names.ENV_POD_UID}
    assert TOKEN not in " ".join(told)
    assert not folder.exists()


async def test_what_only_a_cluster_has_is_named(tmp_path):
    document = yaml.safe_load(cr())
    document["spec"]["model"]["source"] = "pvc://models/chat"
    async with local(tmp_path, yaml.safe_dump(document), "--print") as box:
        assert await box.ended() == 2
    [line] = box.lines
    assert "spec.model.source: pvc://models/chat is mounted by a cluster" in line
    secret = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    async with local(tmp_path, cr(env=[secret]), "--print") as box:
        assert await box.ended() == 2
    assert "KEY: its value comes from a cluster (secretKeyRef)" in box.lines[0]
    async with local(tmp_path, cr(env=[secret]), "--print", KEY="mine") as box:
        assert await box.ended() == 0
    assert not any("KEY=" in line for line in box.lines)


async def test_a_command_that_is_not_there_is_said_before_anything_starts(tmp_path):
    async with local(tmp_path, cr(), "--start", "--entry-point", "no-such-engine") as box:
        assert await box.ended() == 2
    assert "no-such-engine is not found" in box.lines[-1]


# -- processes --------------------------------------------------------------------------------


async def test_an_engine_is_started_steered_and_ended(tmp_path):
    async with running(tmp_path, cr()) as (box, engine):
        await box.line("box-0 well: ready after")
        state = await engine.until(lambda state: state["mode"] == "on")
        assert state["controllable"]
        pid = processes(tmp_path)["box-0"]["pid"]
        assert keeps_secrets(pid, tmp_path / "state" / "engine" / "credentials")
        await engine.show(30)
        await engine.until(lambda state: state["mode"] == "off")
        assert await box.end() == 0
        assert not alive(pid)
    assert any("box-0 note: ended" in line for line in box.lines)


async def test_a_renewed_token_is_handed_to_the_engine(tmp_path):
    async with running(tmp_path, cr()) as (box, engine):
        await engine_ready(box, engine)
        credentials = tmp_path / "state" / "engine" / "credentials"
        (tmp_path / "token").write_text("another")
        await box.line("a new token, sent from now on")
        kept = {file.name: file.read_text() for file in credentials.iterdir()}
        assert (kept["plugin-token"], kept["plugin-token-previous"]) == ("another", TOKEN)
        engine.token = "another"
        await engine.show(30)
        await engine.until(lambda state: state["mode"] == "off")
        assert await box.end() == 0


async def test_an_engine_that_crashes_is_started_again_and_why_is_said(tmp_path):
    async with running(tmp_path, cr()) as (box, engine):
        await engine_ready(box, engine)
        first = processes(tmp_path)["box-0"]["pid"]
        with contextlib.suppress(aiohttp.ClientError):
            await engine.http.post(f"{engine.url}/sim/v1/exit?code=7")
        await box.line("box-0 warning: ended with Error, exit code 7")
        await box.line("box-0 well: ready after")
        state = await engine.until(lambda state: state["mode"] == "on")
        assert state["lease"]["holder"].startswith("local/")
        assert processes(tmp_path)["box-0"]["pid"] != first
        assert await box.end() == 0


async def test_killed_it_leaves_its_engine_running_and_the_next_takes_it_on(tmp_path):
    port, admin = claims.port(), claims.port()
    options = ("--start", "--entry-point", ENTRY, f"--port={port}", f"--admin-port={admin}")
    async with local(tmp_path, cr(), *options) as box:
        await box.line("box-0 switched: on")
        pid = processes(tmp_path)["box-0"]["pid"]
        box.process.kill()
        await box.ended()
    assert alive(pid)
    async with local(tmp_path, cr(), *options) as box:
        await box.line(f"box-0 note: process {pid} runs, and is taken on")
        await box.line("box-0 decides: on")
        assert await box.end() == 0
    await gone(pid)
    # Of another command line it would not be the same engine.
    async with local(tmp_path, cr(), *options, "--keep") as box:
        await box.line("box-0 switched: on")
        kept = processes(tmp_path)["box-0"]["pid"]
        assert await box.end() == 0
    assert alive(kept)
    assert any("box-0 note: left in its fallback" in line for line in box.lines)
    async with local(tmp_path, cr(args=["--sim-seed=3"]), *options) as box:
        await box.line(f"process {kept} is of another command line or configuration; it ends")
        await box.line("box-0 well: ready after")
        assert await box.end() == 0
    await gone(kept)


async def test_an_engine_that_does_not_end_in_time_is_ended_by_force(tmp_path):
    document = yaml.safe_load(cr())
    document["spec"]["pod"]["terminationGracePeriodSeconds"] = 1
    options = ("--start", "--entry-point", STUBBORN)
    async with local(tmp_path, yaml.safe_dump(document), *options) as box:
        await deaf(tmp_path)
        pid = processes(tmp_path)["box-0"]["pid"]
        assert await box.end() == 1
    assert not alive(pid)
    assert any("box-0 warning: ended by force" in line for line in box.lines)


async def test_a_second_signal_hurries(tmp_path):
    document = yaml.safe_load(cr())
    document["spec"]["pod"]["terminationGracePeriodSeconds"] = 600
    options = ("--start", "--entry-point", STUBBORN)
    async with local(tmp_path, yaml.safe_dump(document), *options) as box:
        await deaf(tmp_path)
        box.process.send_signal(signal.SIGINT)
        await box.line("note: ending")
        assert await box.end(signal.SIGINT) == 1


async def deaf(folder):
    """Wait until the engine minds no SIGTERM."""
    log = folder / "state" / "engine" / "box-0.log"
    async with asyncio.timeout(PATIENCE):
        while not (log.exists() and "deaf" in log.read_text()):  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.05)


async def engine_ready(box, engine):
    await box.line("box-0 well: ready after")
    await engine.until(lambda state: state["mode"] == "on")
