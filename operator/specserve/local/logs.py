"""Logs of engines that were started from here: written by the engine alone, kept within bounds.

An engine writes to its file itself. Through a pipe it would depend on a reader, and it is to
outlive this process; so a log that has grown is not exchanged under it, but copied and cut. It is
opened to append for that: the engine goes on at the end that there is then. What it writes between
copy and cut, a moment, is lost.
"""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

#: Bytes of a log from which on it is cut; as many are kept of what was before.
LONGEST: Final = 64 * 1024 * 1024
#: Seconds between two looks at its size.
LOOK: Final = 10.0
#: Bytes of a log's end that tell why an engine ended, as many as the kubelet reads.
LAST_WORDS: Final = 2048


def before(log: Path) -> Path:
    """Where that is which was written before what is in a log."""
    return log.with_suffix(".previous.log")


def begun(log: Path) -> BinaryIO:
    """Begin a log, that of the start before being kept; returns the file to write to.

    Raises:
        OSError: It cannot be written.
    """
    if log.exists():
        log.replace(before(log))
    return log.open("ab")


async def bounded(log: Path, say: Callable[[bool, str], None]) -> None:
    """Keep a log within its bounds, for ever.

    Args:
        log: The file.
        say: Told whether all is well, and what is done or cannot be; the latter once.
    """
    failed = ""
    while True:
        await asyncio.sleep(LOOK)
        try:
            if await asyncio.to_thread(_cut, log):
                say(True, f"the log has grown: the older part of it is {before(log)} now")
            failed = ""
        except OSError as error:
            if failed != str(error):
                failed = str(error)
                say(False, f"the log is not kept within bounds: {error}")


def _cut(log: Path) -> bool:
    """Put what is in a log where the older part is kept, if it is long; returns whether."""
    if log.stat().st_size < LONGEST:
        return False
    # By its handle, as the path may be that of another start's meanwhile.
    with log.open("r+b") as grown:
        with before(log).open("wb") as kept:
            shutil.copyfileobj(grown, kept)
        os.ftruncate(grown.fileno(), 0)
    return True


def last_words(log: Path) -> str:
    """The end of what an engine wrote."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LAST_WORDS))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
