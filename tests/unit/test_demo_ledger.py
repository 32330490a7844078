"""How the demo counts requests, tokens and flips."""

import json
from itertools import pairwise

import pytest

from tests.demo.curve import Curve
from tests.demo.ledger import Answer, Flip, Flips, Ledger


def chunk(tokens, reason=None, **more):
    body = {
        "text": "x" * tokens,
        "output_ids": list(range(tokens)),
        "meta_info": {"finish_reason": reason, "completion_tokens": tokens, "cached_tokens": 0},
    } | more
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n"


END = {"type": "length", "length": 4}
DONE = b"data: [DONE]\n"


def read(*lines):
    answer = Answer()
    return answer, [answer.feed(line) for line in lines]


def test_chunks_carry_all_tokens_so_far_and_count_what_is_new():
    answer, brought = read(chunk(1), b"\n", chunk(3), b"\n", chunk(4, END), b"\n", DONE, b"\n")
    assert brought == [1, 0, 2, 0, 1, 0, 0, 0]
    assert answer.tokens == 4
    assert answer.problem(4) == ""


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "cut off after 0 of 4 tokens"),
        ([chunk(3)], "cut off after 3 of 4 tokens"),
        ([chunk(4, END)], "cut off after 4 of 4 tokens"),
        ([chunk(3, END), DONE], "3 tokens, 4 were asked for"),
        ([chunk(5, END), DONE], "5 tokens, 4 were asked for"),
        ([chunk(4, END, output_ids=[1, 2]), DONE], "4 tokens, 4 were asked for"),
        ([chunk(4, {"type": "abort"}), DONE], "finish reason abort, not length"),
        ([chunk(4), DONE], "finish reason None, not length"),
        ([chunk(4, END), DONE, chunk(4, END)], "went on after its end"),
        ([b'data: {"error":{"message":"no room"}}\n', DONE], "no room"),
        ([DONE], "its last chunk is not JSON"),
    ],
)
def test_an_answer_that_is_not_whole_says_what_is_wrong(lines, problem):
    answer, _ = read(*lines)
    assert answer.problem(4) == problem


def test_every_request_is_open_finished_or_lost():
    ledger = Ledger()
    ledger.sent = 3
    ledger.end("")
    ledger.end("HTTP 503")
    assert (ledger.open, ledger.finished, ledger.lost.total()) == (1, 1, 1)
    assert ledger.lost == {"HTTP 503": 1}


def test_rates_count_the_tokens_of_whole_bins_of_the_run():
    ledger = Ledger()
    for at, tokens in ((0.0, 10), (0.49, 10), (0.5, 40), (1.99, 100), (2.0, 1000), (9.0, 5000)):
        ledger.arrived(tokens, at)
    assert ledger.series(2.0) == [20, 40, 0, 100]
    assert ledger.rate(0.0, 2.0) == 80.0
    assert ledger.rate(0.5, 1.0) == 80.0
    assert ledger.tokens(0.0, 2.5) == 1160


def test_a_flip_is_a_change_that_the_next_look_confirms():
    flips = Flips()
    flips.observe(0.0, on=False)  # what it does at first is no flip
    flips.observe(1.0, on=None)
    flips.observe(2.0, on=True)
    flips.observe(3.0, on=True)
    flips.observe(4.0, on=False)  # it had not taken an order over yet
    flips.observe(5.0, on=True)
    flips.observe(6.0, on=False)
    flips.observe(7.0, on=None)  # a short look
    flips.observe(8.0, on=False)
    flips.observe(9.0, on=False)
    assert flips.seen == [Flip(2.0, on=True), Flip(8.0, on=False)]
    assert (flips.count(on=True), flips.count(on=False)) == (1, 1)


CURVE = Curve(
    60.0,
    ((0, 28), (8, 28), (10, 150), (20, 150), (22, 28), (60, 28)),
    ((0, 2.0), (28, 1.2), (46, 2.0)),
)


def test_the_load_goes_smoothly_from_corner_to_corner():
    levels = [CURVE.at(tenth / 10) for tenth in range(600)]
    assert sum(a < 150 <= b for a, b in pairwise(levels)) == 1
    assert {CURVE.at(at) for at in (0.0, 8.0, 22.0, 59.9)} == {28}
    assert {CURVE.at(at) for at in (10.0, 15.0, 20.0)} == {150}
    assert CURVE.at(9.0) == 89
    assert max(abs(a - b) for a, b in pairwise(levels)) < 12
    assert (CURVE.low, CURVE.high) == (28, 150)
    assert CURVE.at(-0.1) == CURVE.at(60.0) == 0


def test_requests_are_as_predictable_as_prompts_of_their_time_are():
    assert [CURVE.accepted(at) for at in (-0.1, 0.0, 27.9, 28.0, 45.9, 46.0, 99.0)] == [
        *(2.0, 2.0, 2.0),
        *(1.2, 1.2),
        *(2.0, 2.0),
    ]
    assert CURVE.drop == (28, 46)
    assert Curve(9.0, ((0, 1),), ((0, 2.0),)).drop == (9.0, 9.0)
    assert Curve(9.0, ((0, 1),), ((0, 2.0), (4, 1.5))).drop == (4, 9.0)
