"""How the GPUs and the requests of one engine are divided, and whether its limits fit together.

Rules of SGLang 0.5.14 to 0.5.23: `--max-running-requests` holds for each copy of the model, so
that plain data parallelism multiplies it; attention data parallelism divides it among its groups.
A scheduler also runs no more requests than half the tokens that its KV cache holds.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from specserve.conditions import counted

#: Tokens that SGLang wants in the KV cache for each request at the least.
TOKENS_PER_REQUEST: Final = 2

_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T|)")
_FACTORS: Final[Mapping[str, int]] = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """The division of an engine.

    Attributes:
        tensor: GPUs that share the layers of one copy of the model.
        pipeline: stages that its layers are spread over.
        copies: copies of the model (plain data parallelism).
        attention: groups inside a copy that keep requests of their own (attention data
            parallelism).
    """

    tensor: int = 1
    pipeline: int = 1
    copies: int = 1
    attention: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of the pod; attention groups share those of their copy."""
        return self.tensor * self.pipeline * self.copies

    @property
    def ranks(self) -> int:
        """Data-parallel ranks, each with a batch and a queue of its own."""
        return self.copies * self.attention

    def batch(self, limit: int) -> int:
        """The largest batch of one rank under `--max-running-requests=limit`."""
        return limit // self.attention


class Misfit(ValueError):
    """Values that exclude each other; the message has both, and what to change."""


def layout(values: Mapping[str, tuple[str, ...]]) -> Layout:
    """Read the division off the arguments in force.

    Args:
        values: of each flag, by its name.

    Raises:
        Misfit: a size is no whole number above 0, or the sizes do not divide.
    """
    tensor = whole("--tp-size", values, 1)
    data = whole("--dp-size", values, 1)
    groups = whole("--attn-dp-size", values, 1)
    if "--enable-dp-attention" in values:
        # The older way to say it: the groups are counted by --dp-size, inside one copy.
        data, groups = 1, max(data, groups)
    if tensor % groups:
        raise Misfit(
            f"attention data parallelism over {groups} groups cannot divide the {tensor} GPUs of "
            "one copy (--tp-size)"
        )
    return Layout(tensor, whole("--pp-size", values, 1), data, groups)


def check(shape: Layout, values: Mapping[str, tuple[str, ...]], *, graphs: bool) -> None:
    """Refuse limits that the engine could not keep, or would lower without a word.

    Args:
        shape: the division of the engine.
        values: of the arguments in force, by flag.
        graphs: whether every batch must have a CUDA graph.

    Raises:
        Misfit: with the numbers.
    """
    limit = whole("--max-running-requests", values, 1)
    batch = shape.batch(limit)
    if batch < 1:
        raise Misfit(
            f"{counted(limit, 'request')} cannot be shared by {shape.attention} attention groups; "
            "raise spec.engine.maxRunningRequests"
        )
    tokens = _size("--max-total-tokens", values)
    if tokens is not None and batch > tokens // TOKENS_PER_REQUEST:
        raise Misfit(
            f"--max-total-tokens {tokens} is not enough for {counted(batch, 'request')} at once: "
            f"SGLang runs at most one for each {TOKENS_PER_REQUEST} tokens, "
            f"{tokens // TOKENS_PER_REQUEST} here; "
            "lower spec.engine.maxRunningRequests or raise --max-total-tokens"
        )
    longest = _size("--context-length", values)
    if tokens is not None and longest is not None and longest > tokens:
        raise Misfit(
            f"a request of the full context length {longest} does not fit --max-total-tokens "
            f"{tokens}; lower spec.model.contextLength or raise --max-total-tokens"
        )
    flag, captured = _captured(values)
    if graphs and captured is not None and captured < batch:
        raise Misfit(
            f"{flag} ends at {captured}, and up to {batch} requests run at once: larger batches "
            f"would run without CUDA graphs; raise it to {batch} or lower "
            "spec.engine.maxRunningRequests"
        )


def has_graphs(values: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether decode batches get CUDA graphs under these arguments."""
    if "--disable-cuda-graph" in values or "--disable-decode-cuda-graph" in values:
        return False
    given = values.get("--cuda-graph-backend-decode") or (_decode_graphs(values).get("backend"),)
    return given[0] != "disabled"


def sizes_are_given(values: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether these arguments say which batch sizes get a CUDA graph."""
    return _captured(values)[1] is not None


def _captured(values: Mapping[str, tuple[str, ...]]) -> tuple[str, int | None]:
    """The flag that decides on the largest captured batch, and that batch.

    SGLang takes the JSON before the flags, and a list before a bound.
    """
    if not has_graphs(values):
        return "", None
    graphs = _decode_graphs(values)
    listed = graphs.get("bs")
    if isinstance(listed, list) and listed and all(isinstance(item, int) for item in listed):
        return "--cuda-graph-config decode.bs", max(listed)
    flag = "--cuda-graph-bs-decode"
    if flag in values and all(_is_whole(text) for text in values[flag]) and values[flag]:
        return flag, max(int(text) for text in values[flag])
    bound = graphs.get("max_bs")
    if isinstance(bound, int):
        return "--cuda-graph-config decode.max_bs", bound
    flag = "--cuda-graph-max-bs-decode"
    return (flag, whole(flag, values, 1)) if flag in values else ("", None)


def _decode_graphs(values: Mapping[str, tuple[str, ...]]) -> dict[str, object]:
    for text in values.get("--cuda-graph-config", ()):
        try:
            document = json.loads(text)
        except ValueError:
            return {}  # the engine itself says what is wrong with it
        decode = document.get("decode") if isinstance(document, dict) else None
        return decode if isinstance(decode, dict) else {}
    return {}


def whole(flag: str, values: Mapping[str, tuple[str, ...]], default: int) -> int:
    """The number that follows a flag.

    Raises:
        Misfit: it is no whole number above 0.
    """
    if flag not in values:
        return default
    text = values[flag][0] if values[flag] else ""
    if not (_is_whole(text) and int(text) > 0):
        raise Misfit(f"{flag} needs a whole number above 0")
    return int(text)


def _size(flag: str, values: Mapping[str, tuple[str, ...]]) -> int | None:
    """The tokens that follow a flag, with or without a suffix; None if there is no such number."""
    found = _SIZE.fullmatch(values[flag][0].strip()) if values.get(flag) else None
    return int(Decimal(found[1]) * _FACTORS[found[2]]) if found else None


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit()
