"""Any history of load, silence, edits and restarts keeps the promises of the policy."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from specserve import api
from specserve.policy import Memory, Sample, decide

HOUR = 3600.0
STALLED_AFTER = 10.0
counts = st.integers(0, 12)
# Eighths add up without rounding, so that "exactly at the limit" is reached and means it.
delays = st.one_of(
    st.integers(0, 80).map(lambda n: n / 8), st.integers(0, 1000).map(float), st.just(HOUR)
)


@st.composite
def policies(draw: st.DrawFn) -> api.Policy:
    below = draw(st.integers(1, 9))
    return api.Policy.model_validate(
        {
            "mode": draw(st.sampled_from(["Auto", "Auto", "Auto", "Observe", "On", "Off"])),
            "signal": draw(st.sampled_from(["InFlight", "Running", "Queued"])),
            "threshold": {"onBelow": below, "offAbove": draw(st.integers(below + 1, 10))},
            "dwellOnSeconds": draw(st.integers(0, 20)),
            "dwellOffSeconds": draw(st.integers(0, 20)),
            "maxFlipsPerHour": draw(st.integers(1, 4)),
            "staleAfterSeconds": draw(st.integers(1, 10)),
            "onSignalLoss": draw(st.sampled_from(["Hold", "Hold", "On", "Off"])),
        }
    )


@dataclass
class Engine:
    """What a bystander sees of the pod, kept apart from the policy's own memory."""

    mode: str | None = None
    switched: float | None = None
    stamp: float = 0.0
    tokens: int | None = 1000
    latest: Sample | None = None
    previous_tokens: int | None = None
    queue_only_since: float | None = None

    def stalled(self) -> bool:
        return (
            self.latest is not None
            and self.queue_only_since is not None
            and self.latest.at - self.queue_only_since >= STALLED_AFTER
        )


class Policy(RuleBasedStateMachine):
    @initialize(policy=policies())
    def begin(self, policy: api.Policy) -> None:
        self.now = 1000.0
        self.policy = policy
        self.memory = Memory.start()
        self.engine = Engine()
        #: Flips of this operator process, and the one switch it knows of from before.
        self.lives_flips: list[float] = []
        self.carried: float | None = None

    @rule(policy=policies())
    def edit(self, policy: api.Policy) -> None:
        self.policy = policy

    @rule()
    def unpin(self) -> None:
        self.policy = self.policy.model_copy(update={"mode": "Auto"})

    @rule(delay=delays)
    def wait(self, delay: float) -> None:
        self.now += delay

    @rule()
    def restart(self) -> None:
        self.memory = Memory.resume(self.engine.mode, self.engine.switched, (), self.now)
        self.carried = self.engine.switched
        self.lives_flips = []
        self.engine.latest = None
        self.engine.previous_tokens = None
        self.engine.queue_only_since = None

    @rule()
    def silence(self) -> None:
        self.judge(None, new=False)

    @rule()
    def repeat(self) -> None:
        self.judge(self.engine.latest, new=False)

    @rule(late=st.sampled_from([0.0, 0.125, 1.0]))
    def repeat_of_the_same_stamp(self, late: float) -> None:
        latest = self.engine.latest
        if latest is not None:
            at = max(latest.at, self.now - late)
            self.judge(Sample(at, latest.stamp, 99, 99, 12, 5), new=False)

    @rule(
        running=counts,
        queued=counts,
        made=st.sampled_from([0, 0, 50, -900, None]),
        late=st.sampled_from([0.0, 0.0, 0.0, 0.5, 30.0]),
    )
    def read(self, running: int, queued: int, made: int | None, late: float) -> None:
        engine = self.engine
        at = self.now - late
        if engine.latest is not None and at < engine.latest.at:
            at = self.now
        engine.stamp += 1.0
        tokens = None if made is None else max(0, (engine.tokens or 0) + made)
        sample = Sample(at, engine.stamp, running, queued, 12, tokens)
        flat = tokens is not None and engine.previous_tokens == tokens
        if running > 0 or queued == 0 or not flat:
            # A stall is claimed here only for an unbroken run of readings that prove it.
            engine.queue_only_since = at if running == 0 and queued > 0 else None
        if tokens is not None:
            engine.tokens = tokens
            engine.previous_tokens = tokens
        engine.latest = sample
        self.judge(sample, new=True)

    @rule(flips=st.integers(2, 8))
    def swing(self, flips: int) -> None:
        """Push the load from one side to the other, each time with the dwell waited out."""
        for n in range(flips):
            self.wait(21.0)
            self.read(running=12 if n % 2 else 1, queued=12 if n % 2 else 0, made=50, late=0.0)

    def judge(self, sample: Sample | None, *, new: bool) -> None:
        engine, policy, now = self.engine, self.policy, self.now
        verdict, memory = decide(policy, self.memory, sample, now)
        assert (verdict, memory) == decide(policy, self.memory, sample, now)

        pinned = policy.mode in {"On", "Off"}
        latest = engine.latest
        blind = sample is None or latest is None or now - latest.at > policy.stale_after_seconds
        before = engine.mode
        assert verdict.mode == memory.mode
        assert verdict.flip == (before is not None and verdict.mode != before)
        assert verdict.code.isalnum()
        assert verdict.reason
        assert "\n" not in verdict.reason
        assert pinned or any(char.isdigit() for char in verdict.reason)

        if pinned:
            assert verdict.mode == policy.mode
        elif (blind and policy.on_signal_loss == "Hold") or engine.stalled():
            assert verdict.mode == before
        if verdict.flip and not pinned:
            self.check_flip(verdict.mode, sample, blind=blind, new=new)
        if not pinned and not blind and new:
            self.check_duty(verdict.mode, sample)

        if verdict.mode != before:
            engine.mode = verdict.mode
            engine.switched = now
        if verdict.flip:
            self.lives_flips.append(now)
        self.memory = memory

    def check_flip(self, mode: str, sample: Sample | None, *, blind: bool, new: bool) -> None:
        policy, now = self.policy, self.now
        dwell = policy.dwell_off_seconds if mode == "On" else policy.dwell_on_seconds
        if self.engine.switched is not None:
            assert now - self.engine.switched >= dwell
        spent = [at for at in self.lives_flips if now - HOUR < at]
        assert len(spent) < policy.max_flips_per_hour
        if blind:
            assert policy.on_signal_loss == mode
        else:
            assert new
            assert self.asked(sample) == mode

    def asked(self, sample: Sample) -> str | None:
        value = {
            "Running": sample.running,
            "Queued": sample.queued,
            "InFlight": sample.running + sample.queued,
        }[self.policy.signal]
        if value > self.policy.threshold.off_above:
            return "Off"
        return "On" if value < self.policy.threshold.on_below else None

    def check_duty(self, mode: str | None, sample: Sample) -> None:
        """A load that asks for another mode gets it once nothing speaks against that."""
        engine, policy, now = self.engine, self.policy, self.now
        asked = self.asked(sample)
        if sample.running == 0:
            return
        if engine.mode is None:
            assert mode == (asked or "On")
            return
        if asked is None or asked == engine.mode:
            assert mode == engine.mode
            return
        dwell = policy.dwell_off_seconds if asked == "On" else policy.dwell_on_seconds
        known = [*self.lives_flips, self.carried]
        spent = [at for at in known if at is not None and now - HOUR < at]
        rested = engine.switched is None or now - engine.switched >= dwell
        if rested and len(spent) < policy.max_flips_per_hour:
            assert mode == asked


TestPolicy = Policy.TestCase
TestPolicy.settings = settings(max_examples=300, stateful_step_count=40)
