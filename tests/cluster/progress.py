"""Progress of long steps on a terminal or in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Says how far a step is and how long it still takes.

    On a terminal one line is rewritten; elsewhere a plain line is printed when the step starts,
    every `interval` seconds, and when it ends.

    Args:
        stream: where to write; the standard error of the process when not given.
        interval: seconds between two plain lines.
    """

    def __init__(self, stream: TextIO | None = None, interval: float = 20.0) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._interval = 0.2 if self._live else interval
        self._title = ""
        self._began = 0.0
        self._told = 0.0

    def note(self, text: str) -> None:
        """Prints one line."""
        self._write(text + "\n")

    def start(self, title: str, estimate: str = "") -> None:
        """Begins a step; `estimate` says in words how long it usually takes."""
        self._title = title
        self._began = self._told = time.monotonic()
        line = f"{title} ({estimate})" if estimate else title
        self._write(line + ("" if self._live else "\n"))

    def update(self, done: float, total: float, unit: str = "") -> None:
        """Tells the state of the step, unless the last word was less than an interval ago."""
        now = time.monotonic()
        if now - self._told < self._interval:
            return
        self._told = now
        share = min(1.0, done / total) if total > 0 else 0.0
        text = f"{self._title}: {share:4.0%} ({done:.0f} of {total:.0f} {unit}".rstrip() + ")"
        # Below a twentieth the pace says little about the rest.
        if share > 0.05:
            text += f", about {duration((now - self._began) * (1 - share) / share)} left"
        self._write(text + ("" if self._live else "\n"))

    def finish(self) -> None:
        """Ends the step and tells how long it took."""
        took = duration(time.monotonic() - self._began)
        self._write(f"{self._title}: done in {took}\n")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}" if self._live else text)
        self._stream.flush()


def duration(seconds: float) -> str:
    """Seconds as people say them: `8 s`, `2 min 05 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"
