"""The order of cells, and the estimate of the time that is left."""

from specserve.bench.plan import Arm, Estimate, arms_of, cells_of, requests_of


def test_arms_take_turns_there_and_back():
    cells = cells_of((1, 8), arms_of(flip=True, baseline=False, steps=3), 1)
    assert [cell.level for cell in cells] == [1] * 6 + [8] * 6
    order = ["on", "off", "auto", "auto", "off", "on"]
    assert [cell.arm.name for cell in cells] == order * 2
    assert [cell.visit for cell in cells[:6]] == [0, 0, 0, 1, 1, 1]


def test_a_linear_drift_adds_the_same_to_every_arm():
    cells = cells_of((4,), arms_of(flip=True, baseline=True, steps=1), 3)
    moments = {}
    for moment, cell in enumerate(cells):
        moments.setdefault(cell.arm.name, []).append(moment)
    assert len({sum(each) / len(each) for each in moments.values()}) == 1


def test_a_single_arm_is_visited_once_a_repeat():
    cells = cells_of((1,), arms_of(flip=False, baseline=False), 2)
    assert [cell.visit for cell in cells] == [0, 1]


def test_the_baseline_is_never_switched():
    arms = {arm.name: arm for arm in arms_of(flip=True, baseline=True, steps=3, draft_kv="warm")}
    assert arms["base"] == Arm("base", None, baseline=True)
    assert arms["on"].setting == {"mode": "on", "steps": 3, "draftKv": "warm"}
    assert arms["off"].setting == {"mode": "off", "draftKv": "warm"}


def test_requests_grow_with_the_level():
    assert [requests_of(level) for level in (1, 2, 30, 100, 250)] == [4, 6, 90, 200, 500]
    assert requests_of(10, 1) == 10


def test_the_estimate_learns_from_what_is_done():
    cells = cells_of((1, 4), arms_of(flip=True, baseline=False, steps=3), 1)
    estimate = Estimate(list(cells))
    assert estimate.seconds_left() is None
    for cell in cells[:6]:
        estimate.done(cell, 10.0)
    # Four times the level is taken for twice the time, until it is known better.
    assert estimate.seconds_left() == 6 * 20.0
    estimate.done(cells[6], 40.0)
    assert estimate.seconds_left() == 5 * 40.0
    for cell in cells[7:]:
        estimate.done(cell, 1.0)
    assert estimate.seconds_left() == 0
