"""What a server is: its kind, its model and how it was started, as far as it tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve.bench.client import Client, Unreachable
from specserve.bench.connection import Connection
from specserve.bench.dialects import Api


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
        NotServing: It refuses the key, or serves no model.
        Unreachable: No answer.
    """
    reply = await client.call("GET", f"{connection.url}/v1/models", bearer=connection.api_key)
    if reply.status in {401, 403}:
        raise NotServing(
            f"{connection.url}: HTTP {reply.status}, the API key does not fit: give --api-key-file"
        )
    cards = reply.body.get("data")
    if reply.status != 200 or not isinstance(cards, list) or not cards:
        raise NotServing(f"{connection.url}/v1/models: HTTP {reply.status}, no model there")
    return Server(model=str(cards[0].get("id")), info=await _info(client, connection))


async def _info(client: Client, connection: Connection) -> Mapping[str, Any]:
    try:
        reply = await client.call(
            "GET", f"{connection.url}/server_info", bearer=connection.api_key
        )
    except Unreachable:
        return {}
    told = reply.status == 200 and ("tp_size" in reply.body or "internal_states" in reply.body)
    return reply.body if told else {}


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
