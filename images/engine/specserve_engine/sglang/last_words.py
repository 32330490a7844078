"""Leaves a scheduler's exception where Kubernetes keeps it in the status of the pod.

SGLang as the first process of a container cannot kill itself, so that it leaves with 0 after a
crash, and of a container that left with 0 the kubelet keeps no log. Where it does keep the end of
the log, that is how SGLang ended its processes, not why.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Final

PLACE: Final = Path("/dev/termination-log")
"""The file that a container is given for it, unless its spec says otherwise."""
MOST: Final = 4096
"""Bytes of it that are kept."""

_SAID: Final = " hit an exception: "
"""Between the name of a process and its traceback (0.5.14 to 0.5.23)."""
_CUT: Final = b"\n  ...\n"


class LastWords(logging.Handler):
    """Writes the first exception that ends a process of SGLang; its log says the same."""

    def __init__(self, place: Path = PLACE) -> None:
        """Take the file; where there is none, none is made."""
        super().__init__(logging.ERROR)
        self._place = place

    def emit(self, record: logging.LogRecord) -> None:
        """Handle one record."""
        _, said, traceback = record.getMessage().partition(_SAID)
        # Logging goes on, whatever becomes of the file: there is none outside of containers.
        if said:
            with contextlib.suppress(OSError):
                self._write(_shortened(traceback.strip().encode(errors="replace")))

    def _write(self, words: bytes) -> None:
        file = os.open(self._place, os.O_WRONLY | os.O_APPEND)
        try:
            # The other ranks end because of the first one.
            if not os.fstat(file).st_size:
                os.write(file, words)
        finally:
            os.close(file)


def listen(place: Path = PLACE) -> None:
    """Hear of exceptions in this process from now on."""
    # Not at the root, which SGLang clears when it configures logging.
    logging.getLogger("sglang").addHandler(LastWords(place))


def _shortened(traceback: bytes) -> bytes:
    """Without its middle, if it is too long: what was begun, and how it ended, are at its ends."""
    if len(traceback) <= MOST:
        return traceback
    half = (MOST - len(_CUT)) // 2
    return traceback[:half] + _CUT + traceback[-half:]
