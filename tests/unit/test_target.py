"""What the two loops tell each other, and what of it is told on."""

from dataclasses import replace

import pytest

from specserve.target import TOLD_SECONDS, Notice, Told

CRASH = Notice(("team", "chat"), "Warning", "CrashLooping", "pod chat-0: ended with Error")


@pytest.fixture
def told() -> Told:
    made = Told()
    made.tell("a", CRASH, 0.0)
    return made


def test_a_container_that_keeps_ending_is_told_of_once_in_a_while(told):
    restarted = replace(CRASH, reason="Restarted")
    events = []
    for now in range(1, 1201, 10):
        for notice in (restarted, CRASH):
            if not told.lately("a", notice, float(now)):
                told.tell("a", notice, float(now))
                events.append((now, notice.reason))
    assert events == [(1, "Restarted"), (601, "Restarted"), (601, "CrashLooping")]


@pytest.mark.parametrize(
    ("uid", "notice", "now"),
    [
        ("a", replace(CRASH, message="pod chat-1: ended with Error"), 1.0),
        ("a", replace(CRASH, reason="OutOfGpuMemory"), 1.0),
        ("b", CRASH, 1.0),
        ("a", CRASH, TOLD_SECONDS),
    ],
)
def test_another_pod_reason_or_specserve_is_news_and_so_is_a_later_time(told, uid, notice, now):
    assert told.lately("a", CRASH, 1.0)
    assert not told.lately(uid, notice, now)


def test_a_switch_is_news_each_time(told):
    switch = Notice(("team", "chat"), "Normal", "SpeculationEnabled", "in flight below 32")
    told.tell("a", switch, 1.0)
    assert not told.lately("a", switch, 2.0)
