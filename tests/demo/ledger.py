"""What became of each request, and when which tokens arrived. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BIN_SECONDS = 0.5
"""Width of the bins in which arriving tokens are counted."""

_DATA = b"data: "
_DONE = b"[DONE]"
_COUNT = b'"completion_tokens":'


class Answer:
    """Reads one streamed answer of `/generate`, line by line.

    Every chunk carries the whole answer so far. Only the count is looked for in all but the last,
    as parsing each would cost more than the engines do.

    Attributes:
        tokens: tokens received so far.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._last = b""
        self._done = False
        self._after = False

    def feed(self, line: bytes) -> int:
        """Takes one line of the stream; returns how many tokens it brought."""
        if not line.startswith(_DATA):
            return 0
        if self._done:
            self._after = True
            return 0
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            self._done = True
            return 0
        self._last = data
        at = data.rfind(_COUNT)
        if at < 0:
            return 0
        count = data[at + len(_COUNT) :].split(b",", 1)[0].rstrip(b"} ")
        brought = int(count) - self.tokens
        self.tokens += brought
        return brought

    def problem(self, wanted: int) -> str:
        """Why this is not a whole answer of `wanted` tokens; empty if it is one."""
        if not self._done:
            return f"cut off after {self.tokens} of {wanted} tokens"
        if self._after:
            return "went on after its end"
        try:
            last: Any = json.loads(self._last)
        except ValueError:
            return "its last chunk is not JSON"
        if "error" in last:
            return str(last["error"].get("message", last["error"]))
        meta = last.get("meta_info", {})
        reason = (meta.get("finish_reason") or {}).get("type")
        if reason != "length":
            return f"finish reason {reason}, not length"
        if meta["completion_tokens"] != wanted or len(last["output_ids"]) != wanted:
            return f"{meta['completion_tokens']} tokens, {wanted} were asked for"
        return ""


@dataclass(slots=True)
class Ledger:
    """Counts the requests and the tokens of one SpecServe.

    Attributes:
        sent: requests sent.
        finished: those that came to their right end.
        lost: all others that ended, by what was wrong with them.
        bins: tokens that arrived, by number of the bin since the run began.
    """

    sent: int = 0
    finished: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    bins: Counter[int] = field(default_factory=Counter)

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return self.sent - self.finished - self.lost.total()

    def end(self, problem: str) -> None:
        """Records how a request ended."""
        if problem:
            self.lost[problem] += 1
        else:
            self.finished += 1

    def arrived(self, tokens: int, at: float) -> None:
        """Counts tokens that arrived `at` seconds after the run began."""
        self.bins[int(at / BIN_SECONDS)] += tokens

    def tokens(self, begin: float, end: float) -> int:
        """Tokens that arrived in the bins from `begin` to `end`, in seconds of the run."""
        first, last = round(begin / BIN_SECONDS), round(end / BIN_SECONDS)
        return sum(self.bins[number] for number in range(first, last))

    def rate(self, begin: float, end: float) -> float:
        """Tokens per second over the same bins."""
        return self.tokens(begin, end) / (end - begin)

    def series(self, seconds: float) -> list[int]:
        """Tokens of each bin of a run of this length."""
        return [self.bins[number] for number in range(round(seconds / BIN_SECONDS))]


@dataclass(frozen=True, slots=True)
class Flip:
    """A change of what an engine does, by its own word; `at` is in seconds of the run."""

    at: float
    on: bool


@dataclass(slots=True)
class Flips:
    """Collects the flips of one engine from its read-backs.

    An engine takes an order over with its next round, so that right after one it may still say
    what it did before: a change counts when the look after it confirms it, from when it was seen.
    """

    seen: list[Flip] = field(default_factory=list)
    on: bool | None = None
    _changed: Flip | None = None

    def observe(self, at: float, on: bool | None) -> None:
        """Takes in what an engine says of itself.

        Args:
            at: seconds of the run.
            on: whether it speculates; None if it doesn't say, or for a short look only.
        """
        changed, self._changed = self._changed, None
        if on is None or on is self.on:
            return
        if self.on is None:
            self.on = on
        elif changed is None:
            self._changed = Flip(at, on)
        else:
            self.seen.append(changed)
            self.on = on

    def count(self, *, on: bool) -> int:
        """How many flips led to this mode."""
        return sum(flip.on is on for flip in self.seen)
