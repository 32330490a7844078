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
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from prometheus_client.core import GaugeMetricFamily

from specserve import api, policy, telemetry
from specserve.engine import KEEPALIVE, Endpoint, EngineError, EngineRefused, EngineUnreachable
from specserve.observed import Key, Pod
from specserve.pace import Pace
from specserve.policy import Memory, Sample, Verdict, directive
from specserve.signals import Reading
from specserve.status import Engine
from specserve.target import Notice, Target

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
_KEPT = (
    *("bootID", "epoch", "mode", "steps", "tiers", "draftKv", "fallback"),
    *("controllable", "reason"),
)
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


@dataclass(slots=True)
class _Steered:
    """One pod under regulation. Times are monotonic seconds unless named otherwise."""

    pod: Pod
    due: float
    memory: Memory = field(default_factory=Memory.start)
    sample: Sample | None = None
    sample_error: tuple[str, str] | None = None
    sample_failures: int = 0
    ranks: int | None = None
    cache_tokens: int | None = None
    readback: dict[str, Any] | None = None
    astray: str | None = None
    read_at: float = 0.0
    read_wanted: bool = True
    lease_until: float = 0.0
    control_error: tuple[str, str] | None = None
    control_failures: int = 0
    untaken: bool = False
    retry_at: float = 0.0
    epoch: int = 0
    said: str = ""
    verdict: Verdict | None = None
    wanted: dict[str, Any] | None = None
    ticking: bool = False
    switching: asyncio.Task[None] | None = None
    unproved: "_Sent | None" = None
    unsure: bool = False
    switched_at: float | None = None  # wall clock
    switched_why: str = ""
    accept: float | None = None
    told: Engine | None = None


@dataclass(frozen=True, slots=True)
class _Sent:
    """A directive that changes the setting, until the engine is seen to do as it says.

    Attributes:
        setting: What was wanted.
        epoch: Its fence.
        verdict: Why.
        before: Whether the engine speculated when it was sent.
        ours: Whether a directive was in force then; an engine that is taken over from its own
            policy has not flipped.
        announce: Whether the switch is news.
    """

    setting: dict[str, Any]
    epoch: int
    verdict: Verdict
    before: bool | None
    ours: bool
    announce: bool


class Regulator:
    """Steers all pods it is told of.

    Args:
        engines: How to talk to engines.
        holder: The installation's name in directives.
        samples_per_second: Most load readings a second; above it all periods stretch alike.
        read_back_seconds: Longest time between two read-backs of one engine.
        changed: Told a SpecServe whose engines report something new.
        notice: Told what is worth an event.
        clock: Monotonic seconds.
        wall: Wall-clock seconds.
    """

    def __init__(
        self,
        engines: Engines,
        *,
        holder: str,
        changed: Callable[[Key], None],
        notice: Callable[[Notice], None],
        samples_per_second: float = 800.0,
        read_back_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._engines = engines
        self._holder = holder
        self._changed = changed
        self._notice = notice
        self._budget = samples_per_second
        self._read_back = read_back_seconds
        self._clock = clock
        self._wall = wall
        self._targets: dict[Key, Target] = {}
        self._pods: dict[Key, dict[str, _Steered]] = {}
        self._heap: list[tuple[float, int, _Steered]] = []
        self._order = 0
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rates: dict[Key, float] = {}
        self._rate = 0.0
        self._settings: dict[str, Any] = {}
        self._stretch = 1.0
        self._asked = 1.0
        self._pace = Pace(samples_per_second * HEADROOM, clock())
        telemetry.sample_period.set(self._stretch)
        #: Monotonic time of the last turn of the loop, for the liveness probe.
        self.beat = clock()

    def configure(self, target: Target) -> None:
        """Take in a new or changed SpecServe."""
        old = self._targets.get(target.key)
        self._targets[target.key] = target
        if old == target:
            return
        self._measure(target.key)
        for steered in self._pods.get(target.key, {}).values():
            if old is None or old.tokens != target.tokens:
                steered.retry_at = 0.0
            if steered.pod.usable:
                self._schedule(steered, self._clock())

    def release(self, key: Key) -> None:
        """Let go of a SpecServe: nothing more is sent to its pods."""
        if self._targets.pop(key, None) is not None:
            self._measure(key)
        for steered in self._pods.get(key, {}).values():
            self._interrupt(steered)

    def observe(self, old: Pod | None, new: Pod | None) -> None:
        """Take in a pod that appeared, changed or vanished."""
        pod = new or old
        if pod is None:
            return
        fleet = self._pods.setdefault(pod.key, {})
        steered = fleet.get(pod.uid)
        if new is None or not new.alive:
            if steered is not None:
                del fleet[pod.uid]
                # A tick that is under way must find that there is nothing left to steer.
                steered.pod = replace(pod, usable=False, alive=False)
                steered.due = float("inf")
                self._interrupt(steered)
                self._measure(pod.key)
            if not fleet:
                del self._pods[pod.key]
            return
        if steered is None:
            steered = fleet[pod.uid] = _Steered(new, due=float("inf"))
            self._measure(new.key)
            if new.usable:
                self._schedule(steered, self._clock() + self._spread())
            return
        rebooted = steered.pod.boot != new.boot or steered.pod.ip != new.ip
        returned = new.usable and not steered.pod.usable
        steered.pod = new
        if rebooted:
            self._restart(steered)
        if new.usable and (rebooted or returned):
            steered.read_wanted = True
            self._schedule(steered, self._clock())

    def engines(self, key: Key) -> list[Engine]:
        """What is known of the usable pods of a SpecServe, for its status."""
        target = self._targets.get(key)
        return [
            self._report(steered, target)
            for steered in self._pods.get(key, {}).values()
            if steered.pod.usable
        ]

    def asked(self, key: Key) -> bool:
        """Whether every usable pod of a SpecServe has been asked at least once."""
        return all(
            steered.told is not None
            for steered in self._pods.get(key, {}).values()
            if steered.pod.usable
        )

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

    def _schedule(self, steered: _Steered, due: float) -> None:
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
        pods = len(self._pods.get(key, ()))
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
            telemetry.sample_period.set(stretch)

    def _patient(self, target: Target) -> api.Policy:
        """The policy, its times no shorter than the period in force allows.

        A reading that is not due yet is not stale, and a directive must outlive the wait for its
        renewal.
        """
        if self._stretch == 1.0:
            return target.policy
        period = target.policy.sample_period_milliseconds / 1000 * self._stretch
        least = math.ceil(period * PATIENT_PERIODS)
        longer = {
            name: least
            for name in ("stale_after_seconds", "lease_seconds")
            if getattr(target.policy, name) < least
        }
        if "lease_seconds" in longer:
            longer["lease_seconds"] = min(least, LONGEST_LEASE)
        return target.policy.model_copy(update=longer) if longer else target.policy

    def _interrupt(self, steered: _Steered) -> None:
        """Stop what is being sent to a pod; whether it arrived is not known then."""
        if steered.switching is not None:
            steered.switching.cancel()
            steered.switching = None
            steered.read_wanted = steered.unsure = True

    def _start(self, steered: _Steered, now: float) -> None:
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

    async def _tick(self, steered: _Steered) -> None:
        try:
            target = self._targets.get(steered.pod.key)
            if target is None or not steered.pod.usable:
                return
            endpoint = self._endpoint(steered, target)
            now = self._clock()
            due = now - steered.read_at > self._read_back * max(1.0, self._stretch / 2)
            if steered.readback is None:
                # A new leader reads all engines: calls of two kinds, at half the rate each.
                self._pace.spend()
            if steered.switching is None and (steered.read_wanted or due):
                await asyncio.gather(
                    self._sample(steered, endpoint), self._read(steered, target, endpoint)
                )
            else:
                await self._sample(steered, endpoint)
            target = self._targets.get(steered.pod.key)
            if target is not None and steered.pod.usable:
                self._decide(steered, target)
                self._tell(steered, target)
        finally:
            steered.ticking = False

    def _endpoint(self, steered: _Steered, target: Target) -> Endpoint:
        period = target.policy.sample_period_milliseconds / 1000 * self._asked
        return Endpoint(
            steered.pod.ip or "",
            target.tokens,
            target.api_key,
            target.model,
            # One that would idle out before the next call only holds memory meanwhile.
            reuse=period < KEEPALIVE,
        )

    async def _sample(self, steered: _Steered, endpoint: Endpoint) -> None:
        pod = steered.pod
        try:
            reading = await self._engines.load(endpoint)
        except EngineError as error:
            if _replaced(pod, steered.pod):
                return
            steered.sample_failures += 1
            if isinstance(error, EngineRefused) or steered.sample_failures >= TOLERATED_FAILURES:
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
        steered.cache_tokens = reading.cache_tokens
        now = self._clock()
        steered.sample = Sample(
            at=now,
            stamp=now if reading.stamp is None else reading.stamp,
            running=reading.running,
            queued=reading.queued,
            capacity=reading.capacity,
            tokens_total=_tokens(steered)
            if reading.tokens_total is None
            else reading.tokens_total,
        )

    async def _read(self, steered: _Steered, target: Target, endpoint: Endpoint) -> None:
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
            self._recovered(steered)
        self._prove(steered, answer)

    def _recovered(self, steered: _Steered) -> None:
        steered.control_error = None
        steered.control_failures = 0
        steered.untaken = False

    def _take(self, steered: _Steered, target: Target, answer: dict[str, Any]) -> None:
        """Believe a read-back."""
        now = self._clock()
        old = steered.readback
        if old is not None and old.get("bootID") != answer.get("bootID"):
            self._restart(steered)
        first = steered.readback is None
        steered.readback = self._kept(answer)
        steered.astray = directive.astray(answer)
        steered.read_at = now
        steered.read_wanted = steered.unsure = False
        steered.epoch = max(steered.epoch, _epoch(answer))
        lease = answer.get("lease") or {}
        ours = lease.get("holder") == self._holder
        steered.lease_until = now + float(lease.get("remainingSeconds") or 0) if ours else 0.0
        accept = _accept_length(answer)
        if accept is not None:
            steered.accept = accept
        if first and steered.memory.mode is None and steered.epoch > 0:
            since = None
            if target.last_switch is not None:
                since = now - max(0.0, self._wall() - target.last_switch)
            on = directive.is_on(answer)
            steered.memory = Memory.resume(None if on is None else ("On" if on else "Off"), since)

    def _kept(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """What is looked at later of a read-back: a whole one is 5 kB and more for each pod."""
        groups = answer.get("groups") or []
        if answer.get("mode") != "auto":
            groups = [{"tokensTotal": group.get("tokensTotal")} for group in groups]
        kept = {name: answer[name] for name in _KEPT if name in answer}
        kept["groups"] = groups
        for name in ("tiers", "fallback"):
            if kept.get(name):
                kept[name] = self._shared(kept[name])
        return kept

    def _shared(self, setting: Any) -> Any:
        """An equal setting that another pod has, if there is one: few differ."""
        if len(self._settings) > SETTINGS_SHARED:
            self._settings.clear()
        return self._settings.setdefault(repr(setting), setting)

    def _restart(self, steered: _Steered) -> None:
        """Forget what the engine process before this one reported; keep what was decided."""
        steered.readback = None
        steered.read_wanted = True
        steered.sample = None
        steered.sample_failures = 0
        steered.control_failures = 0
        steered.retry_at = 0.0
        steered.epoch = 0
        steered.lease_until = 0.0
        steered.unproved = None
        steered.untaken = False
        steered.ranks = None
        steered.cache_tokens = None
        steered.memory = steered.memory.reboot()

    def _decide(self, steered: _Steered, target: Target) -> None:
        if steered.readback is None:
            return  # the engine is read before anything is decided for it
        now = self._clock()
        was_stalled = steered.memory.stalled
        verdict, steered.memory = policy.decide(
            self._patient(target), steered.memory, steered.sample, now
        )
        steered.verdict = verdict
        if steered.memory.stalled and not was_stalled:
            self._say(steered, "Warning", "EngineStalled", verdict.reason)
        if (
            target.policy.mode == "Observe"
            or verdict.mode is None
            or not steered.readback.get("controllable")
        ):
            steered.wanted = None
            self._at_rest(steered)
            return
        steered.wanted = self._shared(
            directive.wanted(target.policy, target.draft, verdict, target.ranks)
        )
        if steered.switching is not None or steered.unsure or now < steered.retry_at:
            return
        lease = self._patient(target).lease_seconds
        if directive.matches(steered.readback, steered.wanted) is not None:
            epoch = steered.epoch + 1
            steered.said = verdict.reason
        elif steered.lease_until <= now:
            epoch = steered.epoch + 1
            steered.said = steered.said or verdict.reason
        elif steered.lease_until - now <= lease * 2 / 3:
            epoch = steered.epoch
        else:
            self._at_rest(steered)
            return
        if epoch > steered.epoch:
            ours = steered.readback.get("mode") != "auto"
            steered.unproved = _Sent(
                steered.wanted,
                epoch,
                verdict,
                directive.is_on(steered.readback),
                ours=ours,
                announce=ours or steered.control_error is not None,
            )
        body = directive.body(
            steered.wanted,
            pod_uid=steered.pod.uid,
            boot_id=str(steered.readback.get("bootID")),
            epoch=epoch,
            holder=self._holder,
            lease_seconds=lease,
            deadline_ms=DEADLINE_MS,
            reason=steered.said or verdict.reason,
        )
        steered.switching = self._spawn(self._switch(steered, target, body))

    def _at_rest(self, steered: _Steered) -> None:
        """There is nothing to send: what was not taken no longer matters, or was taken."""
        if steered.untaken and not steered.unsure:
            self._recovered(steered)

    async def _switch(self, steered: _Steered, target: Target, body: dict[str, Any]) -> None:
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
                self._recovered(steered)
                self._prove(steered, answer)
        finally:
            # Interrupted, it has been replaced already.
            if steered.switching is asyncio.current_task():
                steered.switching = None
        if (now_target := self._targets.get(steered.pod.key)) is not None:
            self._tell(steered, now_target)

    def _prove(self, steered: _Steered, answer: dict[str, Any]) -> None:
        """Record a switch once the engine reports it, also where the acknowledgement was lost."""
        sent = steered.unproved
        if sent is None or answer["epoch"] < sent.epoch:
            return
        steered.unproved = None
        after = directive.is_on(answer)
        taken = answer["epoch"] == sent.epoch and directive.matches(answer, sent.setting) is None
        if taken and after is not None and (sent.before is not after or not sent.ours):
            self._switched(steered, sent.verdict, after, announce=sent.announce)

    def _switched(
        self, steered: _Steered, verdict: Verdict, after: bool, *, announce: bool
    ) -> None:
        mode = "On" if after else "Off"
        steered.switched_at = self._wall()
        steered.switched_why = f"{steered.pod.name}: {verdict.reason}"
        telemetry.switches.labels(mode, verdict.code).inc()
        log.info("%s/%s switched %s: %s", *steered.pod.key, mode.lower(), steered.switched_why)
        if announce:
            self._say(
                steered,
                "Normal",
                "SpeculationEnabled" if after else "SpeculationDisabled",
                verdict.reason,
            )

    def _refused(self, steered: _Steered, error: EngineError) -> None:
        if isinstance(error, EngineRefused):
            steered.epoch = max(steered.epoch, _epoch(error.body))
            if error.status < 500:
                steered.unproved = None
        # Whatever went wrong, the engine is asked what it does before it is told again.
        steered.read_wanted = steered.unsure = steered.untaken = True
        self._failed(steered, error)

    def _failed(self, steered: _Steered, error: EngineError) -> None:
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

    def _say(self, steered: _Steered, kind: str, reason: str, message: str) -> None:
        self._notice(Notice(steered.pod.key, kind, reason, f"{steered.pod.name}: {message}"))

    # -- reporting --------------------------------------------------------------------------

    def _tell(self, steered: _Steered, target: Target) -> None:
        report = self._report(steered, target)
        if report != steered.told:
            steered.told = report
            self._changed(steered.pod.key)

    def _report(self, steered: _Steered, target: Target | None) -> Engine:
        readback = steered.readback
        on = None if readback is None else directive.is_on(readback)
        verdict = steered.verdict
        stale = target is not None and self._stale(steered, target)
        difference = None
        if readback is not None and steered.wanted is not None:
            difference = directive.matches(readback, steered.wanted) or steered.astray
        sample = steered.sample
        return Engine(
            name=steered.pod.name,
            on=on,
            wanted=verdict.mode if verdict else None,
            code=verdict.code if verdict else "",
            difference=difference,
            controllable=None if readback is None else bool(readback.get("controllable")),
            control_reason="" if readback is None else str(readback.get("reason") or ""),
            control_error=steered.control_error,
            sample_error=steered.sample_error or (("SamplesStale", "") if stale else None),
            sampled=sample is not None,
            ranks=steered.ranks,
            stalled=steered.memory.stalled,
            unreachable=policy.unreachable(target.policy, sample.capacity)
            if target is not None and sample is not None and sample.capacity is not None
            else None,
            capacity=None if sample is None else sample.capacity,
            cache_tokens=steered.cache_tokens,
            epoch=steered.epoch,
            accept=None if steered.accept is None else round(steered.accept, 1),
            switched_at=steered.switched_at,
            switched_why=steered.switched_why,
        )

    def _stale(self, steered: _Steered, target: Target) -> bool:
        age = steered.memory.age(self._clock())
        return age is not None and age > self._patient(target).stale_after_seconds

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Metrics by SpecServe, made when they are asked for (prometheus_client's Collector)."""
        depth = GaugeMetricFamily(
            "specserve_queue_depth",
            "Requests in the engines of a SpecServe by state.",
            labels=["namespace", "name", "state"],
        )
        age = GaugeMetricFamily(
            "specserve_sample_age_seconds",
            "Age of the oldest load reading among the usable pods of a SpecServe.",
            labels=["namespace", "name"],
        )
        enabled = GaugeMetricFamily(
            "specserve_speculation_enabled",
            "Pods of a SpecServe whose engine reports speculation on.",
            labels=["namespace", "name"],
        )
        now = self._clock()
        for key, fleet in list(self._pods.items()):
            usable = [s for s in list(fleet.values()) if s.pod.usable]
            samples = [s.sample for s in usable if s.sample is not None]
            if samples:
                depth.add_metric([*key, "running"], sum(s.running for s in samples))
                depth.add_metric([*key, "queued"], sum(s.queued for s in samples))
            ages = [a for s in usable if (a := s.memory.age(now)) is not None]
            if ages:
                age.add_metric(list(key), max(ages))
            enabled.add_metric(
                list(key), sum(directive.is_on(s.readback or {}) is True for s in usable)
            )
        return [depth, age, enabled]


def _replaced(before: Pod, now: Pod) -> bool:
    """Whether an answer that was asked of `before` may be another engine's by now."""
    return (before.ip, before.boot, before.alive) != (now.ip, now.boot, now.alive)


def _epoch(answer: Mapping[str, Any]) -> int:
    """The largest epoch an answer speaks of; one in doubt fences as well."""
    known = (answer.get("epoch"), answer.get("unresolvedEpoch"))
    return max((epoch for epoch in known if isinstance(epoch, int)), default=0)


def _kept(error: EngineError) -> tuple[str, str]:
    """Code and message; the exception itself holds its frames, the connection, the task: 20 kB."""
    return error.code, str(error)


def _tokens(steered: _Steered) -> int | None:
    """Tokens made so far by the last read-back; the load answer does not carry them."""
    groups = (steered.readback or {}).get("groups") or []
    totals = [group.get("tokensTotal") for group in groups]
    known = [total for total in totals if isinstance(total, int)]
    return sum(known) if known and len(known) == len(totals) else None


def _accept_length(readback: Mapping[str, Any]) -> float | None:
    """Tokens won per request and verify step while on, weighted by rounds."""
    won = rounds = 0.0
    for group in readback.get("groups") or []:
        for stat in group.get("stats") or []:
            length = stat.get("acceptLength")
            if stat.get("steps") and stat.get("rounds") and isinstance(length, int | float):
                won += length * stat["rounds"]
                rounds += stat["rounds"]
    return won / rounds if rounds else None
