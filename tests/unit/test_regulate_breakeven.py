"""The regulation loop under BreakEven: rounds in, tables out, probes that nobody notices."""

import asyncio
import dataclasses
from typing import Any

import pytest

from specserve.decisions import KEPT, KEPT_LEAST, room
from specserve.target import Override, Standing
from tests.unit.engines import Decoding, pod
from tests.unit.regulation import HOLDER, KEY, WALL, World, gaps, target, world
from tests.unit.virtual_time import in_virtual_time, now

QUIET = {"maxFlipsPerHour": 3600, "threshold": {"offAbove": 48, "onBelow": 32}}


def weighing(**policy: Any) -> Any:
    return target(strategy="BreakEven", **QUIET, **policy)


def metrics(w: World) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by metric, and by what labels say beside the SpecServe."""
    return {
        family.name: {tuple(s.labels.values())[2:]: s.value for s in family.samples}
        for family in w.regulator.collect()
    }


async def until(w: World, what: Any, seconds: float) -> float:
    """Wait until something holds, looked at each tenth of a second; returns how long it took."""
    began = now()
    while not what():
        assert now() - began < seconds, [d.verdict.reason for d in w.regulator.log(KEY) or ()][-5:]
        await asyncio.sleep(0.1)
    return now() - began


@in_virtual_time
async def test_engines_are_read_often_enough_to_decide_by():
    async with world() as w:
        w.regulator.configure(weighing())
        w.add(running=8)
        await asyncio.sleep(20)
        assert max(gaps([call.at for call in w.engines.of("read")])) <= 2.6
        w.regulator.configure(target(**QUIET))
        await asyncio.sleep(5)
        before = len(w.engines.of("read"))
        await asyncio.sleep(30)
        assert len(w.engines.of("read")) - before <= 3


@in_virtual_time
async def test_acceptance_that_falls_turns_it_off_and_a_probe_finds_that_it_has_risen():
    async with world() as w:
        w.regulator.configure(weighing())
        engine = w.add(running=8, decoding=Decoding())
        await until(w, lambda: engine.active_steps == 3, 5)
        await asyncio.sleep(60)  # both arms become known, by a probe of the plain one
        assert w.regulator.live(KEY)
        assert w.changed[KEY] > 0
        assert w.engine().on
        engine.decoding.accept = 0.1
        await until(w, lambda: w.engine().on is False, 90)
        (off,) = w.events("SpeculationDisabled")
        assert "below break-even" in off.message
        await asyncio.sleep(30)
        engine.decoding.accept = 0.8
        await until(w, lambda: w.engine().on, 200)
        (on,) = w.events("SpeculationEnabled")
        assert "above break-even" in on.message
        assert metrics(w)["specserve_policy_probes"][()] >= 1
        assert [switch.mode for switch in w.regulator.switches(KEY)][-2:] == ["Off", "On"]


@in_virtual_time
async def test_a_probe_that_changes_nothing_is_no_news():
    async with world() as w:
        w.regulator.configure(weighing())
        engine = w.add(running=8, decoding=Decoding(accept=0.1))
        await until(w, lambda: w.engine().on is False, 120)
        await asyncio.sleep(3)
        w.notices.clear()
        told = len(w.regulator.switches(KEY))
        before = metrics(w)["specserve_policy_probes"][()]
        changed = w.changed[KEY]
        probing = reported = 0
        for _ in range(3000):
            await asyncio.sleep(0.1)
            probing += engine.active_steps > 0
            report = w.engine()
            reported += (report.on, report.wanted, report.difference) != (False, "Off", None)
        assert probing > 0
        assert metrics(w)["specserve_policy_probes"][()] > before
        assert reported == 0
        assert w.notices == []
        assert len(w.regulator.switches(KEY)) == told
        # What else a report tells may move now and then; a probe's comings and goings do not.
        assert w.changed[KEY] - changed <= 4
        assert metrics(w)["specserve_policy_probe_seconds"][()] <= 0.02 * 300


def sweep(engine: Any) -> None:
    """What a calibration leaves in an engine: rounds of all batches, hardly a draft accepted."""
    at = now()
    for batch in (1, 2, 4, 64):
        for steps in (0, 3):
            for _ in range(20):
                at += 0.001
                engine.stats.observe(steps, 0.001, [0] * batch, at)


@in_virtual_time
@pytest.mark.parametrize("restarted", [False, True])
async def test_what_a_calibration_leaves_in_an_engine_is_not_taken_for_traffic(restarted):
    async with world() as w:
        w.regulator.configure(weighing(mode="Off"))
        engine = w.add(running=8, decoding=Decoding())
        await asyncio.sleep(5)
        times = w.regulator.fleet(KEY).knowledge.times
        if restarted:
            sweep(engine)
            await asyncio.sleep(1)
            w.vanish()
            w.regulator.fleet(KEY).forget()
            w.show(pod(KEY, "u1", "10.0.0.1", measured=True))
        else:
            w.edit(usable=False, aside="r1")
            sweep(engine)
            await asyncio.sleep(20)
            w.edit(usable=True, aside=None)
        await asyncio.sleep(50)
        assert w.engines.of("read")[-1].at > now() - 5
        assert w.regulator.fleet(KEY).knowledge.times == ({} if restarted else times)
        (steered,) = w.regulator.fleet(KEY).pods.values()
        assert steered.memory.counts.acceptance is None
        assert w.engine().accept is None
        # Once all of its window is of the traffic it is believed again, and nothing else is.
        await asyncio.sleep(15)
        (bucket,) = w.regulator.fleet(KEY).knowledge.times[0]
        assert bucket[0] == 8
        assert bucket[1].seconds == pytest.approx(0.02)
        assert bucket[1].seen > now() - 5


@in_virtual_time
async def test_one_pod_probes_at_a_time_and_all_learn_of_it():
    async with world() as w:
        w.regulator.configure(weighing())
        engines = [
            w.add(f"u{n}", f"10.0.0.{n}", running=8, decoding=Decoding(accept=0.1))
            for n in range(4)
        ]
        await until(w, lambda: {e.on for e in w.regulator.engines(KEY)} == {False}, 200)
        for engine in engines:
            engine.decoding.accept = 0.8
        most = 0
        for _ in range(4000):
            await asyncio.sleep(0.1)
            most = max(most, metrics(w)["specserve_policy_probing_pods"][()])
            if all(e.on for e in w.regulator.engines(KEY)):
                break
        assert most == 1
        assert all(e.on for e in w.regulator.engines(KEY))


@in_virtual_time
async def test_a_pod_that_vanishes_in_a_probe_leaves_it_to_others():
    async with world() as w:
        w.regulator.configure(weighing())
        for n in range(2):
            w.add(f"u{n}", f"10.0.0.{n}", running=8, decoding=Decoding(accept=0.1))
        probing = lambda: metrics(w)["specserve_policy_probing_pods"].get((), 0)  # noqa: E731
        await until(w, probing, 300)
        prober = next(
            uid for uid, steered in w.regulator._fleets[KEY].pods.items() if steered.verdict.probe
        )
        w.vanish(prober)
        assert not probing()
        await until(w, probing, 600)


@in_virtual_time
async def test_observe_probes_nothing_and_tells_what_it_would_do():
    async with world() as w:
        w.regulator.configure(weighing(mode="Observe"))
        w.add(running=60, decoding=Decoding(accept=0.1))
        await asyncio.sleep(120)
        assert w.switches == []
        seen = metrics(w)
        assert seen["specserve_policy_would_be_pods"] == {("On",): 0, ("Off",): 1}
        assert seen["specserve_policy_probes"][()] == 0


@in_virtual_time
async def test_a_table_sent_once_serves_loads_that_come_and_go():
    async with world() as w:
        # Without probes nothing is learnt of plain rounds: the bounds of the threshold hold.
        w.regulator.configure(weighing(breakEven={"probeBudgetPermille": 0}))
        engine = w.add(running=8, decoding=Decoding())
        await asyncio.sleep(20)
        assert engine.read_back()["tiers"] == [
            {"minBatch": 1, "steps": 3},
            {"minBatch": 49, "steps": 0},
        ]
        engine.running = 60
        await asyncio.sleep(5)
        assert engine.active_steps == 0
        assert w.engine().on, "a short excursion is no news"
        await until(w, lambda: w.engine().on is False, 60)
        engine.running = 8
        await until(w, lambda: w.engine().on, 60)
        assert len(w.events("SpeculationDisabled")) == len(w.events("SpeculationEnabled")) == 1
        assert {mode for _, mode in engine.changes} == {"tiers"}


@in_virtual_time
async def test_what_was_learnt_of_another_draft_is_forgotten():
    async with world() as w:
        first = weighing()
        w.regulator.configure(first)
        w.add(running=8, decoding=Decoding())
        await asyncio.sleep(60)
        assert w.regulator.live(KEY)
        draft = first.draft.model_copy(update={"source": "hf://a/other"})
        w.regulator.configure(dataclasses.replace(first, draft=draft))
        assert not w.regulator.live(KEY)


@in_virtual_time
async def test_metrics_name_what_decisions_rest_on():
    async with world() as w:
        w.regulator.configure(weighing())
        w.add(running=8, decoding=Decoding(accept=0.7, ratio=1.5))
        await asyncio.sleep(90)
        seen = metrics(w)
        assert seen["specserve_policy_acceptance_length"][("3",)] == pytest.approx(2.53, rel=0.1)
        assert seen["specserve_policy_break_even_ratio"][("3",)] == pytest.approx(1.5, rel=0.05)
        assert seen["specserve_policy_arm_value_ratio"][("3",)] == pytest.approx(1.69, rel=0.1)
        assert seen["specserve_policy_batch"][()] == 8


# -- the fleet's load -----------------------------------------------------------------------


@in_virtual_time
async def test_the_mean_load_decides_for_all_pods():
    async with world() as w:
        w.regulator.configure(target(scope="Fleet"))
        loads = (0, 2, 28)  # 10 in the mean: between the bounds
        engines = [w.add(f"u{n}", f"10.0.0.{n}", running=r) for n, r in enumerate(loads)]
        await asyncio.sleep(10)
        assert {engine.mode for engine in engines} == {"on"}
        engines[0].running = 10
        await asyncio.sleep(3)
        assert {engine.mode for engine in engines} == {"off"}


@in_virtual_time
async def test_a_stalled_pod_is_left_out_of_the_mean():
    async with world() as w:
        w.regulator.configure(target(scope="Fleet"))
        well = w.add("u0", "10.0.0.1", running=4)
        w.add("u1", "10.0.0.2", queued=500)
        await asyncio.sleep(30)
        assert well.mode == "on"
        assert len(w.events("EngineStalled")) == 1


@in_virtual_time
async def test_a_pod_not_heard_of_is_left_out_of_the_mean():
    async with world() as w:
        w.regulator.configure(target(scope="Fleet"))
        well = w.add("u0", "10.0.0.1", running=4)
        silent = w.add("u1", "10.0.0.2", running=300)
        await asyncio.sleep(5)
        assert well.mode == "off"
        silent.faults["load"] = "refused"
        await asyncio.sleep(20)
        assert well.mode == "on"


# -- by hand --------------------------------------------------------------------------------


def pinned(until: float | None, **policy: Any) -> Any:
    return dataclasses.replace(target(**policy), mode_until=until)


@in_virtual_time
async def test_a_pin_ends_by_itself():
    async with world() as w:
        end = WALL + now() + 30
        w.regulator.configure(
            pinned(end, mode="Off", modeUntil="2030-03-17T17:50:00Z", maxFlipsPerHour=100)
        )
        engine = w.add(running=1)
        await asyncio.sleep(20)
        assert engine.mode == "off"
        assert "pinned until 2030-03-17T17:50:00Z" in w.switches[0]["reason"]
        await asyncio.sleep(15)
        assert engine.mode == "on"
        assert w.regulator.mode(w.regulator._targets[KEY]) == "Auto"


@in_virtual_time
async def test_the_override_stands_above_every_policy_and_survives_its_end():
    async with world() as w:
        other = ("team", "other")
        w.regulator.configure(target())
        w.regulator.configure(target(other, mode="On"))
        one = w.add(running=1)
        two = w.add("u2", "10.0.0.2", other, running=1)
        await asyncio.sleep(5)
        assert (one.mode, two.mode) == ("on", "on")
        w.changed.clear()
        w.regulator.override(Standing(Override("Off", reason="garbled output")))
        assert set(w.changed) == {KEY, other}
        await asyncio.sleep(3)
        assert (one.mode, two.mode) == ("off", "off")
        off = w.events("SpeculationDisabled")
        assert len(off) == 2
        assert "override of all SpecServes (garbled output), 1 in flight" in off[0].message
        assert {d.verdict.code for d in w.regulator.log(other)[-1:]} == {"OverrideOff"}
        # The fallback is the same: engines stay off also if the operator dies.
        assert one.read_back()["fallback"]["mode"] == "off"
        w.regulator.override(Standing(Override("Observe")))
        await asyncio.sleep(3)
        sent = len(w.switches)
        await asyncio.sleep(100)
        assert len(w.switches) == sent
        w.regulator.override(Standing())
        await asyncio.sleep(15)
        assert (one.mode, two.mode) == ("on", "on")


@in_virtual_time
async def test_an_override_ends_at_its_time():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(running=1)
        w.regulator.override(Standing(Override("Off", until=WALL + now() + 20)))
        await asyncio.sleep(15)
        assert engine.mode == "off"
        await asyncio.sleep(20)
        assert engine.mode == "on"


# -- engines that do not survive it -----------------------------------------------------------


async def crash(w: World, engine: Any, number: int) -> None:
    engine.boot()
    w.edit(boot=f"c{number}#{number}", usable=False)
    await asyncio.sleep(5)
    w.edit(usable=True)
    await asyncio.sleep(15)


@in_virtual_time
async def test_an_engine_that_fails_twice_while_on_is_left_off():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(running=1)
        await asyncio.sleep(5)
        await crash(w, engine, 1)
        assert engine.mode == "on"
        await crash(w, engine, 2)
        assert engine.mode == "off"
        assert w.engine().crashed
        assert len(w.events("CrashedWhileOn")) == 1
        await crash(w, engine, 3)
        assert engine.mode == "off"
        changed = weighing()
        draft = changed.draft.model_copy(update={"source": "hf://a/other"})
        w.regulator.configure(dataclasses.replace(changed, draft=draft))
        await asyncio.sleep(15)
        assert engine.active_steps > 0
        assert not w.engine().crashed


@in_virtual_time
async def test_ends_while_off_are_no_failures_of_the_draft():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(running=60)
        await asyncio.sleep(5)
        for number in (1, 2, 3):
            await crash(w, engine, number)
        assert engine.mode == "off"
        assert not w.engine().crashed


# -- the log --------------------------------------------------------------------------------


@in_virtual_time
async def test_why_it_is_off_can_be_told_an_hour_later():
    async with world() as w:
        w.regulator.configure(target())
        engine = w.add(running=30)
        await asyncio.sleep(5)
        for second in range(3600):  # above and between the bounds in turn, never below
            engine.running = 30 if second % 2 else 8
            await asyncio.sleep(1)
        kept = w.regulator.log(KEY)
        first = kept[0]
        assert (first.what, first.verdict.mode, first.verdict.code) == (
            "first",
            "Off",
            "FirstReading",
        )
        assert "30 in flight above 10" in first.verdict.reason
        assert len(kept) <= 2 * KEPT
        assert w.regulator.logs() == {KEY: len(kept)}


def test_logs_of_many_specserves_have_less_room_each():
    assert room(1) == room(200) == KEPT
    assert KEPT_LEAST <= room(1000) < KEPT
    assert room(10**6) == KEPT_LEAST


@in_virtual_time
async def test_a_new_operator_goes_on_from_the_table_in_force():
    async with world() as w:
        w.regulator.configure(weighing())
        engine = w.add(running=8, decoding=Decoding(accept=0.1))
        await until(w, lambda: w.engine().on is False, 120)
        await until(w, lambda: not engine.active_steps, 10)
        engines = w.engines
    async with world(engines) as w:
        table = engine.read_back()["tiers"]
        w.regulator.configure(weighing())
        w.show(pod(KEY, engine.uid, "10.0.0.1"))
        for _ in range(400):
            await asyncio.sleep(0.1)
            seen = w.regulator.engines(KEY)[0].on
            assert seen in (False, None)
        assert seen is False
        assert engine.active_steps == 0
        assert engine.read_back()["tiers"] == table
        assert engine.read_back()["lease"]["holder"] == HOLDER
        assert not w.events("SpeculationEnabled")
