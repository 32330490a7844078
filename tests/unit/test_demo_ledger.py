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


def test_a_flip_is_a_change_of_mode_under_a_new_order():
    flips = Flips()
    flips.observe(0.0, on=True, epoch=0)  # its own choice, nobody has steered it yet
    flips.observe(1.0, on=False, epoch=1)  # the first order is no flip
    flips.observe(2.0, on=False, epoch=1)
    flips.observe(3.0, on=None, epoch=2)
    flips.observe(4.0, on=True, epoch=2)
    flips.observe(5.0, on=True, epoch=3)
    flips.observe(6.0, on=False, epoch=4)
    assert flips.seen == [Flip(4.0, on=True), Flip(6.0, on=False)]
    assert (flips.count(on=True), flips.count(on=False)) == (1, 1)


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_each_wave_rises_to_the_top_once_and_ends_low(waves):
    curve = Curve(seconds=55.0 * waves, low=28, high=150, waves=waves)
    levels = [curve.at(tenth / 10) for tenth in range(550 * waves)]
    tops = sum(a < 150 <= b for a, b in pairwise(levels))
    assert tops == waves
    assert set(levels[-100:]) == {28}
    assert min(levels) == 28
    assert max(levels) == 150
    assert curve.at(-0.1) == curve.at(55.0 * waves) == 0
