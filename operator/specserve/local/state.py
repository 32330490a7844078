"""What outlives the process: a folder with what the policy remembers, one process at a time.

In a cluster the status of a SpecServe keeps the last switch, and a new leader learns the rest
anew. Here all of it is kept: modes and since when, flips that count against the budget, what
rounds take and what the traffic accepts. Times are on a clock that goes on where the last process
left it, so that nothing has to be converted.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from specserve import api
from specserve.local.files import write_whole
from specserve.policy import Knowledge, Memory, pardoned
from specserve.policy.evidence import CRASH_WINDOW

FILE = "state.json"
LOCK = "lock"
#: A process that is killed loses so many seconds of what it has learnt, and no flip.
SAVE_SECONDS = 10.0


class StateLocked(Exception):
    """Another process works on the folder; the message names it."""


class _Part(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        frozen=True,
        extra="forbid",
        # Times that never came are minus infinity, of which JSON knows none.
        ser_json_inf_nan="strings",
    )


class Remembered(_Part):
    """What is kept of one engine."""

    epoch: int = 0
    memory: Memory


class Document(_Part):
    """The file."""

    schema_version: Literal["specserve.dev/local-v1"] = Field(
        default="specserve.dev/local-v1", alias="schema"
    )
    name: str
    clock: float
    wall: float
    model: dict[str, Any]
    draft: dict[str, Any]
    knowledge: Knowledge
    engines: dict[str, Remembered]


class State:
    """The folder while it is held. Made by `held`.

    Attributes:
        folder: Where it is.
        trouble: Why what was there is not used, empty if there is nothing to say.
    """

    def __init__(self, folder: Path, document: Document | None, trouble: str = "") -> None:
        self.folder = folder
        self.trouble = trouble
        self._document = document
        self._written = b""
        start = time.monotonic()
        if document is not None:
            # A wall clock that was set back must not make times lie in the future.
            start = document.clock + max(0.0, time.time() - document.wall)
        self._zero = time.monotonic() - start

    def clock(self) -> float:
        """Seconds on the clock that goes on from process to process."""
        return time.monotonic() - self._zero

    @property
    def knowledge(self) -> Knowledge:
        """What the engines had learnt together."""
        return Knowledge() if self._document is None else self._document.knowledge

    def memory(self, engine: str) -> Memory | None:
        """What was remembered of an engine, None if nothing was."""
        known = None if self._document is None else self._document.engines.get(engine)
        if known is None:
            return None
        memory = known.memory.reboot()
        if not any(at > self.clock() - CRASH_WINDOW for at in memory.crashes):
            # In a cluster a new pod begins without the crashes of the last one.
            memory = replace(memory, crashes=(), crashed=False)
        return memory

    def of(self, name: str, spec: api.SpecServeSpec) -> Self:
        """The state as far as it is of this SpecServe, its model and its draft."""
        document = self._document
        if document is None:
            return self
        if (document.model, document.draft) != _parts(spec):
            engines = {
                engine: known.model_copy(update={"memory": pardoned(known.memory)})
                for engine, known in document.engines.items()
            }
            self._document = document.model_copy(
                update={"knowledge": Knowledge(), "engines": engines}
            )
            self.trouble = (
                f"{self.folder / FILE} is of another model or draft: what rounds take and what "
                "is accepted is learnt anew"
            )
        elif document.name != name:
            self.trouble = f"{self.folder / FILE} was written for {document.name}; it is used"
        return self

    def save(
        self,
        name: str,
        spec: api.SpecServeSpec,
        knowledge: Knowledge,
        engines: Mapping[str, Remembered],
    ) -> None:
        """Write what is known, whole or not at all.

        Raises:
            OSError: It could not be written; what was there before is there still.
        """
        model, draft = _parts(spec)
        document = Document(
            name=name,
            clock=self.clock(),
            wall=time.time(),
            model=model,
            draft=draft,
            knowledge=knowledge,
            engines=dict(engines),
        )
        write_whole(self.folder / FILE, document.model_dump_json(by_alias=True, indent=1) + "\n")


def _parts(spec: api.SpecServeSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        spec.model.model_dump(mode="json", by_alias=True, exclude_none=True),
        spec.draft.model_dump(mode="json", by_alias=True, exclude_none=True),
    )


def default_folder(name: str, environ: Mapping[str, str]) -> Path:
    """Where the state of a SpecServe is kept unless it is said: by the XDG rules."""
    base = environ.get("XDG_STATE_HOME", "")
    # The rules have a relative path ignored.
    root = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
    return root / "specserve" / name


@contextlib.contextmanager
def held(folder: Path) -> Any:
    """Hold a folder for the length of a `with` block, and read what is there.

    Raises:
        StateLocked: Another process holds it.
        OSError: It cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another"
            raise StateLocked(
                f"{folder}: process {holder} steers with this state; end it, or name another "
                "folder with --state"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield _read(folder)


def _read(folder: Path) -> State:
    path = folder / FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return State(folder, None)
    try:
        return State(folder, Document.model_validate_json(text))
    except ValidationError as error:
        details = error.errors()[0]
        place = ".".join(str(part) for part in details["loc"]) or "the file"
        aside = path.with_name(f"{path.name}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        path.replace(aside)
        why = f"{path} is no state of this version ({place}: {details['msg']})"
        return State(folder, None, f"{why}; it is kept as {aside.name}, and all begins anew")
