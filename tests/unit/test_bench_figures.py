"""What a cell's outcomes amount to: rates, percentiles, acceptance, crossings."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.bench.dialects import Outcome
from specserve.bench.figures import Counters, Figures, Spread, Visit, crossings, verdict
from specserve.bench.report import document, latency_rows, ratios_of, throughput_rows
from specserve.bench.screen import left_text, print_table


def outcome(tokens=101, first=1.0, ended=2.0, **more):
    return Outcome(0.0, first, ended, tokens, **more)


def test_only_whole_answers_count_as_throughput_and_latency():
    visit = Visit(2.0, [outcome(), outcome(ended=9.0, problem="cut off")])
    figures = Figures.of([visit])
    assert figures.rate == pytest.approx(50.5)
    assert (figures.requests, figures.lost) == (2, 1)
    assert figures.problems == {"cut off": 1}
    assert figures.whole == Spread(2.0, 2.0, 2.0)
    assert figures.first == Spread(1.0, 1.0, 1.0)
    assert figures.between.p50 == pytest.approx(0.01)


def test_without_streams_nothing_is_said_of_first_tokens():
    figures = Figures.of([Visit(1.0, [outcome(first=None)])])
    assert figures.first is None
    assert figures.between is None
    assert figures.to_json()["timeToFirstTokenSeconds"] is None


def test_visits_are_weighed_by_their_time():
    slow, fast = Visit(3.0, [outcome(tokens=30)]), Visit(1.0, [outcome(tokens=90)])
    figures = Figures.of([slow, fast])
    assert figures.rates == (10.0, 90.0)
    assert figures.rate == 30.0


@pytest.mark.parametrize(
    ("outcomes", "counters", "expected"),
    [
        ([outcome(verifies=40, accepted=60)], None, 2.5),
        ([outcome(verifies=40)], None, 2.5),
        ([outcome()], Counters(tokens=101, verifies=50), 2.0),
        ([outcome()], Counters(tokens=101, verifies=0), None),
        ([outcome()], None, None),
        ([outcome(verifies=40, accepted=60)], Counters(tokens=101, verifies=100), 2.5),
    ],
)
def test_acceptance_comes_from_answers_or_else_from_the_engines_counts(
    outcomes, counters, expected
):
    assert Figures.of([Visit(1.0, outcomes, counters)]).accept_length == expected


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_values_that_occurred_in_order(values):
    spread = Spread.of(values)
    assert {spread.p50, spread.p90, spread.p99} <= set(values)
    assert spread.p50 <= spread.p90 <= spread.p99 <= max(values)


def test_a_crossing_lies_between_its_levels_in_the_logarithm():
    (crossing,) = crossings({10: 2.0, 1000: 0.5})
    assert crossing.at == pytest.approx(100)
    assert not crossing.to_better


def test_a_curve_may_cross_more_than_once():
    ratios = {1: 0.88, 32: 1.35, 250: 0.82}
    assert [crossing.to_better for crossing in crossings(ratios)] == [True, False]
    said = verdict(ratios, "on", "off")
    assert said.startswith("on beats off from about ")
    assert said.count("about") == 2


@given(st.dictionaries(st.integers(1, 1000), st.floats(0.1, 10), min_size=1))
def test_crossings_alternate_and_lie_within_their_levels(ratios):
    found = crossings(ratios)
    for crossing in found:
        low, high = crossing.between
        assert low * 0.999 <= crossing.at <= high * 1.001
    directions = [crossing.to_better for crossing in found]
    assert all(a != b for a, b in itertools.pairwise(directions))
    assert verdict(ratios, "on", "off")


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({1: 1.5, 8: 1.2}, "on beats off at every level from 1 to 8 in flight"),
        ({1: 0.5, 8: 0.9}, "off beats on at every level from 1 to 8 in flight"),
        ({8: 0.9}, "off beats on at 8 in flight"),
        ({1: 1.01, 8: 0.99}, "on and off are equal within 2% at every level from 1 to 8"),
    ],
)
def test_a_verdict_without_a_crossing(ratios, said):
    assert verdict(ratios, "on", "off").startswith(said)


def figures(rate):
    return Figures.of([Visit(1.0, [outcome(tokens=rate)])])


def test_the_report_names_ratios_and_crossovers():
    table = {
        1: {"on": figures(200), "off": figures(100), "auto": figures(190), "base": figures(110)},
        70: {"on": figures(50), "off": figures(100), "auto": figures(90), "base": figures(110)},
    }
    ratios = ratios_of(table)
    assert ratios["on/off"] == {1: 2.0, 70: 0.5}
    assert ratios["auto/best"] == {1: 0.95, 70: 0.9}
    assert ratios["off/base"][1] == pytest.approx(100 / 110)
    report = document(
        table, at="2031-01-01T00:00:00Z", settings={}, servers={}, complete=True, version="0"
    )
    (crossover,) = report["crossovers"]["on/off"]
    assert crossover["between"] == [1, 70]
    assert crossover["above"] == "loses"
    header, rows = throughput_rows(table)
    assert all(len(row) == len(header) for row in rows)
    header, rows = latency_rows(table)
    assert all(len(row) == len(header) for row in rows)
    assert len(rows) == 8


def test_an_arm_that_brought_nothing_has_no_ratio():
    nothing = Figures.of([Visit(1.0, [outcome(problem="HTTP 500")])])
    table = {1: {"on": nothing, "off": figures(100)}}
    assert ratios_of(table) == {}
    report = document(table, at="", settings={}, servers={}, complete=False, version="0")
    assert report["summary"] == ["on: 1 lost: HTTP 500"]


def test_of_many_reasons_the_commonest_are_said_and_the_others_counted():
    told = [outcome(problem=f"{n} tokens are too many") for n in range(100)]
    table = {1: {"on": Figures.of([Visit(1.0, [*told, *[outcome(problem="cut off")] * 9])])}}
    report = document(table, at="", settings={}, servers={}, complete=True, version="0")
    assert report["summary"][0] == "on: 9 lost: cut off"
    assert report["summary"][-1] == "on: 96 more lost, for 96 other reasons"
    assert len(report["levels"][0]["arms"]["on"]["problems"]) == 101


def test_a_narrow_terminal_loses_no_digit(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    table = {10: {"server": figures(123456)}}
    print_table(*latency_rows(table))
    print_table(*throughput_rows(table))
    out = capsys.readouterr().out
    assert "…" not in out
    assert "123,456.0" in out


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "not known yet"), (0.4, "about 0:00 left"), (61, "about 1:01 left")],
)
def test_the_time_left_is_said(seconds, said):
    assert said in left_text(seconds)
