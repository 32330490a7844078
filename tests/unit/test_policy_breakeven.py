"""The BreakEven strategy on an engine in mean values."""

from dataclasses import replace
from itertools import pairwise

import pytest

from specserve import api
from specserve.policy import (
    Accepted,
    Context,
    Curve,
    Memory,
    Rounds,
    Sample,
    Setting,
    breakeven,
    crashed,
    decide,
    directive,
    pace,
    pardoned,
)
from specserve.policy.acceptance import Acceptance
from specserve.policy.curve import CurveDocument, Point
from specserve.policy.pace import Paces
from specserve.policy.probe import LONGEST
from specserve.policy.state import steps_at
from tests.unit.policy_world import World


def rule(**fields) -> api.Policy:
    return api.Policy.model_validate({"strategy": "BreakEven", **fields})


def between(*points: tuple[int, float]):
    """`r` for 3 steps by batch, the nearest of some points; linear in the steps."""

    def ratio(batch: int, steps: int) -> float:
        nearest = min(points, key=lambda point: abs(point[0] - batch))[1]
        return 1 + (nearest - 1) * steps / 3

    return ratio


ONE_GPU = between((1, 1.4), (32, 1.5), (70, 2.0), (250, 3.0))
HOST_MEMORY = between((1, 2.83), (32, 1.86), (250, 3.04))


def curve(ratio, batches=(1, 2, 8, 32, 70, 128, 250)) -> Curve:
    points = [Point(batch=batch, steps=3, ratio=ratio(batch, 3)) for batch in batches]
    return Curve(CurveDocument(cells=points))


def codes(world: World) -> list[str]:
    """The machine reasons in order, repeats left out."""
    found: list[str] = []
    for _, verdict in world.verdicts:
        if not found or found[-1] != verdict.code:
            found.append(verdict.code)
    return found


@pytest.mark.parametrize("ratio", [ONE_GPU, HOST_MEMORY], ids=["one GPU", "host memory"])
@pytest.mark.parametrize("batch", [1, 5, 32, 70, 250])
@pytest.mark.parametrize("accept", [1.0, 1.5, 2.0, 2.5, 3.0, 3.5])
def test_it_finds_the_better_arm_from_live_rounds_alone(ratio, batch, accept):
    world = World(rule(), ratio, batch=batch, accept=accept)
    world.run(60)
    assert world.run(300) >= 0.97


def test_a_load_below_all_thresholds_can_lose():
    world = World(rule(), HOST_MEMORY, batch=1, accept=2.5)
    world.run(60)
    assert world.active() == 0
    assert world.doing is not None
    assert world.doing.reason == ("off: acceptance 2.50 below break-even 2.83 at 1 in flight")
    assert dict(world.doing.numbers)["breakEven@3"] == pytest.approx(2.83, abs=0.01)


def test_until_it_knows_it_does_as_threshold():
    world = World(rule(breakEven={"probeBudgetPermille": 0}), ONE_GPU, batch=60)
    world.tick()
    assert world.doing is not None
    assert (world.doing.mode, world.doing.code) == ("Off", "Learning")
    world.run(300)
    # Off was never left, so what a round with drafts takes stayed unknown but for its start.
    world = World(rule(breakEven={"probeBudgetPermille": 0}), ONE_GPU, batch=20)
    world.tick()
    assert (world.doing.mode, world.doing.code) == ("On", "Learning")


def test_a_calibrated_curve_decides_from_the_first_acceptance_on():
    world = World(rule(), HOST_MEMORY, batch=1, accept=2.5, curve=curve(HOST_MEMORY))
    while world.doing is None or world.doing.code == "Learning":
        world.tick()
    assert world.now <= 10
    assert "(calibrated)" in world.doing.reason


def test_a_wrong_curve_is_corrected_by_live_rounds():
    flattering = curve(between((1, 1.1)))
    world = World(rule(), HOST_MEMORY, batch=1, accept=2.5, curve=flattering)
    world.run(60)
    assert world.active() == 0
    assert world.doing is not None
    assert "break-even 2.83" in world.doing.reason


def test_what_round_times_leave_out_is_seen_in_the_throughput_after_a_flip():
    world = World(rule(), ONE_GPU, batch=32, accept=1.3)
    world.run(60)
    assert world.active() == 0
    # From now on a speculating engine makes a third fewer tokens than its rounds account for.
    world.hidden, world.accept = 0.5, 2.2
    world.run(400)
    assert "FlipReverted" in codes(world)
    assert world.active() == 0
    watch = world.memory.watch
    assert watch.predicted == pytest.approx(2.2 / 1.5, abs=0.1)
    assert watch.seen == pytest.approx(0.73, abs=0.03)
    assert "FlipFrozen" in codes(world)
    reverted = next(v for _, v in world.verdicts if v.code == "FlipReverted")
    assert "to 0.73 of before, predicted 1.47" in reverted.reason


def test_a_frozen_mode_thaws_when_the_load_doubles():
    world = World(rule(), ONE_GPU, batch=32, accept=1.3)
    world.run(60)
    world.hidden, world.accept = 0.5, 2.2
    while world.memory.watch.frozen is None:
        world.tick()
    world.batch, world.hidden = 66, 1.0
    world.tick()
    assert world.memory.watch.frozen is None


def test_a_collapse_is_answered_within_the_dwell_and_a_recovery_by_a_probe():
    world = World(rule(), ONE_GPU, batch=32, accept=3.0)
    world.run(60)
    assert world.active() == 3
    world.accept = 1.1
    collapsed = world.now
    while world.active() != 0:
        world.tick()
    assert world.now - collapsed <= 10
    world.accept = 3.0
    recovered = world.now
    while world.active() != 3 or world.doing is None or world.doing.probe:
        world.tick()
    assert world.now - recovered <= 70
    probes = [v for _, v in world.verdicts if v.code == "Probing"]
    assert probes
    assert all(v.recheck is not None and v.probe for v in probes)


def test_a_probe_goes_on_while_one_of_two_requests_is_between_two():
    world = World(rule(), ONE_GPU, batch=2, accept=3.9)
    world.run(60)
    world.accept = 1.0
    world.run(30)
    assert world.active() == 0
    world.accept = 3.9
    while world.doing is None or not world.doing.probe:
        world.tick()
    world.batch = 1
    world.tick()
    assert world.doing.probe
    world.batch = 2
    world.run(5)
    assert world.active() == 3
    assert codes(world)[-2:] == ["Probing", "AboveBreakEven"]


def test_probes_grow_rare_while_they_confirm():
    world = World(rule(), ONE_GPU, batch=32, accept=1.1)
    world.run(3600)
    began = [now for now, steps in world.switches if steps == 3 and now > 30]
    gaps = [b - a for a, b in pairwise(began)]
    assert gaps == sorted(gaps)
    assert 60 <= gaps[0] < 130
    assert gaps[-1] == pytest.approx(480, abs=3)


def test_probes_are_short_and_paid_for():
    world = World(rule(), ONE_GPU, batch=32, accept=1.1)
    world.run(60)
    won = world.run(3600)
    # Nothing accepted costs a third here; one per mille of time was spent looking.
    assert won >= 0.999
    on = [now for now, steps in world.switches if steps == 3]
    off = [now for now, steps in world.switches if steps == 0 and now > on[0]]
    assert all(back - began <= LONGEST[0] for began, back in zip(on[1:], off[1:], strict=False))


def test_where_no_acceptance_could_pay_nothing_is_probed():
    world = World(rule(), between((1, 4.5)), batch=100, accept=2.0)
    world.run(120)
    settled = len(world.switches)
    world.run(3500)
    assert len(world.switches) == settled
    # Round times are forgotten after an hour: then it looks again, and once more to be sure.
    world.run(3500)
    assert len(world.switches) == settled + 4


@pytest.mark.parametrize(
    "fields", [{"mode": "Observe"}, {"breakEven": {"probeBudgetPermille": 0}}]
)
def test_without_leave_nothing_is_probed(fields):
    world = World(rule(**fields), ONE_GPU, batch=60, accept=3.0)
    world.run(600)
    assert "Probing" not in codes(world)


def test_another_pods_acceptance_saves_a_probe():
    off = World(rule(), ONE_GPU, batch=32, accept=1.1)
    off.run(60)
    canary = World(rule(), ONE_GPU, batch=32, accept=3.0, now=off.now)
    canary.run(60)
    flips = len(off.memory.flips)
    for _ in range(30):
        canary.tick()
        off.knowledge = off.knowledge.hear(canary.memory.counts.acceptance)
        off.accept = 3.0
        off.tick()
    assert off.active() == 3
    assert len(off.memory.flips) == flips + 1


def test_only_one_pod_looks_at_a_time():
    world = World(rule(), ONE_GPU, batch=32, accept=1.1)
    world.run(60)
    world.may_probe = False
    settled = len(world.switches)
    world.run(600)
    assert len(world.switches) == settled


def test_the_engine_gets_a_table_by_batch():
    world = World(rule(), ONE_GPU, batch=32, accept=2.5, curve=curve(ONE_GPU))
    world.run(60)
    assert world.doing is not None
    assert world.doing.setting is not None
    tiers = world.doing.setting.tiers
    assert steps_at(tiers, 1) == steps_at(tiers, 32) == 3
    assert steps_at(tiers, 256) == 0
    wire = directive.wanted(world.policy, api.Draft(steps=[0, 3]), world.doing)
    assert wire["mode"] == "tiers"
    assert wire["fallback"]["tiers"] == wire["tiers"]


def test_the_table_is_not_monotonic_where_the_curve_is_not():
    world = World(rule(), HOST_MEMORY, batch=32, accept=2.5, curve=curve(HOST_MEMORY))
    world.run(60)
    assert world.doing is not None
    assert world.doing.setting is not None
    steps = [steps_at(world.doing.setting.tiers, batch) for batch in (1, 32, 250)]
    assert steps == [0, 3, 0]


def test_a_jump_of_the_load_is_followed_by_the_table_without_a_flip():
    policy = rule(breakEven={"probeBudgetPermille": 0})
    world = World(policy, ONE_GPU, batch=8, accept=1.95, curve=curve(ONE_GPU))
    world.run(120)
    flips = len(world.memory.flips)
    for _ in range(20):
        world.batch = 200 if world.batch == 8 else 8
        for _ in range(10):
            world.tick()
            assert world.active() == (3 if world.batch == 8 else 0)
    assert len(world.memory.flips) == flips


def test_a_load_that_wavers_around_a_border_switches_nothing():
    world = World(rule(), between((32, 1.5), (64, 3.2)), batch=60, accept=2.5)
    world.run(60)
    assert world.active() == 0
    world.batch = 40
    world.run(60)
    assert world.active() == 3
    settled = len(world.switches)
    for turn in range(1200):
        world.batch = (44, 52, 46, 50, 47, 53)[turn % 6]
        world.tick()
    assert len(world.switches) - settled <= 10


def test_where_the_load_has_been_of_late_only_a_clear_gain_makes_a_border():
    shape = between((8, 1.45), (16, 1.5), (32, 1.65), (64, 1.75), (128, 3.0))
    world = World(rule(), shape, batch=16, accept=1.6, curve=curve(shape, (8, 16, 32, 64, 128)))
    world.run(60)
    for turn in range(2400):
        if turn == 1200:
            settled = len(world.switches)
        world.batch = (16, 34, 12, 40, 20, 60)[turn // 4 % 6]
        world.tick()
    assert len(world.switches) - settled <= 10
    world.accept = 2.2
    for turn in range(1200):
        world.batch = (16, 200)[turn // 10 % 2]
        world.tick()
    # On wins by far at 16 and off at 200: there the engine follows its table.
    assert len(world.switches) - settled > 50


def test_close_calls_dwell_longer_each_time():
    world = World(rule(), between((1, 2.0)), batch=32, accept=2.5)
    world.run(60)
    for turn in range(7200):
        world.accept = (2.16, 1.84)[turn // 10 % 2]
        world.tick()
    flips = [now for now, verdict in world.verdicts if verdict.flip and now > 60]
    assert len(flips) <= 3600 / 60
    clear = World(rule(), between((1, 2.0)), batch=32, accept=3.5)
    clear.run(60)
    clear.accept = 1.2
    before = clear.now
    while clear.active():
        clear.tick()
    assert clear.now - before < 12


def test_acceptance_seen_at_another_load_is_looked_at_soon():
    world = World(rule(), ONE_GPU, batch=8, accept=1.3, curve=curve(ONE_GPU))
    world.run(120)
    assert world.active() == 0
    world.batch, world.accept = 128, 3.4
    moved = world.now
    while world.active() != 3 or world.doing is None or world.doing.probe:
        world.tick()
    assert world.now - moved <= 16
    assert any("acceptance was last seen at 8 in flight" in v.reason for _, v in world.verdicts)


def test_a_jump_of_the_load_is_looked_into_each_time():
    """8 clients of a bad acceptance and 128 of a good one take turns."""
    world = World(rule(), ONE_GPU, batch=8, accept=1.3, curve=curve(ONE_GPU))
    world.run(60)
    for turn in range(8):
        world.batch, world.accept = ((128, 3.2), (8, 1.1))[turn % 2]
        world.run(40)
        assert world.active() == (3 if world.batch == 128 else 0)
        world.run(60)


def test_more_step_counts_are_tried_where_they_promise_more():
    world = World(rule(), ONE_GPU, batch=8, accept=3.8, steps=(0, 1, 3, 7))
    world.run(120)
    best = max(world.steps, key=world.rate)
    assert best == 7
    assert world.active() == 7
    world.accept = 1.25
    world.run(120)
    assert world.active() == max(world.steps, key=world.rate)


def test_a_handful_of_verifies_decides_nothing():
    few = Acceptance((0.0, 0.0, 0.0), 5.0, 1.0)
    context = Context(curve=curve(ONE_GPU))
    assert breakeven.best(rule(), context, few, 8, 3) == 3
    assert breakeven.best(rule(), context, replace(few, verifies=500.0), 8, 3) == 0


def test_the_queue_counts_as_demand():
    world = World(rule(), ONE_GPU, batch=48, accept=2.0, curve=curve(ONE_GPU))
    world.run(60)
    assert dict(world.verdicts[-1][1].numbers)["batch"] == 48
    world.queued = 500
    world.tick()
    assert dict(world.verdicts[-1][1].numbers)["batch"] == world.capacity


def test_the_fleets_load_decides_where_it_is_asked_for():
    world = World(api.Policy(), ONE_GPU, batch=60)
    assert world.tick().mode == "Off"
    sample = Sample(1.0, 1.0, 60, 10)
    context = Context(demand=(20.4, 0.0))
    verdict, _ = decide(api.Policy(), Memory.start(), sample, 1.0, context)
    assert verdict.reason == "on: first reading, 20 in flight in the mean pod below 32"


def test_a_lost_signal_in_a_probe_ends_it_and_holds():
    world = World(rule(), ONE_GPU, batch=32, accept=1.1)
    world.run(60)
    while world.doing is None or not world.doing.probe:
        world.tick()
    assert world.doing.fallback == Setting(world.memory.tiers)
    world.now += 10
    verdict, memory = decide(world.policy, world.memory, None, world.now)
    assert (verdict.mode, verdict.code) == ("Off", "SamplesStale")
    assert verdict.setting is not None
    assert verdict.setting.steps_for(32) == 0
    assert memory.probing.active is None


def test_an_idle_engine_keeps_its_table():
    world = World(rule(), ONE_GPU, batch=32, accept=2.5)
    world.run(60)
    doing = world.doing
    world.batch = 0
    world.run(600)
    assert world.doing is not None
    assert doing is not None
    assert world.doing.setting == doing.setting


def test_after_an_operator_restart_the_engines_table_goes_on():
    world = World(rule(), HOST_MEMORY, batch=1, accept=2.5, curve=curve(HOST_MEMORY))
    world.run(60)
    tiers = world.memory.table
    world.memory = Memory.resume("Off", None, tiers, world.now)
    world.knowledge = replace(world.knowledge, acceptance=None)
    verdict = world.tick()
    assert verdict.setting == Setting(tiers)
    assert not verdict.flip


@pytest.mark.parametrize(
    ("lasting", "kv"), [(3.0, "Warm"), (40.0, "Cold")], ids=["short offs", "long offs"]
)
def test_the_drafts_cache_is_kept_where_offs_are_short(lasting, kv):
    policy = rule(draftKv="Auto", strategy="Threshold", dwellOnSeconds=0, dwellOffSeconds=0)
    world = World(policy, ONE_GPU)
    for _ in range(4):
        world.batch = 60
        world.run(lasting)
        world.batch = 10
        world.run(lasting)
    world.batch = 60
    verdict = world.tick()
    assert verdict.setting == Setting(((1, 0),), kv)


def test_o_b3_a_draft_that_wins_nothing_is_left_out_and_looked_at_again():
    policy = api.Policy(strategy="Threshold")
    world = World(policy, ONE_GPU, batch=8, accept=1.02)
    world.run(60)
    assert world.active() == 0
    assert "DraftIneffective" in codes(world)
    world.accept = 3.0
    world.run(200)
    assert world.active() == 3
    assert world.memory.ineffective == 0


def test_o_b3_reported_only_it_stays_on():
    policy = api.Policy.model_validate({"draftGuard": {"action": "Report"}})
    world = World(policy, ONE_GPU, batch=8, accept=1.02)
    world.run(60)
    assert world.active() == 3
    assert world.memory.ineffective >= policy.draft_guard.windows


@pytest.mark.parametrize("why", ["off", "no traffic", "no counts"])
def test_o_b3_unknown_is_not_bad(why):
    mode = "Off" if why == "off" else "Auto"
    world = World(api.Policy(mode=mode), ONE_GPU, batch=8, accept=1.0)
    if why == "no traffic":
        world.batch = 0
    if why == "no counts":
        world.counted = False
    world.run(600)
    assert world.memory.ineffective <= (1 if why == "off" else 0)


def test_o_b3_after_a_cold_off_the_acceptance_has_its_grace():
    policy = rule(breakEven={"graceMilliseconds": 5000})
    world = World(policy, ONE_GPU, batch=32, accept=3.0)
    world.run(60)
    world.policy = policy.model_copy(update={"mode": "Off"})
    world.run(30)
    world.policy = policy.model_copy(update={"mode": "On"})
    world.accept = 1.0
    world.run(4)
    world.policy = policy
    world.accept = 3.0
    world.run(30)
    assert world.active() == 3
    acceptance = world.memory.counts.acceptance
    assert acceptance is not None
    assert acceptance.length(3) == pytest.approx(3.0, abs=0.02)


def test_o_b4_an_engine_that_ends_twice_while_on_stays_off():
    world = World(rule(), ONE_GPU, batch=8, accept=3.0)
    world.run(60)
    world.memory = crashed(world.memory, world.now)
    world.run(10)
    assert world.active() == 3
    world.memory = crashed(world.memory, world.now)
    verdict = world.tick()
    assert (verdict.mode, verdict.code) == ("Off", "CrashedWhileOn")
    world.memory = world.memory.reboot()
    assert world.tick().code == "CrashedWhileOn"
    world.memory = pardoned(world.memory)
    world.run(12)
    assert world.active() == 3


def test_o_b4_two_ends_far_apart_are_forgiven():
    memory = crashed(crashed(Memory.start(), 0.0), 4000.0)
    assert not memory.crashed


def test_a_bad_threshold_flip_is_taken_back_once_and_held():
    """Acceptance 3.5 at 60 requests: off costs half, whatever the bound says."""
    world = World(api.Policy(), between((60, 1.5)), batch=45, accept=3.5)
    world.run(60)
    assert world.active() == 3
    world.batch = 50
    world.run(120)
    assert codes(world)[-3:] == ["AboveThreshold", "FlipReverted", "FlipFrozen"]
    assert world.active() == 3
    world.run(400)
    assert world.active() == 3
    assert [steps for _, steps in world.switches] == [0, 3]


def test_a_pin_ends_what_was_under_way():
    world = World(rule(), ONE_GPU, batch=32, accept=1.1)
    world.run(60)
    while world.doing is None or not world.doing.probe:
        world.tick()
    world.policy = rule(mode="Off")
    verdict = world.tick()
    assert (verdict.code, verdict.setting) == ("PinnedOff", Setting(((1, 0),)))
    assert world.memory.probing.active is None


@pytest.mark.parametrize(
    ("accept", "present", "after"),
    [(1.503, 0, 0), (1.497, 3, 3), (1.57, 0, 3), (1.43, 3, 0), (1.48, 3, 0)],
    ids=["hardly better", "hardly worse", "clearly better", "clearly worse", "worse for long"],
)
def test_only_a_clear_difference_flips(accept, present, after):
    """Break-even is 1.5 here, so these are 1.002, 0.998, 1.05, 0.95 and 0.99 of off."""
    world = World(rule(), between((1, 1.5)), batch=32, accept=3.0 if present else 1.1)
    world.run(60)
    assert world.active() == present
    world.accept = accept
    world.run(600)
    assert world.active() == after


def test_a_step_count_never_timed_is_looked_at_before_it_is_used():
    world = World(rule(), ONE_GPU, batch=8, accept=1.25, steps=(0, 1, 3))
    world.run(300)
    assert world.active() == 1
    first = next(v for _, v in world.verdicts if v.setting and v.setting.steps_for(8) == 1)
    assert first.code == "Probing"


@pytest.mark.parametrize(("credit", "begins"), [(0.1, False), (1.0, True)])
def test_a_probe_needs_credit(credit, begins):
    world = World(rule(), between((1, 2.0)), batch=32, accept=1.1)
    world.run(60)
    probing = replace(world.memory.probing, credit=credit, credited=world.now)
    world.memory = replace(world.memory, probing=probing)
    world.run(15)
    assert ("Probing" in codes(world)[2:]) == begins


def test_a_load_that_changed_meanwhile_settles_nothing():
    world = World(api.Policy(), between((60, 1.5)), batch=45, accept=3.5)
    world.run(60)
    world.batch = 50
    while world.active() != 0:
        world.tick()
    world.batch = 100
    world.run(60)
    assert "FlipReverted" not in codes(world)
    assert world.active() == 0


@pytest.mark.parametrize("running", [2000, 70_000])
def test_a_load_beyond_all_tiers_decides_and_comes_back(running):
    """Neither Prometheus nor /metrics tells how many requests an engine runs at most."""
    context, memory = Context(curve=curve(ONE_GPU)), Memory.start()
    for now, load in enumerate((8, 8, running, running, running, 8, 8)):
        at = 10.0 * now
        sample = Sample(at, at, load, 0, None, None)
        verdict, memory = decide(rule(), memory, sample, at, context)
        assert verdict.setting is not None
        assert verdict.setting.tiers[0][0] == 1


def test_a_freeze_holds_while_requests_queue():
    world = World(rule(), ONE_GPU, batch=32, accept=1.3)
    world.run(60)
    world.hidden, world.accept = 0.5, 2.2
    while world.memory.watch.frozen is None:
        world.tick()
    world.queued = 400
    world.tick()
    assert world.memory.watch.frozen is not None


def test_a_pace_of_long_ago_is_begun_anew_and_compared_with_none():
    def interval(paces: Paces, at: float, steps: int, took: float) -> Paces:
        count = 1000
        for end, more in ((at, 0), (at + 2, round(2 * 32 / took))):
            counts = (Accepted(3, count + more, (0, 0, 0)),)
            rounds = Rounds(end, acceptance=counts, tokens_total=count + more)
            paces = paces.learn(rounds, 32, steps, 1, -1000.0)
        return paces

    paces = interval(interval(Paces(), 0, 0, 0.010), 10, 3, 0.016)
    found = pace.compared(paces.known, 32, 3)
    assert found is not None
    assert found.ratio == pytest.approx(1.6, rel=0.01)
    later = interval(paces, 5 * 3600.0, 0, 0.020)
    off = pace.find(later.known, 32, 0)
    assert off is not None
    assert off.seconds == pytest.approx(0.020, rel=0.01)
    assert off.behind == pytest.approx(2)
    assert pace.compared(later.known, 32, 3) is None


def test_after_a_probe_is_withdrawn_the_way_back_is_not_timed():
    world = World(rule(), ONE_GPU, batch=32, accept=1.1)
    world.run(60)
    while world.doing is None or not world.doing.probe:
        world.tick()
    world.now += 10
    _, memory = decide(world.policy, world.memory, None, world.now)
    assert memory.turned == world.now


def test_a_plain_round_that_became_shorter_is_noticed_within_the_hour():
    """Speculation seemed to win by far; then plain rounds take half the time, and on loses."""
    world = World(rule(), between((1, 1.3)), batch=32, accept=2.2)
    world.run(120)
    assert world.active() == 3
    whole, ratio = world.plain, world.ratio
    world.plain = lambda batch: whole(batch) / 2
    world.ratio = lambda batch, steps: 2 * ratio(batch, steps)
    world.run(3700)
    assert world.active() == 0


def looked(world: World, began: float) -> list[str]:
    """Why looks began since a time."""
    return [
        verdict.reason.rpartition(": ")[2]
        for (_, before), (now, verdict) in pairwise(world.verdicts)
        if now > began and verdict.probe and not before.probe
    ]


def test_a_plain_round_that_decides_is_looked_at_again_after_ten_minutes():
    world = World(rule(), between((1, 1.5)), batch=32, accept=1.8)
    world.run(120)
    seen = world.now
    world.run(550)
    assert not looked(world, seen)
    world.run(150)
    assert looked(world, seen) == [
        "how long a plain round takes at this load was not seen for long"
    ]


def test_a_close_decision_on_rounds_of_the_bucket_beside_is_checked():
    world = World(rule(), between((1, 1.5)), batch=32, accept=1.8)
    world.run(30)
    world.batch = 40
    moved = world.now
    world.run(30)
    assert looked(world, moved) == ["break-even is known beside this load only"]


def test_a_probe_ends_when_the_load_has_left_its_batch():
    world = World(rule(), ONE_GPU, batch=32, accept=1.1)
    world.run(60)
    while world.doing is None or not world.doing.probe:
        world.tick()
    world.batch = 250
    world.tick()
    assert world.memory.probing.active is None
    assert world.active() == 0
