"""Edits of the file while it is steered by: the policy is followed live, as in a cluster."""

import asyncio
from pathlib import Path
from typing import Final

from specserve import workload
from specserve.bench.connection import BadOption
from specserve.document import Document
from specserve.local.plan import read
from specserve.local.session import Session

#: Seconds between two looks at the file.
LOOK: Final = 1.0


async def follow(path: Path, asked: Document, work: Session) -> None:
    """Take in each change of a file's policy, for ever; one that cannot be used changes nothing.

    Nothing that a file may hold ends it: all that steers, and keeps engines, would end with it.

    Args:
        path: The file.
        asked: What it held at first.
        work: Told the policy.
    """
    seen = _mark(path)
    while True:
        await asyncio.sleep(LOOK)
        mark = _mark(path)
        if mark in {seen, None}:
            continue
        seen = mark
        try:
            new = read(path)
            if _else(new) != _else(asked):
                work.board.say(
                    "warning", "", f"{path}: more than the policy has changed; start anew for it"
                )
                continue
            work.adopt(new.spec.policy)
        except (BadOption, workload.UnusableSpec) as error:
            work.board.say("warning", "", f"{error}; the policy stays as it was")
        except Exception as error:  # noqa: BLE001 - a fault of ours must not cost the engines
            why = f"{path}: {type(error).__name__}: {error}"
            work.board.say("warning", "", f"{why}; the policy stays as it was")


def _mark(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written; None while there is none, as amid a save."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _else(asked: Document) -> object:
    """All that cannot change while engines are steered: where loads come from, and no policy."""
    policy = asked.spec.policy
    rest = asked.spec.model_copy(update={"policy": None})
    return asked.name, asked.namespace, rest, policy.source, policy.prometheus
