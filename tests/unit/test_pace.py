from __future__ import annotations

import pytest

from specserve.pace import BURST_SECONDS, LATE_SECONDS, LEAST_SHARE, RECOVERY_SECONDS, Pace


def started(pace, *, begin, seconds, late=0.0, turn=0.01):
    """How many readings start when more are due than may start, in turns of equal length."""
    count = 0
    for number in range(1, round(seconds / turn) + 1):
        pace.turn(begin + number * turn, late)
        while pace.take():
            count += 1
    return count


def test_the_rate_is_kept_and_no_burst_is_longer_than_allowed():
    pace = Pace(800, 0.0)
    assert started(pace, begin=0.0, seconds=0.01) <= 800 * BURST_SECONDS + 8
    assert started(pace, begin=0.01, seconds=10) == pytest.approx(8000, abs=8)


def test_time_without_anything_due_saves_up_no_more_than_a_burst():
    pace = Pace(800, 0.0)
    pace.turn(3600.0, 0.0)
    count = 0
    while pace.take():
        count += 1
    assert count == 800 * BURST_SECONDS


def test_a_late_loop_starts_less_but_never_nothing():
    pace = Pace(800, 0.0)
    started(pace, begin=0.0, seconds=1, late=LATE_SECONDS * 2)
    assert pace.share == LEAST_SHARE
    assert started(pace, begin=1.0, seconds=10, late=LATE_SECONDS * 2) == pytest.approx(
        800 * LEAST_SHARE * 10, rel=0.05
    )


def test_the_full_rate_comes_back():
    pace = Pace(800, 0.0)
    pace.turn(0.1, LATE_SECONDS * 2)
    assert pace.share == 0.5
    pace.turn(0.1 + RECOVERY_SECONDS / 2, 0.0)
    assert pace.share == 1.0


def test_the_pause_ends_when_the_next_one_may_start():
    pace = Pace(2, 0.0)
    pace.turn(0.0, 0.0)
    assert pace.take()
    assert not pace.take()
    assert pace.pause == pytest.approx(0.5)
    pace.turn(pace.pause, 0.0)
    assert pace.take()


def test_calls_that_start_in_any_case_count():
    pace = Pace(100, 0.0)
    for _ in range(50):
        pace.spend()
    assert not pace.take()
    assert started(pace, begin=0.0, seconds=1) == pytest.approx(100 + 5 - 50, abs=2)
