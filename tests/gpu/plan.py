"""What is measured on the GPU, in which order, and what fits into the time that is left.

A block is one load: some windows of each arm under a number of clients and an acceptance. Blocks
come in the order of their importance, each of live windows after the other of the same number of
clients, so that the load need not be built up anew. Whatever a block lacks is measured by the next
run that continues it; no block is shared by two starts of the servers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ON, OFF, SPECSERVE = "on", "off", "specserve"
BASE, DEFAULT = "base", "engineDefault"
LIVE = "live"
"""The server of the arms on, off and specserve; the other arms have one of their own name."""

CLIENTS = (1, 10, 32, 70, 250)
ACCEPTS = (1.0, 2.5, 3.5)
"""The cells of the table."""
PARALLEL_CLIENTS, PARALLEL_ACCEPTS = (1, 32, 250), (2.5,)
"""The cells where the model is spread over several GPUs."""
DEFAULT_ACCEPT = 2.5
"""The acceptance at which the engine's own table is measured."""
BLOCKS = (
    "250@2.5,250@1,250@base,70@2.5,70@1,70@base,1@2.5,1@1,1@base,32@2.5,32@3.5,32@1,32@base,"
    "10@2.5,10@3.5,10@1,10@base,1@3.5,250@3.5,70@3.5"
)
"""The most important first; next to one another where they can have one load."""

REPEATS = 3
"""Windows of the policy and of on in each cell; the other arms stand for several cells, and have
one less."""

FULL_ANSWERS = 3
"""A load is steady once every client has been answered so often: all ask at once, and are in step
from then on but for what their requests take to come in."""
WARM_SECONDS = 2.0
"""Under each arm before the first window of a server: kernels are compiled at their first use."""
HELD_SECONDS = 1.0
"""From an order to the first window under it."""
START_SECONDS = 2.0
"""What `specserve local` takes to its first order and to its end, about."""
QUIET_SECONDS, LEAST_SECONDS, MOST_SECONDS = 3.0, 4.0, 16.0
"""The policy has settled once the steps have not changed for so long and it waits for nothing;
since its first order the least and the most that this may take."""
WAITING = frozenset({"Learning", "Dwelling", "AwaitingReading", "Probing"})
"""Codes of decisions that will be followed by another: at low load the policy may not turn before
the dwell is over, ten seconds after it took over."""
SETTLING_SECONDS = 6.0
"""What it takes, about."""


@dataclass(frozen=True, slots=True)
class Block:
    """Windows under one load.

    Attributes:
        server: Which one is asked.
        clients: Requests in flight.
        accept: Tokens won per round while drafting; None where it does not matter.
        arms: The arm of each window, in order.
    """

    server: str
    clients: int
    accept: float | None
    arms: tuple[str, ...]

    @property
    def name(self) -> str:
        accept = "" if self.accept is None else f" at acceptance {self.accept:g}"
        return f"{self.server} with {self.clients} clients{accept}"

    def left(self, windows: Iterable[Mapping[str, Any]], fleet: str) -> tuple[str, ...]:
        """The arms of windows that are still to be measured.

        Args:
            windows: All that were measured.
            fleet: The start of the servers that would measure them.
        """
        counts: dict[str, Counter[str]] = {fleet: Counter()}
        for window in windows:
            if (window["server"], window["c"], window["accept"]) == (
                *(self.server, self.clients, self.accept),
            ):
                counts.setdefault(window["fleet"], Counter())[window["arm"]] += 1
        wanted = Counter(self.arms)
        if any(count >= wanted for count in counts.values()):
            return ()
        done, left = counts[fleet], []
        for arm in self.arms:
            if done[arm] > 0:
                done[arm] -= 1
            else:
                left.append(arm)
        return tuple(left)


def live(clients: int, accept: float, *, first: bool = True) -> Block:
    """The block of one cell.

    The policy takes over from on: off, it would not see what is accepted before it may look. The
    more windows of on, the closer it may be to off; where no draft is accepted one shows how far
    below off it is.

    Args:
        clients: Requests in flight.
        accept: Tokens won per round while drafting.
        first: Whether it is the first with as many clients: off, which does not depend on the
            acceptance, is measured there and where it is the better arm.
    """
    nothing = accept <= 1
    off = REPEATS - 1 if first else int(nothing)
    again = 0 if nothing else REPEATS - 1
    arms = (*(OFF,) * off, ON, *(SPECSERVE,) * REPEATS, *(ON,) * again)
    return Block(LIVE, clients, accept, arms)


def plain(clients: int) -> Block:
    """Windows of the server without a draft."""
    return Block(BASE, clients, None, (BASE,) * (REPEATS - 1))


def default(clients: int) -> Block:
    """Windows of the server with the engine's own table."""
    return Block(DEFAULT, clients, DEFAULT_ACCEPT, (DEFAULT,) * (REPEATS - 1))


def blocks(text: str = BLOCKS) -> list[Block]:
    """Blocks by what they are called.

    Args:
        text: Names with commas between: the clients, `@`, and the acceptance, or `base`, or
            `table` for the engine's own.
    """
    found: list[Block] = []
    for name in text.split(","):
        clients, _, what = name.partition("@")
        count = int(clients)
        if what == "base":
            found.append(plain(count))
        elif what == "table":
            found.append(default(count))
        else:
            first = not any((each.server, each.clients) == (LIVE, count) for each in found)
            found.append(live(count, float(what), first=first))
    return found


def load_seconds(clients: int) -> float:
    """What it takes until a load is steady, about."""
    return 4.5 + 0.03 * clients


def missing(windows: Sequence[Mapping[str, Any]], planned: Iterable[Block]) -> list[str]:
    """What was planned and was not measured by any start of the servers, in words."""
    fleets = {window["fleet"] for window in windows} or {""}
    found = []
    for block in planned:
        left = min((block.left(windows, fleet) for fleet in fleets), key=len)
        if left:
            words = ", ".join(f"{count} x {arm}" for arm, count in Counter(left).items())
            found.append(f"{block.name}: {words}")
    return found


def seconds(arms: Sequence[str], window: float) -> float:
    """How long windows under one load take, the load itself running."""
    total = 0.0
    for arm, each in groupby(arms):
        total += len(list(each)) * window + {
            ON: HELD_SECONDS,
            OFF: HELD_SECONDS,
            SPECSERVE: START_SECONDS + SETTLING_SECONDS,
        }.get(arm, 0.0)
    return total


def fitting(arms: Sequence[str], window: float, left: float) -> tuple[str, ...]:
    """As many of the next windows as fit into so many seconds."""
    count = len(arms)
    while count and seconds(arms[:count], window) > left:
        count -= 1
    return tuple(arms[:count])
