"""The two OpenAI routes: what their bodies ask for, and answers in the shape of SGLang's own.

Pure: JSON values in, texts of answers and events out. A body comes down to lengths of prompts and
the sampling parameters of `/generate`, so both kinds of routes run the same requests.

As recorded from SGLang 0.5.23: any model name is taken and echoed; a chat stream begins with the
role and ends with an event that holds no text; a completion stream's last text carries the finish
reason; `usage` is null in the events of a completion stream and absent from those of a chat.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from specserve_sim.text import answer_text, prompt_length

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from specserve_sim.answers import Generation

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
ROUTES: Final = frozenset({CHAT, COMPLETIONS})

DEFAULT_COMPLETION_TOKENS: Final = 16
"""New tokens of a completion that sets no limit; OpenAI's own default."""

MOST_CHOICES: Final = 128

ErrorType = Literal["Bad Request", "BadRequest", "BadRequestError"]


class Refused(ValueError):
    """A body that SGLang refuses.

    Attributes:
        kind: the error's `type`: `Bad Request` where the body does not fit the schema,
            `BadRequest` for options that exclude each other, `BadRequestError` for values.
    """

    def __init__(self, message: str, kind: ErrorType = "BadRequestError") -> None:
        super().__init__(message)
        self.kind: ErrorType = kind


@dataclass(frozen=True, slots=True)
class Ask:
    """What a body asks for.

    Attributes:
        chat: whether it came to the chat route.
        model: the name to echo.
        prompts: length in tokens of each prompt.
        choices: answers wanted to each prompt.
        parameters: as `sampling_params` of /generate.
        stream: whether to stream; such an ask has one choice.
        usage: whether a stream ends with an event of usage.
        running_usage: whether each event with text tells the usage so far.
        meta: whether choices carry `meta_info`.
    """

    chat: bool
    model: str
    prompts: tuple[int, ...]
    choices: int
    parameters: Mapping[str, Any]
    stream: bool
    usage: bool
    running_usage: bool
    meta: bool


def ask_from(route: str, body: Mapping[str, Any]) -> Ask:
    """Read a body.

    Raises:
        Refused: with SGLang's kind of error.
    """
    chat = route == CHAT
    lengths = [_conversation(body)] if chat else _prompts(body)
    choices = body.get("n", 1)
    if isinstance(choices, bool) or not isinstance(choices, int) or choices < 1:
        raise Refused(f"n must be a positive number of choices, not {choices}", "Bad Request")
    if choices * len(lengths) > MOST_CHOICES:
        raise Refused(f"the simulated engine gives {MOST_CHOICES} choices at most")
    stream = body.get("stream") is True
    meta = chat and body.get("return_meta_info") is True
    if stream and meta:
        raise Refused("return_meta_info does not go with stream", "BadRequest")
    if stream and choices * len(lengths) != 1:
        raise Refused("the simulated engine streams single choices only")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused("stream_options: an object", "Bad Request")
    return Ask(
        chat=chat,
        model=str(body.get("model", "default")),
        prompts=tuple(lengths),
        choices=choices,
        parameters=_parameters(body, chat=chat),
        stream=stream,
        usage=options.get("include_usage") is True,
        running_usage=options.get("continuous_usage_stats") is True,
        meta=meta,
    )


def error_text(message: str, kind: str) -> str:
    """Return the body of an answer of status 400."""
    return _json({"object": "error", "message": message, "type": kind, "param": None, "code": 400})


def whole(ask: Ask, generations: Sequence[Generation]) -> str:
    """Return the answer to an ask that does not stream, all of whose requests have finished."""
    tokens = [generation.ticket.request.tokens for generation in generations]
    return _json(
        {
            "id": generations[0].rid,
            "object": "chat.completion" if ask.chat else "text_completion",
            "created": int(generations[0].received),
            "model": ask.model,
            "choices": [
                _choice(ask, index, generation) for index, generation in enumerate(generations)
            ],
            "usage": _usage(ask, sum(tokens)),
            "metadata": {
                "weight_version": "default",
                "weight_versions": [{"version": "default", "start": 0, "end": tokens[0]}],
            },
        }
    )


def _choice(ask: Ask, index: int, generation: Generation) -> dict[str, Any]:
    text = answer_text(generation.ticket.request.tokens)
    choice: dict[str, Any] = {"index": index}
    if ask.chat:
        choice["message"] = {"role": "assistant", "content": text, "reasoning_content": None}
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": "length", "matched_stop": None}
    if ask.meta:
        choice["meta_info"] = generation.meta()
    return choice


def _usage(ask: Ask, tokens: int) -> dict[str, Any]:
    prompt = sum(ask.prompts)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + tokens,
        "completion_tokens": tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


class Events:
    """Writes the events of a stream as its request goes on.

    Args:
        ask: that is answered.
        generation: of its one request.
    """

    def __init__(self, ask: Ask, generation: Generation) -> None:
        self._ask = ask
        self._generation = generation
        self._shown = 0
        self._began = False

    def __call__(self) -> Iterator[str]:
        """Return the events that are due, without the closing [DONE]."""
        request = self._generation.ticket.request
        tokens = request.tokens
        text = answer_text(tokens)[len(answer_text(self._shown)) :]
        self._shown = tokens
        finished = request.state == "finished"
        yield from (
            self._chat(text, tokens)
            if self._ask.chat
            else self._text(text, tokens, finished=finished)
        )
        if not finished:
            return
        if self._ask.chat:
            yield self._event({"delta": {"reasoning_content": None}}, "length")
        if self._ask.usage:
            yield _json({**self._head(), "choices": [], "usage": self._last_usage(tokens)})

    def _chat(self, text: str, tokens: int) -> Iterator[str]:
        if not self._began:
            self._began = True
            role = {"reasoning_content": None, "role": "assistant", "content": ""}
            yield self._event({"delta": role})
        if text:
            more = {"usage": _usage(self._ask, tokens)} if self._ask.running_usage else {}
            yield self._event({"delta": {"reasoning_content": None, "content": text}}, more=more)

    def _text(self, text: str, tokens: int, *, finished: bool) -> Iterator[str]:
        if text or finished:
            usage = self._last_usage(tokens) if self._ask.running_usage else None
            finish = "length" if finished else None
            yield self._event({"text": text}, finish, more={"usage": usage})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._generation.rid,
            "object": "chat.completion.chunk" if self._ask.chat else "text_completion",
            "created": int(self._generation.received),
            "model": self._ask.model,
        }

    def _event(
        self,
        part: Mapping[str, Any],
        finish: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        choice = {
            "index": 0,
            **part,
            "logprobs": None,
            "finish_reason": finish,
            "matched_stop": None,
        }
        return _json({**self._head(), "choices": [choice], **(more or {})})

    def _last_usage(self, tokens: int) -> dict[str, Any]:
        usage = _usage(self._ask, tokens)
        if self._ask.chat:
            return usage
        details = ("prompt_tokens_details", "completion_tokens_details")
        return {name: count for name, count in usage.items() if name not in details}


def _parameters(body: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    limit = body.get("max_tokens")
    if chat and body.get("max_completion_tokens") is not None:
        limit = body["max_completion_tokens"]
    parameters = {
        name: body[name] for name in ("temperature", "custom_params") if body.get(name) is not None
    }
    if limit is not None:
        parameters["max_new_tokens"] = limit
    elif not chat:
        parameters["max_new_tokens"] = DEFAULT_COMPLETION_TOKENS
    return parameters


def _prompts(body: Mapping[str, Any]) -> list[int]:
    """Return the lengths of the prompts of a completion: one, or several; text or token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt_length(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) for item in prompt):
            return [len(prompt)]
        if all(isinstance(item, str) for item in prompt):
            return [prompt_length(item) for item in prompt]
        if all(_is_ids(item) for item in prompt):
            return [len(item) for item in prompt]
    raise Refused("body.prompt: text or token ids, or a list of either", "Bad Request")


def _is_ids(item: object) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(part, int) for part in item)


def _conversation(body: Mapping[str, Any]) -> int:
    """Return the length of a conversation, without what a chat template would add to it."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise Refused("body.messages: a list is required", "Bad Request")
    if not messages:
        raise Refused("messages: none is there")
    return sum(_message(message) for message in messages)


def _message(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if not isinstance(content, str):
        raise Refused("body.messages: each has a content of text", "Bad Request")
    return prompt_length(content)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
