"""History of conditions: transitions, order, completeness."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve import api, conditions
from specserve.conditions import TYPES, Condition, merge

THEN = "2026-01-01T00:00:00Z"
NOW = "2026-01-01T00:05:00Z"

observations = st.lists(
    st.builds(
        Condition,
        type=st.sampled_from(TYPES),
        status=st.sampled_from(["True", "False", "Unknown"]),
        reason=st.sampled_from([conditions.REPLICAS_READY, conditions.SAMPLES_STALE]),
        message=st.text(max_size=20),
    ),
    max_size=12,
)


def by_type(published: list[dict], kind: str) -> dict:
    (found,) = [item for item in published if item["type"] == kind]
    return found


def test_the_first_visit_publishes_every_type():
    published = merge([], [], 1, NOW)
    assert [item["type"] for item in published] == list(TYPES)
    assert {item["status"] for item in published} == {"Unknown"}
    assert {item["lastTransitionTime"] for item in published} == {NOW}
    assert {item["reason"] for item in published} == {"NotObserved"}


def test_an_unchanged_status_keeps_its_time_while_words_and_generation_follow():
    ready = Condition("Ready", "False", "ReplicasNotReady", "0 of 2 ready")
    old = merge([], [ready], 1, THEN)
    new = merge(old, [Condition("Ready", "False", "CrashLoop", "pod a-1 restarts")], 2, NOW)
    assert by_type(new, "Ready") == {
        "type": "Ready",
        "status": "False",
        "reason": "CrashLoop",
        "message": "pod a-1 restarts",
        "lastTransitionTime": THEN,
        "observedGeneration": 2,
    }


def test_a_changed_status_gets_the_time():
    old = merge([], [Condition("Ready", "False", "ReplicasNotReady")], 1, THEN)
    new = merge(old, [Condition("Ready", "True", "ReplicasReady")], 1, NOW)
    assert by_type(new, "Ready")["lastTransitionTime"] == NOW


def test_what_was_not_observed_stays_word_for_word():
    old = merge([], [Condition("MetricsFresh", "False", "SamplesStale", "7 s")], 1, THEN)
    new = merge(old, [Condition("Ready", "True", "ReplicasReady")], 2, NOW)
    assert by_type(new, "MetricsFresh") == by_type(old, "MetricsFresh")


def test_one_is_counted_in_the_singular():
    assert [conditions.counted(n, "flip") for n in (0, 1, 2)] == ["0 flips", "1 flip", "2 flips"]


def test_the_last_word_on_a_type_counts():
    words = [Condition("Ready", "True", "ReplicasReady"), Condition("Ready", "False", "CrashLoop")]
    assert by_type(merge([], words, 1, NOW), "Ready")["reason"] == "CrashLoop"


def test_types_of_others_and_of_the_past_are_left_to_them():
    foreign = {"type": "Audited", "status": "True", "lastTransitionTime": THEN}
    assert "Audited" not in {item["type"] for item in merge([foreign], [], 1, NOW)}


@pytest.mark.parametrize("broken", [{"type": "Ready", "status": "Unknown"}, {}])
def test_a_damaged_history_heals(broken):
    published = merge([broken], [Condition("Ready", "Unknown", "NotObserved")], 1, NOW)
    assert by_type(published, "Ready")["lastTransitionTime"] == NOW


def test_a_message_beyond_the_schema_is_cut_rather_than_refused():
    published = merge([], [Condition("Ready", "False", "SpecRejected", "x" * 50_000)], 1, NOW)
    assert len(by_type(published, "Ready")["message"]) == 32_768


@given(first=observations, second=observations)
def test_merge_is_idempotent_ordered_and_complete(first, second):
    once = merge(merge([], first, 1, THEN), second, 2, NOW)
    again = merge(once, second, 2, "2026-01-01T00:10:00Z")
    assert again == once
    assert [item["type"] for item in once] == list(TYPES)
    for item in once:
        api.Condition.model_validate(item)


def test_the_status_has_room_for_every_type():
    assert len(TYPES) <= 16
    assert {"Ready", "Reconciling", "Stalled"} <= set(TYPES)


def test_reasons_and_types_are_what_the_api_machinery_takes():
    names = [
        value
        for name, value in vars(conditions).items()
        if name.isupper() and isinstance(value, str)
    ]
    assert names
    assert all(value.isalnum() and value[0].isupper() for value in names)
    constants = {value for value in names if value in TYPES}
    assert constants == set(TYPES)
