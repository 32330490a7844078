"""The way to the scheduler ranks: SGLang's own ordered control path, from its HTTP process.

An order goes through `TokenizerManager.set_internal_state` to every data-parallel leader and from
there to all ranks of its group, which take it between the same two batches; `get_internal_state`
brings their reports back on the same path, so a report asked for after an order shows it.

Phases. Within a group the ranks vote and obey in one turn of their loop, so an engine of one
group needs one message, sent at the commit; preparing only waits for the path to be free. With
several groups the order is prepared in all of them before any obeys.

A call into SGLang has no time limit, and one that is cancelled leaves its replies to the next. So
none is cancelled: one that outlasts its deadline keeps the path until its replies have come, and
an order that finds the path taken is not sent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from specserve_engine.control import Capability
from specserve_engine.ranks import GroupState, RankState, Verdict, Vote, silent_groups
from specserve_engine.rounds import Acceptance, ArmFigures
from specserve_engine.sglang.agent import BLOCK
from specserve_engine.sglang.message import Message, Verb, encode
from specserve_engine.wire import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specserve_engine.control import Order

NOT_SENT: Final = "not sent: an earlier order still waits for the scheduler"


class TokenizerManager(Protocol):
    """What is used of SGLang's."""

    async def set_internal_state(self, obj: Any) -> list[bool]:
        """Hand numbers to every group; returns what each leader made of them."""

    async def get_internal_state(self) -> list[dict[str, Any]]:
        """Return each leader's state."""


class NoPlugin(RuntimeError):
    """A scheduler answers without our part: it runs without the plugin."""


class SglangRanks:
    """All scheduler ranks of this engine.

    Attributes:
        latest: The last reports, by group; empty before the first.
        latest_at: When they came, seconds of the event loop's clock.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        request: Callable[..., Any],
        nonce: int,
        layout: Sequence[int],
    ) -> None:
        """Use the control path of `manager`.

        Args:
            manager: SGLang's tokenizer manager.
            request: Makes SGLang's message from `server_args`, a map of numbers.
            nonce: What an order must carry.
            layout: Ranks per group, as far as it is known before the first report.
        """
        self.layout = tuple(layout)
        self.latest: tuple[GroupState, ...] = ()
        self.latest_at = 0.0
        self._manager = manager
        self._request = request
        self._nonce = nonce
        self._path = asyncio.Lock()
        self._sent = 0
        self._reading: asyncio.Task[list[dict[str, Any]]] | None = None
        self._sent_at_reading = -1

    async def prepare(self, order: Order, deadline: float) -> Sequence[Vote]:
        """Take the path, and with several groups ask each whether it could obey."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._path.acquire()
        except TimeoutError:
            return self._all(Verdict.SILENT, NOT_SENT)
        if len(self.layout) == 1:
            return self._all(Verdict.YES)
        return await self._ask(Verb.PREPARE, order, deadline)

    async def commit(self, order: Order, deadline: float) -> Sequence[Vote]:
        """Have every rank obey."""
        verb = Verb.APPLY if len(self.layout) == 1 else Verb.COMMIT
        votes = await self._ask(verb, order, deadline)
        self._release()
        return votes

    async def abort(self, order: Order) -> None:
        """Give the path back; the groups forget what they keep when its turn comes."""
        if self._path.locked() and self._sending is None:
            self._send(Verb.ABORT, order)
        self._release()

    async def read(self, deadline: float) -> Sequence[GroupState]:
        """Read each rank's report."""
        states = await self._states(deadline)
        if states is None:
            return silent_groups(self.layout, "silent")
        return self._note(states)

    async def capability(self, deadline: float) -> Capability | None:
        """Return what the loaded ranks can be ordered to do; None if they are silent.

        Raises:
            NoPlugin: One of them runs without the plugin.
        """
        states = await self._states(deadline)
        if states is None:
            return None
        self._note(states)
        self.layout = tuple(len(group.ranks) for group in self.latest)
        blocks = [_block(state) for state in states]
        controllable = all(block["controllable"] for block in blocks)
        steps = set.intersection(*(set(block["availableSteps"]) for block in blocks))
        return Capability(
            controllable=controllable,
            reason=next((str(block["reason"]) for block in blocks if block["reason"]), ""),
            available_steps=tuple(sorted(steps)) if controllable else (),
        )

    _sending: asyncio.Task[list[bool]] | None = None

    def _send(self, verb: Verb, order: Order) -> asyncio.Task[list[bool]]:
        numbers = encode(Message(verb, order), self._nonce)
        self._sent += 1
        task = asyncio.create_task(
            self._manager.set_internal_state(self._request(server_args=numbers)),
            name=f"specserve {verb.name.lower()}",
        )
        self._sending = task
        task.add_done_callback(self._sending_ended)
        return task

    def _sending_ended(self, task: asyncio.Task[list[bool]]) -> None:
        if self._sending is task:
            self._sending = None
        if self._released:
            self._release()

    _released = False

    def _release(self) -> None:
        """Give the path to the next order, as soon as nothing is under way on it."""
        if self._sending is not None:
            self._released = True
        elif self._path.locked():
            self._released = False
            self._path.release()

    async def _ask(self, verb: Verb, order: Order, deadline: float) -> Sequence[Vote]:
        task = self._send(verb, order)
        await asyncio.wait({task}, timeout=max(0.0, deadline - _loop_time()))
        if not task.done():
            return self._all(Verdict.SILENT, "silent")
        if all(task.result()):
            return self._all(Verdict.YES)
        return await self._objections(verb, order, deadline)

    async def _objections(self, verb: Verb, order: Order, deadline: float) -> Sequence[Vote]:
        """Return who objected, and that therefore nobody of its group did as asked."""
        states = await self._states(deadline)
        if states is None:
            return self._all(Verdict.SILENT, "silent")
        votes: list[Vote] = []
        for index, block in enumerate(map(_block, states)):
            vote = block["vote"] or {}
            asked = (vote.get("verb"), vote.get("epoch")) == (int(verb), order.epoch)
            objections = vote.get("objections", []) if asked else []
            for rank in range(len(block["ranks"])):
                objection = objections[rank] if rank < len(objections) else None
                if objection:
                    code, message = Code(objection["code"]), str(objection["message"])
                    votes.append(Vote(index, rank, Verdict.NO, message, code))
                elif asked and not any(objections):
                    votes.append(Vote(index, rank, Verdict.YES))
                else:
                    votes.append(Vote(index, rank, Verdict.NO, "another rank objected"))
        # The first to be named is the one that objected itself.
        return sorted(votes, key=lambda vote: vote.message == "another rank objected")

    def _all(self, verdict: Verdict, message: str = "") -> Sequence[Vote]:
        return [
            Vote(group, rank, verdict, message)
            for group, size in enumerate(self.layout)
            for rank in range(size)
        ]

    async def _states(self, deadline: float) -> list[dict[str, Any]] | None:
        """Return each leader's state by rising group; None if some are silent until then."""
        reading = self._reading
        # One under way serves all who ask, unless an order was sent after it.
        if reading is None or reading.done() or self._sent_at_reading != self._sent:
            reading = asyncio.create_task(
                self._manager.get_internal_state(),
                name="specserve read",
            )
            self._reading, self._sent_at_reading = reading, self._sent
        await asyncio.wait({reading}, timeout=max(0.0, deadline - _loop_time()))
        if not reading.done():
            return None
        return sorted(reading.result(), key=lambda state: int(_block(state)["group"]))

    def _note(self, states: Sequence[Mapping[str, Any]]) -> tuple[GroupState, ...]:
        self.latest = tuple(_group_state(_block(state)) for state in states)
        self.latest_at = _loop_time()
        return self.latest


def _block(state: Mapping[str, Any]) -> Mapping[str, Any]:
    block = state.get(BLOCK)
    if not isinstance(block, dict):
        raise NoPlugin("a scheduler runs without the specserve plugin")
    return block


def _group_state(block: Mapping[str, Any]) -> GroupState:
    return GroupState(
        ranks=tuple(
            RankState(
                rank=rank["rank"],
                epoch=rank["epoch"],
                active_steps=rank["activeSteps"],
                decode_rounds=rank["decodeRounds"],
                last_batch=rank["lastBatch"],
                switches=rank["switches"],
                running=rank["running"],
                queued=rank["queued"],
                last_error=rank["lastError"],
                obeyed_at=rank["obeyedAt"],
            )
            for rank in block["ranks"]
        ),
        stats=tuple(
            ArmFigures(
                batch_bucket=cell["batchBucket"],
                steps=cell["steps"],
                rounds=cell["rounds"],
                tokens=cell["tokens"],
                median_round_seconds=cell["medianRoundSeconds"],
                p5=cell["p5"],
                p95=cell["p95"],
                accept_length=cell["acceptLength"],
                last_seen=cell["lastSeen"],
            )
            for cell in block["stats"]
        ),
        tokens_total=block["tokensTotal"],
        rounds_total=block["roundsTotal"],
        at=block["at"],
        acceptance=tuple(
            Acceptance(counts["steps"], counts["verifies"], tuple(counts["accepted"]))
            for counts in block["acceptance"]
        ),
    )


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
