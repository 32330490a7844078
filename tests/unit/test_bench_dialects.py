"""How requests are written and answers read: whole or lost, on all three routes."""

import json

import pytest

from specserve.bench.dialects import Answer, Api, Wish, body_of, refusal
from specserve.bench.prompts import Prompt

TEXT = Prompt(text="hello")
IDS = Prompt(ids=(1, 2, 3))
TALK = Prompt(messages=({"role": "system", "content": "be brief"},))


def wish(api=Api.GENERATE, *, stream=True, **more):
    return Wish(api, "a-model", 8, stream, **more)


def read(asked, lines, *, done=True):
    answer = Answer(asked, 1.0)
    for number, line in enumerate([*lines, "[DONE]"] if done else lines):
        data = line if isinstance(line, str) else json.dumps(line)
        answer.feed(f"data: {data}\n".encode(), 2.0 + number)
        answer.feed(b"\n", 2.0 + number)
    return answer.outcome(9.0)


def generated(tokens, **meta):
    return {"text": "x" * tokens, "meta_info": {"completion_tokens": tokens, **meta}}


def completed(text, **more):
    return {"choices": [{"index": 0, "text": text}], "usage": None, **more}


def said(**delta):
    return {"choices": [{"index": 0, "delta": delta}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 8}}
STREAMS = {
    Api.GENERATE: [generated(1), generated(8, spec_verify_ct=3, spec_num_correct_drafts=5)],
    Api.COMPLETIONS: [completed("a"), completed("b"), USAGE],
    Api.CHAT: [said(role="assistant", content=""), said(content="a"), said(), USAGE],
}


@pytest.mark.parametrize("api", list(Api))
def test_a_whole_stream_has_no_problem(api):
    outcome = read(wish(api), STREAMS[api])
    assert (outcome.problem, outcome.tokens) == ("", 8)
    assert outcome.first == (3.0 if api is Api.CHAT else 2.0)
    assert outcome.ended == 9.0


def test_rounds_are_read_where_the_server_tells_them():
    outcome = read(wish(), STREAMS[Api.GENERATE])
    assert (outcome.verifies, outcome.accepted) == (3, 5)
    assert read(wish(Api.CHAT), STREAMS[Api.CHAT]).verifies is None


@pytest.mark.parametrize("api", list(Api))
def test_a_stream_without_its_last_event_is_lost(api):
    assert read(wish(api), STREAMS[api], done=False).problem == "cut off"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([generated(7)], "wrong number of tokens"),
        ([generated(9)], "wrong number of tokens"),
        ([{"error": {"message": "no such parameter"}}], "error: no such parameter"),
        (["nonsense"], "no token count in the answer"),
        ([], "no token count in the answer"),
    ],
)
def test_other_streams_are_lost_too(lines, problem):
    assert read(wish(), lines).problem == problem


def test_an_answer_may_be_shorter_where_the_model_may_end_it():
    assert read(wish(until_end=True), [generated(3)]).problem == ""
    assert read(wish(until_end=True), [generated(0)]).problem == "wrong number of tokens"


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.GENERATE, generated(8)),
        (Api.COMPLETIONS, {"choices": [{"text": "x"}], "usage": {"completion_tokens": 8}}),
    ],
)
def test_an_answer_that_is_no_stream(api, body):
    answer = Answer(wish(api, stream=False), 1.0)
    answer.whole(json.dumps(body).encode())
    outcome = answer.outcome(2.0)
    assert (outcome.problem, outcome.tokens, outcome.first) == ("", 8, None)


def test_what_went_wrong_outside_comes_first():
    answer = Answer(wish(), 1.0)
    assert answer.outcome(2.0, "no answer in time").problem == "no answer in time"


def test_bodies_ask_for_an_exact_length():
    generate = body_of(wish(), IDS)
    assert generate["input_ids"] == [1, 2, 3]
    assert generate["sampling_params"] == {
        "max_new_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    completion = body_of(wish(Api.COMPLETIONS), TALK)
    assert completion["prompt"] == "be brief"
    assert completion["ignore_eos"] is True
    assert completion["stream_options"] == {"include_usage": True}
    chat = body_of(wish(Api.CHAT, stream=False, until_end=True), TEXT)
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert "stream" not in chat
    assert "ignore_eos" not in chat


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ('{"error": "Unauthorized"}', "HTTP 418 Unauthorized"),
        ('{"error": {"message": "too long"}}', "HTTP 418 too long"),
        ('{"object": "error", "message": "bad"}', "HTTP 418 bad"),
        ('{"detail": "Not Found"}', "HTTP 418 Not Found"),
        ("upstream connect error", "HTTP 418 upstream connect error"),
        ("", "HTTP 418"),
    ],
)
def test_every_shape_of_error_is_read(text, label):
    assert refusal(418, text) == label
