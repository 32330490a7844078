"""How a generation is asked for and read, on SGLang's own route and on the two of OpenAI. Pure.

All three ask for an exact number of tokens (`ignore_eos`), so that an answer of any other length
is known to be wrong. A stream counts as complete only with its closing `[DONE]`: a server that
dies under a stream has sent its status 200 long ago.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from specserve.bench.connection import REFUSALS
from specserve.bench.prompts import Prompt

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
#: Characters of a server's own words that are kept.
_WORDS: Final = 160


class Api(StrEnum):
    """A route that generates."""

    GENERATE = "generate"
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Its path."""
        return {
            Api.GENERATE: "/generate",
            Api.COMPLETIONS: "/v1/completions",
            Api.CHAT: "/v1/chat/completions",
        }[self]


@dataclass(frozen=True, slots=True)
class Wish:
    """What every request of a benchmark has in common.

    Attributes:
        api: The route.
        model: Model name for the OpenAI routes.
        tokens: New tokens wanted.
        stream: Whether to stream.
        until_end: Let the model end by itself; `tokens` is only the most then.
    """

    api: Api
    model: str
    tokens: int
    stream: bool
    until_end: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Times are seconds of one monotonic clock.

    Attributes:
        began: When it was sent.
        first: When its first token came; None without a stream, or if none came.
        ended: When its answer was complete or given up.
        tokens: Tokens of the answer as the server counts them; of a failed one too, if known.
        verifies: Decode rounds it took part in; None if the server does not say.
        accepted: Draft tokens that were kept in them, likewise.
        problem: Why it is not a whole answer, as a label to count by; empty if it is one.
    """

    began: float
    first: float | None
    ended: float
    tokens: int
    verifies: int | None = None
    accepted: int | None = None
    problem: str = ""


def body_of(wish: Wish, prompt: Prompt) -> dict[str, Any]:
    """The JSON body that asks for it."""
    if wish.api is Api.GENERATE:
        given = {"input_ids": list(prompt.ids)} if prompt.ids else {"text": prompt.as_text()}
        sampling = {
            "max_new_tokens": wish.tokens,
            "temperature": 0,
            "ignore_eos": not wish.until_end,
        }
        return {**given, "sampling_params": sampling, "stream": wish.stream}
    body: dict[str, Any] = {"model": wish.model, "max_tokens": wish.tokens, "temperature": 0}
    if wish.api is Api.CHAT:
        body["messages"] = prompt.as_messages()
    else:
        body["prompt"] = list(prompt.ids) if prompt.ids else prompt.as_text()
    if not wish.until_end:
        body["ignore_eos"] = True
    if wish.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


class Answer:
    """Reads one answer as it comes in.

    Of a stream only the beginning and the last event are parsed: events in between hold the whole
    text so far on SGLang's route, and parsing all of them would keep the client busier than the
    server.

    Attributes:
        first: When the first token came, None before.
    """

    def __init__(self, wish: Wish, began: float) -> None:
        self._wish = wish
        self._began = began
        self.first: float | None = None
        self._last = b""
        self._done = not wish.stream

    def feed(self, line: bytes, now: float) -> None:
        """Take one line of a stream."""
        if not line.startswith(_DATA) or self._done:
            return
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            self._done = True
            return
        self._last = data
        if self.first is None and _has_token(data):
            self.first = now

    def whole(self, text: bytes) -> None:
        """Take the body of an answer that is no stream."""
        self._last = text

    def outcome(self, now: float, problem: str = "") -> Outcome:
        """The outcome of what was read, given what went wrong outside of it."""
        document = _json(self._last)
        tokens, verifies, accepted = _counts(document)
        wish = self._wish
        if not problem:
            problem = _error(document)
        if not problem and not self._done:
            problem = "cut off"
        if not problem and tokens is None:
            problem = "no token count in the answer"
        if not problem and not (tokens == wish.tokens or (wish.until_end and tokens)):
            problem = "wrong number of tokens"
        return Outcome(self._began, self.first, now, tokens or 0, verifies, accepted, problem)


def refusal(status: int, text: str) -> str:
    """The label of an answer that is no 200: the status and the server's own words, cut."""
    document = _json(text.encode(errors="replace"))
    return f"HTTP {status} {_words(document) or text[:_WORDS]}".strip()


def refuses_key(problem: str) -> bool:
    """Whether this is the label of an answer to a key that does not fit, or to none."""
    return problem.startswith(tuple(f"HTTP {status}" for status in REFUSALS))


def _has_token(data: bytes) -> bool:
    document = _json(data)
    meta = document.get("meta_info")
    if isinstance(meta, dict):
        return bool(meta.get("completion_tokens"))
    for choice in document.get("choices") or []:
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


def _counts(document: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Tokens, verifies and drafts kept, each None if not told."""
    meta = document.get("meta_info")
    if isinstance(meta, dict):
        return (
            meta.get("completion_tokens"),
            meta.get("spec_verify_ct"),
            meta.get("spec_num_correct_drafts", meta.get("spec_accepted_drafts")),
        )
    usage = document.get("usage")
    return (usage.get("completion_tokens") if isinstance(usage, dict) else None), None, None


def _error(document: Mapping[str, Any]) -> str:
    return f"error: {_words(document)}" if "error" in document else ""


def _words(document: Mapping[str, Any]) -> str:
    """What the server says, whichever of its shapes of errors it uses."""
    said = document.get("error", document)
    if isinstance(said, dict):
        said = said.get("message", said.get("detail", ""))
    return " ".join(str(said).split())[:_WORDS]


def _json(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
