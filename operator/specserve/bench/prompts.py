"""What is asked: random token ids, the built-in coding set, or a file of the user's own.

Engines keep the prompts they have seen in a prefix cache. A benchmark that repeats its prompts
measures that cache, so every prompt begins with something new, unless sharing is asked for.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from random import Random
from typing import Any, Protocol

#: Ids put before a prompt of ids that must be new; 16 make a page of any cache differ.
FRESH_IDS = 16
BUILT_IN = "coding"


class BadPrompts(ValueError):
    """A file of prompts that cannot be used; the message names the line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, in the one form it was given.

    Attributes:
        text: Plain text; empty if given otherwise.
        ids: Token ids; empty if given otherwise.
        messages: A conversation, each message with role and content; empty if given otherwise.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, str], ...] = ()

    def as_text(self) -> str:
        """The text, of a conversation all that is said in it, for routes without roles."""
        return self.text or "\n\n".join(message["content"] for message in self.messages)

    def as_messages(self) -> list[dict[str, str]]:
        """The conversation; a text becomes what the user says."""
        if self.messages:
            return [dict(message) for message in self.messages]
        return [{"role": "user", "content": self.text}]


class Prompts(Protocol):
    """An endless source of prompts."""

    name: str
    has_ids: bool

    def draw(self) -> Prompt:
        """The next prompt."""


class RandomIds:
    """Prompts of random token ids: drafts are hardly ever right.

    Args:
        length: Tokens of each prompt.
        random: Source of the ids.
        ids: The ids to draw from, all of them in the model's vocabulary.
        shared: All prompts have their first half in common.
    """

    name = "random"
    has_ids = True

    def __init__(
        self, length: int, random: Random, *, ids: Sequence[int], shared: bool = False
    ) -> None:
        self._random = random
        self._known = ids
        self._prefix = self._ids(length // 2 if shared else 0)
        self._rest = length - len(self._prefix)

    def draw(self) -> Prompt:
        """A prompt that no cache has seen, or not the second half of."""
        return Prompt(ids=self._prefix + self._ids(self._rest))

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(self._known, k=count))


class Written:
    """Prompts that somebody wrote, over and over in a new order each time.

    Args:
        name: Of the set, for the report.
        prompts: At least one.
        random: Source of the order, and of what makes a prompt new.
        shared: Repeat them unchanged.
    """

    def __init__(
        self, name: str, prompts: Sequence[Prompt], random: Random, *, shared: bool = False
    ) -> None:
        if not prompts:
            raise BadPrompts(f"{name}: no prompt in it")
        self.name = name
        self.has_ids = any(prompt.ids for prompt in prompts)
        self._random = random
        self._shared = shared
        self._endless = self._shuffled(prompts)

    def draw(self) -> Prompt:
        """The next prompt, its beginning made new."""
        prompt = next(self._endless)
        return prompt if self._shared else self._renewed(prompt)

    def _shuffled(self, prompts: Sequence[Prompt]) -> Iterator[Prompt]:
        order = list(prompts)
        while True:
            self._random.shuffle(order)
            yield from order

    def _renewed(self, prompt: Prompt) -> Prompt:
        mark = f"Ticket {self._random.getrandbits(64):016x}.\n\n"
        if prompt.ids:
            # Between those that are there already, so that they are sure to be in the vocabulary.
            between = range(min(prompt.ids), max(prompt.ids) + 1)
            fresh = self._random.choices(between, k=FRESH_IDS)
            return replace(prompt, ids=(*fresh, *prompt.ids))
        if prompt.messages:
            first, *others = prompt.messages
            marked = {**first, "content": mark + first["content"]}
            return replace(prompt, messages=(marked, *others))
        return replace(prompt, text=mark + prompt.text)


def built_in() -> list[Prompt]:
    """The coding and agentic prompts that were written for this project."""
    text = (files("specserve.bench") / "coding.jsonl").read_text(encoding="utf-8")
    return read_lines(text.splitlines(), BUILT_IN)


def read_lines(lines: Iterable[str], name: str) -> list[Prompt]:
    """Read prompts, one JSON value a line; blank lines are passed over.

    A line is a string, or an object with one of `prompt` (a string or a list of token ids),
    `text`, `input_ids` or `messages`. Other members are ignored.

    Raises:
        BadPrompts: A line is none of these.
    """
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line)))
        except (json.JSONDecodeError, RecursionError):
            raise BadPrompts(
                f"{name}, line {number}: no JSON; each line is a text in quotes, or an object"
            ) from None
        except ValueError as error:
            raise BadPrompts(f"{name}, line {number}: {error}") from None
    if not prompts:
        raise BadPrompts(f"{name}: no prompt in it")
    return prompts


def _prompt(value: Any) -> Prompt:
    if isinstance(value, dict):
        if isinstance(value.get("messages"), list):
            return Prompt(messages=tuple(_message(item) for item in value["messages"]))
        value = next((value[k] for k in ("prompt", "text", "input_ids") if k in value), None)
    if isinstance(value, str) and value:
        return Prompt(text=value)
    if isinstance(value, list) and value and all(_is_id(item) for item in value):
        return Prompt(ids=tuple(value))
    raise ValueError("neither a text nor an object with prompt, text, input_ids or messages")


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def _message(item: object) -> Mapping[str, str]:
    if isinstance(item, dict):
        role, content = item.get("role"), item.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    raise ValueError("a message needs a role and a content of text")
