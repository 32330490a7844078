"""How many tokens came within a window, from when they were heard of.

An engine tells of a stream every so many tokens. Those told together came one after the other
since the time before, so a window that begins or ends between has its part of them. Whole answers
would be far too coarse: one of 256 tokens is a tenth of what one client gets in ten seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """What all streams were told, newest last.

    Attributes:
        kept: Seconds that are remembered; no window may be asked for that began before.
    """

    kept: float = 120.0
    _spans: deque[tuple[float, float, int]] = field(default_factory=deque)

    def add(self, since: float, until: float, tokens: int) -> None:
        """Take in tokens of one stream that came between two moments, or at one."""
        self._spans.append((since, until, tokens))
        while self._spans[0][1] < until - self.kept:
            self._spans.popleft()

    def between(self, begin: float, end: float) -> float:
        """The tokens that came after `begin` and until `end`."""
        return sum(_part(span, begin, end) for span in self._spans)


def _part(span: tuple[float, float, int], begin: float, end: float) -> float:
    since, until, tokens = span
    if until <= since:
        return tokens if begin < until <= end else 0.0
    inside = min(until, end) - max(since, begin)
    return tokens * inside / (until - since) if inside > 0 else 0.0


@dataclass(slots=True)
class Stream:
    """One answer as it comes.

    Attributes:
        tally: Told what comes.
        tokens: How many have come.
        at: When the last did.
    """

    tally: Tally
    tokens: int = 0
    at: float | None = None

    def heard(self, tokens: int, now: float) -> None:
        """Take in how many tokens of it have come by now."""
        # Before the first there was a prefill, which makes one token at its end.
        self.tally.add(now if self.at is None else self.at, now, tokens - self.tokens)
        self.tokens, self.at = tokens, now
