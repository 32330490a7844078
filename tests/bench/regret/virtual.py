"""A closed loop of clients and one engine in virtual time, many rounds at a time.

The same model as `specserve_sim.model.Scheduler`, for the one load that the measured tables were
made with: clients that each ask again as soon as they are answered. A test holds the two to each
other. Between two things that happen from outside (a look, an order, another load) all rounds of
a constant batch are drawn in one array, one row a round and one column a place in the batch.

On top of that model, and of what was measured on an H200: the time of a round scatters, and a
change of the step count costs the engine a moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from specserve_sim.profile import load_profile, position_probability

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from specserve_sim.profile import DraftKv, Profile

NEW_TOKENS = 256
"""Tokens of each answer, as in the measured tables; their prompts of 128 cost no extra time."""

CAPACITY = 256
"""Requests that the engine runs at once: what the operator asks for by default."""

SCATTER = 0.03
"""Standard deviation of the logarithm of a round's time: 5th and 95th percentile lie 5 % from
the median, as measured at 10 to 70 requests."""

SWITCH_SECONDS = 0.9e-3
"""Measured median from an order to the new state being in place."""

LARGEST_BLOCK = 1 << 16
CUT_BLOCK = 512
"""Entries of the arrays of one block, and of one that is likely to end early."""

PAUSING = 20
"""At most 2 and one in so many of the places pause in one round, but for one round in a thousand
or less."""

DECODES, JOINS, PAUSES = 0, 1, 2
"""What a place does next: decode, prefill a request, or wait a round for its client to ask."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Decode rounds that were played, one entry a round; `accepted` is by place.

    Attributes:
        ended: seconds.
        seconds: what each took.
        steps: draft steps that all of them ran with.
        accepted: drafts accepted in each place.
        decoding: which places decoded.
        joined: whether a request had its prefill.
    """

    ended: NDArray[np.float64]
    seconds: NDArray[np.float64]
    steps: int
    accepted: NDArray[np.int16] | None
    decoding: NDArray[np.bool_]
    joined: NDArray[np.bool_]


@cache
def round_seconds(name: str, steps: int | None, draft_kv: DraftKv) -> NDArray[np.float64]:
    """Seconds of a round by its batch size, 0 for none."""
    profile = load_profile(name)
    sizes = range(1, CAPACITY + 1)
    if steps is None:
        return np.array([0.0, *(profile.t_off(size) for size in sizes)])
    return np.array([0.0, *(profile.t_on(size, steps, draft_kv) for size in sizes)])


@dataclass(slots=True, eq=False)
class VirtualEngine:
    """One engine and its clients.

    Attributes:
        profile: what rounds take.
        seed: of all randomness. Acceptance, scatter and arrivals are drawn apart and in order, so
            that engines of one seed that do the same have the same luck.
        accept_length: tokens won per verify at 3 steps, now.
        choose_steps: draft steps for a batch size.
        has_draft: whether a draft is loaded at all.
        draft_kv: what steps 0 does to the draft.
        on_rows: told of the rounds that were played.
        scatter: see `SCATTER`.
        clock: when the last round ended, seconds.
        tokens: tokens of answers so far.
        active_steps: of the last round.
        switches: how often the step count changed.
        rounds: decode rounds so far.
        drafting_seconds: time spent in rounds that drafted.
        queue: clients who wait for a place.
    """

    profile: Profile
    seed: int
    accept_length: float
    choose_steps: Callable[[int], int]
    has_draft: bool = True
    draft_kv: DraftKv = "cold"
    on_rows: Callable[[Rows], None] | None = None
    scatter: float = SCATTER
    switch_seconds: float = SWITCH_SECONDS
    clock: float = 0.0
    tokens: int = 0
    active_steps: int | None = None
    switches: int = 0
    rounds: int = 0
    drafting_seconds: float = 0.0
    queue: int = 0
    clients: int = 0
    _left: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    _next: Any = field(default_factory=lambda: np.zeros(0, np.int8))
    _noise: Any = field(default_factory=lambda: np.zeros(0))
    _luck: Any = field(init=False)
    _times: Any = field(init=False)
    _arrivals: Any = field(init=False)

    def __post_init__(self) -> None:
        """Make the sources of randomness."""
        self._luck, self._times, self._arrivals = np.random.default_rng(self.seed).spawn(3)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return int((self._next != PAUSES).sum())

    def load(self, clients: int) -> None:
        """Have so many clients from now on; those too many leave when they are answered.

        New ones are at any point of their first answer, as clients are after a while.
        """
        have = len(self._left) + self.queue
        self.clients = clients
        places = min(max(0, clients - have), CAPACITY - len(self._left))
        self.queue = max(0, max(clients, have) - len(self._left) - places)
        if places:
            drawn = self._arrivals.integers(1, NEW_TOKENS + 1, places)
            self._left = np.concatenate((self._left, drawn))
            self._next = np.concatenate((self._next, np.full(places, JOINS, np.int8)))

    def run(self, until: float) -> None:
        """Play all rounds that begin before `until`."""
        while self.clock < until:
            if not len(self._left):
                self.clock = until
                return
            self._block(until)

    def _block(self, until: float) -> None:
        """Play rounds of one step count up to `until`, or up to where the batch changes."""
        places = len(self._left)
        batch = self.running or places
        steps = self.choose_steps(batch) if self.has_draft else 0
        if steps != self.active_steps:
            if self.active_steps is not None:
                self.switches += 1
                self.clock += self.switch_seconds
            self.active_steps = steps
        table = round_seconds(self.profile.name, steps if self.has_draft else None, self.draft_kv)
        expected = (until - self.clock) / table[places]
        count = max(1, min(math.ceil(expected), LARGEST_BLOCK // places))
        noise = self._scattered(count)
        # With fewer in the batch rounds only get shorter, so all of these begin in time.
        begins = self.clock + np.cumsum(noise) * table[places] - noise * table[places]
        count = max(1, int(np.searchsorted(begins, until)))
        self._play(count, noise[:count], steps, table)

    def _scattered(self, count: int) -> NDArray[np.float64]:
        """Factors on the time of the next rounds, 1 in the mean; `_play` takes those it uses."""
        short = count - len(self._noise)
        if short > 0:
            drawn = self._times.normal(-(self.scatter**2) / 2, self.scatter, short)
            self._noise = np.concatenate((self._noise, np.exp(drawn)))
        factors: NDArray[np.float64] = self._noise[:count]
        return factors

    def _drafts(self, count: int, steps: int) -> NDArray[np.int16] | None:
        if not steps:
            return None
        drawn = self._luck.random((count, len(self._left)), dtype=np.float32)
        chance = position_probability(self.accept_length)
        accepted = np.zeros(drawn.shape, np.int16)
        for position in range(1, steps + 1):
            accepted += drawn < chance**position
        return accepted

    def _play(
        self, count: int, noise: NDArray[np.float64], steps: int, table: NDArray[np.float64]
    ) -> None:
        cut = self._cuts(steps)
        if cut:
            count = 1 if cut == 1 else min(count, max(1, CUT_BLOCK // len(self._left)))
        accepted = self._drafts(count, steps)
        if cut > 1:
            count = self._first_answer(accepted, count)
            accepted = None if accepted is None else accepted[:count]
        decoding, joined = self._advance(accepted, count)
        batches = decoding.sum(axis=1) + joined
        seconds = table[batches] * noise[:count]
        self._noise = self._noise[count:]
        ended = self.clock + np.cumsum(seconds)
        self.clock = float(ended[-1])
        held = decoding.any(axis=1)
        self.rounds += int(held.sum())
        if steps:
            self.drafting_seconds += float(seconds.sum())
        if self.on_rows is not None:
            kept = None if accepted is None else accepted[held]
            self.on_rows(
                Rows(ended[held], seconds[held], steps, kept, decoding[held], joined[held] > 0)
            )

    def _cuts(self, steps: int) -> int:
        """Where a block must end: 0 anywhere, 1 after a row, 2 after the first answer.

        Who leaves depends on the answer; and as answered clients pause a round, the batch may
        fall to where the engine chooses other steps.
        """
        places = len(self._left)
        if self.clients < places + self.queue:
            return 2
        if not self.has_draft or self.queue or places == 1:
            return 0
        lowest = max(1, places - 2 - places // PAUSING)
        if all(self.choose_steps(size) == steps for size in range(lowest, places + 1)):
            return 0
        return 1 if (self._next == PAUSES).any() else 2

    def _progress(
        self, accepted: NDArray[np.int16] | None, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens won by each place if it decoded in every row, summed up; and where it is done.

        A place that is not decoding yet wins one token in the row of its prefill.
        """
        places = len(self._left)
        if accepted is None:
            won = np.broadcast_to(np.arange(1, count + 1)[:, None], (count, places))
        else:
            won = np.cumsum(accepted, axis=0, dtype=np.int64)
            won += np.arange(1, count + 1)[:, None]
        goal = self._left.copy()
        for state in (JOINS, PAUSES):
            late = np.flatnonzero(self._next == state)
            if len(late):
                row = state - 1
                goal[late] += (won[row, late] if row < count else won[-1, late] + 1) - 1
        return won, goal

    def _first_answer(self, accepted: NDArray[np.int16] | None, count: int) -> int:
        won, goal = self._progress(accepted, count)
        done = (won >= goal).any(axis=1)
        return int(done.argmax()) + 1 if done.any() else count

    def _advance(
        self, accepted: NDArray[np.int16] | None, count: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Move all places on by `count` rows.

        Returns:
            Which places decoded in which row, and how many joined in each row.
        """
        places = len(self._left)
        won, goal = self._progress(accepted, count)
        decoding = np.ones((count, places), np.bool_)
        joined = np.zeros(count, np.int64)
        before = int(self._left.sum())
        state = np.zeros(places, np.int8)
        for kind in (JOINS, PAUSES):
            late = np.flatnonzero(self._next == kind)
            if len(late):
                decoding[:kind, late] = False
                if kind <= count:
                    joined[kind - 1] += len(late)
                else:
                    state[late] = kind - count
        pause = 0 if self.queue else 1
        answers = 0
        open_ = np.flatnonzero((state == DECODES) & (won[-1] >= goal))
        while len(open_):
            rows = (won[:, open_] >= goal[open_]).argmax(axis=0)
            answers += len(open_)
            starts = rows + 1 + pause
            if pause:
                resting = rows + 1 < count
                decoding[rows[resting] + 1, open_[resting]] = False
            inside = starts < count
            late = open_[~inside]
            state[late] = starts[~inside] - count + 1
            goal[late] = won[-1, late] + NEW_TOKENS
            open_, starts = open_[inside], starts[inside]
            decoding[starts, open_] = False
            np.add.at(joined, starts, 1)
            goal[open_] = won[starts, open_] + NEW_TOKENS - 1
            open_ = open_[won[-1, open_] >= goal[open_]]
        self._left = goal - won[-1]
        self._next = state
        self.tokens += before + answers * NEW_TOKENS - int(self._left.sum())
        self._leave()
        return decoding, joined

    def _leave(self) -> None:
        """Let clients go who are too many, as far as their answers just ended."""
        surplus = len(self._left) + self.queue - self.clients
        if surplus <= 0:
            return
        answered = np.flatnonzero((self._left == NEW_TOKENS) & (self._next != DECODES))
        gone = answered[:surplus]
        from_queue = min(len(gone), self.queue)
        self.queue -= from_queue
        if len(gone) > from_queue:
            self._left = np.delete(self._left, gone[from_queue:])
            self._next = np.delete(self._next, gone[from_queue:])
