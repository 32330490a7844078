"""`specserve local` beside simulated engines, as processes: flips, restarts, endings."""

from __future__ import annotations

import json
import os
import signal

import pytest
import yaml

from tests.cluster import claims
from tests.wire.local_box import TOKEN, at, decisions, engine, local, manifest
from tests.wire.prometheus_server import Target, prometheus

TABLE = [{"minBatch": 1, "steps": 3}, {"minBatch": 21, "steps": 0}]


@pytest.fixture
async def one(tmp_path):
    async with engine(tmp_path) as running:
        yield running


def is_off(state):
    return state["mode"] == "off"


def is_on(state):
    return state["mode"] == "on"


def drafts(state):
    """Whether the batches of now are drafted for, whatever rule says so."""
    return any(rank["activeSteps"] for group in state["groups"] for rank in group["ranks"])


# -- the policy -----------------------------------------------------------------------------


async def test_threshold_flips_with_the_load_and_tells_both_outcomes(one, tmp_path):
    log = tmp_path / "decisions.jsonl"
    async with local(tmp_path, manifest(), *at(one), "--log", str(log)) as box:
        await one.until(is_on)
        await box.line("box-0 switched: on, confirmed by the engine")
        await one.show(30)
        await box.line("box-0 decides: off: 30 in flight above 20")
        state = await one.until(is_off)
        await box.line("box-0 switched: off, confirmed by the engine")
        assert state["lease"]["holder"].startswith("local/")
        assert state["lease"]["remainingSeconds"] > 10
        await one.show(2)
        await box.line("box-0 switched: on")
        await one.until(is_on)
        assert await box.end() == 0
    entries = decisions(log)
    assert [entry["mode"] for entry in entries if entry["what"] in {"first", "mode"}] == [
        *("On", "Off", "On"),
    ]
    off = next(entry for entry in entries if entry["mode"] == "Off")
    assert set(off) == {
        *("time", "pod", "what", "mode", "code", "reason", "setting", "probe", "numbers")
    }
    assert off["numbers"]["running"] == 30.0


async def test_break_even_goes_by_what_the_traffic_accepts(one, tmp_path):
    cr = manifest(strategy="BreakEven", breakEven={"profile": "h200-a"})
    async with local(tmp_path, cr, *at(one)) as box:
        await box.line("break-even curve: profile h200-a")
        async with one.asked(24, accept=1.05):
            # The first verifies, by chance, may win a little more than the mean.
            await box.line("decides: off: acceptance 1.", "below break-even")
            # By a table, it may be off at this batch and larger ones alone.
            await one.until(lambda state: not drafts(state))
        async with one.asked(2, accept=3.8):
            await one.until(drafts, seconds=90)
        assert await box.end() == 0


async def test_without_a_state_an_engine_is_new_whatever_it_was_told_before(one, tmp_path):
    cr = manifest(strategy="BreakEven", breakEven={"profile": "h200-a"})
    async with one.asked(4, accept=3.5):
        async with local(tmp_path, manifest(mode="Off"), *at(one)) as box:
            await one.until(is_off)
            assert await box.end() == 0
        # The acceptance is not known while off: whoever went on with that would wait for a probe.
        state = ("--state", str(tmp_path / "another"))
        async with local(tmp_path, cr, *at(one), *state) as box:
            await box.line("box-0 switched: on", seconds=20)
            await box.line("decides: on: acceptance 3.", seconds=20)
            assert await box.end() == 0


async def test_a_curve_from_a_file_stands_for_the_config_map(one, tmp_path):
    curve = tmp_path / "curve.json"
    cells = [{"batch": batch, "steps": 3, "ratio": 9.0} for batch in (1, 256)]
    curve.write_text(json.dumps({"provenance": {"source": "made up"}, "cells": cells}))
    cr = manifest(strategy="BreakEven", breakEven={"curveConfigMap": "mine"})
    async with local(tmp_path, cr, *at(one), "--curve", str(curve)) as box:
        await box.line(f"break-even curve: file {curve}: made up")
        async with one.asked(2, accept=2.0):
            await box.line("decides: off: ")
            await one.until(is_off)
        assert await box.end() == 0


async def test_two_engines_that_share_an_identity_are_told_apart(tmp_path):
    async with engine(tmp_path) as first, engine(tmp_path) as second:
        await second.show(30)
        async with local(tmp_path, manifest(), *at(first, second)) as box:
            await first.until(is_on)
            await second.until(is_off)
            assert await box.end() == 0


async def test_loads_may_come_from_a_prometheus_server_of_this_box(one, tmp_path):
    labels = {"namespace": "default", "pod": "box-0"}
    scraped = [Target(one.url.removeprefix("http://"), labels)]
    with prometheus(tmp_path / "prometheus", targets=scraped) as server:
        asked = {"url": server.url, "scrapeIntervalSeconds": 1}
        cr = manifest(source="Prometheus", prometheus=asked)
        async with local(tmp_path, cr, *at(one)) as box:
            await one.until(is_on)
            await one.show(30)
            await box.line("box-0 decides: off: 30 in flight above 20")
            await one.until(is_off)
            assert await box.end() == 0


# -- engines that come and go ------------------------------------------------------------------


async def test_an_engine_that_is_away_is_held_and_said_and_goes_on_when_it_is_back(one, tmp_path):
    async with local(tmp_path, manifest(), *at(one)) as box:
        before = await one.until(is_on)
        # Not the whole serving port, which has to be told when it is over.
        loads = {"side": "serving", "kind": "reset", "paths": ["/v1/loads", "/metrics"]}
        await one.behave(faults=[{"side": "admin", "kind": "refuse"}, loads])
        await box.line("box-0 warning: Engine", "its mode is left as it is")
        await one.show(30)  # heals, too
        await box.line("box-0 well: it answers and takes orders")
        after = await one.until(is_off)
        assert after["bootID"] == before["bootID"]
        assert await box.end() == 0


async def test_an_engine_that_comes_back_as_another_process_and_identity_is_taken_on(tmp_path):
    ports = {"port": claims.port(), "admin": claims.port()}
    where = ",".join(f"http://127.0.0.1:{port}" for port in ports.values())
    async with local(tmp_path, manifest(), "--engine", where) as box:
        await box.line("box-0 warning: EngineConnectionRefused")  # it is not there yet
        async with engine(tmp_path, uid="before", **ports) as first:
            await first.until(is_on)
        await box.line("box-0 warning: Engine")
        async with engine(tmp_path, uid="after", **ports) as second:
            await second.until(is_on)
            assert await box.end() == 0


async def test_a_token_that_does_not_fit_ends_it_before_anything_is_begun(one, tmp_path):
    async with local(tmp_path, manifest(), *at(one), "--token-file", "/dev/null") as box:
        assert await box.ended() == 2
    assert any("--token-file: /dev/null" in line for line in box.lines)
    wrong = tmp_path / "wrong"
    wrong.write_text("sesame")
    async with local(tmp_path, manifest(), *at(one), "--token-file", str(wrong)) as box:
        assert await box.ended() == 3
    assert f"{one.admin} refuses the plugin token" in box.lines[-1]
    assert "--token-file" in box.lines[-1]


async def test_a_key_that_does_not_fit_ends_it_before_anything_is_begun(tmp_path):
    key = tmp_path / "key"
    async with engine(tmp_path, words=("--api-key=sesame",)) as one:
        async with local(tmp_path, manifest(), *at(one)) as box:
            assert await box.ended() == 3
        assert f"{one.url} wants an API key" in box.lines[-1]
        key.write_text("simsalabim")
        async with local(tmp_path, manifest(), *at(one), "--api-key-file", str(key)) as box:
            assert await box.ended() == 3
        assert f"{one.url} refuses the API key" in box.lines[-1]
        key.write_text("sesame")
        async with local(tmp_path, manifest(), *at(one), "--api-key-file", str(key)) as box:
            await one.until(is_on)
            # Another one later is no end: it is steered by what the plugin tells.
            key.write_text("simsalabim")
            await box.line(f"note: {key}: a new key, sent from now on")
            await box.line("box-0 warning: KeyRefused: it refuses the API key")
            key.write_text("sesame")
            await box.line("box-0 well: it answers and takes orders")
            assert await box.end() == 0


async def test_a_token_that_is_renewed_is_sent_from_then_on(one, tmp_path):
    mine, theirs = tmp_path / "token", tmp_path / "credentials" / "plugin-token"
    async with local(tmp_path, manifest(), *at(one)) as box:
        await one.until(is_on)
        # First in the file of the command: the engine still wants the one before.
        mine.write_text("another")
        await box.line(f"note: {mine}: a new token, sent from now on")
        await one.show(30)
        await one.until(is_off)
        theirs.write_text("another")
        one.token = "another"
        await one.show(2)
        await one.until(is_on)
        # Then first in the engine's.
        theirs.write_text("a third")
        one.token = "a third"
        await box.line("box-0 warning: Unauthorized", "--token-file is read again")
        mine.write_text("")
        await box.line(f"warning: --token-file: {mine}: not one line", "the one before is sent")
        mine.write_text("a third")
        await box.line(f"note: {mine}: a new token, sent from now on")
        await box.line("box-0 well: it answers and takes orders")
        await one.show(30)
        await one.until(is_off)
        assert await box.end() == 0


# -- endings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_ended_it_leaves_the_engine_in_the_fallback_at_once(one, tmp_path, number):
    async with local(tmp_path, manifest(), *at(one)) as box:
        await one.until(is_on)
        assert await box.end(number) == 0
        state = await one.read()
    assert (state["mode"], state["tiers"]) == ("tiers", TABLE)
    assert state["lease"]["remainingSeconds"] <= 5
    assert any("box-0 note: left in its fallback: by batch" in line for line in box.lines)
    # Nobody renews it: five seconds later the engine is free, and does the same.
    state = await one.until(lambda state: not state["lease"]["remainingSeconds"])
    assert (state["mode"], state["tiers"]) == ("tiers", TABLE)


async def test_killed_it_leaves_the_engine_to_its_lease(one, tmp_path):
    async with local(tmp_path, manifest(), *at(one)) as box:
        before = await one.until(is_on)
        box.process.kill()
        await box.ended()
        state = await one.until(lambda state: state["mode"] == "tiers")
    assert state["tiers"] == TABLE
    assert state["lease"]["expirations"] == 1
    assert state["epoch"] == before["epoch"] + 1


async def test_an_engine_that_cannot_be_told_at_the_end_is_named(one, tmp_path):
    async with local(tmp_path, manifest(), *at(one)) as box:
        await one.until(is_on)
        await one.behave(faults=[{"side": "admin", "kind": "refuse"}])
        assert await box.end() == 1
    assert any("it takes the fallback when its lease is over" in line for line in box.lines)


# -- state -------------------------------------------------------------------------------------


async def test_what_the_policy_remembers_outlives_a_kill(one, tmp_path):
    cr = manifest(dwellOffSeconds=600)
    async with local(tmp_path, cr, *at(one)) as box:
        await one.until(is_on)
        await one.show(30)
        before = await one.until(is_off)
        await box.line("switched: off")
        box.process.kill()
        await box.ended()
    kept = json.loads((tmp_path / "state" / "state.json").read_text())
    assert kept["engines"][one.url]["memory"]["mode"] == "Off"
    assert TOKEN not in json.dumps(kept)
    await one.show(2)
    async with local(tmp_path, cr, *at(one)) as box:
        # The dwell goes on: a process that remembers nothing would begin with on.
        await box.line("decides: hold off: 2 in flight below 10, dwell", "of 600 s left")
        after = await one.read()
        assert is_off(after)
        assert after["epoch"] >= before["epoch"]
        assert after["lease"]["holder"] == before["lease"]["holder"]
        assert await box.end() == 0


async def test_a_state_that_is_none_is_kept_aside_and_begun_anew(one, tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "state.json").write_text('{"schema": "somebody.else/v9"}')
    async with local(tmp_path, manifest(), *at(one)) as box:
        await box.line("warning: ", "is no state of this version (schema:", "all begins anew")
        await one.until(is_on)
        assert await box.end() == 0
    (aside,) = folder.glob("state.json.*")
    assert json.loads(aside.read_text()) == {"schema": "somebody.else/v9"}
    assert json.loads((folder / "state.json").read_text())["schema"] == "specserve.dev/local-v1"


async def test_two_on_one_state_are_one_too_many(one, tmp_path):
    async with local(tmp_path, manifest(), *at(one)) as box:
        await one.until(is_on)
        async with local(tmp_path, manifest(), *at(one)) as second:
            assert await second.ended() == 2
        assert any(
            f"process {box.process.pid} steers with this state" in line for line in second.lines
        )
        assert is_on(await one.read())
        assert await box.end() == 0


# -- the file ----------------------------------------------------------------------------------


async def test_an_edited_policy_holds_at_once_and_a_bad_one_not_at_all(one, tmp_path):
    file = tmp_path / "cr.yaml"
    async with local(tmp_path, manifest(), *at(one)) as box:
        await one.until(is_on)
        file.write_text(manifest(mode="Off"))
        await box.line("note: the policy has changed")
        await one.until(is_off)
        file.write_text(manifest(threshold={"offAbove": 4, "onBelow": 9}))
        await box.line("onBelow (9) must be below offAbove (4); the policy stays as it was")
        file.write_text(manifest(name="another"))
        await box.line("more than the policy has changed")
        file.write_text(manifest())
        await one.until(is_on)
        assert await box.end() == 0


async def test_a_bad_resource_is_refused_with_the_operators_words(tmp_path):
    cr = manifest(leaseSeconds=1)
    async with local(tmp_path, cr, "--engine", "http://127.0.0.1:1") as box:
        assert await box.ended() == 2
    [line] = box.lines
    assert "spec.policy.leaseSeconds: Input should be greater than or equal to 15" in line
    assert not (tmp_path / "state").exists()


async def test_what_means_nothing_here_is_said(one, tmp_path):
    document = yaml.safe_load(manifest())
    document["spec"] |= {
        "replicas": 3,
        "rollout": {"type": "Recreate"},
        "engine": {"image": "x", "apiKeySecretRef": {"name": "key"}},
    }
    document["spec"]["draft"]["steps"] = [0, 1, 3]
    async with local(tmp_path, yaml.safe_dump(document), *at(one)) as box:
        await box.line("spec.replicas is 3, engines given: 1; these are steered")
        await box.line("spec.engine says how engines are started")
        await box.line("give its key with --api-key-file")
        await box.line("spec.rollout replaces pods")
        unprepared = "box-0 warning: spec.draft.steps has 1, and it has prepared 0, 3 alone"
        await box.line(unprepared)
        await one.until(is_on)
        assert await box.end() == 0
    assert sum(unprepared in line for line in box.lines) == 1


# -- who looks on ------------------------------------------------------------------------------


async def test_the_end_of_the_terminal_is_an_end_like_any_other(one, tmp_path):
    async with local(tmp_path, manifest(), *at(one)) as box:
        await one.until(is_on)
        assert await box.end(signal.SIGHUP) == 0
        assert (await one.read())["mode"] == "tiers"


async def test_it_steers_on_when_nobody_reads_its_lines(one, tmp_path):
    async with local(tmp_path, manifest(), *at(one)) as box:
        await one.until(is_on)
        box.process._transport.get_pipe_transport(1).close()
        await one.show(30)
        await one.until(is_off)
        await one.show(2)
        await one.until(is_on)
        box.process.send_signal(signal.SIGTERM)
        assert await box.process.wait() == 0
        assert (await one.read())["mode"] == "tiers"


async def test_on_a_terminal_there_is_a_live_view(one, tmp_path):
    async with local(tmp_path, manifest(), *at(one), terminal=True) as box:
        await one.until(is_on)
        await box.line("engine", "mode", "tok/s", "lease s")
        await box.line("box-0", "on", "0")
        await one.show(30)
        await box.line("box-0 switched off, confirmed by the engine")
        await box.line("box-0  off: 30 in flight above 20")
        os.kill(int((tmp_path / "state" / "lock").read_text()), signal.SIGTERM)
        assert await box.ended() == 0
