"""How many tokens came within a window, from when they were heard of.

An engine tells of a stream every so many tokens. Those told together came one after the other
since the time before, so a window that begins or ends between has its part of them. Whole answers
would be far too coarse: one of 256 tokens is a tenth of what one client gets in ten seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Span = tuple[float, float, int]


@dataclass(slots=True)
class Tally:
    """What all streams were told, newest last.

    Attributes:
        kept: Seconds that are remembered; no window may be asked for that began before.
    """

    kept: float = 60.0
    _spans: deque[Span] = field(default_factory=deque)

    def add(self, since: float, until: float, tokens: int) -> None:
        """Take in tokens of one stream that came between two moments, or at one."""
        self._spans.append((since, until, tokens))
        while self._spans[0][1] < until - self.kept:
            self._spans.popleft()

    def within(self, begin: float, end: float) -> list[Span]:
        """What was heard of that came between two moments, or in part."""
        return [span for span in self._spans if span[1] > begin and span[0] <= end]

    def between(self, begin: float, end: float) -> float:
        """The tokens that came after `begin` and until `end`."""
        return sum(_part(span, begin, end) for span in self.within(begin, end))


def rate(spans: Iterable[Span], begin: float, end: float, wave: float) -> float:
    """Tokens per second between two moments, the same wherever in a wave these are.

    Clients in step are prefilled together, and meanwhile nothing else comes: a window of a few
    waves has by chance one prefill more or less. So this is the mean over all windows within it
    that are shorter by one wave, each of which begins elsewhere in the wave.

    Args:
        spans: What came then.
        begin: When the window began.
        end: When it ended.
        wave: Seconds from one answer of a client to its next.
    """
    ramp = min(wave, (end - begin) / 2)

    def weight(moment: float) -> float:
        # The integral of a trapezoid that rises and falls for one wave each.
        inside = min(max(moment, begin), end) - begin
        falling = max(0.0, inside - (end - begin - ramp))
        rising = min(inside, ramp)
        return rising**2 / (2 * ramp) + (inside - rising) - falling**2 / (2 * ramp)

    total = 0.0
    for since, until, tokens in spans:
        if until > since:
            total += tokens * (weight(until) - weight(since)) / (until - since)
        elif begin < until <= end:
            total += tokens * min(1.0, (until - begin) / ramp, (end - until) / ramp)
    return total / (end - begin - ramp)


def _part(span: Span, begin: float, end: float) -> float:
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
