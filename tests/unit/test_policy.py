"""Each branch of the decision, one line each."""

from dataclasses import replace

import pytest

from specserve import api
from specserve.policy import Memory, Sample, Verdict, decide, unreachable


def policy(**fields) -> api.Policy:
    bounds = {"off_above": fields.pop("off_above", 48), "on_below": fields.pop("on_below", 32)}
    return api.Policy.model_validate({"threshold": bounds, **fields})


def at(time: float, running: int, queued: int = 0, tokens: int | None = None, **fields) -> Sample:
    return Sample(time, fields.get("stamp", time), running, queued, 256, tokens)


def in_mode(mode, since: float = 0.0, **fields) -> Memory:
    return Memory(mode=mode, since=since, **fields)


@pytest.mark.parametrize(
    ("fields", "memory", "sample", "now", "expected"),
    [
        pytest.param(
            {}, Memory.start(), at(0, 60), 0,
            Verdict("Off", "FirstReading", "off: first reading, 60 in flight above 48", False),
            id="first reading above",
        ),
        pytest.param(
            {}, Memory.start(), at(0, 40), 0,
            Verdict(
                "On", "FirstReading", "on: first reading, 40 in flight between 32 and 48", False
            ),
            id="first reading between the bounds",
        ),
        pytest.param(
            {}, Memory.start(), at(0, 0), 0,
            Verdict("On", "FirstReading", "on: first reading, 0 in flight below 32", False),
            id="a true zero is a reading",
        ),
        pytest.param(
            {}, in_mode("On"), at(60, 61), 60,
            Verdict("Off", "AboveThreshold", "off: 61 in flight above 48", True),
            id="flip off",
        ),
        pytest.param(
            {}, in_mode("Off"), at(60, 31), 60,
            Verdict("On", "BelowThreshold", "on: 31 in flight below 32", True),
            id="flip on",
        ),
        pytest.param(
            {}, in_mode("Off"), at(60, 61), 60,
            Verdict("Off", "AboveThreshold", "off: 61 in flight above 48", False),
            id="off already",
        ),
        pytest.param(
            {}, in_mode("On"), at(60, 3), 60,
            Verdict("On", "BelowThreshold", "on: 3 in flight below 32", False),
            id="on already",
        ),
        pytest.param(
            {}, in_mode("On"), at(60, 40), 60,
            Verdict("On", "WithinBand", "hold on: 40 in flight between 32 and 48", False),
            id="between the bounds",
        ),
        pytest.param(
            {}, in_mode("On"), at(60, 48), 60,
            Verdict("On", "WithinBand", "hold on: 48 in flight between 32 and 48", False),
            id="offAbove itself is not above",
        ),
        pytest.param(
            {}, in_mode("Off"), at(60, 32), 60,
            Verdict("Off", "WithinBand", "hold off: 32 in flight between 32 and 48", False),
            id="onBelow itself is not below",
        ),
        pytest.param(
            {}, in_mode("On"), at(60, 40, 9), 60,
            Verdict("Off", "AboveThreshold", "off: 49 in flight above 48", True),
            id="in flight counts the queue",
        ),
        pytest.param(
            {"signal": "Running"}, in_mode("On"), at(60, 40, 99), 60,
            Verdict("On", "WithinBand", "hold on: 40 running between 32 and 48", False),
            id="running does not count the queue",
        ),
        pytest.param(
            {"signal": "Queued"}, in_mode("On"), at(60, 99, 49), 60,
            Verdict("Off", "AboveThreshold", "off: 49 queued above 48", True),
            id="queued counts nothing else",
        ),
        pytest.param(
            {}, in_mode("Off", since=54), at(60, 20), 60,
            Verdict(
                "Off", "Dwelling",
                "hold off: 20 in flight below 32, dwell 4 s of 10 s left", False,
            ),
            id="dwell while off",
        ),
        pytest.param(
            {"dwell_on_seconds": 30}, in_mode("On", since=54.5), at(60, 61), 60,
            Verdict(
                "On", "Dwelling",
                "hold on: 61 in flight above 48, dwell 24.5 s of 30 s left", False,
            ),
            id="dwell while on has its own length",
        ),
        pytest.param(
            {}, in_mode("On", since=50), at(60, 61), 60,
            Verdict("Off", "AboveThreshold", "off: 61 in flight above 48", True),
            id="the dwell ends on its last second",
        ),
        pytest.param(
            {"max_flips_per_hour": 2}, in_mode("On", since=500, flips=(100, 500)), at(600, 61),
            600,
            Verdict(
                "On", "BudgetSpent",
                "hold on: 61 in flight above 48, 2 of 2 flips an hour spent, "
                "next in 3100 s", False,
            ),
            id="budget spent",
        ),
        pytest.param(
            {"max_flips_per_hour": 2}, in_mode("On", since=500, flips=(100, 500)), at(3700, 61),
            3700,
            Verdict("Off", "AboveThreshold", "off: 61 in flight above 48", True),
            id="a flip leaves the budget after an hour",
        ),
        pytest.param(
            {}, Memory.start(), None, 60,
            Verdict(None, "NoSamples", "hold: no reading for 0 s, limit 5 s", False),
            id="nothing known",
        ),
        pytest.param(
            {}, in_mode("Off"), None, 60,
            Verdict("Off", "NoSamples", "hold off: no reading for 0 s, limit 5 s", False),
            id="nothing known since a restart",
        ),
        pytest.param(
            {"on_signal_loss": "On"}, in_mode("Off"), None, 60,
            Verdict("Off", "NoSamples", "hold off: no reading for 0 s, limit 5 s", False),
            id="a reading that is only late is no loss",
        ),
        pytest.param(
            {"on_signal_loss": "On"}, in_mode("Off", waiting=54), None, 60,
            Verdict(
                "On", "NoSamples", "on: no reading for 6 s, limit 5 s, onSignalLoss is On", True
            ),
            id="a reading that never came is a loss",
        ),
        pytest.param(
            {}, in_mode("On", heard=52.8, stamp=1), None, 60,
            Verdict("On", "SamplesStale", "hold on: last reading 7.2 s old, limit 5 s", False),
            id="readings stopped",
        ),
        pytest.param(
            {}, in_mode("On", heard=57, stamp=1), None, 60,
            Verdict("On", "NoSamples", "hold on: last reading 3 s old, limit 5 s", False),
            id="one reading missed",
        ),
        pytest.param(
            {}, in_mode("On"), at(52.8, 61), 60,
            Verdict("On", "SamplesStale", "hold on: last reading 7.2 s old, limit 5 s", False),
            id="reading too old",
        ),
        pytest.param(
            {}, in_mode("On", stamp=7, heard=50), at(60, 61, stamp=7), 60,
            Verdict("On", "SamplesStale", "hold on: last reading 10 s old, limit 5 s", False),
            id="a frozen stamp ages",
        ),
        pytest.param(
            {"on_signal_loss": "Off"}, in_mode("On", heard=50, stamp=1), None, 60,
            Verdict(
                "Off", "SamplesStale",
                "off: last reading 10 s old, limit 5 s, onSignalLoss is Off", True,
            ),
            id="signal loss off",
        ),
        pytest.param(
            {"on_signal_loss": "On"}, in_mode("Off", since=58, heard=50, stamp=1), None, 60,
            Verdict(
                "Off", "Dwelling",
                "hold off: last reading 10 s old, limit 5 s, onSignalLoss is On, "
                "dwell 8 s of 10 s left", False,
            ),
            id="signal loss keeps the dwell",
        ),
        pytest.param(
            {"on_signal_loss": "Off", "max_flips_per_hour": 1},
            in_mode("On", heard=50, stamp=1, flips=(0.0,)), None, 60,
            Verdict(
                "On", "BudgetSpent",
                "hold on: last reading 10 s old, limit 5 s, onSignalLoss is Off, "
                "1 of 1 flips an hour spent, next in 3540 s", False,
            ),
            id="signal loss keeps the budget",
        ),
        pytest.param(
            {}, in_mode("On", stamp=7, heard=58), at(60, 61, stamp=7), 60,
            Verdict(
                "On", "AwaitingReading",
                "hold on: 61 in flight above 48, no new reading for 2 s", False,
            ),
            id="a repeated stamp is no evidence",
        ),
        pytest.param(
            {}, in_mode("On", stamp=7, heard=59), at(58, 61, stamp=6), 60,
            Verdict(
                "On", "AwaitingReading",
                "hold on: 61 in flight above 48, no new reading for 1 s", False,
            ),
            id="a reading that was overtaken is no evidence",
        ),
        pytest.param(
            {"mode": "On"}, in_mode("Off", since=59), at(60, 61), 60,
            Verdict("On", "PinnedOn", "on: pinned by policy.mode, 61 in flight", True),
            id="pin on ignores load and dwell",
        ),
        pytest.param(
            {"mode": "Off", "max_flips_per_hour": 1}, in_mode("On", flips=(50.0,)), None, 60,
            Verdict("Off", "PinnedOff", "off: pinned by policy.mode, load unknown", True),
            id="pin off ignores budget and silence",
        ),
        pytest.param(
            {"mode": "Off"}, Memory.start(), at(60, 1), 60,
            Verdict("Off", "PinnedOff", "off: pinned by policy.mode, 1 in flight", False),
            id="a pin at first is no flip",
        ),
        pytest.param(
            {"mode": "Off"}, in_mode("Off"), at(50, 1), 60,
            Verdict("Off", "PinnedOff", "off: pinned by policy.mode, load unknown", False),
            id="a pin quotes no old load",
        ),
        pytest.param(
            {"mode": "Observe"}, in_mode("On"), at(60, 61), 60,
            Verdict("Off", "AboveThreshold", "off: 61 in flight above 48", True),
            id="observe decides like auto",
        ),
        pytest.param(
            {}, in_mode("On"), at(60, 0, 180), 60,
            Verdict("On", "NothingRunning", "hold on: 0 running with 180 queued", False),
            id="a queue with nothing running decides nothing",
        ),
        pytest.param(
            {}, in_mode("On", tokens=5), at(60, 0, 180, tokens=6), 60,
            Verdict("Off", "AboveThreshold", "off: 180 in flight above 48", True),
            id="a token made meanwhile shows that it does run",
        ),
        pytest.param(
            {}, in_mode("On", tokens=5, stalled_since=50), at(60, 0, 180, tokens=5), 60,
            Verdict(
                "On", "EngineStalled",
                "hold on: engine stalled, requests waited, 0 running and no token for 10 s", False,
            ),
            id="stalled",
        ),
        pytest.param(
            {"on_signal_loss": "Off"},
            in_mode("On", stamp=1, heard=30, tokens=5, stalled_since=20, stalled=True), None, 60,
            Verdict(
                "On", "EngineStalled",
                "hold on: engine stalled, requests waited, 0 running and no token for 40 s", False,
            ),
            id="stalled and silent stays stalled",
        ),
        pytest.param(
            {"mode": "Off"}, in_mode("On", stalled_since=20, stalled=True), None, 60,
            Verdict("Off", "PinnedOff", "off: pinned by policy.mode, load unknown", True),
            id="a pin reaches a stalled engine",
        ),
        pytest.param(
            {}, in_mode("On", since=1e9), at(60, 61), 60,
            Verdict(
                "On", "Dwelling", "hold on: 61 in flight above 48, dwell 10 s of 10 s left", False
            ),
            id="a switch recorded in the future dwells once, not for ever",
        ),
    ],
)  # fmt: skip
def test_verdict(fields, memory, sample, now, expected):
    verdict, after = decide(policy(**fields), memory, sample, now)
    assert replace(verdict, setting=None, numbers=()) == expected
    assert after.mode == expected.mode
    if expected.flip:
        assert after.since == now
        assert after.flips[-1] == now


def test_a_flip_is_remembered_and_forgotten_after_an_hour():
    memory = in_mode("On", since=1000, flips=(0.0, 1000.0))
    _, memory = decide(policy(), memory, at(4000, 61), 4000)
    assert memory.flips == (1000, 4000)


def test_entering_a_mode_without_a_flip_starts_the_dwell():
    verdict, memory = decide(policy(), Memory.start(), at(0, 61), 0)
    assert (verdict.mode, memory.flips) == ("Off", ())
    verdict, memory = decide(policy(), memory, at(9.5, 1), 9.5)
    assert verdict.code == "Dwelling"
    verdict, memory = decide(policy(), memory, at(10, 1), 10)
    assert verdict.flip


def test_unpinning_obeys_the_dwell_of_the_pin():
    _, memory = decide(policy(mode="Off"), in_mode("On"), at(100, 1), 100)
    verdict, memory = decide(policy(), memory, at(105, 1), 105)
    assert verdict.code == "Dwelling"
    verdict, _ = decide(policy(), memory, at(110, 1), 110)
    assert (verdict.mode, verdict.flip) == ("On", True)


def test_a_pin_that_changes_nothing_leaves_the_dwell_alone():
    _, memory = decide(policy(mode="On"), in_mode("On", since=0), at(100, 61), 100)
    assert (memory.since, memory.flips) == (0, ())


def test_readings_are_taken_in_while_pinned():
    _, memory = decide(policy(mode="On"), in_mode("On"), at(100, 61, tokens=7), 100)
    assert (memory.heard, memory.stamp, memory.tokens, memory.age(103)) == (100, 100, 7, 3)


def test_the_same_reading_flips_neither_after_the_dwell_nor_after_an_edit():
    sample = at(100, 45)
    _, memory = decide(policy(), in_mode("On"), sample, 100)
    verdict, memory = decide(policy(off_above=40), memory, sample, 101)
    assert verdict.code == "AwaitingReading"
    verdict, _ = decide(policy(off_above=40), memory, at(101.5, 45), 101.5)
    assert verdict.flip


def test_nothing_but_time_leads_from_waiting_to_loss():
    rule = policy(on_signal_loss="Off")
    memory = Memory.start()
    for now in (0, 2.5, 5):
        verdict, memory = decide(rule, memory, None, now)
        assert (verdict.mode, verdict.code) == (None, "NoSamples")
    verdict, memory = decide(rule, memory, None, 5.5)
    assert (verdict.mode, verdict.code) == ("Off", "NoSamples")
    assert verdict.reason == "off: no reading for 5.5 s, limit 5 s, onSignalLoss is Off"


def test_resume_counts_the_switch_on_record():
    memory = Memory.resume("Off", 100.0, (), 100.0)
    verdict, memory = decide(policy(max_flips_per_hour=1), memory, at(105, 1), 105)
    assert verdict.code == "Dwelling"
    verdict, _ = decide(policy(max_flips_per_hour=1), memory, at(200, 1), 200)
    assert verdict.code == "BudgetSpent"


@pytest.mark.parametrize("memory", [Memory.start(), Memory.resume(None, 5.0, (), 5.0)])
def test_an_engine_nobody_steered_starts_afresh(memory):
    verdict, _ = decide(policy(), memory, at(6, 61), 6)
    assert (verdict.mode, verdict.code) == ("Off", "FirstReading")


def test_resume_without_a_record_owes_no_dwell():
    verdict, _ = decide(policy(), Memory.resume("On", None, (), 0.0), at(1, 61), 1)
    assert verdict.flip


@pytest.mark.parametrize(
    ("fields", "capacity", "parts"),
    [
        (
            {"signal": "Running"},
            48,
            ("at most 48", "offAbove 48", "maxRunningRequests", "InFlight"),
        ),
        ({"signal": "Running", "off_above": 64}, 48, ("at most 48", "offAbove 64", "below 48")),
        ({"signal": "Running", "mode": "Observe"}, 48, ("at most 48",)),
    ],
)
def test_unreachable_names_the_numbers_and_what_to_change(fields, capacity, parts):
    message = unreachable(policy(**fields), capacity)
    assert message is not None
    assert all(part in message for part in parts)


@pytest.mark.parametrize(
    ("fields", "capacity"),
    [
        ({"signal": "Running"}, 49),
        ({"signal": "Running"}, None),
        ({"signal": "InFlight"}, 48),
        ({"signal": "Queued"}, 1),
        ({"signal": "Running", "mode": "Off"}, 48),
        ({"on_below": 1}, 256),
    ],
)
def test_reachable(fields, capacity):
    assert unreachable(policy(**fields), capacity) is None


def test_a_reboot_keeps_decisions_and_forgets_readings():
    flips = (1.0, 20.0, 40.0)
    old = Memory(
        "Off", 40.0, flips, stamp=7.0, heard=41.0, stalled_since=30.0, stalled=True, tokens=5
    )
    assert old.reboot() == Memory("Off", 40.0, flips)


def test_an_engine_in_a_crash_loop_gets_no_new_budget():
    spent = Memory("On", 100.0, tuple(float(n) for n in range(41, 101)))
    verdict, _ = decide(policy(), spent.reboot(), at(200, 500), 200)
    assert (verdict.mode, verdict.code) == ("On", "BudgetSpent")
