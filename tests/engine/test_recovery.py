"""The figures of the study of recovery, from counts that are known."""

import pytest

from tests.engine.recovery import BIN, Reading, accept_length, back_after, course


def test_acceptance_is_of_the_verifies_between_two_readings():
    spans = [(Reading(0, 10, 30), Reading(9, 14, 35)), (Reading(50, 20, 50), Reading(58, 24, 54))]
    assert accept_length(spans) == 1 + (5 + 4) / 8
    assert accept_length([(Reading(0, 3, 1), Reading(90, 3, 1))]) is None


def test_the_course_is_told_by_the_tokens_of_one_request():
    readings = [Reading(100, 5, 9)]
    for _ in range(16):  # two requests, nothing accepted
        readings.append(Reading(readings[-1].tokens + 2, readings[-1].verifies + 2, 9))
    for _ in range(8):  # three drafts each
        last = readings[-1]
        readings.append(Reading(last.tokens + 8, last.verifies + 2, last.accepted + 6))
    assert course(readings, 2) == {0: 1, BIN: 4, 2 * BIN: 4}


@pytest.mark.parametrize(
    ("lengths", "after"),
    [
        ({0: 4.0, 16: 3.9}, 0),
        ({0: 1.0, 16: 1.2, 32: 3.8}, 32),
        ({0: 3.9, 16: 1.2, 32: 3.8}, 32),
        ({0: 1.0, 16: 1.2}, None),
        ({}, None),
    ],
)
def test_it_is_back_where_acceptance_stays_high(lengths, after):
    assert back_after(lengths, before=4.0) == after
