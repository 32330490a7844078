"""The regret benchmark: its fast engine against the simulated one, its driver, its sums."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest

from specserve import api
from specserve_sim.model import Request, Scheduler
from specserve_sim.profile import load_profile, profile_names
from tests.bench import publish
from tests.bench.regret import arms, compare, show, traces
from tests.bench.regret.steering import Judge, Plugin, Steering
from tests.bench.regret.virtual import CAPACITY, NEW_TOKENS, VirtualEngine


def at_least(batch, above, below):
    return lambda size: above if size >= batch else below


def virtual(profile, accept, choose, clients, **settings):
    engine = VirtualEngine(
        load_profile(profile),
        7,
        accept,
        choose,
        **{"scatter": 0.0, "switch_seconds": 0.0, **settings},
    )
    engine.load(clients)
    return engine


def scheduled(profile, accept, choose, clients, seconds):
    """The same load on the engine model that stands behind the HTTP server."""
    scheduler = Scheduler(
        load_profile(profile), max_running=CAPACITY, rng=Random(7), accept_length=accept
    )
    scheduler.choose_steps = choose
    rng = Random(11)
    for _ in range(clients):
        scheduler.submit(Request(128, rng.randint(1, NEW_TOKENS)), 0.0)
    now = 0.0
    while now < seconds:
        for _ in scheduler.advance(now):
            scheduler.submit(Request(128, NEW_TOKENS), now)
        now = max(now, scheduler.next_event)
    return scheduler


@pytest.mark.parametrize(
    ("profile", "clients", "accept", "choose"),
    [
        ("h200-a", 1, 2.5, lambda _: 3),
        ("h200-a", 10, 1.7, lambda _: 3),
        ("h200-a", 32, 2.5, lambda _: 0),
        ("h200-b", 250, 1.0, lambda _: 3),
        ("h200x2-nccl", 5, 3.5, lambda _: 5),
        ("h200x2-hostmem", 250, 2.0, lambda _: 0),
        ("h200-a", 300, 2.5, lambda _: 1),  # 44 of them wait
        ("h200-a", 70, 2.5, at_least(70, 0, 3)),  # answered clients pause: it wavers
    ],
)
def test_the_fast_engine_does_what_the_simulated_one_does(profile, clients, accept, choose):
    seconds = 30.0
    fast = virtual(profile, accept, choose, clients)
    fast.run(seconds)
    slow = scheduled(profile, accept, choose, clients, seconds)
    # Three standard errors of a single client's luck; the others have more draws.
    near = 0.02 if clients < 5 else 0.01
    assert fast.tokens / fast.clock == pytest.approx(slow.tokens_total / slow.clock, rel=near)
    assert fast.rounds / fast.clock == pytest.approx(slow.decode_rounds / slow.clock, rel=0.015)
    assert fast.switches == pytest.approx(slow.switches, rel=0.1, abs=1)


def test_the_fast_engine_accepts_drafts_as_the_simulated_one_does():
    accepted = np.zeros(4)

    def count(rows):
        accepted[:] += np.bincount(rows.accepted[rows.decoding], minlength=4)

    fast = virtual("h200-b", 2.2, lambda _: 3, 32, on_rows=count)
    fast.run(20.0)
    histogram = np.zeros(4)
    slow = Scheduler(load_profile("h200-b"), max_running=32, rng=Random(5), accept_length=2.2)
    requests = [Request(128, 3000) for _ in range(32)]
    for request in requests:
        slow.submit(request, 0.0)
    slow.advance(20.0)
    for request in requests:
        histogram += np.array([*request.histogram, 0, 0, 0, 0][:4])
    assert accepted / accepted.sum() == pytest.approx(histogram / histogram.sum(), abs=0.01)


def test_how_time_is_cut_changes_nothing():
    whole = virtual("h200-a", 2.3, lambda _: 3, 40, scatter=0.03)
    whole.run(30.0)
    pieces = virtual("h200-a", 2.3, lambda _: 3, 40, scatter=0.03)
    for at in np.arange(0.37, 30.0, 0.37):
        pieces.run(float(at))
    pieces.run(30.0)
    assert pieces.tokens == whole.tokens
    assert pieces.clock == pytest.approx(whole.clock)


def test_every_answer_has_its_tokens():
    engine = virtual("h200-a", 2.3, lambda _: 3, 20)
    engine.run(10.0)
    begun = engine.tokens
    left = int(engine._left.sum())
    engine.load(0)
    engine.run(40.0)
    assert engine.running == engine.queue == 0
    assert engine.tokens == begun + left


def test_clients_who_are_too_many_leave_when_answered_and_waiting_ones_take_their_place():
    engine = virtual("h200-a", 2.5, lambda _: 3, 300)
    assert (engine.running, engine.queue) == (256, 44)
    engine.run(2.0)
    engine.load(10)
    assert (engine.running, engine.queue) == (256, 44)
    engine.run(40.0)
    assert engine.queue == 0
    assert 8 <= engine.running <= 10
    engine.load(12)
    engine.run(60.0)
    assert 10 <= engine.running <= 12


def test_scatter_and_switches_cost_what_is_stated():
    calm = virtual("h200-a", 2.0, lambda _: 0, 32)
    calm.run(60.0)
    rough = virtual("h200-a", 2.0, lambda _: 0, 32, scatter=0.03)
    rough.run(60.0)
    assert rough.tokens == pytest.approx(calm.tokens, rel=0.005)
    slow = virtual("h200-a", 2.0, lambda _: 0, 32, switch_seconds=1.0)
    for number in range(10):
        slow.choose_steps = (lambda _: 0) if number % 2 else (lambda _: 3)
        slow.run(6.0 * (number + 1))
    assert slow.switches == 9


def test_the_plugin_reports_what_was_played_and_nothing_that_is_under_way():
    engine = virtual("h200-a", 2.5, lambda _: 3, 8)
    plugin = Plugin(engine, (0, 3))
    engine.run(10.0)
    group = plugin.read_back(10.0)["groups"][0]
    assert group["roundsTotal"] in {engine.rounds, engine.rounds - 1}
    arm = next(stat for stat in group["stats"] if stat["batchBucket"] == 8)
    profile = load_profile("h200-a")
    assert arm["medianRoundSeconds"] == pytest.approx(profile.t_on(8, 3), rel=1e-6)
    assert arm["lastSeen"] <= 10.0
    (accepted,) = group["acceptance"]
    assert 1 + sum(accepted["accepted"]) / accepted["verifies"] == pytest.approx(2.5, abs=0.05)


@pytest.mark.parametrize("name", profile_names())
def test_traces_hold_more_than_one_period_and_stay_within_bounds(name):
    for trace in traces.traces(load_profile(name)):
        assert trace.points[0].at == 0
        assert all(a.at < b.at for a, b in zip(trace.points, trace.points[1:], strict=False))
        assert trace.points[-1].at < trace.seconds
        assert all(point.clients >= 1 and 1 <= point.accept <= 4 for point in trace.points)
        assert trace.period is None or trace.seconds >= 2 * trace.period
        if trace.period is not None:
            by_time = {point.at: point for point in trace.points}
            again = by_time.get(trace.period)
            assert again is None or again.clients == trace.points[0].clients


def test_a_cell_is_judged_against_the_better_arm_held():
    row, _ = compare.play_cell(compare.Cell("h200-a", 70, 1.0))
    assert row["best"] == "AlwaysOff"
    assert row[arms.ALWAYS_OFF] == 1.0
    profile = load_profile("h200-a")
    expected = profile.throughput(70, 3, 1.0) / profile.throughput(70, 0, 1.0)
    assert row[arms.ALWAYS_ON] == pytest.approx(expected, rel=0.01)
    assert row["offToPlain"] == pytest.approx(1 / profile.r(70, 0), rel=0.01)
    assert row["modelledWhat"] == ["off"]


def cell(profile, clients, on, off):
    row = dict.fromkeys(arms.STRATEGIES, 1.0)
    return {
        "profile": profile,
        "c": clients,
        "accept": 2.0,
        **row,
        arms.ALWAYS_ON: on,
        arms.ALWAYS_OFF: off,
        "learning": {arms.BREAK_EVEN: 0.9},
    }


def test_the_fixed_threshold_is_the_one_whose_worst_cell_is_best():
    cells = [
        cell("h200-a", 1, 1.0, 0.5),
        cell("h200-a", 70, 0.9, 1.0),
        cell("h200-a", 250, 0.4, 1.0),
    ]
    compare.fix_thresholds(cells)
    assert [each[arms.FIXED_THRESHOLD] for each in cells] == [1.0, 1.0, 1.0]
    cells.append(cell("h200-a", 2, 0.7, 1.0))
    cells.append(cell("h200-a", 5, 1.0, 0.3))
    compare.fix_thresholds(cells)
    assert min(each[arms.FIXED_THRESHOLD] for each in cells) == 0.7


def test_the_summary_takes_the_worst_of_everything():
    cells = [{**cell("h200-a", 1, 1.0, 0.5), arms.BREAK_EVEN: 0.98}]
    cells[0][arms.FIXED_THRESHOLD] = 1.0
    course = dict.fromkeys(arms.STRATEGIES, 0.95)
    flips = dict.fromkeys(arms.STRATEGIES, 0.5)
    courses = [
        {**course, "noise": True, "flipsPerMinute": flips},
        {**course, arms.BREAK_EVEN: 0.91, "noise": False, "flipsPerMinute": flips},
    ]
    found = compare.summary(cells, courses)[arms.BREAK_EVEN]
    assert found["steadyWorst"] == 0.98
    assert found["tracesWorst"] == 0.91
    assert found["learningWorst"] == 0.9
    assert found["noiseFlipsPerPodMinute"] == 0.5


def test_the_clairvoyant_is_not_beaten_by_an_arm_held():
    row, _ = compare.play_course(compare.Course("h200-a", "acceptance square"))
    assert row[compare.CLAIRVOYANT] >= 1.0
    assert max(row[arms.ALWAYS_ON], row[arms.ALWAYS_OFF]) == 1.0
    assert "acceptance square" in show.tables(
        {
            "strategies": {},
            "cells": [],
            "moreSteps": [],
            "traces": [row],
            "httpCheck": [],
        }
    )


def test_a_result_becomes_a_page_and_pictures(tmp_path):
    cells = [
        {
            **cell(profile, clients, 1.0, 0.7),
            "modelled": clients == 10,
            "best": "AlwaysOn3",
            "switches": dict.fromkeys(arms.STRATEGIES, 2),
            "offToPlain": 0.98,
        }
        for profile in ("h200-a", "h200x2-nccl")
        for clients in (1, 10)
    ]
    compare.fix_thresholds(cells)
    course = {
        **dict.fromkeys((*arms.STRATEGIES, compare.CLAIRVOYANT), 0.95),
        "profile": "h200-a",
        "trace": "a wave",
        "what": "up and down",
        "seconds": 15.0,
        "modelled": False,
        "best": "AlwaysOn",
        "noise": True,
        "flipsPerMinute": dict.fromkeys(arms.STRATEGIES, 0.25),
        "series": {name: [5, 6, 7] for name in (arms.ALWAYS_ON, arms.ALWAYS_OFF, arms.BREAK_EVEN)},
    }
    result = {
        "benchmark": "regret",
        "seconds": 540.0,
        "at": "2026-11-30T00:00:00Z",
        "machine": {
            "cores": 2,
            "processor": "Some CPU",
            "memoryGiB": 8,
            "kernel": "6",
            "loadAverageAtStart": [0.1],
        },
        "versions": {"python": "3.11"},
        "settings": {
            "learningSeconds": 60.0,
            "windowSeconds": 300.0,
            "sampleSeconds": 0.5,
            "readBackSeconds": 2.0,
            "orderSeconds": 0.02,
            "steps": [0, 3],
            "scatter": 0.03,
            "switchSeconds": 0.0009,
        },
        "strategies": compare.summary(cells, [course]),
        "cells": cells,
        "moreSteps": [],
        "traces": [course],
        "httpCheck": [],
    }
    build = tmp_path / "build"
    (build / "bench").mkdir(parents=True)
    (build / "bench" / "regret.json").write_text(json.dumps(result))
    written = publish.publish(build, tmp_path / "docs")
    assert [each.name for each in written] == ["regret.md", "regret.png", "regret-traces.png"]
    text = written[0].read_text()
    for name in ("regret.png", "regret-traces.png", "a wave", "h200x2-nccl", "goal"):
        assert name in text
    for picture in written[1:]:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("accept", "steps"), [(1.0, 0), (3.5, 3)])
def test_the_policy_finds_the_better_arm_by_readings_alone(accept, steps):
    engine = virtual("h200-b", accept, lambda _: 0, 70)
    judge = Judge(
        api.Policy.model_validate({"strategy": "BreakEven"}),
        api.Draft.model_validate({**arms.DRAFT, "steps": [0, 3]}),
        (0, 3),
    )
    steering = Steering(judge, Plugin(engine, (0, 3)))
    steering.run(60.0)
    assert engine.active_steps == steps
    assert any(said.probe for said in judge.said)
    assert [said.at for said in judge.said] == sorted(said.at for said in judge.said)
