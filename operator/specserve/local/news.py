"""What is new about the engines, one line each: decided, done, gone wrong, well again.

A decision is what the policy wants; a switch is what an engine has confirmed. Both are told, as
they are two things.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from specserve import decisions, moments
from specserve.decisions import Decision, Switch
from specserve.status import Engine

Kind = Literal["decides", "switched", "warning", "well", "note"]


@dataclass(frozen=True, slots=True)
class News:
    """One line.

    Attributes:
        at: Wall-clock seconds.
        kind: What it is about.
        engine: Whose, empty if it is about all.
        text: For people, with the numbers.
    """

    at: float
    kind: Kind
    engine: str
    text: str

    def line(self) -> str:
        """The line for a log."""
        who = f" {self.engine}" if self.engine else ""
        return f"{moments.iso(self.at)}{who} {self.kind}: {self.text}"

    def clock(self) -> str:
        """The time of day here, for a person who sits before it."""
        return time.strftime("%H:%M:%S", time.localtime(self.at))


class Board:
    """Gathers news, and hands each on.

    Args:
        wall: Wall-clock seconds.
        tell: Told each line.
        log: Takes decisions as JSON lines, in the form of the operator's decision log; None for
            no such log.
    """

    def __init__(
        self, wall: Callable[[], float], tell: Callable[[News], None], log: TextIO | None
    ) -> None:
        self._wall = wall
        #: Told each line.
        self.tell = tell
        self._log = log
        self._switches: tuple[Switch, ...] = ()
        self._troubles: dict[str, str] = {}

    def say(self, kind: Kind, engine: str, text: str, at: float | None = None) -> None:
        """Tell a line."""
        self.tell(News(self._wall() if at is None else at, kind, engine, text))

    def decided(self, decision: Decision) -> None:
        """Take in a decision that differs from the one before it."""
        self._write(decision)
        verdict = decision.verdict
        probe = " (a probe)" if verdict.probe else ""
        self.say("decides", decision.pod, f"{verdict.reason}{probe}", decision.at)

    def _write(self, decision: Decision) -> None:
        if self._log is None:
            return
        (entry,) = decisions.to_json([decision], moments.exact)
        try:
            self._log.write(json.dumps(entry) + "\n")
            self._log.flush()
        except OSError as error:
            # Steering goes on without it.
            self._log = None
            self.say("warning", "", f"the decision log ends here: {error.strerror}")

    def switched(self, switches: tuple[Switch, ...]) -> None:
        """Take in the last switches that engines confirmed, of which some may be new."""
        for switch in switches:
            if switch not in self._switches:
                text = f"{switch.mode.lower()}, confirmed by the engine: {switch.reason}"
                self.say("switched", switch.pod, text, switch.at)
        self._switches = switches

    def seen(self, engine: Engine) -> None:
        """Take in what is known of an engine: troubles that begin and that end."""
        code, text = _trouble(engine)
        if code == self._troubles.get(engine.name, ""):
            return
        self._troubles[engine.name] = code
        if code:
            self.say("warning", engine.name, text)
        else:
            self.say("well", engine.name, "it answers and takes orders")


class Handler(logging.Handler):
    """Tells warnings of the loop's own log as news."""

    def __init__(self, board: Board) -> None:
        super().__init__(logging.WARNING)
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        """Tell a record, with the kind of its error but without its traceback's lines."""
        error = record.exc_info[1] if record.exc_info else None
        why = f": {type(error).__name__}: {error}" if error is not None else ""
        self._board.say("warning", "", f"{record.getMessage()}{why}")


def _trouble(engine: Engine) -> tuple[str, str]:
    """What is wrong with an engine: a code and a line, both empty if nothing is."""
    for error, what, option in (
        (engine.control_error, "its mode is left as it is", "--token-file"),
        (engine.sample_error, "its load is not known: onSignalLoss decides", "--api-key-file"),
    ):
        if error is not None:
            code, said = error
            mend = f"; {option} is read again when it changes" if code == "Unauthorized" else ""
            return code, f"{code}: {said or 'no new reading'}; {what}{mend}"
    if engine.key_refused:
        return "KeyRefused", (
            "KeyRefused: it refuses the API key, and its plugin is asked for the load; "
            "--api-key-file is read again when it changes"
        )
    if engine.controllable is False:
        why = engine.control_reason or "the engine does not say why"
        return "NotControllable", f"it cannot be switched live: {why}"
    return "", ""


@contextlib.contextmanager
def logged(board: Board) -> Iterator[None]:
    """Have warnings of the log told as news for the length of a `with` block."""
    handler, root = Handler(board), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def open_log(path: Path) -> TextIO:
    """Open a decision log to add to.

    Raises:
        OSError: It cannot be written.
    """
    return path.open("a", encoding="utf-8")
