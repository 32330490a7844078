"""Sets of prompts: none repeats unless asked to, and bad files are named by line."""

import json
from random import Random

import pytest

from specserve.bench.prompts import (
    BadPrompts,
    Prompt,
    RandomIds,
    Written,
    built_in,
    read_lines,
)


def beginnings(prompts, count, characters=16):
    drawn = [prompts.draw() for _ in range(count)]
    return [(each.ids or each.as_text())[:characters] for each in drawn]


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: RandomIds(128, Random(1), ids=range(1000), **more),
        lambda **more: Written("coding", built_in(), Random(1), **more),
        lambda **more: Written("ids", [Prompt(ids=(1, 2, 3))], Random(1), **more),
    ],
)
def test_every_prompt_begins_with_something_new_unless_sharing_is_asked_for(make):
    assert len(set(beginnings(make(), 300))) == 300
    assert len(set(beginnings(make(shared=True), 300))) <= len(built_in())


def test_random_prompts_have_their_length_and_differ_when_shared():
    prompts = RandomIds(100, Random(1), ids=range(1000), shared=True)
    first, second = prompts.draw().ids, prompts.draw().ids
    assert len(first) == len(second) == 100
    assert first[:50] == second[:50]
    assert first[50:] != second[50:]


def test_random_ids_stay_in_their_range():
    drawn = RandomIds(500, Random(1), ids=range(32, 35)).draw().ids
    assert set(drawn) == {32, 33, 34}


def test_a_set_is_gone_through_before_it_repeats():
    written = built_in()
    prompts = Written("coding", written, Random(1), shared=True)
    drawn = [prompts.draw() for _ in written]
    assert sorted(map(repr, drawn)) == sorted(map(repr, written))


def test_the_built_in_set_has_tasks_and_conversations():
    written = built_in()
    assert len(written) >= 20
    assert any(prompt.messages for prompt in written)
    assert all(prompt.as_text() for prompt in written)
    for prompt in written:
        assert prompt.as_messages()[-1]["role"] == "user"


def test_a_file_may_hold_texts_ids_and_conversations():
    conversation = [{"role": "user", "content": "hello"}]
    lines = [
        json.dumps("a text"),
        json.dumps({"prompt": "another", "id": 7}),
        "",
        json.dumps({"input_ids": [1, 2]}),
        json.dumps({"messages": conversation}),
    ]
    texts, other, ids, talk = read_lines(lines, "mine")
    assert (texts.text, other.text, ids.ids) == ("a text", "another", (1, 2))
    assert talk.as_messages() == conversation
    assert texts.as_messages() == [{"role": "user", "content": "a text"}]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "7",
        "{}",
        '""',
        '{"prompt": []}',
        '{"prompt": [true]}',
        '{"prompt": [-1]}',
        '{"messages": [{"role": "user"}]}',
        "[" * 100_000,
    ],
)
def test_a_bad_line_is_named(line):
    with pytest.raises(BadPrompts, match="mine, line 2"):
        read_lines(['"fine"', line], "mine")


def test_an_empty_file_is_no_set():
    with pytest.raises(BadPrompts, match="no prompt"):
        read_lines(["", " "], "mine")
