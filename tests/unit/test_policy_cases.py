"""Series that led other controllers astray, by the case they come from."""

from collections.abc import Iterable
from itertools import pairwise

import pytest

from specserve import api
from specserve.policy import Memory, Sample, Verdict, decide, unreachable

CASE_B1 = api.Policy.model_validate(
    {
        "signal": "Running",
        "threshold": {"offAbove": 32, "onBelow": 20},
        "dwellOnSeconds": 30,
        "dwellOffSeconds": 30,
        "maxFlipsPerHour": 12,
    }
)
NOISE = (30, 34, 31, 33, 32, 34, 30, 33)


def play(
    policy: api.Policy, samples: Iterable[Sample | None], memory: Memory | None = None
) -> tuple[list[tuple[int, Verdict]], Memory]:
    """One decision a second from second 0 on."""
    memory = Memory.start() if memory is None else memory
    verdicts = []
    for now, sample in enumerate(samples):
        verdict, memory = decide(policy, memory, sample, now)
        verdicts.append((now, verdict))
    return verdicts, memory


def running(values: Iterable[int], start: float = 0) -> list[Sample]:
    return [Sample(start + n, start + n, value, 0, 256, None) for n, value in enumerate(values)]


def flips(verdicts: list[tuple[int, Verdict]]) -> list[int]:
    return [now for now, verdict in verdicts if verdict.flip]


def test_o_b1_steady_load_above_goes_off_and_stays_off():
    verdicts, _ = play(CASE_B1, running([8] * 60 + [60] * 600))
    assert flips(verdicts) == [60]
    assert {verdict.mode for _, verdict in verdicts[60:]} == {"Off"}


def test_o_b1_steady_load_above_from_the_start_is_off_at_once():
    verdicts, _ = play(CASE_B1, running([60] * 600))
    assert flips(verdicts) == []
    assert {verdict.mode for _, verdict in verdicts} == {"Off"}


@pytest.mark.parametrize("offset", range(len(NOISE)))
def test_o_b1_noise_on_the_bound_for_half_an_hour_flips_once_at_most(offset):
    series = [NOISE[(n + offset) % len(NOISE)] for n in range(1800)]
    verdicts, _ = play(CASE_B1, running(series))
    assert len(flips(verdicts)) <= 1


def test_o_b1_square_wave_keeps_dwell_and_budget():
    series = [8 if n // 5 % 2 == 0 else 60 for n in range(2 * 3600)]
    verdicts, _ = play(CASE_B1, running(series))
    times = flips(verdicts)
    assert all(later - earlier >= 30 for earlier, later in pairwise(times))
    assert all(sum(start < at <= start + 3600 for at in times) <= 12 for start in range(-1, 3600))
    # Neither guard may silence the policy: all of the budget is used in each hour.
    assert len(times) == 24
    assert "BudgetSpent" in {verdict.code for _, verdict in verdicts}


def test_o_b2_a_cap_below_the_bound_is_named_and_in_flight_is_the_way_out():
    bounds = {"offAbove": 64, "onBelow": 32}
    by_running = api.Policy.model_validate({"signal": "Running", "threshold": bounds})
    series = [Sample(n, n, 48, 212, 48, 1000 * n) for n in range(600)]
    verdicts, _ = play(by_running, series)
    assert flips(verdicts) == []
    message = unreachable(by_running, series[0].capacity)
    assert message is not None
    assert "48" in message
    assert "64" in message

    in_flight = api.Policy.model_validate({"signal": "InFlight", "threshold": bounds})
    assert unreachable(in_flight, 48) is None
    verdicts, _ = play(in_flight, series, Memory.resume("On", None, (), 0.0))
    assert flips(verdicts) == [0]


@pytest.mark.parametrize("value", [24, 60])
def test_o_c3_a_gauge_that_drops_late_causes_one_change_at_most(value):
    busy = [Sample(n, n, value, 0, 256, 100 * n) for n in range(60)]
    late = [Sample(n, n, value, 0, 256, 6000) for n in range(60, 90)]
    idle = [Sample(n, n, 0, 0, 256, 6000) for n in range(90, 900)]
    verdicts, _ = play(api.Policy(), busy + late + idle)
    assert flips(verdicts) == ([] if value == 24 else [90])
    assert "EngineStalled" not in {verdict.code for _, verdict in verdicts}


def test_o_c3_a_gauge_that_never_drops_changes_nothing():
    verdicts, _ = play(api.Policy(), [Sample(n, n, 24, 0, 256, 6000) for n in range(3600)])
    assert flips(verdicts) == []
    assert {verdict.mode for _, verdict in verdicts} == {"On"}


def test_o_c4_lost_readings_at_the_peak_hold_and_the_first_good_one_obeys_the_dwell():
    policy = api.Policy(dwell_off_seconds=120)
    peak = running([60] * 30)
    gone: list[Sample | None] = [None] * 30
    verdicts, memory = play(policy, peak + gone)
    assert flips(verdicts) == []
    assert {verdict.mode for _, verdict in verdicts} == {"Off"}
    assert [v.code for _, v in verdicts[-24:]] == ["SamplesStale"] * 24

    # Second 60: idle by now. Off since second 0, so the dwell lasts until 120.
    verdict, memory = decide(policy, memory, Sample(60, 60, 0, 0), 60)
    assert (verdict.mode, verdict.code) == ("Off", "Dwelling")
    verdict, _ = decide(policy, memory, Sample(120, 120, 0, 0), 120)
    assert (verdict.mode, verdict.flip) == ("On", True)


def test_o_c4_the_first_good_reading_flips_once_the_dwell_is_over():
    verdicts, memory = play(api.Policy(), [*running([60] * 30), *[None] * 30])
    assert flips(verdicts) == []
    verdict, _ = decide(api.Policy(), memory, Sample(60, 60, 0, 0), 60)
    assert (verdict.mode, verdict.flip) == ("On", True)


@pytest.mark.parametrize("signal", ["InFlight", "Running", "Queued"])
@pytest.mark.parametrize("mode", ["On", "Off", None])
def test_o_c8_a_stalled_engine_is_never_flipped_and_is_called_stalled_in_ten_seconds(signal, mode):
    policy = api.Policy(signal=signal, dwell_on_seconds=0, dwell_off_seconds=0)
    stalled = [Sample(n, n, 0, 180, 256, 51234) for n in range(180)]
    verdicts, memory = play(policy, stalled, Memory.resume(mode, None, (), 0.0))
    assert {verdict.mode for _, verdict in verdicts} == {mode}
    assert [v.code for _, v in verdicts] == ["NothingRunning"] * 10 + ["EngineStalled"] * 170

    given_up = Sample(180, 180, 0, 0, 256, 51234)
    verdict, memory = decide(policy, memory, given_up, 180)
    assert verdict.code == "EngineStalled"
    verdict, memory = decide(policy, memory, Sample(181, 181, 60, 60, 256, 51300), 181)
    assert verdict.mode == "Off"
    assert verdict.code != "EngineStalled"


def test_o_c8_without_a_token_count_a_stall_is_suspected_but_not_claimed():
    verdicts, _ = play(api.Policy(), [Sample(n, n, 0, 180, 256, None) for n in range(60)])
    assert {verdict.code for _, verdict in verdicts} == {"NothingRunning"}


def test_o_c8_a_token_count_that_appears_late_starts_the_ten_seconds():
    unknown = [Sample(n, n, 0, 9, 256, None) for n in range(30)]
    known = [Sample(n, n, 0, 9, 256, 7) for n in range(30, 60)]
    verdicts, _ = play(api.Policy(), unknown + known)
    assert [now for now, v in verdicts if v.code == "EngineStalled"] == list(range(40, 60))


def test_o_c8_one_reading_without_the_count_neither_ends_nor_proves_a_stall():
    series = [Sample(n, n, 0, 9, 256, None if n in {10, 15} else 7) for n in range(20)]
    verdicts, _ = play(api.Policy(), series)
    assert [now for now, v in verdicts if v.code == "EngineStalled"] == list(range(11, 20))


def test_o_c8_a_repeated_reading_proves_no_stall():
    policy = api.Policy(stale_after_seconds=60)
    verdicts, _ = play(policy, [Sample(n, 0, 0, 9, 256, 7) for n in range(30)])
    assert {verdict.code for _, verdict in verdicts} == {"NothingRunning"}


def test_o_c9_a_count_that_falls_is_a_new_base_not_a_stall():
    policy = api.Policy(dwell_on_seconds=0)
    memory = Memory.resume("On", None, (), 0.0)
    before = [Sample(n, n, 0, 1, 256, 100_000) for n in range(12)]
    verdicts, memory = play(policy, before, memory)
    assert verdicts[-1][1].code == "EngineStalled"
    verdict, memory = decide(policy, memory, Sample(12, 12, 0, 1, 256, 120), 12)
    assert (verdict.code, memory.tokens) == ("BelowThreshold", 120)
    for now in range(13, 23):
        verdict, memory = decide(policy, memory, Sample(now, now, 0, 1, 256, 120), now)
        assert verdict.code == "NothingRunning"
    verdict, memory = decide(policy, memory, Sample(23, 23, 0, 1, 256, 120), 23)
    assert verdict.code == "EngineStalled"


def test_o_e7_the_first_pod_after_zero_has_the_mode_with_its_first_reading():
    memory = Memory.start()
    verdict, memory = decide(api.Policy(), memory, None, 600)
    assert (verdict.mode, verdict.flip) == (None, False)
    verdict, _ = decide(api.Policy(), memory, Sample(600.5, 600.5, 60, 0), 600.5)
    assert (verdict.mode, verdict.flip) == ("Off", False)
