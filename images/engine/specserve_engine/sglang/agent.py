"""One scheduler rank: judges orders together with its group, obeys them, reports itself.

All of it runs in SGLang's scheduler process, between two batches, at the same turn of the loop on
every tensor-parallel rank of a group. So the ranks can vote on an order and gather their reports
over the group's CPU process group, and either all of them obey from the same batch on, or none.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from specserve_engine.sglang import journal
from specserve_engine.sglang.message import Malformed, Message, Verb, concerns_us, decode
from specserve_engine.sglang.policy import ForcePolicy
from specserve_engine.sglang.redaction import blank
from specserve_engine.sglang.upstream import SKIP_DRAFT_EXTEND
from specserve_engine.wire import Code, DraftKv

if TYPE_CHECKING:
    from collections.abc import Callable

    from specserve_engine.control import Order

BLOCK: Final = "specserve"
"""Name of our part in SGLang's internal state."""

_log = logging.getLogger(__name__)


class RanksDiffer(RuntimeError):
    """The ranks of a group do not run the same plugin on the same SGLang."""


class Group:
    """The tensor-parallel ranks of one data-parallel group."""

    def __init__(self, process_group: Any) -> None:
        """Take a torch process group of CPUs; None stands for a rank on its own."""
        self._process_group = process_group
        self.size = 1
        self.rank = 0
        if process_group is not None:
            # Late: not every process that loads the plugin needs torch.
            self._distributed = importlib.import_module("torch.distributed")
            self.size = self._distributed.get_world_size(process_group)
            self.rank = self._distributed.get_rank(process_group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks. Every rank must call it."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._distributed.all_gather_object(values, value, group=self._process_group)
        return values


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a rank cannot obey an order."""

    code: Code
    message: str


class Agent:
    """The plugin in one scheduler process. Its methods are hooks, or called by them."""

    def __init__(
        self,
        *,
        nonce: int,
        versions: tuple[str, str],
        reply: Callable[..., Any],
        unsupported_reason: Callable[[Any], str | None],
        context: Callable[[], Any] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the hooks of a process that may become a scheduler.

        Args:
            nonce: What an order must carry.
            versions: SGLang's and the plugin's, compared among the ranks of a group.
            reply: Makes SGLang's answer to `/set_internal_state`.
            unsupported_reason: SGLang's own judgement of its arguments.
            context: Returns SGLang's runtime context, None in versions without one.
            clock: Seconds of the machine's monotonic clock.
        """
        self._nonce = nonce
        self._versions = versions
        self._reply = reply
        self._unsupported_reason = unsupported_reason
        self._context = context
        self._clock = clock
        self._scheduler: Any = None
        self._controller: Any = None
        self._policy: ForcePolicy | None = None
        self._group = Group(None)
        self._kept: Order | None = None
        self._vote: dict[str, Any] | None = None
        self._last_error = ""

    # Hooks

    def after_controller_init(
        self, _: None, controller: Any, *_arguments: Any, **_named: Any
    ) -> None:
        """Stand before the policy of SGLang's adaptive controller."""
        if not (hasattr(controller, "params") and hasattr(controller, "_states")):
            raise RanksDiffer("AdaptiveController has no params or no _states in this SGLang")
        self._policy = ForcePolicy(controller.params, clock=self._clock)
        controller.params = self._policy
        self._controller = controller
        self._keep_draft(self._policy.order.setting.draft_kv)

    def around_activate(
        self, original: Callable[..., None], controller: Any, speculative_num_steps: int
    ) -> None:
        """Count a change of steps, and keep its record short."""
        before = controller.worker.speculative_num_steps
        original(controller, speculative_num_steps)
        if controller.worker.speculative_num_steps != before and self._policy is not None:
            self._policy.switched()
            for record in self._records():
                journal.compact(record)

    def after_scheduler_init(
        self, _: None, scheduler: Any, *_arguments: Any, **_named: Any
    ) -> None:
        """Make sure that every rank of the group runs this plugin.

        A rank without it never comes here, so that the engine does not become ready.

        Raises:
            RanksDiffer: They run different ones.
        """
        self._scheduler = scheduler
        self._group = Group(scheduler.tp_cpu_group)
        for name in ("forward_ct", "running_batch", "waiting_queue", "server_args"):
            if not hasattr(scheduler, name):
                raise RanksDiffer(f"Scheduler.{name} is missing in this SGLang")
        if self._policy is not None:
            self._policy.forward_passes = lambda: int(scheduler.forward_ct)
        nonce = hashlib.sha256(str(self._nonce).encode()).hexdigest()[:12]
        mine = (*self._versions, nonce, self.available_steps)
        all_of_them = self._group.gather(mine)
        if any(other != mine for other in all_of_them):
            raise RanksDiffer(f"the ranks of this group differ: {all_of_them}")
        _log.warning(
            "specserve: rank %d of %d, SGLang %s, plugin %s, steps %s",
            self._group.rank,
            self._group.size,
            *self._versions,
            ", ".join(map(str, self.available_steps)) or self.reason,
        )

    def around_set_internal_state(
        self, original: Callable[..., Any], scheduler: Any, recv_req: Any
    ) -> Any:
        """Take a message if it is ours."""
        if not concerns_us(recv_req.server_args):
            return original(scheduler, recv_req)
        return self._reply(updated=self.receive(recv_req.server_args))

    def after_get_internal_state(self, state: Any, _scheduler: Any, _recv_req: Any) -> Any:
        """Add the group's report, and take SGLang's keys out."""
        shown = blank(state.internal_state)
        shown[BLOCK] = self.report()
        state.internal_state = shown
        return state

    # What they do

    @property
    def available_steps(self) -> tuple[int, ...]:
        """The step counts that this rank has prepared, ascending."""
        return tuple(sorted(self._controller._states)) if self._controller else ()  # noqa: SLF001

    @property
    def reason(self) -> str:
        """Why this rank's steps cannot be changed; empty if they can."""
        if self._controller is not None:
            return ""
        arguments = self._scheduler.server_args
        if getattr(arguments, "speculative_algorithm", None) is None:
            return "speculative decoding is not configured"
        try:
            unsupported = self._unsupported_reason(arguments)
        except Exception as error:  # noqa: BLE001 - a reason must not take the engine down
            unsupported = f"SGLang could not say why: {error!r}"
        return unsupported or "there is no adaptive controller: --speculative-adaptive is not set"

    def receive(self, fields: Any) -> bool:
        """Vote on an order with the group, and obey it if that is asked and nobody objects.

        Returns:
            Whether the group did what was asked; then so did this rank.
        """
        try:
            message = decode(fields, self._nonce)
        except Malformed as error:
            # Alike on every rank, so none waits for another one's vote.
            self._last_error = f"a message on /set_internal_state {error}"
            _log.warning("specserve: refused: %s", self._last_error)
            return False
        order = message.order
        if message.verb is Verb.ABORT:
            self._kept = None
            return True
        votes = self._group.gather(self._objection(message))
        self._vote = {
            "verb": int(message.verb),
            "epoch": order.epoch,
            "objections": [
                vote and {"code": str(vote.code), "message": vote.message} for vote in votes
            ],
        }
        if any(votes):
            mine = votes[self._group.rank]
            self._last_error = mine.message if mine else "another rank objected"
            return False
        if message.verb is Verb.PREPARE:
            self._kept = order
            return True
        self._obey(order)
        return True

    def report(self) -> dict[str, Any]:
        """Return the group's report. Every rank of the group must call it."""
        ranks = self._group.gather(self._own_report())
        stats = self._policy.stats if self._policy else None
        now = self._clock()
        return {
            "group": _data_parallel_rank(self._scheduler),
            "controllable": self._controller is not None,
            "reason": self.reason,
            "availableSteps": list(self.available_steps),
            "vote": self._vote,
            "ranks": ranks,
            "stats": [figures.to_json() for figures in stats.figures(now)] if stats else [],
            "acceptance": [counts.to_json() for counts in stats.acceptance()] if stats else [],
            "tokensTotal": stats.tokens_total if stats else None,
            "roundsTotal": stats.rounds_total if stats else None,
            "at": now,
        }

    def _own_report(self) -> dict[str, Any]:
        scheduler, policy = self._scheduler, self._policy
        return {
            "rank": self._group.rank,
            "epoch": policy.order.epoch if policy else 0,
            "activeSteps": self._controller.worker.speculative_num_steps if policy else None,
            "decodeRounds": policy.decode_rounds if policy else None,
            "lastBatch": policy.last_batch if policy else None,
            "switches": policy.switches if policy else 0,
            "running": len(scheduler.running_batch.reqs),
            "queued": len(scheduler.waiting_queue),
            "lastError": self._last_error or None,
            "obeyedAt": policy.obeyed_at if policy else None,
            "records": max((len(record) for record in self._records()), default=0),
        }

    def _objection(self, message: Message) -> Objection | None:
        order, policy = message.order, self._policy
        if policy is None:
            return Objection(Code.NOT_CONTROLLABLE, self.reason)
        missing = sorted(order.setting.needed_steps() - set(self.available_steps))
        if missing:
            text = f"no prepared state for steps {', '.join(map(str, missing))}"
            return Objection(Code.UNKNOWN_STEPS, text)
        if order.epoch < policy.order.epoch:
            return Objection(
                Code.NOT_CONTROLLABLE, f"obeys epoch {policy.order.epoch}, not {order.epoch}"
            )
        if order.epoch == policy.order.epoch and order != policy.order:
            return Objection(
                Code.NOT_CONTROLLABLE, f"epoch {order.epoch} was given to something else"
            )
        if message.verb is Verb.COMMIT and order not in (self._kept, policy.order):
            return Objection(Code.NOT_CONTROLLABLE, f"epoch {order.epoch} was not prepared")
        return None

    def _obey(self, order: Order) -> None:
        self._kept = None
        self._last_error = ""
        if self._policy is None or order == self._policy.order:
            return
        self._policy.obey(order)
        self._keep_draft(order.setting.draft_kv)
        _log.info("specserve: epoch %d: %s", order.epoch, order.setting)

    @staticmethod
    def _keep_draft(draft_kv: DraftKv) -> None:
        # SGLang asks the environment at each round with 0 steps.
        os.environ[SKIP_DRAFT_EXTEND] = "1" if draft_kv is DraftKv.COLD else "0"

    def _records(self) -> list[list[Any]]:
        arguments = (
            getattr(self._controller.worker, "server_args", None) if (self._controller) else None
        )
        return journal.records(arguments, self._context())


def _data_parallel_rank(scheduler: Any) -> int:
    """Return the index of this rank's group, wherever this version of SGLang keeps it."""
    for holder in (scheduler, getattr(scheduler, "ps", None)):
        rank = getattr(holder, "dp_rank", None)
        if rank is not None:
            return int(rank)
    return 0
