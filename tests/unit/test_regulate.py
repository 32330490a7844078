"""The regulation loop against engines in memory, in virtual time."""

import asyncio
import dataclasses

import pytest

from specserve.engine import Endpoint
from specserve.signals import Reading
from tests.unit.engines import FakeEngine, FakeEngines, fault, pod
from tests.unit.regulation import HOLDER, KEY, WALL, gaps, target, world
from tests.unit.virtual_time import in_virtual_time, now

# -- sampling -------------------------------------------------------------------------------


@in_virtual_time
async def test_a_pod_is_sampled_every_period():
    async with world() as w:
        w.regulator.configure(target())
        w.add()
        await asyncio.sleep(20)
        assert set(gaps([call.at for call in w.engines.of("load")])) == {0.5}


@in_virtual_time
async def test_periods_stretch_alike_when_there_is_too_much_to_read():
    async with world(samples_per_second=10) as w:
        w.regulator.configure(target())
        for n in range(20):
            w.add(f"u{n}", f"10.0.1.{n}")
        assert w.regulator.stretch == 4.0
        await asyncio.sleep(3)
        before = len(w.engines.of("load"))
        await asyncio.sleep(20)
        assert len(w.engines.of("load")) - before == pytest.approx(200, abs=20)
        for n in range(20):
            w.vanish(f"u{n}")
        assert w.regulator.stretch == 1.0


@in_virtual_time
async def test_the_stretch_follows_edits_and_deletions():
    async with world(samples_per_second=10) as w:
        others = [("team", f"n{n}") for n in range(10)]
        for key in others:
            w.regulator.configure(target(key))
            w.add(f"u-{key[1]}", f"10.0.2.{key[1][1:]}", key)
        assert w.regulator.stretch == 2.0
        w.regulator.configure(target(others[0], samplePeriodMilliseconds=100))
        assert w.regulator.stretch == pytest.approx(2.8)
        w.regulator.release(others[0])
        assert w.regulator.stretch == pytest.approx(1.8)


@in_virtual_time
async def test_a_pod_that_does_not_answer_is_asked_less_often():
    async with world() as w:
        w.regulator.configure(target())
        w.add(faults={"load": "reset", "read": "reset"})
        await asyncio.sleep(30)
        assert gaps([call.at for call in w.engines.of("load")])[-3:] == [2.0] * 3


@in_virtual_time
async def test_a_hung_engine_delays_no_other():
    async with world() as w:
        w.regulator.configure(target())
        for n in range(10):
            w.add(f"h{n}", f"10.0.3.{n}", faults={"load": "hang", "read": "hang"})
        w.add()
        await asyncio.sleep(20)
        assert set(gaps([call.at for call in w.engines.of("load", "u1")])) == {0.5}


@in_virtual_time
async def test_pods_that_are_not_usable_are_not_called():
    async with world() as w:
        w.regulator.configure(target())
        w.engines.at["10.0.0.1"] = FakeEngine("u1")
        w.show(pod(KEY, "u1", "10.0.0.1", usable=False))
        w.show(pod(KEY, "u2", None, usable=False))
        await asyncio.sleep(5)
        assert not w.engines.calls
        w.edit(usable=True)
        await asyncio.sleep(1)
        assert w.engines.of("switch", "u1")
        w.edit(usable=False)
        await asyncio.sleep(1)
        w.engines.calls.clear()
        await asyncio.sleep(5)
        assert not w.engines.calls


@in_virtual_time
async def test_a_pod_that_is_aside_is_told_nothing_and_looked_at_anew_on_its_return():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add()
        w.add("u2", "10.0.0.2")
        await asyncio.sleep(2)
        w.edit(usable=False, aside="r1")
        assert [one.name for one in w.regulator.engines(KEY)] == ["chat-u2"]
        await asyncio.sleep(1)
        w.engines.calls.clear()
        # Who measures it has it do this and that, in our name.
        engine.steer("off", holder=HOLDER, lease=5)
        engine.running = 99
        await asyncio.sleep(90)
        assert {call.uid for call in w.engines.calls} == {"u2"}
        told = await w.regulator.ask(w.pods["u1"])
        assert told is not None
        assert told.running == 99
        engine.running = 0
        w.edit(usable=True, aside=None)
        await asyncio.sleep(2)
        (order,) = w.engines.of("switch", "u1")
        assert order.body["epoch"] > 2
        assert engine.mode == "on"
        assert w.events("SpeculationSwitchFailed") == []


@in_virtual_time
async def test_a_pod_that_cannot_be_asked_says_nothing():
    async with world() as w:
        w.add(faults={"load": "reset"})
        assert await w.regulator.ask(w.pods["u1"]) is None  # nobody is served
        w.regulator.configure(target())
        assert await w.regulator.ask(w.pods["u1"]) is None
        w.vanish()
        assert await w.regulator.ask(pod(KEY, "u1", "10.0.0.1")) is None


@in_virtual_time
async def test_the_beat_goes_on_with_nothing_to_do():
    async with world() as w:
        await asyncio.sleep(30)
        assert now() - w.regulator.beat <= 1.0


# -- deciding -------------------------------------------------------------------------------


@in_virtual_time
async def test_load_that_rises_and_falls_switches_once_each_way():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add()
        await asyncio.sleep(2)
        assert engine.mode == "on"
        engine.running = 30
        await asyncio.sleep(2)
        assert engine.mode == "off"
        engine.running = 1
        await asyncio.sleep(2)
        assert engine.mode == "on"
        assert engine.changes == [(1, "on"), (2, "off"), (3, "on")]
        assert len(w.events("SpeculationDisabled")) == 1
        assert len(w.events("SpeculationEnabled")) == 1
        assert w.engine().switched_why.startswith("chat-u1: on: 1 in flight below 5")


@in_virtual_time
async def test_a_first_directive_is_no_news():
    async with world() as w:
        w.regulator.configure(target())
        w.add()
        await asyncio.sleep(5)
        assert w.notices == []


@in_virtual_time
async def test_between_the_bounds_nothing_is_sent_but_the_first_mode():
    async with world() as w:
        w.regulator.configure(target(leaseSeconds=600))
        engine = w.add()
        await asyncio.sleep(2)
        engine.running = 7
        await asyncio.sleep(100)
        assert len(w.switches) == 1


@in_virtual_time
async def test_a_lost_signal_holds_the_mode_and_is_told():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(running=30)
        await asyncio.sleep(2)
        with fault(engine, load="reset"):
            await asyncio.sleep(0.1)  # a reading may be under way
            engine.running = 0
            await asyncio.sleep(60)
            assert engine.mode == "off"
            assert w.engine().sample_error[0] == "EngineConnectionReset"
        await asyncio.sleep(3)
        assert engine.mode == "on"
        assert w.engine().sample_error is None


@in_virtual_time
async def test_a_reading_that_repeats_itself_is_stale():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(running=30)
        await asyncio.sleep(2)
        engine.stamp, engine.running = now(), 0
        await asyncio.sleep(1)
        engine.running = 30
        await asyncio.sleep(20)
        assert w.engine().sample_error == ("SamplesStale", "")


@in_virtual_time
async def test_one_reset_is_no_fault_and_three_in_a_row_are():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add()
        await asyncio.sleep(2)
        with fault(engine, load="reset"):
            await asyncio.sleep(0.6)
            assert w.engine().sample_error is None
            await asyncio.sleep(2)
            assert w.engine().sample_error is not None


@in_virtual_time
async def test_observing_sends_nothing_and_tells_what_it_would_do():
    async with world() as w:
        w.regulator.configure(target(mode="Observe"))
        engine = w.add(running=30)
        await asyncio.sleep(120)
        assert w.switches == []
        assert (engine.mode, w.engine().wanted, w.engine().difference) == ("auto", "Off", None)


@in_virtual_time
async def test_an_engine_without_control_is_sent_nothing():
    async with world() as w:
        w.regulator.configure(target())
        w.add(controllable=False)
        await asyncio.sleep(60)
        assert w.switches == []
        assert w.engine().controllable is False
        assert w.engine().control_reason == "no adaptive controller"


@in_virtual_time
async def test_a_pin_holds_whatever_the_load():
    async with world() as w:
        w.regulator.configure(target(mode="Off"))
        engine = w.add()
        await asyncio.sleep(2)
        assert engine.mode == "off"
        w.regulator.configure(target(mode="On"))
        engine.running = 100
        await asyncio.sleep(2)
        assert engine.mode == "on"


@in_virtual_time
async def test_a_stalled_engine_is_not_switched_and_told_once():
    async with world() as w:
        w.regulator.configure(target(signal="Queued"))
        engine = w.add(tokens=51234)
        await asyncio.sleep(2)
        engine.queued = 180
        await asyncio.sleep(60)
        assert engine.mode == "on"
        assert w.engine().stalled
        assert len(w.events("EngineStalled")) == 1
        engine.tokens, engine.running = 60000, 8
        await asyncio.sleep(3)
        assert not w.engine().stalled


@in_virtual_time
async def test_a_busy_engine_with_nothing_running_for_a_moment_is_not_stalled():
    async with world() as w:
        w.regulator.configure(target(signal="Queued"))
        engine = w.add(tokens=0)
        await asyncio.sleep(2)
        engine.queued = 3
        for _ in range(120):
            engine.tokens += 10
            await asyncio.sleep(0.5)
        assert not w.engine().stalled
        assert w.events("EngineStalled") == []


@in_virtual_time
async def test_ranks_that_a_reading_covers_are_told():
    async with world() as w:
        w.regulator.configure(target())
        w.add(ranks=3)
        await asyncio.sleep(1)
        assert w.engine().ranks == 3


@in_virtual_time
async def test_what_an_engine_holds_is_reported_until_it_is_another_one():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(capacity=48)
        await asyncio.sleep(2)
        assert w.engine().capacity == 48
        engine.capacity = 96
        await asyncio.sleep(2)
        assert w.engine().capacity == 96
        engine.faults.update(load="hang", read="hang")
        engine.boot()
        w.edit(boot="again", usable=False)
        w.edit(usable=True)
        assert w.engine().capacity is None


# -- leases and fencing ---------------------------------------------------------------------


@in_virtual_time
async def test_a_lease_is_renewed_after_a_third_with_the_same_epoch():
    async with world() as w:
        w.regulator.configure(target(leaseSeconds=60))
        engine = w.add()
        await asyncio.sleep(200)
        assert {body["epoch"] for body in w.switches} == {1}
        times = [call.at for call in w.engines.of("switch")]
        assert all(19.9 <= gap <= 21.1 for gap in gaps(times))
        assert engine.changes == [(1, "on")]


@in_virtual_time
async def test_a_lease_that_ran_out_is_taken_again_with_a_higher_epoch():
    async with world() as w:
        w.regulator.configure(target(leaseSeconds=15))
        engine = w.add(running=30)
        await asyncio.sleep(2)
        with fault(engine, switch="reset", read="reset"):
            await asyncio.sleep(60)
        assert engine.mode == "tiers"  # the fallback, by the engine's own watch
        await asyncio.sleep(25)
        assert engine.mode == "off"
        assert engine.changes[-1][0] > 2


@in_virtual_time
async def test_a_stale_epoch_goes_on_from_the_larger_one():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add()
        await asyncio.sleep(2)
        engine.steer("on", holder=HOLDER, epoch=40)
        engine.running = 30
        await asyncio.sleep(3)
        assert engine.mode == "off"
        assert engine.changes[-1] == (41, "off")
        assert w.engine().control_error is None


@in_virtual_time
async def test_another_installations_lease_is_respected_with_growing_pauses():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add()
        engine.steer("off", lease=120)
        await asyncio.sleep(100)
        assert engine.mode == "off"
        assert w.engine().control_error[0] == "LeaseHeld"
        assert len(w.events("SpeculationSwitchFailed")) == 1
        pauses = gaps([call.at for call in w.engines.of("switch")])
        assert pauses == sorted(pauses)
        assert 10.0 <= pauses[-1] <= 11.0
        await asyncio.sleep(40)
        assert engine.mode == "on"
        assert w.engine().control_error is None


@pytest.mark.parametrize("how", ["hang", "reset", "refused"])
@in_virtual_time
async def test_an_engine_that_is_read_but_takes_no_directive_is_told(how: str):
    async with world() as w:
        w.regulator.configure(target())
        w.add(faults={"switch": how})
        await asyncio.sleep(120)
        assert w.engine().control_error is not None
        assert len(w.events("SpeculationSwitchFailed")) == 1
        assert gaps([call.at for call in w.engines.of("switch")])[-1] >= 10.0


@in_virtual_time
async def test_what_was_refused_is_forgotten_when_it_is_no_longer_wanted():
    async with world() as w:
        w.regulator.configure(target())
        w.add(faults={"switch": "refused"})
        await asyncio.sleep(30)
        assert w.engine().control_error is not None
        w.regulator.configure(target(mode="Observe"))
        await asyncio.sleep(15)
        assert w.engine().control_error is None


@in_virtual_time
async def test_an_engine_that_refuses_for_hours_is_still_asked():
    async with world() as w:
        w.regulator.configure(target(samplePeriodMilliseconds=5000, staleAfterSeconds=10))
        engine = w.add(faults={"read": "refused"})
        await asyncio.sleep(4 * 3600)
        assert now() - w.engines.of("read")[-1].at <= 15
        engine.faults.clear()
        await asyncio.sleep(30)
        assert engine.mode == "on"


@in_virtual_time
async def test_drift_by_another_hand_is_corrected():
    async with world(read_back_seconds=10) as w:
        w.regulator.configure(target())
        engine = w.add()
        await asyncio.sleep(2)
        engine.steer("off", holder=HOLDER)
        await asyncio.sleep(12)
        assert engine.mode == "on"


@in_virtual_time
async def test_address_of_another_pod_is_no_success():
    async with world() as w:
        w.regulator.configure(target())
        w.engines.at["10.0.0.1"] = stranger = FakeEngine("other")
        w.show(pod(KEY, "u1", "10.0.0.1"))
        await asyncio.sleep(10)
        assert stranger.changes == []
        assert w.engine().control_error[0] == "WrongPod"
        assert w.engine().on is None


# -- unknown outcomes -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "unproved"])
@in_virtual_time
async def test_a_switch_without_an_answer_is_found_by_reading_back(how: str):
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add()
        await asyncio.sleep(2)
        with fault(engine, switch=how):
            engine.running = 30
            await asyncio.sleep(3)
        assert engine.changes == [(1, "on"), (2, "off")]
        assert [body["epoch"] for body in w.switches] == [1, 2]
        assert w.engine().difference is None
        assert w.engine().control_error is None
        # It is news all the same, once.
        assert len(w.events("SpeculationDisabled")) == 1
        assert w.engine().switched_why.startswith("chat-u1: off")


@in_virtual_time
async def test_after_an_unknown_outcome_nothing_is_sent_before_a_read_back():
    async with world() as w:
        w.regulator.configure(target(leaseSeconds=600))
        engine = w.add()
        await asyncio.sleep(2)
        engine.faults.update(switch="lost", read="hang")
        engine.running = 30
        await asyncio.sleep(60)
        assert [body["epoch"] for body in w.switches] == [1, 2]
        engine.faults.clear()
        await asyncio.sleep(15)
        assert engine.changes == [(1, "on"), (2, "off")]


@in_virtual_time
async def test_never_two_directives_at_once_and_the_newer_decision_follows():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add()
        await asyncio.sleep(2)
        engine.answer_seconds = 1.5
        engine.running = 30
        await asyncio.sleep(2.5)  # the directive for off is under way
        engine.running = 0
        await asyncio.sleep(10)  # the fake fails the test on a second one
        assert engine.mode == "on"


@in_virtual_time
async def test_sampling_goes_on_while_an_engine_takes_its_time():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add()
        engine.faults["switch"] = "hang"
        await asyncio.sleep(10)
        assert set(gaps([call.at for call in w.engines.of("load")])) == {0.5}


# -- coming and going -----------------------------------------------------------------------


@in_virtual_time
async def test_a_restarted_engine_gets_its_mode_back_within_two_ticks():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(running=30)
        await asyncio.sleep(2)
        engine.boot()
        assert engine.mode == "auto"
        w.edit(boot="c2#1")
        await asyncio.sleep(1.1)
        assert engine.mode == "off"
        assert engine.changes[-1] == (1, "off")
        assert w.events("SpeculationDisabled") == []


@in_virtual_time
async def test_a_restart_that_no_pod_status_tells_is_found_by_reading_back():
    async with world(read_back_seconds=10) as w:
        w.regulator.configure(target())
        engine = w.add(running=30)
        await asyncio.sleep(2)
        engine.boot()
        await asyncio.sleep(12)
        assert engine.mode == "off"


@in_virtual_time
async def test_a_directive_for_the_process_before_changes_nothing():
    async with world(read_back_seconds=1000) as w:
        w.regulator.configure(target())
        engine = w.add()
        await asyncio.sleep(2)
        engine.boot()
        engine.running = 30
        await asyncio.sleep(3)
        assert engine.changes[1:] == [(1, "off")]
        assert w.engine().control_error is None


@in_virtual_time
async def test_a_restarted_operator_sends_nothing_when_reality_matches():
    engines = FakeEngines()
    async with world(engines) as w:
        w.regulator.configure(target(leaseSeconds=600))
        w.add(running=30)
        await asyncio.sleep(2)
    engines.calls.clear()
    async with world(engines) as second:
        second.regulator.configure(target(leaseSeconds=600, last_switch=WALL + now() - 1))
        second.show(pod(KEY, "u1", "10.0.0.1"))
        await asyncio.sleep(30)
        assert second.switches == []
        assert second.notices == []


@in_virtual_time
async def test_a_restarted_operator_goes_on_with_the_dwell():
    engines = FakeEngines()
    async with world(engines) as w:
        w.regulator.configure(target())
        engine = w.add(running=30)
        await asyncio.sleep(2)
    engine.running = 0
    async with world(engines) as second:
        switched = WALL + now() - 20
        second.regulator.configure(target(dwellOffSeconds=60, last_switch=switched))
        second.show(pod(KEY, "u1", "10.0.0.1"))
        await asyncio.sleep(35)
        assert engine.mode == "off"
        await asyncio.sleep(10)
        assert engine.mode == "on"


@in_virtual_time
async def test_a_restarted_operator_renews_the_lease_it_finds():
    engines = FakeEngines()
    async with world(engines) as w:
        w.regulator.configure(target(leaseSeconds=60))
        engine = w.add()
        await asyncio.sleep(2)
    async with world(engines) as second:
        second.regulator.configure(target(leaseSeconds=60))
        second.show(pod(KEY, "u1", "10.0.0.1"))
        await asyncio.sleep(100)
        assert engine.changes == [(1, "on")]
        assert engine.read_back()["lease"]["remainingSeconds"] > 30


@pytest.mark.parametrize("kind", ["load", "read", "switch"])
@in_virtual_time
async def test_a_pod_that_vanishes_during_a_call_is_let_alone(kind: str):
    async with world() as w:
        w.regulator.configure(target())
        answer = w.engines.hold(kind)
        w.add()
        await asyncio.sleep(1.2)
        w.vanish()
        w.engines.calls.clear()
        answer.set()
        await asyncio.sleep(10)
        assert w.engines.calls == []
        assert w.regulator.engines(KEY) == []


@pytest.mark.parametrize("kind", ["load", "read", "switch"])
@in_virtual_time
async def test_an_answer_from_the_address_before_is_discarded(kind: str):
    async with world() as w:
        w.regulator.configure(target())
        answer = w.engines.hold(kind)
        old = w.add(running=30)
        await asyncio.sleep(1.2)
        new = w.engines.at["10.0.0.9"] = FakeEngine("u1")
        del w.engines.at["10.0.0.1"]
        w.edit(ip="10.0.0.9", boot="c2#1")
        answer.set()
        await asyncio.sleep(5)
        assert new.mode == "on"
        assert all(call.uid == "u1" for call in w.engines.calls)
        assert w.engine().on is True
        assert old.changes in ([], [(1, "off")])


@in_virtual_time
async def test_a_pod_that_turns_unready_during_a_reading_is_sent_nothing():
    async with world() as w:
        w.regulator.configure(target())
        answer = w.engines.hold("load")
        w.add()
        await asyncio.sleep(1.2)
        w.edit(usable=False)
        answer.set()
        await asyncio.sleep(5)
        assert w.switches == []


@in_virtual_time
async def test_a_deleted_specserve_ends_all_calls():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(faults={"switch": "hang"})
        await asyncio.sleep(1.2)
        w.regulator.release(KEY)
        await asyncio.sleep(0.1)
        w.engines.calls.clear()
        await asyncio.sleep(30)
        assert w.engines.calls == []
        # One of the same name finds the pods that are left and takes them on.
        engine.faults.clear()
        w.regulator.configure(target())
        await asyncio.sleep(3)
        assert engine.mode == "on"


@in_virtual_time
async def test_a_specserve_deleted_in_the_moment_of_a_switch_can_come_back(monkeypatch):
    async with world() as w:
        spawn = w.regulator._spawn

        def delete_first(work):
            if work.__name__ == "_switch":
                asyncio.get_running_loop().call_soon(w.regulator.release, KEY)
            return spawn(work)

        monkeypatch.setattr(w.regulator, "_spawn", delete_first)
        w.regulator.configure(target())
        engine = w.add()
        await asyncio.sleep(3)
        assert engine.changes == []
        monkeypatch.undo()
        w.regulator.configure(target())
        await asyncio.sleep(3)
        assert engine.mode == "on"


@in_virtual_time
async def test_new_tokens_are_tried_at_once():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(faults={"read": "refused"})
        await asyncio.sleep(100)
        engine.faults.clear()
        w.regulator.configure(dataclasses.replace(target(), tokens=("new", "t")))
        await asyncio.sleep(1.1)
        assert engine.mode == "on"


@in_virtual_time
async def test_a_steady_engine_is_told_about_once():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(running=2)
        await asyncio.sleep(30)
        w.changed.clear()
        for load in (1, 3, 2, 4, 3):
            engine.running = load
            await asyncio.sleep(30)
        assert w.changed[KEY] == 0


@in_virtual_time
async def test_an_error_nobody_thought_of_stays_with_its_pod(caplog):
    class Odd(FakeEngines):
        async def load(self, engine: Endpoint) -> Reading:
            if engine.ip == "10.0.0.1":
                raise ZeroDivisionError
            return await super().load(engine)

    async with world(Odd()) as w:
        w.regulator.configure(target())
        w.add()
        other = w.add("u2", "10.0.0.2")
        await asyncio.sleep(5)
        assert other.mode == "on"
        assert "a tick failed" in caplog.text


@in_virtual_time
async def test_metrics_are_those_of_usable_pods():
    async with world() as w:
        w.regulator.configure(target())
        w.add(running=3, queued=1)
        w.add("u2", "10.0.0.2", running=20)
        await asyncio.sleep(3)
        depth, age, enabled, *_ = w.regulator.collect()
        values = {sample.labels["state"]: sample.value for sample in depth.samples}
        assert values == {"running": 23, "queued": 1}
        assert age.samples[0].value <= 1.0
        assert enabled.samples[0].value == 1
        w.vanish("u1")
        w.vanish("u2")
        assert all(not family.samples for family in w.regulator.collect())


@in_virtual_time
async def test_an_accepted_order_that_a_rank_does_not_follow_shows_as_drift():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(running=50)
        await asyncio.sleep(2)
        assert engine.mode == "off"
        assert w.engine().difference is None
        engine.rank_states = [
            {"rank": 0, "activeSteps": 0, "decodeRounds": 40},
            {"rank": 1, "activeSteps": 3, "decodeRounds": 40},
        ]
        await asyncio.sleep(11)
        assert w.engine().difference == "rank 1 runs 3 steps, ordered 0"
        engine.rank_states[1]["activeSteps"] = 0
        await asyncio.sleep(11)
        assert w.engine().difference is None


@in_virtual_time
async def test_leases_are_renewed_while_the_load_cannot_be_read_however_rarely_it_is_tried():
    async with world() as w:
        slow = {"samplePeriodMilliseconds": 15_000, "staleAfterSeconds": 60, "leaseSeconds": 60}
        w.regulator.configure(target(**slow))
        engine = w.add(running=50)
        await asyncio.sleep(40)
        assert engine.mode == "off"
        epoch = engine.control.epoch
        with fault(engine, load="reset"):
            await asyncio.sleep(600)
            assert engine.mode == "off"
            assert engine.control.epoch == epoch


@in_virtual_time
async def test_the_fallback_of_a_pod_with_ranks_is_by_their_share():
    async with world() as w:
        w.regulator.configure(dataclasses.replace(target(), ranks=4))
        w.add(running=50)
        await asyncio.sleep(2)
        assert w.switches[0]["fallback"]["tiers"][-1] == {"minBatch": 10 // 4 + 1, "steps": 0}
