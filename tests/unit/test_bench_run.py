"""The whole command against simulated engines: tables, files, modes put back, failures said."""

import argparse
import asyncio
import contextlib
import json
import signal
import sys

import pytest

from specserve.bench import command, connection, screen
from specserve.bench.client import Client
from specserve.bench.connection import BadOption
from specserve.bench.steering import NotSteerable, Steering, steering
from specserve.local.session import holder_of
from specserve_sim.behaviour import Fault
from specserve_sim.engine import EngineConfig
from specserve_sim.launch import running_engine

TOKEN = "a-plugin-token"
FAST = 20.0
SLOW = 5.0
"""For comparisons of rates: what HTTP takes on a busy machine must be small beside the rounds."""


def options_of(*given):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "--quiet", *map(str, given)])


@pytest.fixture
def credentials(tmp_path):
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "plugin-token").write_text(TOKEN)
    return folder


@contextlib.asynccontextmanager
async def engine_at(credentials, **config):
    settings = {"time_scale": FAST, "max_running_requests": 64} | config
    async with running_engine(EngineConfig(**settings), credentials=credentials) as running:
        yield running


async def bench(running, *given, token=TOKEN, key=None):
    options = options_of("--url", running.url, "--admin-url", running.admin_url, *given)
    environ = {connection.ENV_TOKEN: token, connection.ENV_API_KEY: key or ""}
    return await command.measure(options, connection.connection_of(options, environ))


async def until(condition):
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


def mode(running):
    return running.engine.control.read_back(0.0)["mode"]


async def test_on_off_and_auto_are_told_apart_and_the_mode_is_put_back(credentials, tmp_path):
    file = tmp_path / "out.json"
    async with engine_at(credentials, time_scale=SLOW) as running:
        given = ("--flip", "--levels", "1,4", "--max-new-tokens", 128, "--json", file)
        assert await bench(running, *given) == 0
        assert mode(running) == "auto"
        applied = [entry.mode for entry in running.engine.applied]
    assert applied[:6] == ["on", "off", "auto", "off", "on", "off"]
    report = json.loads(file.read_text())
    assert report["complete"]
    assert report["servers"]["server"]["simulated"] is True
    for entry in report["levels"]:
        arms = entry["arms"]
        assert arms["on"]["acceptLength"] == pytest.approx(2.5, rel=0.15)
        assert arms["off"]["acceptLength"] == 1.0
        assert entry["ratios"]["on/off"] > 1.2
        for arm in arms.values():
            assert arm["lost"] == 0
            assert len(arm["visits"]) == 2
            assert arm["timeToFirstTokenSeconds"]["p50"] > 0
    assert TOKEN not in file.read_text()


@pytest.mark.parametrize("api", ["generate", "completions", "chat"])
@pytest.mark.parametrize("stream", [True, False])
async def test_every_route_is_measured_alike(credentials, tmp_path, api, stream):
    file = tmp_path / "out.json"
    async with engine_at(credentials) as running:
        given = ["--levels", "4", "--max-new-tokens", 64, "--api", api, "--json", file]
        assert await bench(running, *given, *([] if stream else ["--no-stream"])) == 0
    (entry,) = json.loads(file.read_text())["levels"]
    arm = entry["arms"]["server"]
    assert (arm["lost"], arm["requests"]) == (0, 12)
    assert (arm["timeToFirstTokenSeconds"] is not None) == stream
    assert arm["endToEndSeconds"]["p99"] > 0


async def test_acceptance_is_counted_by_the_engine_where_answers_do_not_tell(
    credentials, tmp_path
):
    file = tmp_path / "out.json"
    async with engine_at(credentials, accept_length=4.0) as running:
        given = ("--levels", "4", "--max-new-tokens", 65, "--api", "chat", "--json", file)
        assert await bench(running, *given) == 0
    (entry,) = json.loads(file.read_text())["levels"]
    assert entry["arms"]["server"]["acceptLength"] == pytest.approx(4.0, rel=0.02)


async def test_a_second_server_is_the_baseline(credentials, tmp_path):
    file = tmp_path / "out.json"
    async with (
        engine_at(credentials, time_scale=SLOW) as running,
        engine_at(credentials, time_scale=SLOW, algorithm=None) as plain,
    ):
        given = ("--baseline", plain.url, "--levels", "2", "--json", file, "--prompts", "random")
        assert await bench(running, *given, "--max-new-tokens", 128) == 0
        assert not plain.engine.applied
    report = json.loads(file.read_text())
    assert report["levels"][0]["ratios"]["server/base"] > 1.2
    assert report["levels"][0]["arms"]["base"]["acceptLength"] is None


async def test_a_picture_is_drawn(credentials, tmp_path):
    file = tmp_path / "out.png"
    async with engine_at(credentials) as running:
        given = ("--flip", "--levels", "1,2", "--max-new-tokens", 16, "--plot", file)
        assert await bench(running, *given) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


async def test_what_was_measured_is_printed_if_the_disk_is_full(credentials, capsys):
    async with engine_at(credentials) as running:
        given = ("--levels", "1", "--max-new-tokens", 16, "--json", "/dev/full")
        assert await bench(running, *given) == 2
    printed = capsys.readouterr()
    assert "--json: /dev/full: No space left on device" in printed.err
    assert json.loads(printed.out[printed.out.index("{") :])["complete"]


async def test_a_reader_that_leaves_early_costs_no_measurement(credentials, tmp_path, monkeypatch):
    file, picture = tmp_path / "out.json", tmp_path / "out.png"

    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr(screen, "print_table", gone)
    async with engine_at(credentials) as running:
        given = ("--levels", "1", "--max-new-tokens", 16, "--json", file, "--plot", picture)
        with pytest.raises(BrokenPipeError):
            await bench(running, *given)
    assert json.loads(file.read_text())["complete"]
    assert picture.exists()


async def test_an_interrupted_run_reports_what_it_has_and_puts_the_mode_back(
    credentials, tmp_path
):
    file = tmp_path / "out.json"
    async with engine_at(credentials) as running:
        given = ("--flip", "--levels", "1,2", "--max-new-tokens", 128, "--json", file)
        task = asyncio.create_task(bench(running, *given))
        modes = running.engine.applied
        # Two cells are done once the third order is there.
        await until(lambda: len(modes) == 3)
        task.cancel()
        assert await task == 130
        assert modes[-1].mode == "auto"
        await until(lambda: not running.engine.loads()[0].running)
    report = json.loads(file.read_text())
    assert not report["complete"]
    assert set(report["levels"][0]["arms"]) == {"on", "off"}


async def test_an_impatient_ctrl_c_ends_it_in_good_order(credentials, tmp_path):
    file = tmp_path / "out.json"
    async with engine_at(credentials) as running:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specserve.cli", "bench", "--url", running.url),
            *("--admin-url", running.admin_url, "--token-file", credentials / "plugin-token"),
            *("--flip", "--levels", "1,2", "--max-new-tokens", "256", "--json", file),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        modes = running.engine.applied
        await until(lambda: len(modes) == 3)
        for _ in range(5):
            process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        assert process.returncode == 130, err
        assert modes[-1].mode == mode(running) == "auto"
    assert b"incomplete: 2 of 12 cells" in out
    assert b"1 in flight  on" in err
    assert not json.loads(file.read_text())["complete"]


async def test_a_server_that_dies_under_streams_loses_them_and_is_said_to(
    credentials, tmp_path, capsys
):
    file = tmp_path / "out.json"
    async with engine_at(credentials) as running:
        given = ("--levels", "4", "--max-new-tokens", 4000, "--json", file)
        task = asyncio.create_task(bench(running, *given))
        await until(lambda: running.engine.loads()[0].used_tokens > 2_000)
        running.engine.restart()
        assert await task == 1
    arm = json.loads(file.read_text())["levels"][0]["arms"]["server"]
    assert arm["lost"] == 4
    assert sum(arm["problems"].values()) == 4
    assert "4 lost" in capsys.readouterr().out


async def test_a_server_that_is_gone_is_said_before_the_mode_that_was_not_put_back(
    credentials, capsys
):
    async with engine_at(credentials) as running:
        given = ("--flip", "--levels", "1,2", "--max-new-tokens", 4000)
        task = asyncio.create_task(bench(running, *given))
        await until(lambda: running.engine.loads()[0].used_tokens > 200)
    assert await task == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert "no connection" in first
    assert "was not put back" not in first
    assert last.startswith("specserve: the engine was not put back: ")
    assert "goes back by itself within 60 s" in last


async def test_an_engine_that_was_not_put_back_at_the_end_is_said(credentials):
    async with Client() as client, contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(engine_at(credentials))
        place = connection.Connection(running.url, running.admin_url, token=TOKEN)

        async def end_it_meanwhile() -> None:
            async with steering(client, place) as hand:
                await hand.apply({"mode": "off", "draftKv": "cold"})
                await stack.aclose()

        with pytest.raises(NotSteerable, match="was not put back"):
            await end_it_meanwhile()


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"a\nb\n", b"\xff\xfe", "schl\u00fcssel".encode()]
)
def test_a_file_that_holds_no_key_is_named(tmp_path, content):
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(BadOption, match=f"--token-file: {file}: not one line"):
        connection.connection_of(options_of("--url", "h", "--token-file", file), {})


@pytest.mark.parametrize("variable", [connection.ENV_API_KEY, connection.ENV_TOKEN])
def test_a_variable_that_holds_no_key_is_named(variable):
    with pytest.raises(BadOption, match=f"{variable}: not one line"):
        connection.connection_of(options_of("--url", "h"), {variable: "a\nb"})
    found = connection.connection_of(options_of("--url", "h"), {variable: "a\n"})
    assert "a" in {found.api_key, found.token}


async def test_what_cannot_be_measured_is_said_at_once(credentials, capsys):
    async with engine_at(credentials, api_key="user") as running:
        assert await bench(running, "--flip", "--steps", 2, key="user") == 2
        assert "it has prepared 1, 3; ask for these" in capsys.readouterr().err
        assert await bench(running, "--prompts", "nowhere.jsonl", key="user") == 2
        assert "nowhere.jsonl" in capsys.readouterr().err
        assert not running.engine.applied
        running.engine.behaviour = running.engine.behaviour.__class__(
            faults=(Fault("serving", "status", ("/generate",), status=503),)
        )
        assert await bench(running, "--levels", 2, key="user") == 2
        assert "HTTP 503" in capsys.readouterr().err
    assert await bench(running) == 2
    assert "no connection" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"key": "wrong"}, "refuses the API key: give the server's own with --api-key-file"),
        ({"key": ""}, "wants an API key: give the server's own with --api-key-file"),
        ({"token": "wrong"}, "refuses the plugin token: give the engine's own with --token-file"),
        ({"token": ""}, "wants the plugin token: give the engine's own with --token-file"),
    ],
)
async def test_a_key_that_is_refused_is_named_with_a_status_of_its_own(
    credentials, capsys, given, words
):
    async with engine_at(credentials, api_key="user") as running:
        code = await bench(running, "--flip", **{"key": "user", "token": TOKEN, **given})
        assert not running.engine.applied
    assert code == 3
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/server_info", "/generate"])
async def test_a_key_that_not_all_routes_take_is_refused_too(credentials, capsys, path):
    async with engine_at(credentials) as running:
        running.engine.behaviour = running.engine.behaviour.__class__(
            faults=(Fault("serving", "status", (path,), status=401),)
        )
        assert await bench(running, "--levels", 2, key="of another route") == 3
    assert f"{running.url}{path} refuses the API key" in capsys.readouterr().err


async def test_an_engine_without_live_control_is_not_flipped(credentials, capsys):
    async with engine_at(credentials, algorithm="NGRAM") as running:
        assert await bench(running, "--flip") == 2
    assert "NGRAM" in capsys.readouterr().err


async def test_an_engine_beside_specserve_local_is_had_by_ending_that(
    credentials, tmp_path, capsys
):
    async with engine_at(credentials) as running, Client() as client:
        place = connection.Connection(running.url, running.admin_url, token=TOKEN)
        async with steering(client, place, holder=holder_of(tmp_path)) as hand:
            await hand.apply({"mode": "off", "draftKv": "cold"})
            assert await bench(running, "--flip") == 2
    err = capsys.readouterr().err
    assert f"{holder_of(tmp_path)} steers this engine" in err
    assert "end the `specserve local` that does" in err
    assert "Observe" not in err


async def test_an_engine_that_somebody_steers_is_left_alone(credentials, capsys):
    async with engine_at(credentials) as running, Client() as client:
        place = connection.Connection(running.url, running.admin_url, token=TOKEN)
        async with steering(client, place) as hand:
            await hand.apply({"mode": "on", "steps": 1, "draftKv": "warm"})
            assert await bench(running, "--flip") == 2
            err = capsys.readouterr().err
            assert "steers this engine" in err
            assert "set its SpecServe to mode Observe" in err
            with pytest.raises(NotSteerable, match="steers"):
                async with steering(client, place):
                    raise AssertionError("it was taken over")
        assert mode(running) == "auto"


async def test_an_engine_is_put_back_though_its_renewals_failed(credentials, monkeypatch):
    async def refused(self) -> None:
        raise NotSteerable("the token is another one now")

    monkeypatch.setattr(Steering, "renew", refused)
    async with engine_at(credentials) as running, Client() as client:
        place = connection.Connection(running.url, running.admin_url, token=TOKEN)
        async with steering(client, place) as hand:
            await hand.apply({"mode": "off", "draftKv": "cold"})
            assert mode(running) == "off"
        assert mode(running) == "auto"


@pytest.mark.parametrize(
    "given",
    [
        ("--url", "ftp://host"),
        ("--url", "http://host:port"),
        ("--url", "http://[::1:30000"),
        ("--url", "::1:30000"),
        ("--url", ""),
        ("--url", "h", "--admin-url", "x://"),
        ("--url", "h", "--token-file", "/nowhere"),
    ],
)
def test_bad_addresses_and_files_are_named(given):
    with pytest.raises(BadOption, match=given[-2]):
        connection.connection_of(options_of(*given), {})


def test_the_admin_address_is_beside_the_server_and_keys_stay_hidden(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = options_of("--url", "https://me:pw@[::1]:8443/v1/", "--api-key-file", key)
    found = connection.connection_of(options, {connection.ENV_TOKEN: "another"})
    assert (found.url, found.admin_url) == ("https://[::1]:8443", "http://[::1]:9470")
    assert (found.api_key, found.token) == ("secret", "another")
    assert "secret" not in repr(found)
    assert "another" not in repr(found)


@pytest.mark.parametrize(
    "given",
    [
        ("--levels", "0"),
        ("--levels", "a"),
        ("--levels", ""),
        ("--levels", "1,10001"),
        ("--levels", "1" * 5000),
        ("--repeats", "x"),
        ("--id-range", "9"),
        ("--id-range", "9-1"),
    ],
)
def test_numbers_that_are_none_end_it(given):
    with pytest.raises(SystemExit):
        options_of("--url", "h", *given)


@pytest.mark.parametrize(
    "given",
    [
        ("--max-new-tokens", 0),
        ("--rounds", -1),
        ("--seconds", 0),
        ("--seconds", "nan"),
        ("--seconds", "inf"),
        ("--steps", 3),
        ("--json", "/nowhere/out.json"),
        ("--plot", "/nowhere/out.png"),
        ("--json", "/"),
    ],
)
def test_options_that_make_no_sense_are_named(given, capsys):
    assert command.run(options_of("--url", "h", *given)) == 2
    assert given[0] in capsys.readouterr().err
