"""Profiles: what they hold, what is refused, and what is said to be modelled."""

from __future__ import annotations

import copy
import tomllib
from importlib.resources import files

import pytest

from specserve_sim.profile import (
    ProfileError,
    expected_tokens,
    load_profile,
    parse_profile,
    position_probability,
    profile_names,
)


def document(name="h200-b"):
    return tomllib.loads((files("specserve_sim") / f"profiles/{name}.toml").read_text())


def test_the_measured_machines_are_all_there():
    assert set(profile_names()) == {
        "h200-a",
        "h200-b",
        "h200x2-nvlink",
        "h200x2-nccl",
        "h200x2-hostmem",
    }


def test_break_even_is_the_median_over_the_columns_with_its_spread():
    even = load_profile("h200-b").break_even
    assert even.columns == 6
    # acceptance over ratio at C = 250: 2.27 2.42 2.56 2.78 3.00 2.94
    assert even.middle.values[-1] == pytest.approx((2.0 / 0.78 + 2.5 / 0.90) / 2)
    assert even.lowest.values[-1] == pytest.approx(1 / 0.44)
    assert even.highest.values[-1] == pytest.approx(3.0)


def test_break_even_is_not_monotonic_without_peer_memory():
    profile = load_profile("h200x2-hostmem")
    r = {batch: profile.r(batch, 3) for batch in (1, 32, 250)}
    assert r[1] > 2.5 > r[32] < r[250]


def test_steps_scale_the_excess_over_one():
    profile = load_profile("h200-a")
    assert profile.r(70, 1) - 1 == pytest.approx((profile.r(70, 3) - 1) / 3)
    assert profile.r(1, 0, "warm") == pytest.approx(1 / 0.9)


def test_between_and_beyond_measured_batches():
    profile = load_profile("h200-a")
    assert profile.t_off(70) < profile.t_off(128) < profile.t_off(250) < profile.t_off(400)
    assert profile.r(70, 3) < profile.r(128, 3) < profile.r(250, 3) == profile.r(400, 3)


def test_what_was_not_measured_says_so():
    assert "off.cold" in load_profile("h200-a").modelled
    assert "off.cold" not in load_profile("h200-b").modelled
    assert {"off.warm", "off.cold"} <= set(load_profile("h200x2-nvlink").modelled)


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_position_probability_inverts_expected_tokens(steps, share):
    accept_length = 1 + share * steps
    probability = position_probability(accept_length, steps)
    assert expected_tokens(probability, steps) == pytest.approx(accept_length)


@pytest.mark.parametrize("accept_length", [0.99, 4.01])
def test_impossible_acceptance_is_refused(accept_length):
    with pytest.raises(ValueError, match="acceptance length"):
        position_probability(accept_length)


def drop_off(doc):
    del doc["off"]["cold"]


def descending(doc):
    doc["plain"]["concurrency"][1] = 1


def too_few(doc):
    doc["plain"]["tokens_per_second"].pop()


def faster_in_a_larger_batch(doc):
    doc["plain"]["tokens_per_second"][0] = 10


def negative(doc):
    doc["speculating"][0]["ratio"][0] = -1


def no_column(doc):
    doc["speculating"] = []


def other_steps(doc):
    doc["speculating"][0]["steps"] = 5


def unmatched(doc):
    column = doc["speculating"][0]
    column["concurrency"], column["ratio"] = [1, 10], [1.0, 1.0]


def unknown_provenance(doc):
    doc["provenance"]["weather"] = "fair"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (drop_off, "cold"),
        (descending, "plain.concurrency"),
        (too_few, "plain"),
        (faster_in_a_larger_batch, "plain"),
        (negative, r"speculating\[0\].ratio"),
        (no_column, "speculating"),
        (other_steps, r"speculating\[0\].steps"),
        (unmatched, r"speculating\[0\].concurrency"),
        (unknown_provenance, "weather"),
    ],
)
def test_a_spoilt_profile_is_refused_with_the_place(spoil, named):
    doc = copy.deepcopy(document())
    spoil(doc)
    with pytest.raises(ProfileError, match=named):
        parse_profile(doc)


def test_an_unknown_profile_is_refused_with_those_there_are():
    with pytest.raises(ProfileError, match="h200x2-hostmem"):
        load_profile("b200")
