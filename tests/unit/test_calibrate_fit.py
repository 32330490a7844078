"""From round times to a curve: ratios, intervals, words; no course over the batch is assumed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.calibrate.fit import (
    Reading,
    break_even_words,
    crossover_words,
    curve_of,
    disagreements,
    paying,
    ratios,
    sparse,
    unsettled,
)
from specserve.calibrate.sweep import Room, Whole, cells_of, mean_batch
from specserve.policy.curve import Curve, Provenance

# Two GPUs that share no memory: drafting loses alone, wins at 32 and loses again.
NOT_MONOTONIC = {1: 2.83, 10: 2.26, 32: 1.86, 70: 2.23, 250: 3.04}


def readings(table, steps=3, repeats=3, off=0.005, noise=0.0):
    for batch, ratio in table.items():
        for repeat in range(repeats):
            yield Reading(batch, 0, repeat, off * (1 + repeat), 500)
            seconds = off * (1 + repeat) * ratio * (1 + noise * (repeat - 1))
            yield Reading(batch, steps, repeat, seconds, 500)


def test_a_drift_that_slows_both_arms_leaves_the_ratio_alone():
    for ratio in ratios(readings(NOT_MONOTONIC)):
        assert ratio.mean == pytest.approx(NOT_MONOTONIC[ratio.batch])
        assert ratio.spread == pytest.approx(0, abs=1e-9)
        assert ratio.rounds == 1500


def test_the_interval_is_students():
    (ratio,) = ratios(readings({8: 2.0}, noise=0.01))
    logs = [math.log(2.0 * factor) for factor in (0.99, 1.0, 1.01)]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / 2)
    assert ratio.spread == pytest.approx(ratio.mean * 4.303 * deviation / math.sqrt(3), rel=1e-3)


def test_one_repeat_has_no_interval():
    (ratio,) = ratios(readings({8: 2.0}, repeats=1))
    assert ratio.spread is None
    assert curve_of([ratio], Provenance()).document.cells[0].spread is None


def test_a_visit_without_its_plain_one_is_left_out():
    assert ratios([Reading(8, 3, 0, 0.01, 500), Reading(8, 0, 1, 0.005, 500)]) == []
    assert ratios([Reading(8, 0, 0, 0.005, 500)]) == []


def test_a_cell_is_named_for_the_visit_that_has_fewest_rounds():
    visits = [Reading(8, 0, 0, 0.005, 40), Reading(8, 3, 0, 0.01, 400)]
    visits += [Reading(9, 0, 0, 0.005, 100), Reading(9, 3, 0, 0.01, 400)]
    [said] = sparse(ratios(visits), 100)
    assert said.startswith("batch 8, 3 steps: 40 timed in a visit, below 100")


WAVES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), max_size=6)


@given(WAVES, st.integers(0, 9))
def test_rounds_of_the_whole_batch_are_counted(waves, late):
    """Requests of a wave begin with the same round, or the longest as late as any does."""
    counted, passed, whole, timed = Whole(), 0, 0, 0
    for wave in waves:
        *others, longest = sorted(wave)
        spans = [range(count) for count in others]
        spans.append(range(late if others else 0, longest + (late if others else 0)))
        running = {number for span in spans for number in span}
        together = running.intersection(*map(set, spans))
        passed += len(running)
        whole += len(together)
        timed += max(0, len(together) - 1)
        assert counted.add(wave, passed) == len(together)
    assert (counted.rounds, counted.timed) == (whole, timed - 3)


def test_of_rounds_in_the_window_the_share_of_the_visit_is_timed():
    counted = Whole()
    assert counted.add([50, 50], 50) == 50
    assert (counted.rounds, counted.timed) == (50, 46)
    assert counted.add([50, 20], 100) == 20
    assert (counted.rounds, counted.timed) == (70, 65)
    assert counted.timed_of(100) == 65


@given(st.dictionaries(st.integers(1, 512), st.floats(0.5, 5), min_size=1, max_size=20))
def test_a_curve_says_what_was_measured_whatever_its_course(table):
    measured = ratios(readings(table))
    curve = Curve.from_json(curve_of(measured, Provenance(source="test")).to_json())
    for batch, ratio in table.items():
        assert curve.ratio(batch, 3) == pytest.approx(ratio, abs=1e-4)


@given(
    st.dictionaries(st.integers(1, 512), st.floats(1.01, 5), min_size=1, max_size=20),
    st.floats(1, 4),
)
def test_stretches_that_pay_are_those_under_the_acceptance(row, acceptance):
    stretches = paying(row, acceptance)
    ends = [end for stretch in stretches for end in stretch]
    assert ends == sorted(ends)
    for batch, ratio in row.items():
        inside = any(
            first * (1 - 1e-12) <= batch <= last * (1 + 1e-12) for first, last in stretches
        )
        if abs(ratio - acceptance) > 1e-3:
            assert inside == (acceptance > ratio)


def test_what_pays_is_said_in_words():
    measured = ratios(readings(NOT_MONOTONIC))
    assert "at 70 in flight it pays above 2.23 with 3 steps" in break_even_words(measured)
    said = crossover_words(measured)
    (at_half,) = [line for line in said if "acceptance 2.5" in line]
    assert "from about 4 to about 107 in flight" in at_half
    assert "3 steps at acceptance 1.5: it pays nowhere" in said
    (high,) = [line for line in said if "acceptance 3.5" in line]
    assert high.endswith("at every size from 1 to 250 in flight")


def test_one_step_is_not_asked_for_acceptances_that_it_cannot_have():
    said = crossover_words(ratios(readings({1: 1.1, 8: 1.6}, steps=1)))
    assert [line.split(":")[0] for line in said] == [
        "1 step at acceptance 1.5",
        "1 step at acceptance 2",
    ]
    assert said[0].endswith("up to about 5 in flight")


def test_cells_that_do_not_repeat_are_named():
    quiet = ratios(readings({8: 2.0}, noise=0.05))
    assert unsettled(quiet) == []
    loud = ratios(readings({8: 2.0}, noise=0.1))
    assert unsettled(loud) == ["batch 8, 3 steps: repeats from 1.80 to 2.20"]


def test_runs_that_differ_are_named_by_cell():
    then = curve_of(ratios(readings({1: 1.3, 8: 1.5, 64: 2.0})), Provenance())
    now = curve_of(ratios(readings({1: 1.4, 8: 1.9, 128: 2.4})), Provenance())
    assert disagreements(now, then) == ["batch 8, 3 steps: 1.90 now, 1.50 then"]
    assert disagreements(then, then) == []


def test_one_step_is_one_step():
    loud = ratios(readings({8: 2.0}, steps=1, noise=0.1))
    assert unsettled(loud)[0].startswith("batch 8, 1 step: repeats")


def test_steps_are_visited_there_and_back():
    cells = cells_of((1, 8), (1, 3), 3)
    assert [cell.level for cell in cells] == [1] * 9 + [8] * 9
    names = [cell.arm.name[0] for cell in cells[:9]]
    assert "".join(names) == "013310013"
    assert cells[0].arm.setting == {"mode": "off", "draftKv": "cold"}
    assert cells[1].arm.setting == {"mode": "on", "steps": 1, "draftKv": "cold"}


def test_what_an_engine_has_no_room_for_is_said():
    room = Room.of([{"max_running_requests": 48, "max_total_num_tokens": 10_000}] * 2)
    assert room.groups == 2
    assert "at most 48 requests at once" in room.objection(64, 384)
    assert "a cache of 10000" in room.objection(32, 384)
    assert room.objection(16, 384) == ""
    assert room.longest(32, 128) == 10_000 // 32 - 128
    assert Room.of([]).objection(4096, 384) == ""
    assert Room.of([]).longest(1, 128) == 4096
    short = Room.of([], context=300)
    assert "a request may have 300 (--context-length)" in short.objection(1, 384)
    assert short.objection(1, 300) == ""
    assert short.longest(1, 128) == 172


def test_the_mean_batch_is_told_by_the_engines_own_figures():
    stat = {"rounds": 10, "tokens": 10 * 30 * 2.5, "acceptLength": 2.5}
    assert mean_batch(stat) == pytest.approx(30)
