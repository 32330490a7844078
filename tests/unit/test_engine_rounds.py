from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_engine.rounds import (
    ARM_SECONDS,
    SETTLE_ROUNDS,
    WINDOW_ROUNDS,
    WINDOW_SECONDS,
    RoundStats,
    bucket_of,
)


def drafts(batch: int, tokens: int) -> list[int]:
    """Accepted drafts of each request, spread evenly, that make `tokens` of a round."""
    each, more = divmod(tokens - batch, batch)
    return [each + (index < more) for index in range(batch)]


def run(stats: RoundStats, rounds: int, batch=8, steps=3, seconds=0.02, tokens=20, now=0.0, **kw):
    for _ in range(rounds):
        now += seconds
        stats.observe(steps, seconds, drafts(batch, tokens), now, **kw)
    return now


def test_buckets_are_powers_of_two_and_their_middles():
    found = sorted({bucket_of(batch) for batch in range(1, 300)})
    assert found == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]


@given(st.integers(1, 100_000))
def test_a_bucket_is_the_next_size_up_and_its_own(batch):
    bucket = bucket_of(batch)
    assert batch <= bucket < max(2 * batch, 2)
    assert bucket_of(bucket) == bucket


def test_rounds_of_one_kind():
    stats = RoundStats()
    run(stats, 10 + SETTLE_ROUNDS, seconds=0.02)
    (cell,) = stats.figures(1.0)
    assert (cell.batch_bucket, cell.steps) == (8, 3)
    assert cell.rounds == 10 + SETTLE_ROUNDS
    assert cell.tokens == 20 * cell.rounds
    assert cell.accept_length == pytest.approx(2.5)
    assert cell.median_round_seconds == cell.p5 == cell.p95 == 0.02
    assert cell.last_seen == pytest.approx(0.02 * cell.rounds)


def test_a_stall_does_not_move_the_median():
    stats = RoundStats()
    now = run(stats, 100)
    stats.observe(3, 5.0, drafts(8, 20), now + 5)
    (cell,) = stats.figures(now + 5)
    assert cell.median_round_seconds == 0.02
    assert cell.p95 == 0.02


def test_percentiles():
    stats = RoundStats()
    now = run(stats, SETTLE_ROUNDS, seconds=9.0)
    for percent in range(1, 101):
        stats.observe(3, percent / 1000, [0] * 8, now)
    (cell,) = stats.figures(now)
    assert cell.p5 == pytest.approx(0.005, abs=0.0011)
    assert cell.median_round_seconds == pytest.approx(0.050, abs=0.0011)
    assert cell.p95 == pytest.approx(0.095, abs=0.0011)


def test_rounds_right_after_a_change_of_steps_are_not_timed():
    stats = RoundStats()
    now = run(stats, 50, steps=3)
    run(stats, SETTLE_ROUNDS, steps=0, tokens=8, seconds=1.0, now=now)
    off = stats.figures(now)[0]
    assert (off.steps, off.rounds, off.median_round_seconds) == (0, SETTLE_ROUNDS, None)
    assert off.accept_length == 1.0  # they count for all else
    run(stats, 1, steps=0, tokens=8, seconds=0.01, now=now)
    assert stats.figures(now)[0].median_round_seconds == 0.01


def test_a_round_after_another_batch_or_a_prefill_is_not_timed():
    stats = RoundStats()
    run(stats, 20, batch=8)
    stats.observe(3, 1.0, [0] * 7, 1.0)
    stats.observe(3, 1.0, [0] * 8, 1.0)
    stats.observe(3, 1.0, [0] * 8, 1.0, prefill_between=True)
    (cell,) = stats.figures(1.0)
    assert cell.rounds == 23
    assert cell.p95 == 0.02


def test_arms_are_kept_apart_and_ordered():
    stats = RoundStats()
    for batch, steps in ((64, 0), (8, 3), (8, 0), (64, 3)):
        run(stats, 5, batch=batch, steps=steps, tokens=batch)
    cells = stats.figures(1.0)
    assert [(cell.batch_bucket, cell.steps) for cell in cells] == [
        (8, 0),
        (8, 3),
        (64, 0),
        (64, 3),
    ]
    assert sum(cell.rounds for cell in cells) == stats.rounds_total == 20
    assert sum(cell.tokens for cell in cells) == stats.tokens_total == 5 * (64 + 8) * 2


def test_the_window_slides_by_rounds():
    stats = RoundStats()
    now = run(stats, 100, tokens=8)
    run(stats, WINDOW_ROUNDS, tokens=24, now=now)
    (cell,) = stats.figures(now)
    assert (cell.rounds, cell.accept_length) == (WINDOW_ROUNDS, 3.0)
    assert stats.rounds_total == 100 + WINDOW_ROUNDS  # totals only rise


def test_the_window_slides_by_time():
    stats = RoundStats()
    now = run(stats, 100, tokens=8)
    run(stats, 10, tokens=24, now=now + WINDOW_SECONDS + 1)
    (cell,) = stats.figures(now + WINDOW_SECONDS + 1)
    assert (cell.rounds, cell.accept_length) == (10, 3.0)


def test_an_idle_arm_keeps_its_figures_with_their_age_until_they_are_too_old():
    stats = RoundStats()
    now = run(stats, 100, steps=3)
    run(stats, 10, steps=0, now=now + ARM_SECONDS)
    on = next(cell for cell in stats.figures(now + ARM_SECONDS) if cell.steps == 3)
    assert on.accept_length == pytest.approx(2.5)
    assert on.last_seen == pytest.approx(now)
    assert [cell.steps for cell in stats.figures(now + ARM_SECONDS + 0.1)] == [0]


def test_nothing_seen_is_nothing_told():
    assert RoundStats().figures(0.0) == ()
    assert RoundStats().acceptance() == ()


def test_acceptance_is_counted_by_steps_and_position():
    stats = RoundStats()
    stats.observe(3, 0.02, [3, 0, 1], 1.0)
    stats.observe(0, 0.01, [0, 0, 0], 2.0)
    stats.observe(3, 0.02, [2, 0], 3.0)
    stats.observe(1, 0.02, [1, 1, 0, 0], 4.0)
    assert [counts.to_json() for counts in stats.acceptance()] == [
        {"steps": 1, "verifies": 4, "accepted": [2]},
        {"steps": 3, "verifies": 5, "accepted": [3, 2, 1]},
    ]


def test_acceptance_has_no_window():
    stats = RoundStats()
    now = run(stats, WINDOW_ROUNDS, batch=2, tokens=8)
    run(stats, 1, batch=2, tokens=2, now=now + ARM_SECONDS + 1)
    (counts,) = stats.acceptance()
    assert counts.verifies == 2 * WINDOW_ROUNDS + 2
    assert counts.accepted == (2 * WINDOW_ROUNDS,) * 3


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=20))
def test_acceptance_and_tokens_agree(rounds):
    stats = RoundStats()
    for accepted in rounds:
        stats.observe(3, 0.02, accepted, 1.0)
    (counts,) = stats.acceptance()
    assert counts.verifies + sum(counts.accepted) == stats.tokens_total
    assert list(counts.accepted) == sorted(counts.accepted, reverse=True)
    assert counts.accepted[0] <= counts.verifies
