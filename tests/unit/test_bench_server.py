"""Which token ids may be sent: an id beyond the vocabulary ends a real SGLang."""

import pytest

from specserve.bench.client import Reply
from specserve.bench.connection import Connection
from specserve.bench.server import ANY_IDS, NotServing, Server, known_ids

PLACE = Connection("http://engine:30000", "http://engine:9470", api_key="user")
SGLANG = Server("chat", {"tp_size": 1, "version": "0.5.23"})


class Tokenizer:
    """Answers like the route /tokenize."""

    def __init__(self, status, body):
        self.reply = Reply(status, "", body)
        self.asked = []

    async def call(self, method, url, **more):
        self.asked.append((method, url, more))
        return self.reply


async def test_ids_are_those_that_the_server_makes_of_texts_itself():
    client = Tokenizer(200, {"tokens": [*range(40, 20, -1), 30], "count": 21})
    assert await known_ids(client, PLACE, SGLANG) == list(range(21, 41))
    ((method, url, more),) = client.asked
    assert (method, url, more["bearer"]) == ("POST", "http://engine:30000/tokenize", "user")
    assert more["body"]["model"] == "chat"
    assert more["body"]["add_special_tokens"] is False
    assert len(more["body"]["prompt"]) > 1000


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, {}),
        (500, {"tokens": list(range(100))}),
        (200, {"tokens": [1, 2, 3]}),  # of so few, prompts would repeat
        (200, {"tokens": [[1, 2]]}),
        (200, {"tokens": "1 2 3"}),
        (200, {}),
    ],
)
async def test_without_them_a_range_has_to_be_given(status, body):
    with pytest.raises(NotServing, match="--id-range"):
        await known_ids(Tokenizer(status, body), PLACE, SGLANG)


async def test_the_simulated_engine_takes_any():
    client = Tokenizer(404, {})
    assert await known_ids(client, PLACE, Server("chat", {"simulated": True})) == ANY_IDS
    assert not client.asked
