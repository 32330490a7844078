"""The edge to the scheduler ranks: all of them obey an order, or none.

An implementation of `Ranks` carries orders to the data-parallel groups and their tensor-parallel
ranks; `carry_out` runs the two phases over any of them. Two implementations are in mind: messages
through SGLang's own ordered control path, and ranks that live in this process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from specserve_engine.wire import Code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specserve_engine.control import Order
    from specserve_engine.rounds import ArmFigures


class Verdict(StrEnum):
    """A rank's answer to one phase of an order."""

    YES = "yes"
    NO = "no"
    SILENT = "silent"  # not a word until the deadline


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank says to an order.

    Attributes:
        group: Data-parallel index of the rank's group.
        rank: Tensor-parallel index within it.
        verdict: Its answer.
        message: Why not, if not.
        code: With `Verdict.NO`: `Code.NOT_CONTROLLABLE` or `Code.UNKNOWN_STEPS`.
    """

    group: int
    rank: int
    verdict: Verdict
    message: str = ""
    code: Code = Code.NOT_CONTROLLABLE


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank reports of itself; None where it did not answer (absent is not zero).

    Attributes:
        rank: Tensor-parallel index within the group.
        epoch: Epoch of the order it obeys, 0 before the first.
        active_steps: Steps of the last decode batch it launched: changes after the order does.
        decode_rounds: Decode rounds since the order it obeys was applied.
        last_batch: Requests in the last decode batch.
        switches: Changes of `active_steps` since the process began.
        running: Requests being decoded.
        queued: Requests waiting.
        last_error: The last thing that went wrong, in one line.
    """

    rank: int
    epoch: int | None = None
    active_steps: int | None = None
    decode_rounds: int | None = None
    last_batch: int | None = None
    switches: int | None = None
    running: int | None = None
    queued: int | None = None
    last_error: str | None = None


@dataclass(frozen=True, slots=True)
class GroupState:
    """One data-parallel leader's report, with all of its tensor-parallel ranks.

    Attributes:
        ranks: One per rank, in order.
        stats: Round figures by batch bucket and steps, as the leader counted them.
        tokens_total: Tokens emitted since the process began.
        rounds_total: Decode rounds since the process began.
        at: When this was read, seconds of the engine's monotonic clock.
    """

    ranks: tuple[RankState, ...]
    stats: tuple[ArmFigures, ...] = ()
    tokens_total: int | None = None
    rounds_total: int | None = None
    at: float | None = None


class Ranks(Protocol):
    """Access to every scheduler rank of one engine.

    `deadline` is seconds of the running event loop's clock. An implementation answers by then,
    marking ranks that did not as silent; `carry_out` cuts off one that fails to. A call that was
    cut off goes on in the background, so its late replies must be told apart by epoch.

    Messages are ordered: a `read` begun after an order was sent is answered after that order was
    processed. The resolution of doubts rests on it.
    """

    @property
    def layout(self) -> Sequence[int]:
        """The number of tensor-parallel ranks in each data-parallel group."""

    async def prepare(self, order: Order, deadline: float) -> Sequence[Vote]:
        """Ask each rank whether it could obey; a rank changes nothing but keeps the order."""

    async def commit(self, order: Order, deadline: float) -> Sequence[Vote]:
        """Have each rank obey the order it keeps, from its next decode batch on."""

    async def abort(self, order: Order) -> None:
        """Have each rank forget the order it keeps."""

    async def read(self, deadline: float) -> Sequence[GroupState]:
        """Read each rank's state."""


class Result(StrEnum):
    """What came of an order."""

    APPLIED = "applied"  # by every rank
    REFUSED = "refused"  # by some rank, so applied by none
    SILENT = "silent"  # a rank did not vote: applied by none
    UNKNOWN = "unknown"  # a rank did not confirm: perhaps applied


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an order, and the votes that made it so."""

    result: Result
    votes: tuple[Vote, ...]


async def carry_out(ranks: Ranks, order: Order, deadline: float) -> Outcome:
    """Take `order` to all ranks in two phases, within `deadline` (event loop's clock)."""
    raise NotImplementedError


def groups_json(groups: Sequence[GroupState]) -> list[dict[str, Any]]:
    """Return the read-back's `groups`."""
    raise NotImplementedError
