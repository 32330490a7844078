"""The second loop: sample → decide → switch → read back, for every pod of every SpecServe.

Each pod has a due time in one heap. A tick reads the pod's load, and now and then the engine's own
report; the policy decides; a directive goes out as a task of its own, so that sampling goes on
while an engine takes its time. At most one tick and one directive are under way for a pod, and
nothing a pod does can delay another.

What is believed of an engine comes from its read-back, never from the last command sent.
"""

import asyncio
import contextlib
import heapq
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from specserve import api, decisions, policy, signals
from specserve.engine import KEEPALIVE, Endpoint, EngineError, EngineRefused, EngineUnreachable
from specserve.fleet import FOLLOWED, Fleet, Sent, Steered, accept_length
from specserve.observed import Key, Pod
from specserve.pace import Pace
from specserve.policy import Memory, Sample, Verdict, directive
from specserve.queries import PrometheusError
from specserve.signals import Reading
from specserve.status import Engine
from specserve.target import Notice, Standing, Target

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

#: Milliseconds an engine has to answer a directive.
DEADLINE_MS = 2000
#: Failures in a row before a pod counts as unreachable; one reset on an idle connection is none.
TOLERATED_FAILURES = 3
#: Seconds between tries after a refusal: first and longest.
BACKOFF = (0.5, 10.0)
#: Directives that need no backoff to be sent again: the answer says what to correct.
_REREAD = frozenset({"StaleEpoch", "EpochReused", "Rebooted", "Timeout"})
#: Settings that are kept to be shared.
SETTINGS_SHARED = 1000
#: Longest time in seconds between two read-backs of an engine under strategy BreakEven: round
#: times and accepted drafts are what it decides by.
BREAK_EVEN_READ_BACK = 2.0
#: Rate at which readings that are due may start, over the rate that periods are stretched to: a
#: backlog must shrink.
HEADROOM = 1.1
#: Periods in force that a reading stays fresh and a directive stays alive, whatever the policy
#: says.
PATIENT_PERIODS = 3
#: Longest life of a directive that engines take, in seconds.
LONGEST_LEASE = 600
#: A pod that fails is sampled this many times less often.
FAILING_STRETCH = 4.0


class Engines(Protocol):
    """What the loop asks of engines; `specserve.engine.EngineClient` is the real one."""

    async def load(self, engine: Endpoint) -> Reading:
        """Requests running and waiting."""
        ...

    async def read_back(self, engine: Endpoint) -> dict[str, Any]:
        """What the engine does."""
        ...

    async def switch(self, engine: Endpoint, directive: dict[str, Any]) -> dict[str, Any]:
        """Send a directive; the read-back acknowledges it."""
        ...


#: Verdicts that are worth a warning when they begin.
_WARNINGS = frozenset({"FlipReverted", "CrashedWhileOn"})


class Loads(Protocol):
    """Where loads come from that the engines are not asked for themselves.

    `specserve.prometheus.PrometheusClient` is the real one.
    """

    async def load(self, target: Target, pod: str) -> Reading:
        """Requests running and waiting in the pod of that name."""
        ...

    def forget(self, key: Key) -> None:
        """Let go of a SpecServe."""
        ...


class Regulator:
    """Steers all pods it is told of.

    Args:
        engines: How to talk to engines.
        loads: Where loads come from under source Prometheus.
        holder: The installation's name in directives.
        samples_per_second: Most load readings a second; above it all periods stretch alike.
        read_back_seconds: Longest time between two read-backs of one engine.
        resumes: Whether what an engine does when it is first heard of is gone on with, as another
            process of ours has ordered it; else it is decided on as for a new engine, unless
            `observe` was given a memory.
        changed: Told a SpecServe whose engines report something new.
        notice: Told what is worth an event.
        decided: Told each decision that differs from the one before it.
        switched: Told the mode and the code of each switch that an engine has confirmed.
        stretched: Told what sample periods are multiplied by, when it changes.
        clock: Monotonic seconds.
        wall: Wall-clock seconds.
    """

    def __init__(
        self,
        engines: Engines,
        loads: Loads | None = None,
        *,
        holder: str,
        changed: Callable[[Key], None],
        notice: Callable[[Notice], None],
        decided: Callable[[Key, decisions.Decision], None] = lambda *_: None,
        switched: Callable[[str, str], None] = lambda *_: None,
        stretched: Callable[[float], None] = lambda _: None,
        samples_per_second: float = 800.0,
        read_back_seconds: float = 10.0,
        resumes: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._engines = engines
        self._loads = loads
        self._holder = holder
        self._changed = changed
        self._notice = notice
        self._decided = decided
        self._told_switch = switched
        self._stretched = stretched
        self._budget = samples_per_second
        self._read_back = read_back_seconds
        self._resumes = resumes
        self._clock = clock
        self._wall = wall
        self._targets: dict[Key, Target] = {}
        self._fleets: dict[Key, Fleet] = {}
        #: What is known of the override of all SpecServes.
        self.standing = Standing()
        self._heap: list[tuple[float, int, Steered]] = []
        self._order = 0
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rates: dict[Key, float] = {}
        self._rate = 0.0
        self._settings: dict[str, Any] = {}
        self._stretch = 1.0
        self._asked = 1.0
        self._pace = Pace(samples_per_second * HEADROOM, clock())
        stretched(self._stretch)
        #: Monotonic time of the last turn of the loop, for the liveness probe.
        self.beat = clock()

    def configure(self, target: Target) -> None:
        """Take in a new or changed SpecServe."""
        old = self._targets.get(target.key)
        self._targets[target.key] = target
        if old == target:
            return
        self._measure(target.key)
        fleet = self._fleet(target.key)
        if old is not None and (old.draft, old.model) != (target.draft, target.model):
            fleet.forget()
        for steered in fleet.pods.values():
            if old is None or old.tokens != target.tokens:
                steered.retry_at = 0.0
            if old is not None and old.draft != target.draft:
                # What another draft did to the engine says nothing about this one.
                steered.memory = policy.pardoned(steered.memory)
            if steered.pod.usable:
                self._schedule(steered, self._clock())

    def release(self, key: Key) -> None:
        """Let go of a SpecServe: nothing more is sent to its pods."""
        if self._targets.pop(key, None) is not None:
            self._measure(key)
            if self._loads is not None:
                self._loads.forget(key)
        fleet = self._fleets.get(key)
        if fleet is None:
            return
        for steered in fleet.pods.values():
            self._interrupt(steered)
        if not fleet.pods:
            del self._fleets[key]

    def override(self, standing: Standing) -> None:
        """Take in a mode that stands above all policies, or that there is none any more."""
        moved = standing.override != self.standing.override
        self.standing = standing
        for key, fleet in self._fleets.items():
            self._changed(key)
            for steered in fleet.usable if moved else ():
                self._schedule(steered, self._clock() + self._spread())

    def observe(self, old: Pod | None, new: Pod | None, memory: Memory | None = None) -> None:
        """Take in a pod that appeared, changed or vanished.

        Args:
            old: As it was, None if it is new.
            new: As it is, None if it is no more.
            memory: What an earlier process of ours remembered of a pod that is new, on the
                clock of this one.
        """
        pod = new or old
        if pod is None:
            return
        fleet = self._fleet(pod.key)
        steered = fleet.pods.get(pod.uid)
        if new is None or not new.alive:
            if steered is not None:
                del fleet.pods[pod.uid]
                # A tick that is under way must find that there is nothing left to steer.
                steered.pod = replace(pod, usable=False, alive=False)
                steered.due = float("inf")
                self._interrupt(steered)
                self._measure(pod.key)
            if not fleet.pods and pod.key not in self._targets:
                del self._fleets[pod.key]
            return
        if steered is None:
            steered = fleet.pods[pod.uid] = Steered(
                new,
                due=float("inf"),
                memory=memory or Memory.start(),
                # When it came back is not known; what is older than this may be of the sweep.
                returned=self._clock() if new.measured else None,
            )
            self._measure(new.key)
            if new.usable:
                self._schedule(steered, self._clock() + self._spread())
            return
        rebooted = steered.pod.boot != new.boot or steered.pod.ip != new.ip
        returned = new.usable and not steered.pod.usable
        moved = (steered.pod.aside is None) is not (new.aside is None)
        ended = steered.pod.boot != new.boot
        steered.pod = new
        if ended:
            self._ended(steered)
        # Who measures a pod that is aside has it do what no policy decided, under other traffic.
        if rebooted or moved:
            steered.restart(self._clock(), moved=moved)
        if new.usable and (rebooted or returned):
            steered.read_wanted = True
            self._schedule(steered, self._clock())

    def engines(self, key: Key) -> list[Engine]:
        """What is known of the usable pods of a SpecServe, for its status."""
        fleet, target = self._fleets.get(key), self._targets.get(key)
        if fleet is None:
            return []
        now, patient = self._clock(), self._patient(target) if target else None
        return [steered.report(patient, now) for steered in fleet.usable]

    def asked(self, key: Key) -> bool:
        """Whether every usable pod of a SpecServe has been asked at least once."""
        fleet = self._fleets.get(key)
        return fleet is None or all(steered.told is not None for steered in fleet.usable)

    def fleet(self, key: Key) -> Fleet:
        """What is known of the pods of a SpecServe."""
        return self._fleet(key)

    def live(self, key: Key) -> bool:
        """Whether both arms of some batch were timed in the engines of a SpecServe."""
        fleet = self._fleets.get(key)
        return fleet is not None and fleet.live

    async def ask(self, pod: Pod) -> Reading | None:
        """Ask a pod that is aside for its load; None if it does not say."""
        target = self._targets.get(pod.key)
        fleet = self._fleets.get(pod.key)
        steered = None if fleet is None else fleet.pods.get(pod.uid)
        if target is None or steered is None or steered.pod.ip is None:
            return None
        try:
            return await self._engines.load(self._endpoint(steered, target))
        except EngineError:
            return None

    def switches(self, key: Key) -> tuple[decisions.Switch, ...]:
        """The last changes that engines of a SpecServe confirmed."""
        fleet = self._fleets.get(key)
        return () if fleet is None else fleet.log.switches

    def log(self, key: Key) -> list[decisions.Decision] | None:
        """What was decided for a SpecServe, the oldest first; None if it is not served.

        May be asked for from another thread, as may `logs`.
        """
        fleet = self._fleets.get(key)
        return None if fleet is None else fleet.log.entries

    def logs(self) -> dict[Key, int]:
        """How many decisions are kept of each SpecServe."""
        return {key: len(fleet.log) for key, fleet in list(self._fleets.items())}

    @property
    def stretch(self) -> float:
        """Sample period of the budget over the period asked for; 1 unless over budget.

        What a slow process adds for the moment shows in the metric only: it is no state.
        """
        return self._asked

    async def run(self) -> None:
        """Tick every pod when it is due, for ever."""
        expected = self._clock()
        try:
            while True:
                now = self.beat = self._clock()
                self._pace.turn(now, now - expected)
                self._restretch()
                self._wake.clear()
                while self._heap and self._heap[0][0] <= now:
                    due, _, steered = self._heap[0]
                    if steered.due == due and not self._pace.take():
                        break
                    heapq.heappop(self._heap)
                    if steered.due == due:
                        self._start(steered, now)
                wait = min(self._heap[0][0] - now, 1.0) if self._heap else 1.0
                wait = max(wait, self._pace.pause)
                expected = now + wait
                with contextlib.suppress(TimeoutError):
                    # Not wait_for: in Python 3.11 it loses a cancellation that meets the
                    # wake-up, and pods are steered on after the lease is lost.
                    async with asyncio.timeout(max(wait, 0.0)):
                        await self._wake.wait()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- schedule ---------------------------------------------------------------------------

    def _schedule(self, steered: Steered, due: float) -> None:
        steered.due = due
        self._order += 1
        heapq.heappush(self._heap, (due, self._order, steered))
        if self._heap[0][2] is steered:
            self._wake.set()

    def _spread(self) -> float:
        # Pods found in one list must not tick in one instant for ever after.
        return random.random() * 0.5 * self._stretch  # noqa: S311

    def _measure(self, key: Key) -> None:
        """Count one SpecServe's readings anew; counting all for each pod would be quadratic."""
        target = self._targets.get(key)
        pods = len(self._fleets[key].pods) if key in self._fleets else 0
        rate = pods * 1000 / target.policy.sample_period_milliseconds if target else 0.0
        self._rate = max(0.0, self._rate + rate - self._rates.pop(key, 0.0))
        if rate:
            self._rates[key] = rate
        self._restretch()

    def _restretch(self) -> None:
        self._asked = max(1.0, self._rate / self._budget)
        stretch = max(1.0, self._rate / (self._budget * self._pace.share))
        if stretch != self._stretch:
            self._stretch = stretch
            self._stretched(stretch)

    def _fleet(self, key: Key) -> Fleet:
        fleet = self._fleets.get(key)
        if fleet is None:
            fleet = self._fleets[key] = Fleet(key)
        return fleet

    def mode(self, target: Target) -> str:
        """The mode in force: of the override, else of the policy unless its time is over."""
        now = self._wall()
        override = self.standing.override
        if override is not None and (override.until is None or now < override.until):
            return override.mode
        pinned = target.policy.mode in {"On", "Off"}
        over = pinned and target.mode_until is not None and now >= target.mode_until
        return "Auto" if over else target.policy.mode

    def _patient(self, target: Target) -> api.Policy:
        """The policy in force: the mode of now, times no shorter than the period in force allows.

        A reading that is not due yet is not stale, and a directive must outlive the wait for its
        renewal.
        """
        mode = self.mode(target)
        if self._stretch == 1.0 and mode == target.policy.mode:
            return target.policy
        return self._fleet(target.key).in_force(
            target, (mode, self._stretch), lambda: self._lengthened(target, mode)
        )

    def _lengthened(self, target: Target, mode: str) -> api.Policy:
        period = target.policy.sample_period_milliseconds / 1000 * self._stretch
        least = math.ceil(period * PATIENT_PERIODS)
        longer: dict[str, Any] = {
            name: least
            for name in ("stale_after_seconds", "lease_seconds")
            if self._stretch > 1.0 and getattr(target.policy, name) < least
        }
        if "lease_seconds" in longer:
            longer["lease_seconds"] = min(least, LONGEST_LEASE)
        return target.policy.model_copy(update={**longer, "mode": mode})

    def _interrupt(self, steered: Steered) -> None:
        """Stop what is being sent to a pod; whether it arrived is not known then."""
        if steered.switching is not None:
            steered.switching.cancel()
            steered.switching = None
            steered.read_wanted = steered.unsure = True

    def _start(self, steered: Steered, now: float) -> None:
        target = self._targets.get(steered.pod.key)
        if target is None or not steered.pod.usable:
            steered.due = float("inf")
            return
        # Not by the stretch in force: after a slow moment nobody has to wait out a long period.
        period = target.policy.sample_period_milliseconds / 1000 * self._asked
        if steered.sample_failures >= TOLERATED_FAILURES:
            # Leases are renewed on ticks, whether or not the load can be read.
            period = max(period, min(period * FAILING_STRETCH, target.policy.lease_seconds / 3))
        self._schedule(steered, now + period)
        if not steered.ticking:
            steered.ticking = True
            self._spawn(self._tick(steered))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a tick failed", exc_info=error)

    # -- one pod ----------------------------------------------------------------------------

    async def _tick(self, steered: Steered) -> None:
        try:
            target = self._targets.get(steered.pod.key)
            if target is None or not steered.pod.usable:
                return
            endpoint = self._endpoint(steered, target)
            now = self._clock()
            due = now - steered.read_at > self._read_period(target)
            if steered.readback is None:
                # A new leader reads all engines: calls of two kinds, at half the rate each.
                self._pace.spend()
            if steered.switching is None and (steered.read_wanted or due):
                await asyncio.gather(
                    self._sample(steered, target, endpoint),
                    self._read(steered, target, endpoint),
                    self._ask_gpu(steered, target, endpoint),
                )
            else:
                await self._sample(steered, target, endpoint)
            target = self._targets.get(steered.pod.key)
            if target is not None and steered.pod.usable:
                self._decide(steered, target)
                self._tell(steered, target)
        finally:
            steered.ticking = False

    def _read_period(self, target: Target) -> float:
        if target.policy.strategy == "BreakEven":
            return min(self._read_back, BREAK_EVEN_READ_BACK) * max(1.0, self._stretch)
        return self._read_back * max(1.0, self._stretch / 2)

    def _endpoint(self, steered: Steered, target: Target) -> Endpoint:
        period = target.policy.sample_period_milliseconds / 1000 * self._asked
        return Endpoint(
            steered.pod.ip or "",
            target.tokens,
            target.api_key,
            target.model,
            # One that would idle out before the next call only holds memory meanwhile.
            reuse=period < KEEPALIVE,
        )

    async def _load(self, pod: Pod, target: Target, endpoint: Endpoint) -> Reading:
        if target.policy.source == "Prometheus" and self._loads is not None:
            return await self._loads.load(target, pod.name)
        return await self._engines.load(endpoint)

    async def _ask_gpu(self, steered: Steered, target: Target, endpoint: Endpoint) -> None:
        """Ask an engine itself what it runs on where its load comes from elsewhere.

        A curve holds for one GPU. A pod keeps its own, so an answer is good for its life.
        """
        policy = target.policy
        if policy.source != "Prometheus" or policy.strategy != "BreakEven" or steered.gpu:
            return
        if steered.gpu_asked >= TOLERATED_FAILURES:
            return
        steered.gpu_asked += 1
        self._pace.spend()
        with contextlib.suppress(EngineError):
            reading = await self._engines.load(endpoint)
            steered.gpu = self._shared(reading.gpu)
            # One that does not say has none to tell.
            steered.gpu_asked = TOLERATED_FAILURES

    async def _sample(self, steered: Steered, target: Target, endpoint: Endpoint) -> None:
        pod = steered.pod
        try:
            reading = await self._load(pod, target, endpoint)
        except (EngineError, PrometheusError) as error:
            if _replaced(pod, steered.pod):
                return
            steered.sample_failures += 1
            sure = isinstance(error, EngineRefused) or getattr(error, "answered", False)
            if sure or steered.sample_failures >= TOLERATED_FAILURES:
                steered.sample_error = _kept(error)
            return
        if _replaced(pod, steered.pod):
            return
        steered.sample_failures = 0
        steered.sample_error = None
        if reading.running == 0 and reading.queued > 0:
            # Stalled or just busy: only a fresh count of tokens tells.
            steered.read_wanted = True
        steered.ranks = reading.ranks
        self._keyed(steered, refused=reading.key_refused)
        # What stays the same for an engine process is not told by each source of its load.
        capacity = reading.capacity
        if capacity is None and steered.sample is not None:
            capacity = steered.sample.capacity
        if reading.cache_tokens is not None:
            steered.cache_tokens = reading.cache_tokens
        steered.gpu = self._shared(reading.gpu or steered.gpu)
        now = self._clock()
        if now - reading.age < steered.born:
            return  # what Prometheus knows is of the engine process before this one
        steered.sample = Sample(
            at=now - reading.age,
            stamp=now if reading.stamp is None else reading.stamp,
            running=reading.running,
            queued=reading.queued,
            capacity=capacity,
            tokens_total=signals.tokens_total(steered.readback or {})
            if reading.tokens_total is None
            else reading.tokens_total,
        )

    def _keyed(self, steered: Steered, *, refused: bool) -> None:
        if refused and not steered.key_refused:
            self._say(
                steered,
                "Warning",
                "ApiKeyRefused",
                "the engine refuses the API key, as it will that of clients; its load is read "
                "from its plugin",
            )
        steered.key_refused = refused

    async def _read(self, steered: Steered, target: Target, endpoint: Endpoint) -> None:
        if self._clock() < steered.retry_at:
            return
        pod = steered.pod
        try:
            answer = await self._engines.read_back(endpoint)
        except EngineError as error:
            if not _replaced(pod, steered.pod):
                self._failed(steered, error)
            return
        if _replaced(pod, steered.pod):
            return
        if answer.get("podUID") != pod.uid:
            self._failed(
                steered,
                EngineRefused("WrongPod", "another pod answers at this address", 412, answer),
            )
            return
        self._take(steered, target, answer)
        if not steered.untaken:
            # That an engine can be read is no sign that it takes directives.
            steered.recover()
        self._prove(steered, answer)

    def _take(self, steered: Steered, target: Target, answer: dict[str, Any]) -> None:
        """Believe a read-back."""
        now = self._clock()
        old = steered.readback
        if old is not None and old.get("bootID") != answer.get("bootID"):
            steered.restart(self._clock())
        first = steered.readback is None
        fleet = self._fleet(target.key)
        # Short contexts and random prompts: what a sweep saw is none of the traffic's.
        answer = signals.since(answer, now, steered.returned)
        steered.rounds = signals.rounds(answer, now)
        if target.policy.strategy == "BreakEven" and fleet.learn(steered.rounds):
            self._changed(target.key)
        steered.readback = steered.keep(answer)
        for name in ("tiers", "fallback", "availableSteps"):
            if steered.readback.get(name):
                steered.readback[name] = self._shared(steered.readback[name])
        versions = answer.get("versions") or {}
        steered.sglang = self._shared(str(versions.get("sglang") or ""))
        steered.plugin = self._shared(str(versions.get("plugin") or ""))
        steered.astray = directive.astray(answer)
        steered.read_at = now
        steered.read_wanted = steered.unsure = False
        steered.epoch = max(steered.epoch, _epoch(answer))
        sent = steered.unproved
        if not steered.looking and not (sent is not None and sent.verdict.probe):
            steered.epoch_shown = steered.epoch
        lease = answer.get("lease") or {}
        ours = lease.get("holder") == self._holder
        steered.lease_until = now + float(lease.get("remainingSeconds") or 0) if ours else 0.0
        accept = accept_length(answer)
        if accept is not None:
            steered.accept = accept
        tabled = answer.get("mode") == "tiers"
        if first and not tabled:
            steered.shown = directive.is_on(answer)
        unknown = first and steered.memory.mode is None
        if unknown and steered.epoch > 0 and self._resumes:
            since = None
            if target.last_switch is not None:
                since = now - max(0.0, self._wall() - target.last_switch)
            on = directive.is_on(answer)
            steered.memory = Memory.resume(
                None if on is None else ("On" if on else "Off"),
                since,
                _table(answer) if target.policy.strategy == "BreakEven" else (),
                now,
            )

    def _shared(self, setting: Any) -> Any:
        """An equal setting that another pod has, if there is one: few differ."""
        if len(self._settings) > SETTINGS_SHARED:
            self._settings.clear()
        return self._settings.setdefault(repr(setting), setting)

    def _ended(self, steered: Steered) -> None:
        """Take in that an engine process is gone in a living pod; what it did may be why.

        Its exit code says nothing: SGLang as the first process of a container cannot kill
        itself, so it leaves with 0 after a crash, while older ones leave a drain with 137.
        """
        if steered.readback is not None and directive.is_on(steered.readback):
            steered.memory = policy.crashed(steered.memory, self._clock())
            log.warning("%s: the engine ended while it speculated", steered.pod.name)

    def _judge(self, steered: Steered, target: Target, now: float) -> Verdict:
        """Have the policy decide, and take note of what it said."""
        fleet, patient = self._fleet(target.key), self._patient(target)
        sample = steered.sample
        if sample is not None and steered.rounds is not None:
            # Handed on once: of 10,000 pods nobody keeps what has been taken in.
            sample = replace(sample, rounds=steered.rounds)
            steered.rounds = None
        before = steered.verdict
        probing = steered.memory.probing.active
        verdict, steered.memory = policy.decide(
            patient, steered.memory, sample, now, fleet.context(steered, target, patient, now)
        )
        if probing is not None and steered.memory.probing.active is None:
            fleet.probed(now - probing.began)
        verdict = self._worded(target, verdict)
        room = decisions.room(len(self._fleets))
        decision = fleet.decided(steered, verdict, now, wall=self._wall(), room=room)
        if decision is not None:
            self._decided(target.key, decision)
        if before is not None and verdict.code != before.code and verdict.code in _WARNINGS:
            self._say(steered, "Warning", verdict.code, verdict.reason)
        if verdict.recheck is not None and now + verdict.recheck < steered.due:
            steered.read_wanted = True
            self._schedule(steered, now + verdict.recheck)
        return verdict

    def _worded(self, target: Target, verdict: Verdict) -> Verdict:
        """The verdict, a pin in the words of who set it."""
        if not verdict.code.startswith("Pinned"):
            return verdict
        _, _, load = verdict.reason.partition(", ")
        mode, override = verdict.code.removeprefix("Pinned"), self.standing.override
        if override is not None and override.mode == mode == self.mode(target):
            why = f" ({override.reason})" if override.reason else ""
            reason = f"{mode.lower()}: override of all SpecServes{why}, {load}"
            return replace(verdict, code=f"Override{mode}", reason=reason)
        if target.mode_until is not None:
            reason = f"{mode.lower()}: pinned until {target.policy.mode_until}, {load}"
            return replace(verdict, reason=reason)
        return verdict

    def _decide(self, steered: Steered, target: Target) -> None:
        if steered.readback is None:
            return  # the engine is read before anything is decided for it
        fleet, patient = self._fleet(target.key), self._patient(target)
        if patient.scope == "Fleet" and steered.verdict is None and not fleet.asked:
            return  # the first few pods are not the fleet
        now = self._clock()
        was_stalled = steered.memory.stalled
        verdict = self._judge(steered, target, now)
        if steered.memory.stalled and not was_stalled:
            self._say(steered, "Warning", "EngineStalled", verdict.reason)
        if (
            patient.mode == "Observe"
            or verdict.setting is None
            or not steered.readback.get("controllable")
        ):
            steered.wanted = None
            self._at_rest(steered)
            return
        steered.wanted = self._shared(
            directive.wanted(patient, target.draft, verdict, target.ranks)
        )
        if steered.switching is not None or steered.unsure or now < steered.retry_at:
            return
        if directive.matches(steered.readback, steered.wanted) is not None:
            epoch = steered.epoch + 1
            steered.said = verdict.reason
        elif steered.lease_until <= now:
            epoch = steered.epoch + 1
            steered.said = steered.said or verdict.reason
        elif steered.lease_until - now <= patient.lease_seconds * 2 / 3:
            epoch = steered.epoch
        else:
            self._at_rest(steered)
            self._settle(steered, verdict, now)
            return
        if epoch > steered.epoch:
            ours = steered.readback.get("mode") != "auto"
            steered.unproved = Sent(
                steered.wanted,
                epoch,
                verdict,
                steered.shown if steered.looking else steered.on(now),
                ours=ours,
                announce=ours or steered.control_error is not None,
                tabled=steered.readback.get("mode") == "tiers",
            )
        body = directive.body(
            steered.wanted,
            pod_uid=steered.pod.uid,
            boot_id=str(steered.readback.get("bootID")),
            epoch=epoch,
            holder=self._holder,
            lease_seconds=patient.lease_seconds,
            deadline_ms=DEADLINE_MS,
            reason=steered.said or verdict.reason,
        )
        steered.switching = self._spawn(self._switch(steered, target, body))

    def _settle(self, steered: Steered, verdict: Verdict, now: float) -> None:
        """Take note of the mode of an engine that does as it is told, once a probe is over.

        An engine that follows a table changes its mode by itself; only if that lasts is it told.
        """
        if verdict.probe or steered.readback is None:
            return
        steered.quiet_until = 0.0
        on = verdict.mode == "On"
        if steered.shown is None or steered.shown is on:
            steered.shown, steered.strayed_at = on, None
            return
        if steered.readback.get("mode") == "tiers" and not verdict.flip:
            if steered.strayed_at is None:
                steered.strayed_at = now
            if now - steered.strayed_at < FOLLOWED:
                return
        self._switched(steered, verdict, on=on, announce=True)

    def _at_rest(self, steered: Steered) -> None:
        """There is nothing to send: what was not taken no longer matters, or was taken."""
        if steered.untaken and not steered.unsure:
            steered.recover()

    async def _switch(self, steered: Steered, target: Target, body: dict[str, Any]) -> None:
        pod = steered.pod
        try:
            if not pod.usable:
                return
            answer = await self._engines.switch(self._endpoint(steered, target), body)
        except EngineError as error:
            if not _replaced(pod, steered.pod):
                self._refused(steered, error)
        else:
            if not _replaced(pod, steered.pod):
                self._take(steered, target, answer)
                steered.recover()
                self._prove(steered, answer)
        finally:
            # Interrupted, it has been replaced already.
            if steered.switching is asyncio.current_task():
                steered.switching = None
        if (now_target := self._targets.get(steered.pod.key)) is not None:
            self._tell(steered, now_target)

    def _prove(self, steered: Steered, answer: dict[str, Any]) -> None:
        """Record a switch once the engine reports it, also where the acknowledgement was lost."""
        sent = steered.unproved
        if sent is None or answer["epoch"] < sent.epoch:
            return
        steered.unproved = None
        if answer["epoch"] != sent.epoch or directive.matches(answer, sent.setting) is not None:
            return
        steered.looking = sent.verdict.probe
        if sent.verdict.probe:
            return  # a short look is no switch, and neither is the way back from it
        steered.epoch_shown = steered.epoch
        on = sent.verdict.mode == "On"
        following = sent.tabled and answer.get("mode") == "tiers" and not sent.verdict.flip
        if following and steered.shown is not None:
            return  # where the load went, not what was ordered; told if it lasts
        if sent.before is not on or not sent.ours:
            self._switched(steered, sent.verdict, on=on, announce=sent.announce)
        else:
            steered.shown = on

    def _switched(self, steered: Steered, verdict: Verdict, *, on: bool, announce: bool) -> None:
        fleet = self._fleet(steered.pod.key)
        fleet.switched(steered, verdict, on=on, wall=self._wall())
        mode = "On" if on else "Off"
        self._told_switch(mode, verdict.code)
        log.info("%s/%s switched %s: %s", *steered.pod.key, mode.lower(), steered.switched_why)
        if announce:
            self._say(
                steered,
                "Normal",
                "SpeculationEnabled" if on else "SpeculationDisabled",
                verdict.reason,
            )

    def _refused(self, steered: Steered, error: EngineError) -> None:
        if isinstance(error, EngineRefused):
            steered.epoch = max(steered.epoch, _epoch(error.body))
            if error.status < 500:
                steered.unproved = None
        # Whatever went wrong, the engine is asked what it does before it is told again.
        steered.read_wanted = steered.unsure = steered.untaken = True
        self._failed(steered, error)

    def _failed(self, steered: Steered, error: EngineError) -> None:
        steered.control_failures += 1
        tolerated = isinstance(error, EngineUnreachable) or error.code in _REREAD
        known = steered.control_error
        if not tolerated or steered.control_failures >= TOLERATED_FAILURES:
            steered.control_error = _kept(error)
            if known is None or known[0] != error.code:
                self._say(steered, "Warning", "SpeculationSwitchFailed", f"{error.code}: {error}")
        if steered.control_failures > 1 or not tolerated:
            first, longest = BACKOFF
            pause = min(first * 2 ** min(steered.control_failures - 1, 16), longest)
            steered.retry_at = self._clock() + pause

    def _say(self, steered: Steered, kind: str, reason: str, message: str) -> None:
        self._notice(Notice(steered.pod.key, kind, reason, f"{steered.pod.name}: {message}"))

    # -- reporting --------------------------------------------------------------------------

    def _tell(self, steered: Steered, target: Target) -> None:
        report = steered.report(self._patient(target), self._clock())
        if report != steered.told:
            steered.told = report
            self._changed(steered.pod.key)

    def collect(self) -> "Iterable[Metric]":
        """Metrics by SpecServe, made when they are asked for (prometheus_client's Collector)."""
        # Nobody asks `specserve local`, which runs without the library.
        from specserve import gauges  # noqa: PLC0415

        served = [
            (fleet, self._patient(target) if target else None)
            for key, fleet in list(self._fleets.items())
            if fleet.pods
            for target in [self._targets.get(key)]
        ]
        return gauges.collect(served, self._clock())


def _replaced(before: Pod, now: Pod) -> bool:
    """Whether an answer that was asked of `before` may be another engine's by now."""
    return (before.ip, before.boot, before.alive) != (now.ip, now.boot, now.alive)


def _epoch(answer: Mapping[str, Any]) -> int:
    """The largest epoch an answer speaks of; one in doubt fences as well."""
    known = (answer.get("epoch"), answer.get("unresolvedEpoch"))
    return max((epoch for epoch in known if isinstance(epoch, int)), default=0)


def _kept(error: EngineError | PrometheusError) -> tuple[str, str]:
    """Code and message; the exception itself holds its frames, the connection, the task: 20 kB."""
    return error.code, str(error)


def _table(answer: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """The table that an engine follows, as a policy's setting has it; empty if it follows none."""
    if answer.get("mode") == "on" and answer.get("steps"):
        return ((1, int(answer["steps"])),)
    if answer.get("mode") == "off":
        return ((1, 0),)
    if answer.get("mode") != "tiers":
        return ()
    return tuple((int(tier["minBatch"]), int(tier["steps"])) for tier in answer["tiers"])
