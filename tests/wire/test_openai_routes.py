"""The simulated engine's OpenAI routes: shapes as SGLang 0.5.23 answered, streams, errors."""

from __future__ import annotations

import contextlib
import json

import aiohttp
import pytest

from specserve_sim.engine import EngineConfig
from specserve_sim.launch import running_engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NEW = 24
USAGE = {
    "prompt_tokens": "int",
    "total_tokens": "int",
    "completion_tokens": "int",
    "prompt_tokens_details": "null",
    "reasoning_tokens": "int",
    "completion_tokens_details": "null",
}
ENDED = {"logprobs": "null", "finish_reason": "str", "matched_stop": "null"}
GOES_ON = ENDED | {"finish_reason": "null"}
HEAD = {"id": "str", "object": "str", "created": "int", "model": "str"}
METADATA = {
    "weight_version": "str",
    "weight_versions": [{"version": "str", "start": "int", "end": "int"}],
}
ERROR = {"object": "str", "message": "str", "type": "str", "param": "null", "code": "int"}


def shape(value):
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    names = {str: "str", bool: "bool", int: "int", float: "float", type(None): "null"}
    return names[type(value)]


class Client:
    def __init__(self, session, running):
        self.session = session
        self.engine = running.engine
        self.url = running.url

    async def send(self, route, body):
        async with self.session.post(self.url + route, json=body) as answer:
            return answer.status, answer.content_type, await answer.text()

    async def ask(self, route, **body):
        status, kind, text = await self.send(route, prompt_of(route) | body)
        assert kind == "application/json", text
        return status, json.loads(text)

    async def stream(self, route, **body):
        """The events of a stream, which has to end with [DONE]."""
        asked = prompt_of(route) | {"stream": True} | body
        status, kind, text = await self.send(route, asked)
        assert (status, kind) == (200, "text/event-stream"), text
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


def prompt_of(route):
    common = {"model": "sim", "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    if route == CHAT:
        return common | {"messages": [{"role": "user", "content": "a prompt of few words"}]}
    return common | {"prompt": "a prompt of few words"}


@contextlib.asynccontextmanager
async def client_of(config):
    async with running_engine(config) as running, aiohttp.ClientSession() as session:
        yield Client(session, running)


@pytest.fixture
async def client():
    async with client_of(EngineConfig(time_scale=20.0)) as client:
        yield client


# Whole answers


async def test_a_completion_looks_as_recorded(client):
    status, answer = await client.ask(COMPLETIONS)
    assert status == 200
    choice = {"index": "int", "text": "str"} | ENDED
    assert shape(answer) == HEAD | {"choices": [choice], "usage": USAGE, "metadata": METADATA}
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == NEW
    assert answer["metadata"]["weight_versions"][0]["end"] == NEW


async def test_a_chat_answer_looks_as_recorded(client):
    status, answer = await client.ask(CHAT)
    assert status == 200
    message = {"role": "str", "content": "str", "reasoning_content": "null"}
    choice = {"index": "int", "message": message} | ENDED
    assert shape(answer) == HEAD | {"choices": [choice], "usage": USAGE, "metadata": METADATA}
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"


async def test_any_model_is_served_and_echoed(client):
    assert (await client.ask(CHAT, model="other"))[1]["model"] == "other"


async def test_meta_info_comes_with_chat_choices_on_request(client):
    (choice,) = (await client.ask(CHAT, return_meta_info=True))[1]["choices"]
    assert choice["meta_info"]["completion_tokens"] == NEW
    assert choice["meta_info"]["spec_verify_ct"] > 0
    (plain,) = (await client.ask(COMPLETIONS, return_meta_info=True))[1]["choices"]
    assert "meta_info" not in plain


async def test_choices_share_one_prompt(client):
    answer = (await client.ask(CHAT, n=2, max_tokens=4))[1]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    one = (await client.ask(CHAT))[1]["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens"] == one
    assert answer["usage"]["completion_tokens"] == 8


async def test_prompts_can_be_several_and_token_ids(client):
    answer = (await client.ask(COMPLETIONS, prompt=[[1, 2, 3], [4, 5]]))[1]
    assert len(answer["choices"]) == 2
    assert answer["usage"]["prompt_tokens"] == 5
    assert (await client.ask(COMPLETIONS, prompt=[1, 2, 3]))[1]["usage"]["prompt_tokens"] == 3


async def test_a_completion_without_a_limit_has_sixteen_tokens(client):
    usage = (await client.ask(COMPLETIONS, max_tokens=None))[1]["usage"]
    assert usage["completion_tokens"] == 16


async def test_a_prompt_sets_its_acceptance(client):
    answer = (await client.ask(CHAT, custom_params={"accept_length": 4.0}, return_meta_info=True))[
        1
    ]
    meta = answer["choices"][0]["meta_info"]
    assert meta["spec_num_correct_drafts"] == 3 * meta["spec_verify_ct"]


# Streams


@pytest.mark.parametrize("usage", [False, True])
async def test_a_completion_stream_looks_as_recorded(client, usage):
    events = await client.stream(COMPLETIONS, stream_options={"include_usage": usage})
    if usage:
        last = events.pop()
        details = {"prompt_tokens_details", "completion_tokens_details"}
        kept = {name: kind for name, kind in USAGE.items() if name not in details}
        assert shape(last) == HEAD | {"choices": [], "usage": kept}
        assert last["usage"]["completion_tokens"] == NEW
    for event, kind in (*((event, GOES_ON) for event in events[:-1]), (events[-1], ENDED)):
        choice = {"index": "int", "text": "str"} | kind
        assert shape(event) == HEAD | {"choices": [choice], "usage": "null"}
    whole = (await client.ask(COMPLETIONS))[1]["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("running", [False, True])
async def test_a_chat_stream_looks_as_recorded(client, running):
    options = {"include_usage": running, "continuous_usage_stats": running}
    events = await client.stream(CHAT, stream_options=options)
    if running:
        last = events.pop()
        assert shape(last) == HEAD | {"choices": [], "usage": USAGE}
        assert last["usage"]["completion_tokens"] == NEW
    first, *middle, end = events
    role = {"reasoning_content": "null", "role": "str", "content": "str"}
    assert shape(first) == HEAD | {"choices": [{"index": "int", "delta": role} | GOES_ON]}
    assert first["choices"][0]["delta"]["content"] == ""
    text = {"reasoning_content": "null", "content": "str"}
    more = {"usage": USAGE} if running else {}
    for event in middle:
        delta = {"index": "int", "delta": text} | GOES_ON
        assert shape(event) == HEAD | {"choices": [delta]} | more
    closing = {"index": "int", "delta": {"reasoning_content": "null"}} | ENDED
    assert shape(end) == HEAD | {"choices": [closing]}
    whole = (await client.ask(CHAT))[1]["choices"][0]["message"]["content"]
    assert "".join(event["choices"][0]["delta"]["content"] for event in middle) == whole
    if running:
        counts = [event["usage"]["completion_tokens"] for event in middle]
        assert counts == sorted(counts)
        assert counts[-1] == NEW


async def test_a_stream_that_is_cut_has_no_last_event(client):
    body = prompt_of(CHAT) | {"stream": True, "max_tokens": 100_000}
    async with client.session.post(client.url + CHAT, json=body) as answer:
        await answer.content.readuntil(b"\n\n")
        client.engine.restart()
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


# Errors


@pytest.mark.parametrize(
    ("route", "body", "kind"),
    [
        (CHAT, {"messages": None}, "Bad Request"),
        (CHAT, {"messages": []}, "BadRequestError"),
        (CHAT, {"messages": [{"role": "user"}]}, "Bad Request"),
        (CHAT, {"temperature": -1}, "BadRequestError"),
        (CHAT, {"return_meta_info": True, "stream": True}, "BadRequest"),
        (CHAT, {"max_tokens": 10**9, "stream": True}, "BadRequestError"),
        (CHAT, {"n": 0}, "Bad Request"),
        (CHAT, {"n": 2, "stream": True}, "BadRequestError"),
        (COMPLETIONS, {"prompt": "x" * 10**6}, "BadRequestError"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "Bad Request"),
        (COMPLETIONS, {"stream_options": 1}, "Bad Request"),
    ],
)
async def test_a_refusal_is_a_plain_400_in_streams_too(client, route, body, kind):
    status, answer = await client.ask(route, **body)
    assert status == 400
    assert shape(answer) == ERROR
    assert (answer["object"], answer["type"], answer["code"]) == ("error", kind, 400)
    load = client.engine.loads()[0]
    assert (load.running, load.queued) == (0, 0)


async def test_each_kind_of_error_has_its_own_body():
    async with client_of(EngineConfig(api_key="user")) as client:
        assert (await client.ask(CHAT)) == (401, {"error": "Unauthorized"})
        bearer = {"Authorization": "Bearer user"}
        async with client.session.get(client.url + CHAT, headers=bearer) as answer:
            assert (answer.status, await answer.json()) == (405, {"detail": "Method Not Allowed"})
        async with client.session.post(
            client.url + CHAT, headers=bearer, data="{not json"
        ) as answer:
            assert answer.status == 400
            assert shape(await answer.json()) == ERROR
        async with client.session.post(
            client.url + "/generate", headers=bearer, json={}
        ) as answer:
            assert answer.status == 400
            assert shape(await answer.json()) == {"error": {"message": "str"}}
