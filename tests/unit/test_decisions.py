"""The decision log: what counts as new, what is kept, how it is told."""

from dataclasses import replace

from specserve.decisions import (
    KEPT,
    LONGEST_REASON,
    ON_RECORD,
    Decision,
    Log,
    Switch,
    difference,
    recent,
    to_json,
)
from specserve.policy import Setting, Verdict

ON = Setting(((1, 3),))
OFF = Setting(((1, 0),))
BELOW = Verdict("On", "BelowThreshold", "on: 3 in flight below 5", flip=False, setting=ON)


def iso(seconds: float) -> str:
    return f"2030-01-01T00:00:{seconds:02.0f}Z"


def test_what_is_new_about_a_verdict():
    assert difference(None, BELOW) == "first"
    assert difference(BELOW, replace(BELOW, reason="on: 4 in flight below 5")) == ""
    assert difference(BELOW, replace(BELOW, code="WithinBand")) == "reason"
    assert difference(BELOW, replace(BELOW, mode="Off", setting=OFF)) == "mode"
    assert difference(BELOW, replace(BELOW, setting=Setting(((1, 3), (49, 0))))) == "setting"


def test_a_probe_and_the_way_back_are_no_change_of_mode():
    off = replace(BELOW, mode="Off", code="BelowBreakEven", setting=OFF)
    looking = replace(off, mode="On", code="Probing", setting=ON, probe=True)
    assert difference(off, looking) == "probe"
    assert difference(looking, looking) == ""
    back = replace(off, probe=True)
    assert difference(looking, back) == "probe"
    assert difference(back, off) == ""
    # One that changes the decision is the decision.
    assert difference(looking, replace(off, code="AboveBreakEven", mode="On", flip=True)) == "mode"


def test_changes_of_mode_outlast_all_else():
    log = Log()
    log.add(Decision(0.0, "p", BELOW, "first"))
    for second in range(5 * KEPT):
        log.add(Decision(1.0 + second, "p", BELOW, "reason"))
    assert len(log) == KEPT + 1
    assert log.entries[0].what == "first"
    assert log.entries == sorted(log.entries, key=lambda one: one.at)
    log.add(Decision(9999.0, "p", BELOW, "reason"), most=10)
    assert len(log) == 11


def test_how_it_is_told():
    verdict = replace(BELOW, numbers=(("running", 3.0),), setting=Setting(((1, 3), (49, 0))))
    assert to_json([Decision(7.0, "chat-0", verdict, "mode")], iso) == [
        {
            "time": "2030-01-01T00:00:07Z",
            "pod": "chat-0",
            "what": "mode",
            "mode": "On",
            "code": "BelowThreshold",
            "reason": "on: 3 in flight below 5",
            "setting": {
                "tiers": [{"minBatch": 1, "steps": 3}, {"minBatch": 49, "steps": 0}],
                "draftKv": "Cold",
            },
            "probe": False,
            "numbers": {"running": 3.0},
        }
    ]
    (told,) = to_json([Decision(7.0, "chat-0", replace(BELOW, setting=None), "mode")], iso)
    assert told["setting"] is None


def test_the_record_in_the_status_grows_by_what_is_new_and_stays_short():
    first = recent([], [Switch(1.0, "p", "Off", "off: why")], iso)
    assert first == [
        {"time": iso(1), "pod": "p", "mode": "Off", "reason": "off: why"},
    ]
    # The same switches again, as at every look: nothing is new.
    assert recent(first, [Switch(1.0, "p", "Off", "off: why")], iso) == first
    # A new process has seen nothing: what is on record stays.
    assert recent(first, [], iso) == first
    more = [Switch(2.0 + n, "p", "On", "x" * 2000) for n in range(9)]
    grown = recent(first, more, iso)
    assert [entry["time"] for entry in grown] == [iso(n) for n in range(6, 11)]
    assert len(grown) == ON_RECORD
    assert all(len(entry["reason"]) == LONGEST_REASON for entry in grown)
    together = [Switch(3.0, f"p{n}", "On", "on") for n in range(9)]
    once = recent([], together, iso)
    assert recent(once, together, iso) == once
    assert recent(grown, more, iso) == grown
