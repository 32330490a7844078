"""Decode rounds out of read-backs: groups put together, the engine's clock, what is not said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.policy.rounds import Accepted, Cell
from specserve.signals import WINDOW, Unreadable, checked_read_back, rounds, since
from specserve_engine.ranks import GroupState, groups_json
from specserve_engine.rounds import WINDOW_SECONDS, RoundStats

AT = 1000.0


def group(at: float = 50.0, stats=(), acceptance=(), tokens: int | None = 10) -> dict:
    return {"at": at, "stats": list(stats), "acceptance": list(acceptance), "tokensTotal": tokens}


def stat(bucket: int = 8, steps: int = 3, seconds: float | None = 0.02, count=100, seen=49.0):
    return {
        "batchBucket": bucket,
        "steps": steps,
        "rounds": count,
        "medianRoundSeconds": seconds,
        "lastSeen": seen,
    }


def row(steps: int, verifies: int, *accepted: int) -> dict:
    return {"steps": steps, "verifies": verifies, "accepted": list(accepted)}


def read(*groups: dict):
    return rounds({"groups": list(groups)}, AT)


def test_what_an_engine_reports():
    stats = RoundStats()
    now = 7.0
    for _ in range(20):
        now += 0.02
        stats.observe(3, 0.02, [3, 0, 1, 2], now)
    state = GroupState((), stats.figures(now), stats.tokens_total, 20, now + 2, stats.acceptance())
    body = {"podUID": "u", "bootID": "b", "mode": "on", "controllable": True, "epoch": 1}
    found = rounds(checked_read_back({**body, "groups": groups_json([state])}), AT)
    assert found.at == AT
    assert found.cells == (Cell(4, 3, 20, 0.02, pytest.approx(AT - 2), 4.0),)
    assert found.acceptance == (Accepted(3, 80, (60, 40, 20)),)
    assert (found.tokens_total, found.rounds_total) == (20 * 10, 20)


def test_of_a_round_time_the_group_with_most_rounds_speaks():
    found = read(
        group(stats=[stat(count=40, seconds=0.05), stat(steps=0, seconds=0.01)]),
        group(at=900.0, stats=[stat(count=60, seconds=0.03, seen=890.0)]),
    )
    assert found.cells == (
        Cell(8, 0, 100, 0.01, AT - 1),
        Cell(8, 3, 60, 0.03, AT - 10),
    )


def test_accepted_drafts_of_groups_add_up():
    found = read(
        group(acceptance=[row(1, 10, 5), row(3, 20, 9, 4, 1)]),
        group(acceptance=[row(3, 30, 30, 20, 10)]),
    )
    assert found.acceptance == (Accepted(1, 10, (5,)), Accepted(3, 50, (39, 24, 11)))
    assert found.tokens_total == 20


def test_what_is_not_said_is_not_zero():
    assert read(group(tokens=None), group()).tokens_total is None
    assert read(group(stats=[stat(seconds=None)])).cells == ()
    assert read(group(stats=[{**stat(), "steps": None}])).cells == ()
    assert read({**group(stats=[stat()]), "at": None}).cells == ()
    # An engine of an older plugin has no counts by position; one that is silent has no groups.
    assert read({"at": 50.0, "stats": [stat()], "tokensTotal": 1}).acceptance == ()
    assert rounds({}, AT).tokens_total is None


@pytest.mark.parametrize(
    "wrong", [row(3, 10, 5, 4), row(2, 10, 4, 5), row(1, 4, 5), row(0, 4), {"verifies": 4}]
)
def test_counts_that_contradict_themselves_are_left_out(wrong: dict):
    assert read(group(acceptance=[wrong, row(1, 10, 5)])).acceptance == (Accepted(1, 10, (5,)),)


@pytest.mark.parametrize("field", [*stat(), "tokens", "acceptLength"])
def test_a_figure_of_another_type_is_named_and_ends_nothing(field: str):
    body = {"podUID": "u", "bootID": "b", "mode": "on", "controllable": True, "epoch": 1}
    wrong = group(stats=[{**stat(), field: "many"}])
    with pytest.raises(Unreadable, match=f"the read-back's {field} is no count"):
        checked_read_back({**body, "groups": [wrong]})


def test_a_round_cannot_lie_ahead_of_its_report():
    (cell,) = read(group(at=50.0, stats=[stat(seen=51.0)])).cells
    assert cell.seen == AT


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "batchBucket": st.integers(0, 99),
                "steps": st.integers(0, 9),
                "rounds": st.integers(0, 512),
                "medianRoundSeconds": st.none() | st.floats(0, 9),
                "lastSeen": st.none() | st.floats(0, 1e9),
            },
        ),
        max_size=4,
    ),
    st.none() | st.floats(0, 1e9),
)
def test_any_checked_rows_can_be_read(stats: list[dict], at: float | None):
    body = {"podUID": "u", "bootID": "b", "mode": "on", "controllable": True, "epoch": 1}
    found = rounds(checked_read_back({**body, "groups": [{"stats": stats, "at": at}]}), AT)
    assert all(cell.seen <= AT and cell.seconds > 0 for cell in found.cells)


def test_a_cell_is_left_out_until_none_of_its_rounds_can_be_of_before():
    assert WINDOW == WINDOW_SECONDS
    stats, now = RoundStats(), 7.0
    for steps in (0, 3):
        for _ in range(20):
            now += 0.02
            stats.observe(steps, 0.02, [0] * 4, now)
    began = now
    # Plain rounds go on, slower; their window holds both kinds for a while.
    for lasted, told in ((WINDOW - 1, []), (WINDOW + 1, [Cell])):
        while now < began + lasted:
            now += 0.2
            stats.observe(0, 0.2, [0] * 4, now)
        state = GroupState((), stats.figures(now), 1, 1, now, stats.acceptance())
        body = {"groups": groups_json([state])}
        at = AT + now - began
        kept = rounds(since(body, at, AT), at)
        assert [type(cell) for cell in kept.cells] == told
        assert len(rounds(body, at).cells) == 2
        assert kept.acceptance == rounds(body, at).acceptance != ()
    assert [(cell.steps, cell.seconds) for cell in kept.cells] == [(0, 0.2)]
    assert since({"groups": [group(stats=[{"steps": 0}])]}, AT, 0.0)["groups"][0]["stats"] == []
