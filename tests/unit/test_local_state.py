"""What outlives the process: whole, on one clock, and only where it still fits."""

import json
import math
import time
from dataclasses import replace

import pytest

from specserve import api
from specserve.local import state
from specserve.local.state import Remembered, StateLocked, default_folder, held
from specserve.policy import Acceptance, Context, Knowledge, Memory, Rounds, Sample, decide
from specserve.policy.rounds import Accepted, Cell

URL = "http://127.0.0.1:30000"


def spec(draft="hf://a/draft", **policy):
    return api.SpecServeSpec.model_validate(
        {
            "model": {"source": "hf://a/b"},
            "draft": {"method": "EAGLE3", "source": draft, "steps": [0, 3]},
            "policy": {"strategy": "BreakEven", **policy},
        }
    )


def lived(began):
    """A memory and a knowledge as a few minutes of BreakEven leave them."""
    policy, memory, knowledge = spec().policy, Memory.start(), Knowledge()
    for second in range(0, 240, 2):
        now = began + second
        running = 4 if second < 120 else 120
        rounds = Rounds(
            now,
            tuple(
                Cell(bucket, steps, 40, 0.005 * (1 + steps * (bucket > 8)), now)
                for bucket in (4, 128)
                for steps in (0, 3)
            ),
            (Accepted(3, 100 * second, (70 * second, 40 * second, 20 * second)),),
            1000 * second,
        )
        knowledge = knowledge.learn(rounds)
        sample = Sample(now, now, running, 0, 256, 1000 * second, rounds)
        context = Context((0, 3), knowledge=knowledge)
        _, memory = decide(policy, memory, sample, now, context)
    memory = replace(memory, flips=(began + 1.5, began + 130.25))
    return memory, knowledge.hear(memory.counts.acceptance)


def saved(folder, **kept):
    with held(folder) as begun:
        memory, knowledge = lived(begun.clock() - 240)
        begun.save(
            "chat",
            spec(),
            kept.get("knowledge", knowledge),
            {URL: Remembered(epoch=7, memory=kept.get("memory", memory))},
        )
    return memory, knowledge


def test_what_was_learnt_comes_back_as_it_was(tmp_path):
    memory, knowledge = saved(tmp_path)
    assert memory.mode is not None
    assert memory.paces.known
    with held(tmp_path) as again:
        found = again.of("chat", spec())
        assert found.trouble == ""
        assert found.knowledge == knowledge
        assert found.memory(URL) == memory.reboot()
        assert found.memory("http://elsewhere") is None


def test_a_memory_of_nothing_comes_back_too(tmp_path):
    saved(tmp_path, memory=Memory.start(), knowledge=Knowledge())
    text = (tmp_path / state.FILE).read_text()
    json.loads(text, parse_constant=pytest.fail)  # JSON has no Infinity
    with held(tmp_path) as again:
        assert again.memory(URL) == Memory.start()


def test_the_clock_goes_on_where_it_was_left_and_counts_the_time_between(tmp_path, monkeypatch):
    with held(tmp_path) as begun:
        begun.save("chat", spec(), Knowledge(acceptance=Acceptance((0.5,), 9, begun.clock())), {})
        left = begun.clock()
    wall = time.time
    monkeypatch.setattr(state.time, "time", lambda: wall() + 100)
    with held(tmp_path) as again:
        assert again.clock() == pytest.approx(left + 100, abs=2)
        assert again.clock() - again.knowledge.acceptance.at == pytest.approx(100, abs=2)
    # A clock of the wall that was set back makes nothing happen in the future.
    monkeypatch.setattr(state.time, "time", lambda: wall() - 5000)
    with held(tmp_path) as again:
        assert again.clock() == pytest.approx(left, abs=2)


def test_crashes_are_remembered_for_an_hour(tmp_path, monkeypatch):
    with held(tmp_path) as begun:
        now = begun.clock()
    twice = replace(Memory.start(), crashes=(now - 60, now - 30), crashed=True)
    saved(tmp_path, memory=twice)
    with held(tmp_path) as again:
        assert again.memory(URL).crashed
    wall = time.time
    monkeypatch.setattr(state.time, "time", lambda: wall() + 3600)
    with held(tmp_path) as again:
        assert again.memory(URL) == Memory.start()


def test_of_another_draft_what_was_learnt_is_forgotten_and_the_dwell_is_not(tmp_path):
    memory, _ = saved(tmp_path)
    with held(tmp_path) as again:
        found = again.of("chat", spec(draft="hf://a/other"))
        assert "another model or draft" in found.trouble
        assert found.knowledge == Knowledge()
        kept = found.memory(URL)
        assert (kept.mode, kept.since, kept.flips) == (memory.mode, memory.since, memory.flips)
        assert kept.counts.acceptance is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "x"}', '{"clock": 1}', "\0" * 64])
def test_what_cannot_be_read_is_kept_aside_and_said(tmp_path, text):
    (tmp_path / state.FILE).write_text(text)
    with held(tmp_path) as begun:
        assert "is no state of this version" in begun.trouble
        assert begun.knowledge == Knowledge()
        begun.save("chat", spec(), Knowledge(), {})
    [aside] = tmp_path.glob(f"{state.FILE}.*")
    assert aside.read_text() == text
    with held(tmp_path) as again:
        assert again.trouble == ""


def test_a_field_that_this_version_does_not_know_makes_it_another_version(tmp_path):
    saved(tmp_path)
    path = tmp_path / state.FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"novelty": 1}))
    with held(tmp_path) as begun:
        assert "novelty" in begun.trouble


def test_one_process_holds_a_folder(tmp_path):
    with (
        held(tmp_path),
        pytest.raises(StateLocked, match="steers with this state; end it"),
        held(tmp_path),
    ):
        pytest.fail("both hold it")
    with held(tmp_path):
        pass


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    saved(tmp_path)
    before = (tmp_path / state.FILE).read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        saved(tmp_path)
    assert (tmp_path / state.FILE).read_bytes() == before
    assert (tmp_path / state.FILE).stat().st_mode & 0o777 == 0o600


def test_the_default_folder_is_where_xdg_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        default_folder("chat", {"XDG_STATE_HOME": "/var/x"}).as_posix() == "/var/x/specserve/chat"
    )
    home = tmp_path / ".local" / "state" / "specserve" / "chat"
    assert default_folder("chat", {}) == default_folder("chat", {"XDG_STATE_HOME": "x"}) == home


def test_times_that_never_came_are_no_numbers(tmp_path):
    saved(tmp_path, memory=Memory.start())
    kept = json.loads((tmp_path / state.FILE).read_text())["engines"][URL]["memory"]
    assert kept["since"] == "-Infinity"
    with held(tmp_path) as again:
        assert again.memory(URL).since == -math.inf
