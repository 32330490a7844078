"""The step policy that stands before the engine's own: forced while an order says so.

It has the members of SGLang's `AdaptiveSpecPolicy`, so the adaptive controller calls it at each
decode round: once when a batch is launched, to choose its steps, and once when the batch's result
has arrived. With overlap scheduling the result comes after the next launch, so each launch is
remembered until its result is there.

Every choice is a function of the order in force and the batch size alone. All tensor-parallel
ranks must choose alike, or they hang: so no rank looks at a clock or at its own counts to choose.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from specserve_engine.control import Order
from specserve_engine.rounds import RoundStats
from specserve_engine.wire import AUTO, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LAUNCHES: Final = 16
"""Launches that wait for their result. SGLang has two under way; more means lost results."""


class StepPolicy(Protocol):
    """SGLang's `AdaptiveSpecPolicy`."""

    @property
    def candidate_steps(self) -> list[int]:
        """The step counts to prepare."""

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Take the batch sizes that graphs are captured for."""

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Choose the steps of a batch that is about to be launched."""

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        """Take a round's result; return steps to activate at once, or None."""

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Return the batch sizes to capture graphs for at a step count."""


class _Launch(NamedTuple):
    batch: int
    steps: int
    epoch: int
    prefill_between: bool


class ForcePolicy:
    """Obeys the order in force, and leaves the rest to the engine's own policy.

    Attributes:
        order: The order in force; the start is epoch 0 in mode auto.
        stats: Figures of all decode rounds of this rank.
        decode_rounds: Rounds launched and finished under the order in force.
        obeyed_at: When the first batch was launched under the order in force, its steps active,
            seconds of the monotonic clock; None before.
        last_batch: Requests in the last launched batch.
        switches: Changes of steps since the process began, as the controller carried them out.
    """

    def __init__(
        self,
        own: StepPolicy,
        forward_passes: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stand before a policy.

        Args:
            own: The engine's own policy.
            forward_passes: Count of all forward passes, prefills among them, this one included.
            clock: Seconds of the machine's monotonic clock.
        """
        self.order = Order(0, AUTO)
        self.stats = RoundStats()
        self.decode_rounds = 0
        self.obeyed_at: float | None = None
        self.last_batch = 0
        self.switches = 0
        self._own = own
        self.forward_passes = forward_passes
        self._clock = clock
        self._launches: deque[_Launch] = deque(maxlen=MAX_LAUNCHES)
        self._launched = 0  # under the order in force
        self._passes_at_launch = 0
        self._last_result = 0.0

    def __getattr__(self, name: str) -> Any:
        """Hand on what later versions of SGLang ask of their own policy."""
        return getattr(self._own, name)

    @property
    def candidate_steps(self) -> list[int]:
        """The step counts to prepare."""
        return self._own.candidate_steps

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Take the batch sizes that graphs are captured for."""
        self._own.set_cuda_graph_bs(cuda_graph_bs)

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Return the batch sizes to capture graphs for at a step count."""
        return self._own.cuda_graph_bs_for_step(step)

    def obey(self, order: Order) -> None:
        """Let `order` decide from the next launch on."""
        self.order = order
        self.decode_rounds = 0
        self.obeyed_at = None
        self._launched = 0

    def switched(self) -> None:
        """Count a change of steps that the controller has carried out."""
        self.switches += 1
        if self._launched == 1:
            self.obeyed_at = self._clock()

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Choose the steps of a batch that is about to be launched."""
        forced = self.order.setting.steps_for(batch_size)
        steps = self._own.get_steps_for_batch(batch_size) if forced is None else forced
        if batch_size > 0:
            self._launched += 1
            if self.obeyed_at is None:
                self.obeyed_at = self._clock()
            passes = self.forward_passes()
            self._launches.append(
                _Launch(batch_size, steps, self.order.epoch, passes - self._passes_at_launch > 1)
            )
            self._passes_at_launch = passes
            self.last_batch = batch_size
        return steps

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        """Take a round's result; return steps to activate at once, or None.

        While forced it is always None: a result that was under way when the order came would
        bring old steps back.
        """
        self._count(num_correct_drafts_per_req)
        if self.order.setting.mode is not Mode.AUTO:
            return None
        return self._own.on_verify_complete(num_correct_drafts_per_req, batch_size)

    def _count(self, correct_drafts: list[int]) -> None:
        batch = len(correct_drafts)
        # Results come in the order of launches; one whose launch is not found is not counted.
        while self._launches and self._launches[0].batch != batch:
            self._launches.popleft()
        if not self._launches:
            return
        launch = self._launches.popleft()
        now = self._clock()
        self.stats.observe(
            launch.steps,
            now - self._last_result,
            correct_drafts,
            now,
            prefill_between=launch.prefill_between,
        )
        self._last_result = now
        if launch.epoch == self.order.epoch:
            self.decode_rounds += 1
