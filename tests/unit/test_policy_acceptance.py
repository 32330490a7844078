"""Acceptance by draft position, and how counts become it."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.policy.acceptance import FORGOTTEN, Acceptance, Counts
from specserve.policy.rounds import BUCKETS, Accepted, Rounds, bucket_of
from specserve_engine.rounds import bucket_of as engine_bucket_of

#: Counts of an engine that has made no round yet.
BORN = Counts(base=())


def read(at: float, *rows: tuple[int, int, tuple[int, ...]], total: int | None = None) -> Rounds:
    return Rounds(at, acceptance=tuple(Accepted(*row) for row in rows), rounds_total=total)


def test_buckets_are_the_engines():
    assert {batch: bucket_of(batch) for batch in range(1, 2000)} == {
        batch: engine_bucket_of(batch) for batch in range(1, 2000)
    }
    assert BUCKETS[:8] == (1, 2, 3, 4, 6, 8, 12, 16)
    assert BUCKETS[-1] == 65_536


def test_length_at_fewer_steps_is_counted_and_at_more_goes_on_with_the_last_chance():
    seen = Acceptance((0.8, 0.6, 0.3), 1000, 0.0)
    assert seen.length(1) == pytest.approx(1.8)
    assert seen.length(3) == pytest.approx(2.7)
    assert seen.length(5) == pytest.approx(2.7 + 0.15 + 0.075)
    assert Acceptance((0.5,), 1000, 0.0).length(3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert Acceptance((0.0,), 1000, 0.0).length(3) == 1.0


@given(chance=st.floats(0, 0.99), steps=st.integers(1, 8), seen=st.integers(1, 8))
def test_with_one_chance_for_all_positions_it_is_the_geometric_sum(chance, steps, seen):
    survival = tuple(chance**position for position in range(1, seen + 1))
    length = Acceptance(survival, 1000, 0.0).length(steps)
    assert length == pytest.approx((1 - chance ** (steps + 1)) / (1 - chance), rel=1e-6)


@pytest.mark.parametrize("verifies", [60, 400, 4000])
def test_the_error_is_that_of_the_mean(verifies):
    rng = Random(7)
    chances = (0.7, 0.45, 0.3)
    lengths = []
    for _ in range(400):
        drawn = [rng.random() for _ in range(verifies)]
        lengths.append(1 + sum(d < c for d in drawn for c in chances) / verifies)
    mean = sum(lengths) / len(lengths)
    spread = math.sqrt(sum((each - mean) ** 2 for each in lengths) / len(lengths)) / mean
    assert Acceptance(chances, verifies, 0.0).error(3) == pytest.approx(spread, rel=0.15)


def test_a_few_equal_verifies_are_no_certainty():
    assert Acceptance((1.0, 1.0, 1.0), 5, 0.0).error(3) > 0.03


def test_an_interval_is_the_difference_of_two_readings():
    counts, verifies = BORN.learn(read(1, (3, 100, (50, 20, 10))))
    assert verifies == 100
    counts, verifies = counts.learn(read(2, (3, 300, (250, 120, 60))))
    assert verifies == 200
    acceptance = counts.acceptance
    assert acceptance is not None
    assert acceptance.at == 2
    # What the first interval saw was other traffic: 0.5 against 1.0 at the first position.
    assert acceptance.survival == pytest.approx((1.0, 0.5, 0.25))


def test_like_intervals_add_up_and_fade():
    counts, _ = BORN.learn(read(0, (3, 1000, (700, 450, 300))))
    counts, _ = counts.learn(read(2, (3, 2000, (1410, 890, 605))))
    acceptance = counts.acceptance
    assert acceptance is not None
    assert 1800 < acceptance.verifies < 2000
    assert acceptance.survival[0] == pytest.approx(0.705, abs=0.001)


def test_step_counts_share_the_positions_they_have_in_common():
    counts, _ = BORN.learn(read(0, (1, 100, (60,)), (3, 100, (80, 40, 20))))
    acceptance = counts.acceptance
    assert acceptance is not None
    assert acceptance.survival == pytest.approx((0.7, 0.4, 0.2))


@pytest.mark.parametrize("case", ["O-C9.1 a counter that went down", "nothing decoded"])
def test_no_interval_without_growth(case):
    counts, _ = BORN.learn(read(0, (3, 40000, (30000, 20000, 10000))))
    after = (3, 60, (20, 10, 5)) if "down" in case else (3, 40000, (30000, 20000, 10000))
    later, verifies = counts.learn(read(2, after))
    assert verifies == 0
    assert later.acceptance == counts.acceptance
    if "down" in case:
        # The next interval counts from the new base: 2000 of 4000, not tens of thousands.
        later, verifies = later.learn(read(4, (3, 4060, (2020, 1010, 505))))
        assert verifies == 4000


@given(batch=st.integers(1, 256), won=st.sampled_from((1, 2)))
def test_one_round_however_large_does_not_contradict_many(batch, won):
    """As in a server whose requests win alike in each round: 2, 3, 2, 3 ... tokens."""
    drafts = 1_000 * batch, (1_000 * batch, 500 * batch, 0)
    counts, _ = BORN.learn(read(0.0, (3, *drafts), total=1_000))
    later = drafts[0] + batch, (drafts[1][0] + batch, drafts[1][1] + (won - 1) * batch, 0)
    counts, _ = counts.learn(read(0.5, (3, *later), total=1_001))
    assert counts.acceptance.counted == pytest.approx(2.5, abs=0.01)


@pytest.mark.parametrize(("verifies", "rounds"), [(40, 40), (250, 2), (250, None)])
def test_several_rounds_of_another_traffic_are_believed_at_once(verifies, rounds):
    drafts = 10_000, (9_000, 8_000, 7_000)
    counts, _ = BORN.learn(read(0.0, (3, *drafts), total=rounds and 100))
    later = read(0.5, (3, drafts[0] + verifies, drafts[1]), total=rounds and 100 + rounds)
    counts, _ = counts.learn(later)
    assert counts.acceptance.counted == 1.0


def test_what_is_long_ago_says_nothing():
    counts, _ = BORN.learn(read(0, (3, 5000, (3500, 2250, 1500))))
    counts, _ = counts.learn(read(FORGOTTEN, (3, 5010, (3502, 2251, 1500))))
    acceptance = counts.acceptance
    assert acceptance is not None
    assert acceptance.verifies == 10


def test_o_c9_the_first_reading_is_only_a_base():
    counts, verifies = Counts().learn(read(0, (3, 40000, (30000, 20000, 10000))))
    assert (verifies, counts.acceptance) == (0, None)


def test_a_grace_moves_the_base_and_counts_nothing():
    counts, verifies = BORN.learn(read(0, (3, 500, (0, 0, 0))), judged=False)
    assert verifies == 0
    assert counts.acceptance is None
    counts, verifies = counts.learn(read(2, (3, 600, (70, 45, 30))))
    assert verifies == 100
    assert counts.acceptance is not None
    assert counts.acceptance.length(3) == pytest.approx(2.45)


def test_without_counts_acceptance_is_unknown_not_bad():
    counts, verifies = BORN.learn(read(0))
    assert (verifies, counts.acceptance) == (0, None)


def test_chances_never_rise_with_the_position():
    # Rows of different traffic can say so; a draft still needs all those before it.
    counts, _ = BORN.learn(read(0, (1, 1000, (10,)), (3, 10, (9, 9, 9))))
    acceptance = counts.acceptance
    assert acceptance is not None
    assert list(acceptance.survival) == sorted(acceptance.survival, reverse=True)
