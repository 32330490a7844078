"""The edge to the scheduler ranks: all of them obey an order, or none.

An implementation of `Ranks` carries orders to the data-parallel groups and their tensor-parallel
ranks; `carry_out` runs the two phases over any of them. Two implementations are in mind: messages
through SGLang's own ordered control path, and ranks that live in this process.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from specserve_engine.wire import Code

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from specserve_engine.control import Order
    from specserve_engine.rounds import Acceptance, ArmFigures


T = TypeVar("T")

_log = logging.getLogger(__name__)


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
        obeyed_at: When it launched the first batch under the order it obeys, seconds of the
            engine's monotonic clock; None before.
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
    obeyed_at: float | None = None


@dataclass(frozen=True, slots=True)
class GroupState:
    """One data-parallel leader's report, with all of its tensor-parallel ranks.

    Attributes:
        ranks: One per rank, in order.
        stats: Round figures by batch bucket and steps, as the leader counted them.
        acceptance: Accepted drafts by steps and position, likewise.
        tokens_total: Tokens emitted since the process began.
        rounds_total: Decode rounds since the process began.
        at: When this was read, seconds of the engine's monotonic clock.
    """

    ranks: tuple[RankState, ...]
    stats: tuple[ArmFigures, ...] = ()
    tokens_total: int | None = None
    rounds_total: int | None = None
    at: float | None = None
    acceptance: tuple[Acceptance, ...] = ()


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


GRACE_SECONDS: Final = 0.05
"""How long past its deadline an implementation may still hand over what it gathered."""


async def carry_out(ranks: Ranks, order: Order, deadline: float) -> Outcome:
    """Take `order` to all ranks in two phases, within `deadline` (event loop's clock).

    Each phase may use half of the time there is, so a rank too slow for the first is found out
    while nothing has been changed. If this is cancelled, the order may still come to be obeyed.
    """
    now = asyncio.get_running_loop().time()
    half = (now + deadline) / 2
    votes = await _gather(ranks, ranks.prepare(order, half), half)
    if not all(vote.verdict is Verdict.YES for vote in votes):
        await _cut_off(ranks.abort(order), asyncio.get_running_loop().time())
        refused = any(vote.verdict is Verdict.NO for vote in votes)
        return Outcome(Result.REFUSED if refused else Result.SILENT, votes)
    if not votes:
        return Outcome(Result.SILENT, votes)
    votes = await _gather(ranks, ranks.commit(order, deadline), deadline)
    verdicts = {vote.verdict for vote in votes}
    if verdicts == {Verdict.YES}:
        return Outcome(Result.APPLIED, votes)
    return Outcome(Result.REFUSED if verdicts == {Verdict.NO} else Result.UNKNOWN, votes)


async def read_all(ranks: Ranks, deadline: float) -> tuple[GroupState, ...]:
    """Read every rank by `deadline` (event loop's clock); those that don't answer are silent."""
    try:
        groups = await _cut_off(ranks.read(deadline), deadline)
    except Exception as error:  # noqa: BLE001 - whatever broke, the ranks did not answer
        return silent_groups(ranks.layout, f"reading failed: {error!r}")
    return silent_groups(ranks.layout, "silent") if groups is None else tuple(groups)


def silent_groups(layout: Sequence[int], last_error: str) -> tuple[GroupState, ...]:
    """Return the state of groups none of whose ranks answers."""
    return tuple(
        GroupState(tuple(RankState(rank, last_error=last_error) for rank in range(size)))
        for size in layout
    )


def groups_json(groups: Sequence[GroupState]) -> list[dict[str, Any]]:
    """Return the read-back's `groups`; `rank` and `epoch` tell apart ranks that disagree."""
    return [
        {
            "ranks": [
                {
                    "rank": state.rank,
                    "epoch": state.epoch,
                    "activeSteps": state.active_steps,
                    "decodeRounds": state.decode_rounds,
                    "lastBatch": state.last_batch,
                    "switches": state.switches,
                    "running": state.running,
                    "queued": state.queued,
                    "lastError": state.last_error,
                    "obeyedAt": state.obeyed_at,
                }
                for state in group.ranks
            ],
            "stats": [figures.to_json() for figures in group.stats],
            "acceptance": [counts.to_json() for counts in group.acceptance],
            "tokensTotal": group.tokens_total,
            "roundsTotal": group.rounds_total,
            "at": group.at,
        }
        for group in groups
    ]


def votes_json(votes: Sequence[Vote]) -> list[dict[str, Any]]:
    """Return each rank's answer to an order, for the body of an error answer."""
    return [
        {
            "group": vote.group,
            "rank": vote.rank,
            "verdict": str(vote.verdict),
            "message": vote.message,
        }
        for vote in votes
    ]


async def _gather(
    ranks: Ranks, phase: Coroutine[Any, Any, Sequence[Vote]], deadline: float
) -> tuple[Vote, ...]:
    """Await one phase and return a vote for every rank of the layout, in order."""
    message = "silent"
    try:
        given = await _cut_off(phase, deadline) or ()
    except Exception as error:  # noqa: BLE001 - whatever broke, nothing is known of the ranks
        given, message = (), f"the path to the ranks failed: {error!r}"
    by_rank = {(vote.group, vote.rank): vote for vote in given}
    return tuple(
        by_rank.get((group, rank), Vote(group, rank, Verdict.SILENT, message))
        for group, size in enumerate(ranks.layout)
        for rank in range(size)
    )


async def _cut_off(call: Coroutine[Any, Any, T], deadline: float) -> T | None:
    """Await `call` until shortly after `deadline`; then leave it to itself and return None.

    It is never cancelled: a fan-out that is cancelled leaves its replies to its successor.
    """
    task = asyncio.ensure_future(call)
    remaining = deadline + GRACE_SECONDS - asyncio.get_running_loop().time()
    await asyncio.wait({task}, timeout=max(remaining, 0))
    if task.done():
        return task.result()
    _left_alone.add(task)
    task.add_done_callback(_note_end)
    return None


_left_alone: Final[set[asyncio.Future[Any]]] = set()
"""Calls that were cut off and go on; the event loop itself refers to a task only weakly."""


def _note_end(task: asyncio.Future[Any]) -> None:
    _left_alone.discard(task)
    if not task.cancelled() and (error := task.exception()):
        _log.warning("a call to the ranks that was cut off has failed: %r", error)
