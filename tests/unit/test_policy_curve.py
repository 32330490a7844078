"""Break-even curves: the file format, interpolation, and what live rounds teach."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.policy import Acceptance, Cell, Curve, CurveError, Knowledge, Rounds
from specserve.policy.curve import across
from specserve.policy.knowledge import EXPIRY, FEWEST_ROUNDS

HOST_MEMORY = [(1, 2.83), (10, 2.26), (32, 1.86), (70, 2.23), (250, 3.04)]


def document(points=HOST_MEMORY, steps: int = 3, **fields) -> str:
    cells = [{"batch": batch, "steps": steps, "ratio": ratio} for batch, ratio in points]
    return json.dumps({"apiVersion": "specserve.dev/curve-v1", "cells": cells, **fields})


def test_a_curve_reads_what_it_writes():
    text = document(
        provenance={"model": "hf://org/model", "gpu": "NVIDIA H200", "tensorParallel": 2}
    )
    curve = Curve.from_json(text)
    assert Curve.from_json(curve.to_json()) == curve
    assert curve.provenance.tensor_parallel == 2
    assert json.loads(curve.to_json())["provenance"]["tensorParallel"] == 2


def test_a_curve_need_not_be_monotonic():
    curve = Curve.from_json(document())
    assert [round(curve.ratio(batch, 3), 2) for batch in (1, 32, 250)] == [2.83, 1.86, 3.04]
    assert curve.ratio(16, 3) == pytest.approx(2.10, abs=0.01)
    assert curve.ratio(1000, 3) == 3.04


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "document: Invalid JSON"),
        (document([]), "cells: List should have at least 1 item"),
        (document([(0, 1.5)]), "cells.0.batch"),
        (document([(1, -1.5)]), "cells.0.ratio"),
        (document(steps=0), "cells.0.steps"),
        (document(apiVersion="specserve.dev/curve-v9"), "apiVersion"),
        (document(extra=1), "extra"),
        (document([(1, 2.0), (1, 3.0)]), "batch 1 with 3 steps is there twice"),
    ],
)
def test_what_is_no_curve_says_why(text, said):
    with pytest.raises(CurveError, match=said):
        Curve.from_json(text)


def test_other_step_counts_follow_a_line():
    assert across({3: 1.6}, 0) == 1.0
    assert across({3: 1.6}, 1) == pytest.approx(1.2)
    assert across({3: 1.6}, 5) == pytest.approx(2.0)
    assert across({1: 1.4, 3: 1.8}, 2) == pytest.approx(1.6)
    assert across({1: 1.4, 3: 1.8}, 4) == pytest.approx(2.0)
    assert across({1: 1.4, 3: 1.8}, 3) == 1.8


@given(ratio=st.floats(0.1, 1.0), steps=st.integers(1, 64))
def test_a_ratio_stays_above_zero(ratio, steps):
    assert across({1: ratio}, steps) > 0


def cells(*rows: tuple[int, int, float], seen: float = 100.0, rounds: int = 100) -> Rounds:
    return Rounds(seen, tuple(Cell(bucket, steps, rounds, s, seen) for bucket, steps, s in rows))


def test_live_rounds_of_both_arms_make_a_ratio():
    known = Knowledge().learn(cells((32, 0, 0.005), (32, 3, 0.007)))
    assert known.ratio(32, 3) == pytest.approx(1.4)
    assert known.ratio(30, 3) == pytest.approx(1.4)  # of the same bucket


def test_one_arm_makes_none():
    known = Knowledge().learn(cells((32, 3, 0.007)))
    assert known.ratio(32, 3) is None
    assert known.time(32, 0) is None


def test_the_two_times_are_of_one_bucket():
    # Off timed at 32, on at 128: their quotient would say that drafts cost four times as much.
    known = Knowledge().learn(cells((32, 0, 0.005), (128, 3, 0.020)))
    assert known.ratio(32, 3) is None
    assert known.ratio(64, 3) is None
    assert known.ratio(128, 3) is None


def test_a_bucket_beside_will_do_and_one_further_off_will_not():
    known = Knowledge().learn(cells((32, 0, 0.005), (32, 3, 0.007)))
    assert known.ratio(48, 3) == pytest.approx(1.4)
    assert known.ratio(24, 3) == pytest.approx(1.4)
    assert known.ratio(64, 3) is None
    assert known.ratio(16, 3) is None


def test_between_two_near_buckets_a_time_is_interpolated():
    known = Knowledge().learn(cells((32, 0, 0.004), (64, 0, 0.016)))
    time = known.time(48, 0)
    assert time is not None
    assert 0.004 < time.seconds < 0.016
    assert Knowledge().learn(cells((8, 0, 0.004), (64, 0, 0.016))).time(24, 0) is None


def test_newer_rounds_replace_older_ones_and_never_the_other_way_round():
    known = Knowledge().learn(cells((32, 0, 0.005), seen=200))
    assert known.learn(cells((32, 0, 0.004), seen=100)).time(32, 0) == known.time(32, 0)
    later = known.learn(cells((32, 0, 0.006), seen=300)).time(32, 0)
    assert later is not None
    assert later.seconds == 0.006


def test_too_few_rounds_are_not_believed():
    assert not Knowledge().learn(cells((32, 0, 0.005), rounds=FEWEST_ROUNDS - 1)).times


def test_old_times_are_forgotten():
    known = Knowledge().learn(cells((32, 0, 0.005), seen=0))
    known = known.learn(cells((64, 0, 0.006), seen=EXPIRY + 1))
    assert known.time(32, 0) is None
    assert known.time(64, 0) is not None


def test_the_newest_acceptance_is_kept():
    old, new = Acceptance((0.5,), 100, 1.0), Acceptance((0.7,), 100, 2.0)
    known = Knowledge().hear(new).hear(old).hear(None)
    assert known.acceptance == new


def test_old_times_are_forgotten_of_step_counts_not_seen_since():
    known = Knowledge().learn(cells((32, 0, 0.005), seen=0))
    known = known.learn(cells((32, 3, 0.007), seen=EXPIRY + 1))
    assert known.time(32, 0) is None
    assert known.time(32, 3) is not None


def test_a_bucket_tells_when_its_own_rounds_were_seen():
    known = Knowledge().learn(cells((24, 3, 0.006), (48, 3, 0.009), seen=10))
    known = known.learn(cells((24, 3, 0.006), seen=100))
    between = known.time(32, 3)
    own = known.of_bucket(24, 3)
    assert between is not None
    assert own is not None
    assert (between.seen, own.seen) == (10, 100)
    assert known.of_bucket(32, 3) is None
