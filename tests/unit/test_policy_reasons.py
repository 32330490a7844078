"""What verdicts say, read as a stranger reads it; the table of codes in docs/policy.md is true."""

import re
from functools import cache
from pathlib import Path

import pytest

from specserve import api
from specserve.policy import Context, Memory, Sample, breakeven, crashed, decide
from specserve.policy.acceptance import TELLING, Acceptance
from tests.unit.policy_world import World
from tests.unit.test_policy_breakeven import ONE_GPU, between, curve, rule

DOCS = Path(__file__).parents[2] / "docs" / "policy.md"
HEAD = "| code | says, for example |"
UNKNOWN_AT_20 = "break-even at 20 in flight not known yet"
UNKNOWN_AT_70 = "break-even at 70 in flight not known yet"
BY_BOUNDS = "by policy.threshold until then"


def documented() -> dict[str, str]:
    """The example of each code in the documentation."""
    lines = DOCS.read_text().partition(HEAD)[2].split("\n\n")[0].splitlines()[2:]
    rows = [re.fullmatch(r"\| `(\w+)` \| (.+) \|", line) for line in lines]
    return {row[1]: row[2] for row in rows if row is not None}


def by_thresholds() -> list[World]:
    world = World(api.Policy(maxFlipsPerHour=2), ONE_GPU, batch=40, accept=3.0)
    for batch in (40, 20, 60, 20, 40, 60, 20):
        world.batch = batch
        world.run(8)
    silent = World(api.Policy(onSignalLoss="Off"), ONE_GPU, batch=20)
    silent.run(20)
    for seconds in (3.0, 5.0):
        silent.now += seconds
        verdict, silent.memory = decide(silent.policy, silent.memory, None, silent.now)
        silent.verdicts.append((silent.now, verdict))
    again = World(api.Policy(), ONE_GPU, batch=20)
    again.run(20)
    stamp = again.memory.stamp
    assert stamp is not None
    repeated = Sample(again.now, stamp, 60, 0)
    verdict, _ = decide(again.policy, again.memory, repeated, again.now + 1.5)
    again.verdicts.append((again.now, verdict))
    return [world, silent, again]


def by_break_even() -> list[World]:
    world = World(rule(), ONE_GPU, batch=32, accept=3.0)
    world.run(60)
    world.accept = 1.1
    world.run(90)
    close = World(rule(), between((1, 1.5)), batch=32, accept=1.1)
    close.run(60)
    close.accept = 1.503
    close.run(200)
    few = World(rule(), ONE_GPU, batch=1, accept=1.0, curve=curve(ONE_GPU), plain=lambda _: 0.2)
    few.run(20)
    return [world, close, few]


def guarded() -> list[World]:
    pinned = World(api.Policy(mode="On"), ONE_GPU, batch=8)
    pinned.run(3)
    pinned.policy = api.Policy(mode="Off")
    pinned.run(3)
    stalled = World(rule(), ONE_GPU, batch=8)
    stalled.run(30)
    stalled.batch, stalled.queued = 0, 5
    stalled.run(15)
    ended = World(rule(), ONE_GPU, batch=8)
    ended.run(30)
    ended.memory = crashed(crashed(ended.memory, 30.0), 31.0)
    ended.run(3)
    bad = World(api.Policy(), ONE_GPU, batch=8, accept=1.02)
    bad.run(60)
    worse = World(rule(), ONE_GPU, batch=32, accept=1.3)
    worse.run(60)
    worse.hidden, worse.accept = 0.5, 2.2
    worse.run(200)
    return [pinned, stalled, ended, bad, worse]


@cache
def said() -> frozenset[tuple[str, str]]:
    """All that was said in lives that come to every code."""
    worlds = [*by_thresholds(), *by_break_even(), *guarded()]
    return frozenset((v.code, v.reason) for world in worlds for _, v in world.verdicts)


def test_each_code_is_in_the_documentation():
    assert {code for code, _ in said()} == set(documented())


def test_each_example_of_the_documentation_is_said():
    assert set(documented().items()) <= said()


def accepted(length: float, verifies: float = 500.0) -> Acceptance:
    return Acceptance(((length - 1) / 3,) * 3, verifies, 1.0)


def told(acceptance: Acceptance, steps: int, **sample) -> tuple[str, str]:
    context = Context(ranks=sample.pop("ranks", 1), curve=curve(ONE_GPU))
    load = {"at": 1.0, "stamp": 1.0, "running": 8, "queued": 0, **sample}
    known = breakeven.arms(context, acceptance, 8)
    return breakeven.words(context, Sample(**load), acceptance, known, steps, 8)


@pytest.mark.parametrize(
    ("acceptance", "steps", "code"),
    [
        (accepted(2.0), 3, "AboveBreakEven"),
        (accepted(1.2), 0, "BelowBreakEven"),
        (accepted(1.43), 0, "WithinMargin"),
        (accepted(1.38), 3, "WithinMargin"),
        (accepted(2.0, TELLING - 1), 0, "TooFewVerifies"),
        (accepted(1.0, TELLING - 1), 3, "TooFewVerifies"),
        (accepted(1.0, TELLING - 1), 0, "BelowBreakEven"),
        (accepted(2.0, TELLING - 1), 3, "AboveBreakEven"),
    ],
)
def test_who_stays_against_break_even_says_what_keeps_it(acceptance, steps, code):
    assert told(acceptance, steps)[0] == code


@pytest.mark.parametrize(
    ("sample", "where"),
    [
        ({}, "at 8 in flight"),
        ({"running": 0}, "at 8 in flight, idle now"),
        ({"ranks": 2}, "at 8 in flight per rank"),
        ({"queued": 300, "capacity": 8}, "at 8 in flight and 300 more waiting"),
    ],
)
def test_the_load_is_the_one_there_is(sample, where):
    assert told(accepted(2.0), 3, **sample)[1].endswith(where)


@pytest.mark.parametrize(
    ("tiers", "batch", "reason"),
    [
        (((1, 3),), 70, f"on: {UNKNOWN_AT_70}, as before until then"),
        (((1, 0),), 20, f"off: {UNKNOWN_AT_20}, as before until then"),
        (((1, 3), (49, 0)), 70, f"off: {UNKNOWN_AT_70}, {BY_BOUNDS}: 70 in flight above 48"),
        ((), 20, f"on: {UNKNOWN_AT_20}, {BY_BOUNDS}: 20 in flight below 32"),
    ],
)
def test_where_nothing_is_known_no_bound_is_the_reason_for_its_opposite(tiers, batch, reason):
    memory = Memory.resume("On" if batch else "Off", None, tiers, 0.0)
    verdict, _ = decide(rule(), memory, Sample(1.0, 1.0, batch, 0), 1.0)
    assert (verdict.code, verdict.reason) == ("Learning", reason)


def test_a_break_even_that_is_known_is_named_though_no_acceptance_is():
    sample = Sample(1.0, 1.0, 20, 0)
    verdict, _ = decide(rule(), Memory.start(), sample, 1.0, Context(curve=curve(ONE_GPU)))
    assert verdict.reason.startswith("on: acceptance not seen yet, break-even 1.4")
    assert "(calibrated) at 20 in flight" in verdict.reason


def taken_over_off(since, **settings):
    """An engine that has been off since a moment, as a new operator finds it at 0."""
    world = World(rule(**settings), ONE_GPU, batch=8, accept=3.0)
    world.doing, _ = decide(api.Policy(mode="Off"), Memory.start(), Sample(0.0, 0.0, 8, 0), 0.0)
    world.memory = Memory.resume("Off", since, ((1, 0),), 0.0)
    return world


def test_an_engine_that_is_taken_over_off_is_looked_at_soon():
    """Nothing of it is known: a minute off may be a minute lost."""
    world = taken_over_off(-60.0)
    world.run(9)
    assert not world.switches
    world.run(6)
    assert world.active() == 3
    assert len(world.memory.flips) == 2


def test_an_engine_that_is_taken_over_keeps_its_dwell():
    world = taken_over_off(-10.0, dwellOffSeconds=40)
    world.run(29)
    assert not world.switches
    world.run(5)
    assert world.active() == 3
