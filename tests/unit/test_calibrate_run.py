"""The whole command against simulated engines: it recovers the profile that they run on."""

import argparse
import asyncio
import contextlib
from importlib.resources import files
from pathlib import Path

import pytest

from specserve.bench import connection, screen
from specserve.bench.client import Client
from specserve.calibrate import command, sweep
from specserve.policy import directive
from specserve.policy.curve import Curve
from specserve_sim.engine import EngineConfig
from specserve_sim.launch import running_engine
from specserve_sim.profile import load_profile

TOKEN = "a-plugin-token"
PROFILES = sorted(
    Path(entry.name).stem
    for entry in (files("specserve_sim") / "profiles").iterdir()
    if entry.name.endswith(".toml")
)
SIZES = (1, 4, 16)
STEPS = (1, 3)


def options_of(*given):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["calibrate", "--quiet", *map(str, given)])


@contextlib.asynccontextmanager
async def engine(folder, **config):
    (folder / "plugin-token").write_text(TOKEN)
    settings = {"time_scale": 20.0, "max_running_requests": 64} | config
    async with running_engine(EngineConfig(**settings), credentials=folder) as running:
        yield running


async def calibrate(running, file, *given):
    options = options_of(
        *("--url", running.url, "--admin-url", running.admin_url, "--output", file),
        *("--sizes", ",".join(map(str, SIZES)), *given),
    )
    environ = {connection.ENV_TOKEN: TOKEN}
    return await command.calibrate(options, connection.connection_of(options, environ))


@pytest.mark.parametrize("profile", PROFILES)
async def test_the_profile_is_recovered_within_five_percent(tmp_path, capsys, profile):
    file = tmp_path / "curve.json"
    async with engine(tmp_path, profile=profile) as running:
        given = ("--repeats", 2, "--gpu", "1 x Imagined", "--model", "hf://org/model")
        assert await calibrate(running, file, *given) == 0
        assert running.engine.control.read_back(0.0)["mode"] == "auto"
    curve = Curve.from_json(file.read_bytes())
    assert len(curve.document.cells) == len(SIZES) * len(STEPS)
    runs_on = load_profile(profile)
    for point in curve.document.cells:
        expected = runs_on.r(point.batch, point.steps) / runs_on.r(point.batch, 0)
        assert point.ratio == pytest.approx(expected, rel=0.05)
        assert point.rounds >= 200
    origin = curve.provenance
    assert (origin.gpu, origin.model, origin.tensor_parallel) == (
        "1 x Imagined",
        "hf://org/model",
        1,
    )
    assert origin.sglang.startswith("specserve-sim")
    assert origin.interconnect is None
    assert origin.settings.startswith("simulated engine")
    assert "at 16 in flight it pays above" in capsys.readouterr().out


async def test_a_visit_lasts_until_enough_of_its_own_rounds_are_timed(tmp_path, monkeypatch):
    """Requests end apart, and visits of a cell follow each other within the engine's window."""
    readings, visit = [], sweep.Sweep.visit
    async with engine(tmp_path) as running:
        [group] = running.engine.groups

        def window(cell):
            arm = group.stats._arms.get((cell.level, cell.arm.setting.get("steps", 0)))
            return [] if arm is None else list(arm.rounds)

        async def watched(self, cell):
            before = window(cell)
            reading = await visit(self, cell)
            readings.append((cell, reading, before, window(cell)))
            return reading

        monkeypatch.setattr(sweep.Sweep, "visit", watched)
        given = ("--sizes", "1,12", "--steps", 3, "--repeats", 2, "--max-new-tokens", 48)
        # 1 where the machine was busy, and the repeats differ.
        assert await calibrate(running, tmp_path / "curve.json", *given) in {0, 1}
    assert len(readings) == 8
    for cell, reading, before, after in readings:
        timed = [each for each in after if each.seconds is not None]
        assert sweep.FEWEST_ROUNDS <= reading.rounds <= len(timed), cell
        earlier = {each.ended for each in before}
        own = sum(each.ended not in earlier for each in timed)
        # How many are is reckoned from answers: on a busy machine not to the round.
        assert own >= sweep.FEWEST_ROUNDS / 2, cell


async def test_cells_with_few_rounds_are_named(tmp_path, capsys):
    # There is no room for longer answers.
    room = {"max_total_tokens": 4 * (128 + 16), "context_length": 128 + 16}
    async with engine(tmp_path, **room) as running:
        given = ("--sizes", 4, "--steps", 3, "--repeats", 1, "--max-new-tokens", 16)
        assert await calibrate(running, tmp_path / "curve.json", *given) == 1
    assert "few rounds: batch 4, 3 steps: " in capsys.readouterr().out
    [point] = Curve.from_json((tmp_path / "curve.json").read_bytes()).document.cells
    assert point.rounds < sweep.FEWEST_ROUNDS


async def test_two_runs_agree_and_a_third_that_does_not_is_named(tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    async with engine(tmp_path) as running:
        assert await calibrate(running, first, "--repeats", 1, "--steps", 3) == 0
        # The second waits until the first's last lease has run out.
        given = ("--repeats", 1, "--steps", 3, "--against", first)
        assert await calibrate(running, second, *given) == 0
        assert "agrees with" in capsys.readouterr().out
    async with engine(tmp_path, profile="h200x2-hostmem") as other:
        assert await calibrate(other, second, *given) == 1
        assert "runs differ: batch 1, 3 steps" in capsys.readouterr().out


async def test_an_interrupted_run_keeps_the_sizes_it_has_completed(tmp_path):
    file = tmp_path / "curve.json"
    async with engine(tmp_path) as running:
        task = asyncio.create_task(calibrate(running, file, "--repeats", 1))
        async with asyncio.timeout(60):
            while True:
                if len(running.engine.applied) >= 5:  # three for the first size, two for the next
                    break
                await asyncio.sleep(0.005)
        task.cancel()
        assert await task == 130
        assert running.engine.control.read_back(0.0)["mode"] == "auto"
    curve = Curve.from_json(file.read_bytes())
    assert {point.batch for point in curve.document.cells} == {1}


async def test_sizes_without_room_are_left_out_and_said(tmp_path, capsys):
    file = tmp_path / "curve.json"
    async with engine(tmp_path, max_running_requests=None) as running:
        assert await calibrate(running, file, "--sizes", "64") == 2
        assert "none of them can be held" in capsys.readouterr().err
        given = ("--sizes", "1,15,16,64", "--repeats", 1, "--steps", 3)
        assert await calibrate(running, file, *given) == 0
        err = capsys.readouterr().err
        assert "batch 64: at most 48 requests at once (--max-running-requests)" in err
        assert "batch 16: the engine does not tell it from a smaller one" in err


async def test_what_cannot_be_calibrated_is_said(tmp_path, capsys):
    file = tmp_path / "curve.json"
    async with engine(tmp_path, algorithm="NGRAM") as running:
        assert await calibrate(running, file) == 2
    assert "NGRAM" in capsys.readouterr().err
    async with engine(tmp_path, steps=(1, 3)) as running:
        assert await calibrate(running, file) == 2
        assert "0 and another are needed" in capsys.readouterr().err
    async with engine(tmp_path) as running:
        assert await calibrate(running, file, "--steps", 2) == 2
        err = capsys.readouterr().err
        assert "has not prepared 2: it has prepared 1, 3; ask for these, or have it" in err
        assert "(draft.steps)" in err
        assert await calibrate(running, file, "--against", tmp_path / "nowhere") == 2
        assert "nowhere" in capsys.readouterr().err
        broken = tmp_path / "broken.json"
        broken.write_text("{}")
        assert await calibrate(running, file, "--against", broken) == 2
        assert "cells" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize(
    ("key", "token", "words"),
    [
        ("user", "wrong", "refuses the plugin token"),
        ("user", "", "wants the plugin token"),
        ("wrong", TOKEN, "refuses the API key"),
    ],
)
async def test_a_key_that_is_refused_is_named(tmp_path, capsys, key, token, words):
    environ = {connection.ENV_API_KEY: key, connection.ENV_TOKEN: token}
    async with engine(tmp_path, api_key="user") as running:
        options = options_of(
            *("--url", running.url, "--admin-url", running.admin_url),
            *("--output", tmp_path / "curve.json"),
        )
        target = connection.connection_of(options, environ)
        assert await command.calibrate(options, target) == 3
        assert not running.engine.applied
    assert words in capsys.readouterr().err
    assert not (tmp_path / "curve.json").exists()


async def test_a_curve_fits_into_the_bytes_that_are_kept_of_it(tmp_path, capsys):
    file = tmp_path / "curve.json"
    async with engine(tmp_path) as running:
        given = ("--sizes", "1,4", "--repeats", 1)
        assert await calibrate(running, file, *given, "--most-bytes", 400) == 2
        assert "may take" in capsys.readouterr().err
        assert len(running.engine.applied) == 0
        assert await calibrate(running, file, *given, "--most-bytes", 4096) == 0
    text = file.read_text()
    assert "\n" not in text
    assert len(text) <= 4096
    assert {point.batch for point in Curve.from_json(text).document.cells} == {1, 4}


async def test_a_reader_that_leaves_early_costs_no_curve(tmp_path, monkeypatch):
    file = tmp_path / "curve.json"

    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr(screen, "print_table", gone)
    async with engine(tmp_path) as running:
        with pytest.raises(BrokenPipeError):
            await calibrate(running, file, "--sizes", "1", "--repeats", 1, "--steps", 3)
    assert [point.batch for point in Curve.from_json(file.read_bytes()).document.cells] == [1]


async def test_an_engine_is_steered_in_the_name_of_who_has_let_go_of_it(tmp_path, capsys):
    file = tmp_path / "curve.json"
    async with engine(tmp_path) as running:
        state = running.engine.control.read_back(0.0)
        held = directive.body(
            {"mode": "off", "draftKv": "cold", "fallback": {"mode": "off", "draftKv": "cold"}},
            pod_uid=state["podUID"],
            boot_id=state["bootID"],
            epoch=state["epoch"] + 1,
            holder="system/specserve",
            lease_seconds=60,
            deadline_ms=2000,
            reason="held",
        )
        async with Client() as client:
            reply = await client.call(
                "PUT", f"{running.admin_url}/v1/speculation", bearer=TOKEN, body=held, seconds=5
            )
        assert reply.status == 200
        given = ("--sizes", "1", "--repeats", 1, "--steps", 3)
        assert await calibrate(running, file, *given, "--holder", "other/one") == 2
        assert "system/specserve steers this engine" in capsys.readouterr().err
        assert await calibrate(running, file, *given, "--holder", "system/specserve") == 0
        after = running.engine.control.read_back(0.0)
        assert (after["mode"], after["lease"]["holder"]) == ("off", "system/specserve")


async def test_a_curve_is_printed_if_the_disk_is_full(tmp_path, capsys):
    async with engine(tmp_path) as running:
        assert await calibrate(running, "/dev/full", "--repeats", 1, "--sizes", 1) == 2
    printed = capsys.readouterr()
    assert "--output: /dev/full: No space left on device" in printed.err
    assert Curve.from_json(printed.out[printed.out.index("{") :]).document.cells
    assert "it pays at 1 in flight" in printed.out


def test_options_that_make_no_sense_are_named(capsys):
    assert command.run(options_of("--url", "h", "--output", "x", "--repeats", 0)) == 2
    assert "--repeats" in capsys.readouterr().err
    assert command.run(options_of("--url", "h", "--output", "/nowhere/curve.json")) == 2
    assert "--output: /nowhere/curve.json" in capsys.readouterr().err
