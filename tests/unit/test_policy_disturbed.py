"""Other work on the machine lengthens rounds: what is learnt then is not believed for long."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from specserve import api
from specserve.policy import Context, Curve, Knowledge, breakeven
from specserve.policy.curve import CurveDocument, Point
from specserve.policy.knowledge import SURE
from specserve.policy.pace import Pace
from specserve.policy.probe import AGED, APART, DOUBTED, LEARN_WAIT
from specserve.policy.rounds import Cell, Rounds
from tests.unit.policy_world import World

DISTURBED = 300.0
CALM = 660.0
"""Seconds in which all is set right: a plain round time is looked at again after 600."""


def policy() -> api.Policy:
    # A flip is also judged by the throughput after it; that hold is not what is tested here.
    return api.Policy.model_validate({"strategy": "BreakEven", "flipGuard": {"freezeSeconds": 60}})


def even(ratio: float) -> Callable[[int, int], float]:
    """`r` for 3 steps, the same at all batches."""
    return lambda _, steps: 1 + (ratio - 1) * steps / 3


def during(*bursts: tuple[float, float, float]) -> Callable[[float], float]:
    """Rounds longer by a factor within some (begin, end, factor)."""
    return lambda now: next((f for begin, end, f in bursts if begin <= now < end), 1.0)


def looks(world: World, steps: int) -> list[float]:
    """When looks at a step count began."""
    return [
        now
        for (_, before), (now, verdict) in zip(world.verdicts, world.verdicts[1:], strict=False)
        if verdict.code == "Probing" and not before.probe and verdict.setting
        if verdict.setting.steps_for(1) == steps
    ]


@dataclass(frozen=True)
class History:
    """An engine, its traffic, and what disturbs its rounds for `DISTURBED` seconds."""

    ratio: float
    accept: float
    batch: int
    plain: float
    bursts: tuple[tuple[float, float, float], ...]


def history(seed: int) -> History:
    """Up to two fifths of the time, in stretches of a fraction of a second to some."""
    rng = random.Random(seed)
    ratio, batch = rng.uniform(1.2, 3.0), rng.choice([1, 2, 8, 32, 70])
    value = rng.choice([rng.uniform(0.6, 0.88), rng.uniform(1.12, 1.8)])
    share = rng.uniform(0.05, 0.4)
    bursts, now = [], 0.0
    while now < DISTURBED:
        length = rng.choice([0.3, 1, 3, 8]) * rng.uniform(0.5, 1.5)
        now += length * (1 - share) / share * rng.uniform(0.5, 1.5)
        bursts.append((now, min(now + length, DISTURBED), rng.uniform(1.3, 3.0)))
        now += length
    accept = min(3.9, max(1.0, value * ratio))
    return History(ratio, accept, batch, rng.choice([0.002, 0.005, 0.02]), tuple(bursts))


@pytest.mark.parametrize("seed", [4, 17, 27, 29, 37, 58, 205, 221])
def test_after_disturbances_the_better_arm_is_found(seed):
    """Histories after which a wrong break-even was believed for an hour; any are as good."""
    lived = history(seed)
    world = World(
        policy(),
        even(lived.ratio),
        batch=lived.batch,
        accept=lived.accept,
        plain=lambda _: lived.plain,
        slowed=during(*lived.bursts),
    )
    world.run(DISTURBED + CALM)
    assert world.run(60) >= 0.95


@pytest.mark.parametrize(
    ("accept", "within"),
    [(1.7, 2 * APART), (1.9, AGED)],
    ids=["speculation seems to win 1.3 of off", "1.45"],
)
def test_a_plain_round_seen_in_a_bad_moment_is_seen_again(accept, within):
    """Break-even is 2.1; rounds of the first look seem to make it 1.3."""
    bad = during((LEARN_WAIT, LEARN_WAIT + 4, 1.6))
    world = World(policy(), even(2.1), batch=2, accept=accept, slowed=bad)
    world.run(30)
    assert world.active() == 3
    assert dict(world.verdicts[-1][1].numbers)["breakEven@3"] == pytest.approx(1.31, abs=0.01)
    world.run(within)
    assert world.active() == 0
    assert len(looks(world, 0)) == 2


def test_what_bears_itself_out_is_left_alone():
    world = World(policy(), even(1.5), batch=8, accept=1.95)
    world.run(2 * APART)
    assert len(looks(world, 0)) == 2
    world.run(400)
    assert len(looks(world, 0)) == 2


def test_where_a_wrong_plain_round_decides_nothing_one_look_will_do():
    world = World(policy(), even(1.5), batch=8, accept=3.5)
    world.run(500)
    assert len(looks(world, 0)) == 1


@pytest.mark.parametrize("lasts", [1.2, 5.0], ids=["shorter than the look", "longer"])
def test_a_round_with_drafts_is_never_held_to_be_shorter_than_a_plain_one(lasts):
    bad = during((LEARN_WAIT, LEARN_WAIT + lasts, 3.0))
    world = World(policy(), even(2.1), batch=2, accept=1.9, slowed=bad)
    world.run(20)
    looked = [now for now, verdict in world.verdicts if verdict.code == "Probing"]
    assert 0.5 <= looked[-1] - looked[0] <= DOUBTED
    said = [dict(verdict.numbers).get("breakEven@3", 2.1) for _, verdict in world.verdicts]
    assert min(said) >= 1.0
    if lasts < DOUBTED / 2:
        assert world.active() == 0
    world.run(2 * APART)
    assert world.active() == 0


def test_drafts_that_seemed_never_to_pay_are_looked_at_again():
    """Rounds with drafts took thrice as long at the start: break-even 4.5 of at most 4."""
    world = World(policy(), even(1.5), batch=60, accept=2.5, slowed=during((0.0, 0.6, 3.0)))
    world.run(30)
    assert world.active() == 0
    assert breakeven.live(Context(knowledge=world.knowledge), 60, 3) == pytest.approx(4.5)
    world.run(2 * APART)
    assert world.active() == 3


def test_a_time_is_sure_once_it_was_seen_again():
    def seen(at: float, took: float) -> Rounds:
        return Rounds(at, (Cell(32, 0, 100, took, at),))

    knowledge = Knowledge().learn(seen(1.0, 0.010))

    def sure() -> bool:
        time = knowledge.of_bucket(32, 0)
        assert time is not None
        return time.sure

    assert not sure()
    knowledge = knowledge.learn(seen(2.0 + SURE, 0.011))
    assert sure()
    knowledge = knowledge.learn(seen(90.0, 0.016))
    assert not sure()
    knowledge = knowledge.learn(seen(90.0 + SURE, 0.015))
    assert sure()


@pytest.mark.parametrize(
    ("plain_seen", "timed", "live"),
    [(90.0, 2.0, 3.0), (90.0, 2.8, 3.0), (400.0, 2.0, 2.0), (400.0, 2.8, 3.0), (400.0, None, 3.0)],
    ids=["of one time", "agreeing", "kept up no more", "borne out", "no round undisturbed"],
)
def test_a_clock_that_was_not_kept_up_gives_way_to_round_times_that_differ(
    plain_seen, timed, live
):
    paces = (Pace(32, 3, 0.030, 20.0, 100.0, 32.0), Pace(32, 0, 0.010, 20.0, plain_seen, 32.0))
    knowledge = Knowledge()
    if timed is not None:
        cells = (Cell(32, 0, 100, 0.010, 1.0), Cell(32, 3, 100, 0.010 * timed, 1.0))
        knowledge = knowledge.learn(Rounds(1.0, cells))
    context = Context(knowledge=knowledge, paces=paces)
    assert breakeven.live(context, 32, 3) == pytest.approx(live)


@pytest.mark.parametrize(
    ("ratio", "beside", "curve", "odd"),
    [
        (1.5, None, None, False),
        (0.95, None, None, True),
        (4.1, None, None, True),
        (1.5, 1.8, 1.8, False),
        (1.3, 2.1, None, True),
        (2.1, 1.3, None, True),
        (1.3, None, 2.1, True),
        (2.1, None, 1.3, True),
    ],
)
def test_a_ratio_that_can_hardly_be_is_odd(ratio, beside, curve, odd):
    cells = [Cell(32, 0, 100, 0.010, 1.0), Cell(32, 3, 100, 0.010 * ratio, 1.0)]
    if beside is not None:
        cells += [Cell(48, 0, 100, 0.011, 1.0), Cell(48, 3, 100, 0.011 * beside, 1.0)]
    known = None
    if curve is not None:
        known = Curve(CurveDocument(cells=[Point(batch=32, steps=3, ratio=curve)]))
    knowledge = Knowledge().learn(Rounds(1.0, tuple(cells)))
    context = Context(curve=known, knowledge=knowledge)
    assert breakeven.odd(context, 32, 3) is odd
    assert not breakeven.odd(context, 200, 3)
