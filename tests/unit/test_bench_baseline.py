"""A second server is asked in its own vocabulary: an id beyond it ends a real SGLang."""

import argparse
import contextlib
import json
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from specserve.bench import command, connection

#: Of two models; what the first one's tokenizer makes lies beyond the other one's vocabulary.
LARGE, SMALL = range(100, 200), range(50)


@dataclass
class Model:
    """An OpenAI-compatible server with a vocabulary; it takes ids of others, and remembers them.

    Attributes:
        vocabulary: Ids that its tokenizer makes.
        tokenizes: Whether it has the route for that.
        url: Where it is.
        asked: What it was asked to go on with.
    """

    vocabulary: range
    tokenizes: bool = True
    url: str = ""
    asked: list = field(default_factory=list)

    async def models(self, _):
        return web.json_response({"data": [{"id": "chat"}]})

    async def tokenize(self, _):
        return web.json_response({"tokens": list(self.vocabulary)})

    async def complete(self, request):
        body = await request.json()
        self.asked.append(body["prompt"])
        usage = {"completion_tokens": body["max_tokens"]}
        return web.json_response({"choices": [{"text": "so"}], "usage": usage})

    @property
    def ids(self):
        """All token ids that it was sent."""
        return {each for prompt in self.asked for each in prompt}


@contextlib.asynccontextmanager
async def serving(model):
    app = web.Application()
    app.router.add_get("/v1/models", model.models)
    app.router.add_post("/v1/completions", model.complete)
    if model.tokenizes:
        app.router.add_post("/tokenize", model.tokenize)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    model.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield model
    finally:
        await runner.cleanup()


async def compare(one, other, *given):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(
        [
            *("bench", "--quiet", "--url", one.url, "--baseline", other.url, "--no-stream"),
            *("--api", "completions", "--levels", "2", "--max-new-tokens", "4", *given),
        ]
    )
    return await command.measure(options, connection.connection_of(options, {}))


async def test_random_ids_are_of_the_vocabulary_of_whom_they_are_sent_to():
    async with serving(Model(LARGE)) as one, serving(Model(SMALL)) as other:
        assert await compare(one, other, "--prompts", "random", "--prompt-tokens", "32") == 0
    assert one.ids <= set(LARGE)
    assert other.ids <= set(SMALL)
    assert {len(prompt) for prompt in one.asked + other.asked} == {32}


async def test_texts_are_the_same_for_both():
    async with serving(Model(LARGE)) as one, serving(Model(SMALL)) as other:
        assert await compare(one, other) == 0
    assert all(isinstance(prompt, str) for prompt in one.asked + other.asked)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Model(SMALL), "differ, so the same token ids cannot be meant for both"),
        (Model(LARGE, tokenizes=False), "does not tell which token ids it knows; give texts"),
    ],
)
async def test_ids_of_a_file_are_not_sent_to_a_server_that_may_not_know_them(
    tmp_path, capsys, other, words
):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"input_ids": [*LARGE]}) + "\n")
    async with serving(Model(LARGE)) as one, serving(other):
        assert await compare(one, other, "--prompts", str(file)) == 2
        assert words in capsys.readouterr().err
        assert not one.asked
        assert not other.asked


async def test_ids_of_a_file_are_sent_to_both_where_their_tokenizers_agree(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"input_ids": [*LARGE]}) + "\n")
    async with serving(Model(LARGE)) as one, serving(Model(LARGE)) as other:
        assert await compare(one, other, "--prompts", str(file)) == 0
    assert one.ids == other.ids == set(LARGE)
