"""What a server is: its kind, its model and how it was started, as far as it tells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specserve.bench.client import Client, Reply, Unreachable
from specserve.bench.connection import REFUSALS, Connection, Refused
from specserve.bench.dialects import Api
from specserve.bench.prompts import built_in

#: Ids for the simulated engine, which has no tokenizer and takes any.
ANY_IDS: Final = range(1_000, 30_000)
#: Fewer different ids than this make prompts that a prefix cache has seen.
FEWEST_IDS: Final = 16


class NotServing(Exception):
    """No server that could be measured; the message says what was tried and what came back."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server as it describes itself.

    Attributes:
        model: Name to ask for.
        info: SGLang's own description of its settings; empty for other servers. It may hold keys:
            only `facts` may be shown.
    """

    model: str
    info: Mapping[str, Any]

    @property
    def is_sglang(self) -> bool:
        """Whether SGLang's own routes are there."""
        return bool(self.info)

    @property
    def may_speculate(self) -> bool:
        """Whether it has a draft, or does not tell."""
        return not self.is_sglang or bool(self.info.get("speculative_algorithm"))

    def facts(self) -> dict[str, Any]:
        """What belongs into a report: versions and settings that matter, and no key."""
        info = self.info
        facts = {
            "model": info.get("model_path", self.model),
            "servedModelName": self.model,
            "draft": info.get("speculative_draft_model_path"),
            "algorithm": info.get("speculative_algorithm"),
            "engine": info.get("version"),
            "tensorParallel": info.get("tp_size"),
            "dataParallel": info.get("dp_size"),
            "dtype": info.get("dtype"),
            "quantization": info.get("quantization"),
            "attentionBackend": info.get("attention_backend"),
            "maxRunningRequests": info.get("max_running_requests"),
            "simulated": info.get("simulated"),
        }
        return {name: value for name, value in facts.items() if value is not None}


async def describe(client: Client, connection: Connection) -> Server:
    """Ask a server what it is.

    Raises:
        NotServing: It serves no model.
        Refused: It refuses the key.
        Unreachable: No answer.
    """
    url = f"{connection.url}/v1/models"
    reply = await client.call("GET", url, bearer=connection.api_key)
    if reply.status in REFUSALS:
        raise Refused.key(url, connection.api_key)
    cards = reply.body.get("data")
    if reply.status != 200 or not isinstance(cards, list) or not cards:
        raise NotServing(f"{connection.url}/v1/models: HTTP {reply.status}, no model there")
    return Server(model=str(cards[0].get("id")), info=await _info(client, connection))


async def _info(client: Client, connection: Connection) -> Mapping[str, Any]:
    url = f"{connection.url}/server_info"
    try:
        reply = await client.call("GET", url, bearer=connection.api_key)
    except Unreachable:
        return {}
    refuse_wrong_key(url, reply, connection)
    told = reply.status == 200 and ("tp_size" in reply.body or "internal_states" in reply.body)
    return reply.body if told else {}


def refuse_wrong_key(url: str, reply: Reply, connection: Connection) -> None:
    """Refuse a key that a route does not know, where others asked for none.

    Without a key, and where a route is closed to everybody (403), it is only not shown.

    Raises:
        Refused: The route does not know the key that was sent.
    """
    if reply.status == 401 and connection.api_key is not None:
        raise Refused.key(url, connection.api_key)


async def known_ids(client: Client, connection: Connection, server: Server) -> Sequence[int]:
    """Token ids that are sure to be in the vocabulary: of what the server's tokenizer makes.

    SGLang does not look whether an id is in the vocabulary: one beyond it ends the scheduler, and
    the server with it. No route tells the size of the vocabulary.

    Raises:
        NotServing: The server does not tell.
        Unreachable: No answer.
    """
    if server.info.get("simulated"):
        return ANY_IDS
    text = "\n\n".join(prompt.as_text() for prompt in built_in())
    reply = await client.call(
        "POST",
        f"{connection.url}/tokenize",
        bearer=connection.api_key,
        body={"model": server.model, "prompt": text, "add_special_tokens": False},
    )
    tokens = reply.body.get("tokens") if reply.status == 200 else None
    if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens):
        ids = sorted(set(tokens))
        if len(ids) >= FEWEST_IDS:
            return ids
    raise NotServing(
        f"{connection.url}/tokenize: HTTP {reply.status}, the server does not tell which token "
        "ids it knows; give --id-range, within the model's vocabulary"
    )


async def same_ids(
    client: Client, one: tuple[Connection, Server], other: tuple[Connection, Server]
) -> None:
    """Refuse to send the same token ids to two servers, unless their tokenizers agree on ids.

    Args:
        client: To ask with.
        one: A server, and how it describes itself.
        other: Another one, likewise.

    Raises:
        NotServing: They do not, or one of them does not tell.
        Unreachable: No answer.
    """
    texts = "give texts, which each server tokenizes for itself, or measure them in two runs"
    try:
        agree = await known_ids(client, *one) == await known_ids(client, *other)
    except NotServing as error:
        why = str(error).partition(";")[0]
        raise NotServing(f"--prompts: token ids for two servers: {why}; {texts}") from None
    if not agree:
        raise NotServing(
            f"--prompts: the tokenizers of {one[0].url} and {other[0].url} differ, so the same "
            f"token ids cannot be meant for both (one beyond a vocabulary ends SGLang); {texts}"
        )


def api_for(server: Server, wanted: str, *, ids: bool) -> Api:
    """The route to use: the one that was asked for, else the best of what the server has.

    Args:
        server: The server.
        wanted: `auto`, or a route's name.
        ids: Whether prompts are token ids, which a chat cannot be given.

    Raises:
        NotServing: The route cannot take such prompts.
    """
    if wanted == "auto":
        return Api.GENERATE if server.is_sglang else Api.COMPLETIONS if ids else Api.CHAT
    if ids and wanted == Api.CHAT:
        raise NotServing(
            "--api chat cannot take prompts of token ids; use generate or completions"
        )
    return Api(wanted)
