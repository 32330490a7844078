"""One simulated engine: its data-parallel groups, its clock, who waits for what, its lives.

Idle engines cost nothing: there is no task, only a timer while requests run, and schedulers and
the admin listener are made when first needed. Time is the monotonic clock times `time_scale`; all
figures told to the outside are in seconds of the wall clock.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from random import Random
from typing import TYPE_CHECKING

from specserve_engine.control import Capability, Control, Identity, Versions
from specserve_engine.listener import Listener
from specserve_engine.rounds import RoundStats
from specserve_sim.behaviour import WELL, Behaviour, Load
from specserve_sim.model import Request, Round, Scheduler, upstream_default
from specserve_sim.profile import REFERENCE_STEPS, load_profile, position_probability
from specserve_sim.ranks import SimRanks

if TYPE_CHECKING:
    from collections.abc import Callable

    from specserve_engine.auth import TokenFile
    from specserve_engine.control import Order
    from specserve_engine.wire import Setting

CONTROLLABLE_ALGORITHMS = frozenset({"EAGLE", "EAGLE3", "NEXTN"})
CAP_WITH_DRAFT = 48
"""Requests that SGLang runs at most as soon as a draft is loaded and no limit is given."""

FEWEST_WITHOUT_LIMIT, MOST_WITHOUT_LIMIT = 2048, 4096
"""Bounds of what SGLang gives itself without a draft and a limit, from the cache's size."""

REQUESTS_PER_CONTEXT = 512
"""Requests that it then reckons with for each full context that the cache holds."""

TOKENS_PER_REQUEST = 2
"""Tokens of the cache for each request at the least: a higher limit is lowered to that."""

SHORTEST_SLEEP = 0.004
"""Seconds between two looks at an engine at least; shorter rounds are run several at a time."""

SHORTEST_CHUNK = 0.02
CHUNKS_PER_SECOND = 2000
"""Streams share this many chunks a second and process, each at most one in 20 ms."""

NAME = f"specserve-sim {version('specserve-sim')}"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is started with.

    Attributes:
        served_model_name: name in answers and metric labels.
        model_path: echoed only.
        profile: name of the profile that gives its round times.
        tensor_parallel: ranks in each group.
        data_parallel: groups; requests go to the least loaded one.
        max_running_requests: most requests decoding together in each group; None takes SGLang's
            own limit, 48 with a draft.
        algorithm: speculative algorithm; None is a server without a draft. All are given the
            round times of the profile, whatever they were measured with.
        topk: branches of the draft tree; live control needs 1.
        steps: step counts prepared for live control.
        initial_steps: draft steps of an engine that cannot be controlled.
        accept_length: tokens won per verify at 3 steps by requests that name none.
        recovery_rounds: see `model.Scheduler`.
        time_scale: engine seconds in a second of the wall clock.
        seed: of the acceptance process.
        startup_seconds: wall-clock seconds of loading.
        api_key: user key; None leaves the serving routes open.
        admin_api_key: SGLang's admin key: refused on the routes that exist here.
        max_total_tokens: tokens that the KV cache of a group holds; nothing here but the limit
            of requests depends on it.
        context_length: longest prompt with its answer.
        decode_log_interval: decode rounds between two looks at the gauges of /metrics.
        require_live: without live control the admin port says "not ready".
        metrics: whether there is a /metrics.
    """

    served_model_name: str = "sim"
    model_path: str = "sim"
    profile: str = "h200-a"
    tensor_parallel: int = 1
    data_parallel: int = 1
    max_running_requests: int | None = None
    algorithm: str | None = "EAGLE3"
    topk: int = 1
    steps: tuple[int, ...] = (0, 1, 3)
    initial_steps: int = REFERENCE_STEPS
    accept_length: float = 2.5
    recovery_rounds: int = 0
    time_scale: float = 1.0
    seed: int = 0
    startup_seconds: float = 0.0
    api_key: str | None = None
    admin_api_key: str | None = None
    max_total_tokens: int = 400_000
    context_length: int = 131_072
    decode_log_interval: int = 40
    require_live: bool = False
    metrics: bool = True

    def __post_init__(self) -> None:
        """Refuse what no engine could be started with.

        Raises:
            ValueError: naming the setting.
        """
        for name in ("tensor_parallel", "data_parallel", "decode_log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is below 1")
        if self.time_scale <= 0:
            raise ValueError("time_scale is not positive")
        if self.max_running_requests is not None and self.max_running_requests < 1:
            raise ValueError("max_running_requests is below 1")
        if self.initial_steps < 1:
            raise ValueError("initial_steps is below 1")
        position_probability(self.accept_length)

    @property
    def request_limit(self) -> int | None:
        """What SGLang's argument comes to; None leaves it to the size of the cache."""
        if self.max_running_requests is None and self.algorithm is not None:
            return CAP_WITH_DRAFT
        return self.max_running_requests

    @property
    def running_cap(self) -> int:
        """Most requests decoding together in one group.

        As in SGLang, every group of plain data parallelism has the whole limit, lowered to what
        the cache holds.
        """
        limit = self.request_limit
        if limit is None:
            contexts = self.max_total_tokens / self.context_length
            limit = max(int(contexts * REQUESTS_PER_CONTEXT), FEWEST_WITHOUT_LIMIT)
            limit = min(limit, MOST_WITHOUT_LIMIT)
        return max(1, min(limit, self.max_total_tokens // TOKENS_PER_REQUEST))

    @property
    def first_steps(self) -> int | None:
        """Draft steps at the start, which are the most there will be; None without a draft."""
        if self.algorithm is None:
            return None
        return max(self.steps) if self.capability().controllable else self.initial_steps

    def capability(self) -> Capability:
        """Return what can be controlled in the live engine, or why nothing can."""
        if self.algorithm is None:
            return Capability(controllable=False, reason="no draft is loaded")
        if self.algorithm not in CONTROLLABLE_ALGORITHMS:
            return Capability(
                controllable=False,
                reason=f"{self.algorithm} has no adaptive controller: its verify width is fixed",
            )
        if self.topk != 1:
            return Capability(
                controllable=False, reason=f"speculative-eagle-topk is {self.topk}, not 1"
            )
        if not self.steps:
            return Capability(controllable=False, reason="SPECSERVE_STEPS prepares no step count")
        return Capability(controllable=True, available_steps=tuple(sorted(self.steps)))


@dataclass(frozen=True, slots=True)
class Applied:
    """An order that a group's scheduler took over; `at` is the monotonic clock, in seconds."""

    group: int
    epoch: int
    mode: str
    steps: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Gauges:
    """What /metrics shows of one group, as of its last look.

    `throughput` is in tokens per second; `accept_length` is that of the window, 0 before the
    first one.
    """

    running: int = 0
    queued: int = 0
    throughput: float = 0.0
    used_tokens: int = 0
    steps: int = 0
    accept_length: float = 0.0
    accept_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What /v1/loads shows of one group; `accept_length` is the mean since the start."""

    at: float
    running: int
    queued: int
    queued_tokens: int
    used_tokens: int
    throughput: float
    accept_length: float | None
    accept_rate: float


class Group:
    """One data-parallel group: a scheduler, its figures, and the order it obeys."""

    def __init__(self, index: int, config: EngineConfig, salt: str) -> None:
        self.index = index
        self.config = config
        self.stats = RoundStats()
        self.gauges = Gauges()
        self.epochs = [0] * config.tensor_parallel
        self.rounds_at_order = 0
        self.auto = upstream_default(config.steps or (config.initial_steps,))
        self.scheduler = Scheduler(
            load_profile(config.profile),
            max_running=config.running_cap,
            rng=Random(f"{config.seed}/{salt}/{index}"),  # noqa: S311 - a model, no secret
            accept_length=config.accept_length,
            steps=config.first_steps,
            recovery_rounds=config.recovery_rounds,
            on_round=self._observe,
        )
        if config.capability().controllable:
            self.scheduler.choose_steps = self.auto
        self.wall: Callable[[float], float] = lambda seconds: seconds
        self._window_rounds = self._window_tokens = self._window_won = self._window_verifies = 0
        self._window_began = 0.0

    def obey(self, order: Order, rank: int) -> None:
        """Have a rank follow an order; the scheduler does what rank 0 follows."""
        self.epochs[rank] = order.epoch
        if rank == 0:
            self.rounds_at_order = self.scheduler.decode_rounds
            self.scheduler.draft_kv = order.setting.draft_kv.value
            self.scheduler.choose_steps = partial(self._choose, order.setting)

    def _choose(self, setting: Setting, batch: int) -> int:
        forced = setting.steps_for(batch)
        return self.auto(batch) if forced is None else forced

    def _observe(self, done: Round) -> None:
        scale = self.config.time_scale
        if done.decoding:
            self.stats.observe(
                done.steps,
                (done.ended - done.started) / scale,
                done.accepted,
                self.wall(done.ended),
                prefill_between=done.batch > done.decoding,
            )
            self._window_rounds += 1
            self._window_tokens += done.tokens
            self._window_won += done.won
            self._window_verifies += done.decoding
        if self._window_rounds >= self.config.decode_log_interval:
            self._look(done)
        elif done.batch > done.decoding:
            self._glance()

    def _look(self, done: Round) -> None:
        """Close a window, as a decode report does."""
        seconds = (done.ended - self._window_began) / self.config.time_scale
        has_draft = self.scheduler.has_draft
        accept_length = self._window_won / self._window_verifies
        self.gauges = Gauges(
            running=len(self.scheduler.running),
            queued=len(self.scheduler.queue),
            throughput=self._window_tokens / seconds if seconds > 0 else 0.0,
            used_tokens=self.scheduler.used_tokens,
            steps=done.steps,
            accept_length=accept_length if has_draft else 0.0,
            accept_rate=(accept_length - 1) / done.steps if done.steps else 0.0,
        )
        self._window_rounds = self._window_tokens = self._window_won = self._window_verifies = 0
        self._window_began = done.ended

    def _glance(self) -> None:
        """Renew the request counts, as a prefill report does."""
        self.gauges = replace(
            self.gauges,
            running=len(self.scheduler.running),
            queued=len(self.scheduler.queue),
            used_tokens=self.scheduler.used_tokens,
        )

    def rest(self) -> None:
        """Zero what SGLang zeroes when idle; acceptance and steps keep their last value."""
        self.gauges = replace(self.gauges, running=0, queued=0, throughput=0.0, used_tokens=0)
        self._window_began = self.scheduler.clock


class Pace:
    """How often streams of one process get a chunk."""

    def __init__(self) -> None:
        self.streams = 0

    @property
    def seconds(self) -> float:
        """Seconds between two chunks of a stream."""
        return max(SHORTEST_CHUNK, self.streams / CHUNKS_PER_SECOND)


@dataclass(slots=True, eq=False)
class Ticket:
    """Someone who waits for a request.

    Attributes:
        request: what for.
        group: index of the group it went to.
        stream: whether each new token is of interest.
        news: set when there is something to look at.
        lost: the engine process it was in is gone.
    """

    request: Request
    group: int
    stream: bool
    news: asyncio.Event
    lost: bool = False


class SimEngine:
    """A simulated engine, through all the processes of its life.

    Args:
        config: what it is started with.
        tokens: of the admin port; None leaves the engine without one.
        pod_uid: the pod it says it is.
        pace: shared by the engines of one process.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokens: TokenFile | None = None,
        *,
        pod_uid: str = "",
        pace: Pace | None = None,
    ) -> None:
        self.config = config
        self.pod_uid = pod_uid
        self.pace = pace or Pace()
        self.behaviour = WELL
        self.boots = 0
        self.applied: deque[Applied] = deque(maxlen=64)
        self.loading = False
        self.draining = False
        self._tokens = tokens
        self._timer: asyncio.TimerHandle | None = None
        self._loaded: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._boot()

    def _boot(self) -> None:
        self.boots += 1
        self.boot_id = uuid.uuid4().hex
        self.born = time.monotonic()
        self.born_wall = time.time()
        self.counters: Counter[tuple[str, ...]] = Counter()
        self._frozen_gauges: list[Gauges] | None = None
        self._frozen_loads: list[GroupLoad] | None = None
        self._groups: list[Group] | None = None
        self._control: Control | None = None
        self._listener: Listener | None = None
        self.ranks = SimRanks(self)
        self._tickets: dict[Request, Ticket] = {}
        self._left = asyncio.Event()
        self._expecting: set[Ticket] = set()
        self._next_chunk = 0.0
        self._ready = asyncio.Event()
        self.loading = self.config.startup_seconds > 0
        if self.loading:
            loop = asyncio.get_running_loop()
            self._loaded = loop.call_later(self.config.startup_seconds, self.load)

    # The lives of the engine

    async def loaded(self) -> None:
        """Return once the engine serves."""
        if self.loading:
            await self._ready.wait()

    def load(self) -> None:
        """Have loaded: serve from now on."""
        self.loading = False
        self._ready.set()
        if self._control is not None:
            self._control.serve(self.config.capability())

    def restart(self) -> None:
        """Die and come back with another boot id, at epoch 0, with nothing in memory."""
        self.close()
        for ticket in self._tickets.values():
            ticket.lost = True
            ticket.news.set()
        self._left.set()
        self.draining = False
        self._boot()

    def adopt(self, pod_uid: str) -> None:
        """Be in this pod from now on; an engine that was in another one restarts."""
        if pod_uid != self.pod_uid:
            self.pod_uid = pod_uid
            self.restart()

    def close(self) -> None:
        """Stop timers and the lease watchdog."""
        for handle in (self._timer, self._loaded, self._watch):
            if handle is not None:
                handle.cancel()
        self._timer = self._loaded = self._watch = None

    def drain(self) -> None:
        """Begin to shut down: requests go on, new ones are still taken, health says no."""
        self.draining = True
        if self._control is not None:
            self._control.drain()

    def die(self, reason: str) -> None:
        """Lose the scheduler: nothing is decoded any more, while HTTP still answers."""
        self.control.die(reason)
        for group in self.groups:
            group.scheduler.hold()

    async def drained(self) -> None:
        """Return once nobody waits for an answer any more."""
        while self._tickets:
            self._left.clear()
            await self._left.wait()

    # The admin side

    @property
    def control(self) -> Control:
        """The control core of the present process."""
        if self._control is None:
            identity = Identity(pod_uid=self.pod_uid, boot_id=self.boot_id)
            versions = Versions(sglang=NAME, plugin=version("specserve-engine"), proved=True)
            self._control = Control(identity, versions)
            if not self.loading:
                self._control.serve(self.config.capability())
            if self.draining:
                self._control.drain()
        return self._control

    @property
    def listener(self) -> Listener:
        """The admin listener of the present process.

        Raises:
            LookupError: the engine was made without tokens.
        """
        if self._listener is None:
            if self._tokens is None:
                raise LookupError("an engine without tokens has no admin port")
            self._listener = Listener(
                self.control,
                self.ranks,
                self._tokens,
                require_live=self.config.require_live,
            )
        return self._listener

    def watch_leases(self) -> None:
        """Run the lease watchdog from now on; without a directive there is nothing to watch."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(_watching(self.listener))

    # Time

    def now(self) -> float:
        """Engine seconds since this process of the engine began."""
        return (time.monotonic() - self.born) * self.config.time_scale

    def monotonic(self, engine_seconds: float) -> float:
        """Return the monotonic clock's reading at an engine time."""
        return self.born + engine_seconds / self.config.time_scale

    def wall(self, engine_seconds: float) -> float:
        """Return the Unix time at an engine time."""
        return self.born_wall + engine_seconds / self.config.time_scale

    # Requests

    @property
    def groups(self) -> list[Group]:
        """The groups, in order."""
        if self._groups is None:
            self._groups = [
                Group(index, self.config, self.pod_uid)
                for index in range(self.config.data_parallel)
            ]
            for group in self._groups:
                group.wall = self.monotonic
            self._behave()
        return self._groups

    def submit(self, request: Request, *, stream: bool) -> Ticket:
        """Queue a request in the least loaded group; `leave` must follow in any case."""
        self.advance()
        group = min(self.groups, key=lambda g: len(g.scheduler.running) + len(g.scheduler.queue))
        group.scheduler.submit(request, self.now())
        ticket = Ticket(request, group.index, stream, asyncio.Event())
        self._tickets[request] = ticket
        if stream:
            self.pace.streams += 1
            self._expecting.add(ticket)
        self.advance()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Forget a ticket, aborting its request if that is still alive; count what it did."""
        request = ticket.request
        if ticket.stream:
            self.pace.streams -= 1
        if self._tickets.pop(request, None) is None:
            return
        self._expecting.discard(ticket)
        self._left.set()
        self.advance()
        if self.groups[ticket.group].scheduler.abort(request, self.now()):
            self.counters["num_aborted_requests_total",] += 1
            self._arm()
            return
        streaming = "true" if ticket.stream else "false"
        self.counters["num_requests_total", streaming] += 1
        self.counters["prompt_tokens_total", streaming] += request.prompt_tokens
        self.counters["generation_tokens_total", streaming] += request.tokens
        self.counters["spec_verify_calls_total",] += request.verifies

    def advance(self) -> None:
        """Run what is due, wake whom it concerns, and set the timer for what comes next."""
        if self._groups is None:
            return
        now = self.now()
        for group in self._groups:
            for request in group.scheduler.advance(now):
                ticket = self._tickets.get(request)
                if ticket is not None:
                    self._expecting.discard(ticket)
                    ticket.news.set()
        if self._expecting:
            started = [t for t in self._expecting if t.request.first_token is not None]
            self._expecting.difference_update(started)
            for ticket in started:
                ticket.news.set()
        clock = time.monotonic()
        if clock >= self._next_chunk and self.pace.streams:
            self._next_chunk = clock + self.pace.seconds
            for ticket in self._tickets.values():
                if ticket.stream:
                    ticket.news.set()
        self._arm()

    def _arm(self) -> None:
        events = [group.scheduler.next_event for group in self._groups or ()]
        due = min((event for event in events if event is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            wait = max(SHORTEST_SLEEP, self.monotonic(due) - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait, self.advance)

    # What can be told to misbehave, and what is shown

    def behave(self, behaviour: Behaviour) -> None:
        """Behave so from now on."""
        self.advance()
        self._frozen_gauges = self._frozen_loads = None
        self.behaviour = behaviour
        if behaviour.frozen:
            self.gauges()
            self.loads()
        self._behave()
        if self._groups is not None:
            self.advance()

    def set_load(self, running: int, queued: int) -> float:
        """Report this load from now on instead of the real one; return the monotonic time."""
        self.behaviour = replace(self.behaviour, load=Load(running, queued))
        return time.monotonic()

    def _behave(self) -> None:
        if self._groups is None:
            if self.behaviour == WELL:
                return
            _ = self.groups
            return
        now = self.now()
        accept_length = self.behaviour.accept_length
        for group in self._groups:
            scheduler = group.scheduler
            scheduler.accept_length = (
                self.config.accept_length if accept_length is None else accept_length
            )
            if self.behaviour.stalled:
                scheduler.hold()
            elif scheduler.held:
                scheduler.release(now)

    def counts(self, group: Group) -> tuple[int, int]:
        """Return the running and the queued requests that a group says it has."""
        load = self.behaviour.load
        if load is None:
            return len(group.scheduler.running), len(group.scheduler.queue)
        return _share(load.running, group.index, self), _share(load.queued, group.index, self)

    def gauges(self) -> list[Gauges]:
        """Return what /metrics shows of each group; if frozen, what it showed first."""
        if not self.behaviour.frozen:
            return self._gauges()
        if self._frozen_gauges is None:
            self._frozen_gauges = self._gauges()
        return self._frozen_gauges

    def _gauges(self) -> list[Gauges]:
        self.advance()
        shown = []
        for group in self.groups:
            if not group.scheduler.running:
                group.rest()
            running, queued = self.counts(group)
            gauges = group.gauges
            if self.behaviour.load is not None or not group.scheduler.running:
                gauges = replace(gauges, running=running, queued=queued)
            shown.append(gauges)
        return shown

    def loads(self) -> list[GroupLoad]:
        """Return what /v1/loads shows of each group; if frozen, what it showed first."""
        if not self.behaviour.frozen:
            return self._loads()
        if self._frozen_loads is None:
            self._frozen_loads = self._loads()
        return self._frozen_loads

    def _loads(self) -> list[GroupLoad]:
        self.advance()
        shown = []
        for group in self.groups:
            scheduler = group.scheduler
            running, queued = self.counts(group)
            verifies = scheduler.verifies_total
            shown.append(
                GroupLoad(
                    at=time.time(),
                    running=running,
                    queued=queued,
                    queued_tokens=sum(request.prompt_tokens for request in scheduler.queue),
                    used_tokens=scheduler.used_tokens,
                    throughput=group.gauges.throughput if scheduler.running else 0.0,
                    accept_length=(
                        scheduler.won_total / verifies
                        if verifies and scheduler.has_draft
                        else None
                    ),
                    accept_rate=group.gauges.accept_rate,
                )
            )
        return shown

    def took_over(self, group: int, rank: int, order: Order) -> None:
        """Note that a rank obeys an order, if that is the one which its scheduler follows."""
        if rank == 0:
            setting = order.setting
            self.applied.append(
                Applied(group, order.epoch, str(setting.mode), setting.steps, time.monotonic())
            )


def _share(total: int, index: int, engine: SimEngine) -> int:
    parts = engine.config.data_parallel
    return total // parts + (1 if index < total % parts else 0)


async def _watching(listener: Listener) -> None:
    async with listener.watching():
        await asyncio.get_running_loop().create_future()
