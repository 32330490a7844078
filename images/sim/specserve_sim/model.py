"""Continuous batching in virtual time: one scheduler, its queue, its decode rounds.

Nothing here sleeps or reads a clock: callers pass `now` in seconds and draw randomness from the
generator they hand in, so the same code runs behind the HTTP server, in benchmarks and in
property tests.

A round takes the time that the profile gives for its batch and its draft steps. The round in
which a request joins is its prefill: it wins one token, and every later round wins
`1 + accepted drafts`. A new step count holds from the next decode round on; an idle scheduler
keeps the old one. Not modelled: KV memory pressure, prefix caching, retraction.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from specserve_sim.profile import (
    PREFILL_SECONDS_PER_TOKEN,
    REFERENCE_STEPS,
    expected_tokens,
    position_probability,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from specserve_sim.profile import DraftKv, Profile

RequestState = Literal["new", "queued", "running", "finished", "aborted"]

AUTO_OFF_FROM = 64
"""SGLang's own default table does not draft in batches of this size or more."""


@dataclass(slots=True, eq=False)
class Request:
    """One generation.

    Attributes:
        prompt_tokens: length of the prompt.
        max_new_tokens: tokens it ends after; the model has no end-of-text token.
        accept_length: tokens won per verify at 3 steps; None takes the engine's.
        state: where it is.
        arrived: when it was submitted, seconds.
        admitted: when its prefill began.
        first_token: when its first token was there.
        ended: when it finished or was aborted.
        tokens: tokens generated so far.
        verifies: decode rounds it took part in.
        accepted: drafts accepted in them.
        histogram: how many of its rounds accepted 0, 1, 2 ... drafts.
    """

    prompt_tokens: int
    max_new_tokens: int
    accept_length: float | None = None
    state: RequestState = "new"
    arrived: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    tokens: int = 0
    verifies: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    stale_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """A finished round.

    Attributes:
        started: seconds.
        ended: seconds.
        steps: draft steps it ran with.
        batch: requests in it.
        decoding: those that decoded; the others were in their prefill.
        tokens: tokens that reached requests.
        won: tokens the verifies won, before requests were cut at their length.
        accepted: drafts accepted of each request that decoded.
    """

    started: float
    ended: float
    steps: int
    batch: int
    decoding: int
    tokens: int
    won: int
    accepted: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Running:
    """The round in progress."""

    started: float
    ends: float
    steps: int
    draft_kv: DraftKv
    decoding: list[Request]
    joining: list[Request]


@lru_cache(maxsize=4096)
def _thresholds(accept_length: float, steps: int) -> tuple[float, ...]:
    """Chance that the first 1, 2 ... `steps` drafts are all accepted."""
    probability = position_probability(accept_length)
    return tuple(probability**position for position in range(1, steps + 1))


def accept_length_at(accept_length: float, steps: int) -> float:
    """Tokens won per verify with `steps` draft steps, given those at 3 steps."""
    return expected_tokens(position_probability(accept_length), steps)


def upstream_default(available: tuple[int, ...]) -> Callable[[int], int]:
    """The engine's own choice of steps by batch: the most, and none in large batches."""
    most, least = max(available), min(available)
    return lambda batch: least if batch >= AUTO_OFF_FROM else most


class Scheduler:
    """One scheduler with its queue and its batch.

    Args:
        profile: what rounds take.
        max_running: most requests in a batch.
        rng: source of all randomness.
        accept_length: acceptance of requests that name none.
        steps: draft steps at the start; None is an engine without a draft.
        recovery_rounds: after a cold off, rounds until the drafts of a request that decoded
            meanwhile are accepted as before. 0 is a draft that looks back a few tokens; one that
            needs the token 64 back took 64 rounds and more (docs/engine-plugin.md).
        on_round: told of each finished round.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        max_running: int,
        rng: Random,
        accept_length: float = 2.5,
        steps: int | None = REFERENCE_STEPS,
        recovery_rounds: int = 0,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        if max_running < 1:
            raise ValueError(f"max_running {max_running} is below 1")
        position_probability(accept_length)
        self.profile = profile
        self.max_running = max_running
        self.accept_length = accept_length
        self.recovery_rounds = recovery_rounds
        self.on_round = on_round
        self.has_draft = steps is not None
        self.active_steps = steps or 0
        self.draft_kv: DraftKv = "cold"
        self.choose_steps: Callable[[int], int] = lambda _batch: self.active_steps
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []
        self.switches = 0
        self.decode_rounds = 0
        self.last_batch = 0
        self.tokens_total = 0
        self.won_total = 0
        self.verifies_total = 0
        self.clock = 0.0
        self.held = False
        self._rng = rng
        self._round: _Running | None = None

    @property
    def next_event(self) -> float | None:
        """When something changes by itself; None while idle or held."""
        if self._round is not None:
            return self._round.ends
        if self.queue and not self.held:
            return max(self.clock, self.queue[0].arrived)
        return None

    @property
    def used_tokens(self) -> int:
        """Tokens of prompts and answers that running requests keep in the cache."""
        return sum(request.prompt_tokens + request.tokens for request in self.running)

    def submit(self, request: Request, now: float) -> None:
        """Queue a request.

        Raises:
            ValueError: it was submitted before, or its numbers make no sense.
        """
        if request.state != "new":
            raise ValueError(f"request is {request.state} already")
        if request.prompt_tokens < 1 or request.max_new_tokens < 0:
            raise ValueError("a request has a prompt, and no negative length")
        if request.accept_length is not None:
            position_probability(request.accept_length)
        request.arrived = now
        request.state = "queued"
        self.queue.append(request)

    def abort(self, request: Request, now: float) -> bool:
        """Drop a request wherever it is; True if it was still alive."""
        if request.state == "queued":
            self.queue.remove(request)
        elif request.state == "running":
            self.running.remove(request)
        else:
            return False
        request.state = "aborted"
        request.ended = now
        return True

    def hold(self) -> None:
        """Stall: back to the queue with what runs, and no round from here on."""
        self.held = True
        self._round = None
        for request in reversed(self.running):
            request.state = "queued"
            self.queue.appendleft(request)
        self.running.clear()

    def release(self, now: float) -> None:
        """End a stall: rounds begin again at `now`."""
        self.held = False
        self.clock = max(self.clock, now)

    def advance(self, now: float) -> list[Request]:
        """Run all rounds that end by `now`, and begin the one after.

        Returns:
            The requests that finished, in order.
        """
        finished: list[Request] = []
        while True:
            if self._round is None:
                begin = self.next_event
                if begin is None or begin > now:
                    break
                self._begin(begin)
            current = self._round
            if current is None or current.ends > now:
                break
            self._round = None
            self.clock = current.ends
            self._finish(current, finished)
            if self.running and not self.held:
                self._begin(current.ends)
        return finished

    def _begin(self, at: float) -> None:
        decoding = list(self.running)
        joining: list[Request] = []
        while self.queue and len(self.running) < self.max_running:
            if self.queue[0].arrived > at:
                break
            request = self.queue.popleft()
            request.state = "running"
            self.running.append(request)
            if request.admitted is None:
                request.admitted = at
                joining.append(request)
            else:
                decoding.append(request)
        batch = len(self.running)
        if decoding and self.has_draft:
            steps = self.choose_steps(batch)
            if steps != self.active_steps:
                self.active_steps = steps
                self.switches += 1
        self._round = _Running(
            started=at,
            ends=at + self._seconds(batch, joining),
            steps=self.active_steps,
            draft_kv=self.draft_kv,
            decoding=decoding,
            joining=joining,
        )

    def _seconds(self, batch: int, joining: list[Request]) -> float:
        if self.has_draft:
            seconds = self.profile.t_on(batch, self.active_steps, self.draft_kv)
        else:
            seconds = self.profile.t_off(batch)
        included = self.profile.provenance.prompt_tokens
        longer = sum(max(0, request.prompt_tokens - included) for request in joining)
        return seconds + longer * PREFILL_SECONDS_PER_TOKEN

    def _finish(self, current: _Running, finished: list[Request]) -> None:
        end, steps = current.ends, current.steps
        tokens = 0
        accepted: list[int] = []
        for request in current.joining:
            if request.state == "running":
                tokens += self._grant(request, 1, end, finished)
        for request in current.decoding:
            if request.state != "running":
                continue
            drafts = self._accepted_drafts(request, steps, current.draft_kv)
            accepted.append(drafts)
            tokens += self._grant(request, 1 + drafts, end, finished)
        if finished:
            self.running = [request for request in self.running if request.state == "running"]
        decoded = len(accepted)
        won = decoded + sum(accepted)
        self.tokens_total += tokens
        if decoded:
            self.decode_rounds += 1
            self.last_batch = decoded
            self.won_total += won
            self.verifies_total += decoded
        if self.on_round is not None:
            batch = len(current.decoding) + len(current.joining)
            self.on_round(
                Round(current.started, end, steps, batch, decoded, tokens, won, tuple(accepted))
            )

    def _accepted_drafts(self, request: Request, steps: int, draft_kv: DraftKv) -> int:
        accepted = 0
        if steps == 0:
            if draft_kv == "cold":
                request.stale_rounds = self.recovery_rounds
        else:
            mean = self.accept_length if request.accept_length is None else request.accept_length
            if request.stale_rounds:
                fresh = 1 - request.stale_rounds / (self.recovery_rounds + 1)
                mean = 1 + (mean - 1) * fresh
                request.stale_rounds -= 1
            drawn = self._rng.random()
            for threshold in _thresholds(mean, steps):
                if drawn >= threshold:
                    break
                accepted += 1
        histogram = request.histogram
        while len(histogram) <= accepted:
            histogram.append(0)
        histogram[accepted] += 1
        request.verifies += 1
        request.accepted += accepted
        return accepted

    @staticmethod
    def _grant(request: Request, won: int, at: float, finished: list[Request]) -> int:
        granted = min(won, request.max_new_tokens - request.tokens)
        request.tokens += granted
        if request.first_token is None:
            request.first_token = at
        if request.tokens == request.max_new_tokens:
            request.state = "finished"
            request.ended = at
            finished.append(request)
        return granted
