"""Any history of traffic, silence, edits and restarts keeps the promises of BreakEven."""

import re
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specserve import api
from specserve.policy import Context, Knowledge, Memory, Sample, Verdict, crashed, decide
from specserve.policy.probe import LONGEST
from tests.unit.policy_world import World

HOUR = 3600.0
STEPS = [(0, 3), (0, 1, 3), (0, 2, 5)]
FREE = {"PinnedOn", "PinnedOff", "CrashedWhileOn", "FlipReverted"}
"""Codes of flips that wait for nobody."""


@st.composite
def policies(draw: st.DrawFn) -> api.Policy:
    return api.Policy.model_validate(
        {
            "mode": draw(
                st.sampled_from(["Auto", "Auto", "Auto", "Auto", "Observe", "On", "Off"])
            ),
            "strategy": draw(
                st.sampled_from(["BreakEven", "BreakEven", "BreakEven", "Threshold"])
            ),
            "threshold": {"onBelow": 16, "offAbove": 48},
            "dwellOnSeconds": draw(st.integers(0, 20)),
            "dwellOffSeconds": draw(st.integers(0, 20)),
            "maxFlipsPerHour": draw(st.sampled_from([1, 8, 60])),
            "onSignalLoss": draw(st.sampled_from(["Hold", "Hold", "On", "Off"])),
            "breakEven": {
                "marginPercent": draw(st.integers(0, 10)),
                "probeBudgetPermille": draw(st.sampled_from([0, 10, 100])),
                "graceMilliseconds": draw(st.sampled_from([0, 0, 3000])),
            },
            "draftGuard": {"action": draw(st.sampled_from(["Off", "Report"]))},
            "draftKv": draw(st.sampled_from(["Cold", "Warm", "Auto"])),
        }
    )


def true_to_itself(verdict: Verdict) -> None:
    """No reason speaks for the opposite of what is done, held or looked at for other reasons."""
    weighed = re.search(r"acceptance ([\d.]+) (above|below) break-even ([\d.]+)", verdict.reason)
    if weighed is not None:
        length, relation, ratio = float(weighed[1]), weighed[2], float(weighed[3])
        assert length >= ratio - 0.01 if relation == "above" else length <= ratio + 0.01
    if verdict.reason.startswith("hold") or verdict.code == "Probing":
        return
    assert verdict.reason.startswith(f"{str(verdict.mode).lower()}: ")
    against = {"On": r"below break-even|\d (?:in flight|running|queued)[\w ]* above \d"}.get(
        str(verdict.mode), r"above break-even|\d (?:in flight|running|queued)[\w ]* below \d"
    )
    if verdict.code not in FREE:
        assert re.search(against, verdict.reason) is None


class Life(RuleBasedStateMachine):
    @initialize(
        policy=policies(),
        steps=st.sampled_from(STEPS),
        slope=st.floats(0.0, 2.0),
        base=st.floats(1.05, 3.0),
    )
    def begin(self, policy, steps, slope, base) -> None:
        def ratio(batch: int, deep: int) -> float:
            return 1 + (base - 1 + slope * abs(batch - 32) / 256) * deep / 3

        self.world = World(policy, ratio, steps=steps)
        self.spoken: list[tuple[float, Verdict, api.Policy]] = []
        self.life_began = 0.0

    @rule(policy=policies())
    def edit(self, policy: api.Policy) -> None:
        self.world.policy = policy

    @rule(
        batch=st.sampled_from([0, 1, 8, 32, 47, 49, 200]),
        accept=st.floats(1.0, 3.99),
        queued=st.sampled_from([0, 0, 0, 40]),
    )
    def other_traffic(self, batch: int, accept: float, queued: int) -> None:
        self.world.batch, self.world.accept, self.world.queued = batch, accept, queued

    @rule(ticks=st.integers(1, 40))
    def live(self, ticks: int) -> None:
        for _ in range(ticks):
            if self.world.batch == 0 and self.world.queued:
                self.world.queued = 0
            self.speak()

    @rule(seconds=st.sampled_from([30, 120, 700]))
    def live_long(self, seconds: int) -> None:
        ends = self.world.now + seconds
        while self.world.now < ends:
            self.world.queued = self.world.queued if self.world.batch else 0
            self.speak()

    @rule(seconds=st.sampled_from([1.0, 4.0, 6.0, 30.0]))
    def silence(self, seconds: float) -> None:
        world = self.world
        world.advance(seconds)
        verdict, memory = decide(world.policy, world.memory, None, world.now, self.context())
        assert not verdict.probe
        if world.policy.mode in {"Auto", "Observe"} and world.policy.on_signal_loss == "Hold":
            assert not verdict.flip or verdict.code in FREE
        self.note(verdict, memory)

    @rule()
    def repeat(self) -> None:
        """The same reading again is no evidence."""
        world = self.world
        if world.memory.heard is None:
            return
        stamp = world.memory.stamp
        assert stamp is not None
        sample = Sample(
            world.memory.heard, stamp, world.batch, world.queued, world.capacity, None, None
        )
        verdict, memory = decide(world.policy, world.memory, sample, world.now, self.context())
        if verdict.flip and world.doing is not None and not world.doing.probe:
            assert verdict.code in FREE | {"DraftIneffective", "SamplesStale", "FirstReading"}
        self.note(verdict, memory)

    @rule()
    def crash(self) -> None:
        self.world.memory = crashed(self.world.memory, self.world.now).reboot()
        self.world.counts.clear()
        self.world.tokens = 0.0
        self.world.rounds = None

    @rule()
    def new_operator(self) -> None:
        world = self.world
        doing = world.doing
        tiers = doing.setting.tiers if doing is not None and doing.setting is not None else ()
        world.memory = Memory.resume(world.memory.mode, world.memory.since, tiers, world.now)
        world.knowledge = Knowledge()
        self.spoken.clear()
        self.life_began = world.now

    def context(self) -> Context:
        return Context(self.world.steps, 1, None, self.world.knowledge)

    def speak(self) -> None:
        world = self.world
        before = world.memory
        verdict = world.tick()
        sample = Sample(
            world.now,
            world.now,
            world.batch,
            world.queued,
            world.capacity,
            int(world.tokens),
            world.rounds,
        )
        again = decide(world.policy, before, sample, world.now, self.context())
        heard = world.memory.counts.acceptance
        if heard is None or world.knowledge.acceptance is not heard:
            assert again[0] == verdict
        self.judge(verdict)

    def note(self, verdict: Verdict, memory: Memory) -> None:
        self.world.memory = memory
        self.world.doing = verdict
        self.judge(verdict)

    def judge(self, verdict: Verdict) -> None:
        world = self.world
        self.spoken.append((world.now, verdict, world.policy))
        assert verdict.code.isalnum()
        assert verdict.reason
        assert "\n" not in verdict.reason
        true_to_itself(verdict)
        if verdict.mode is None:
            return
        assert verdict.setting is not None
        for setting in filter(None, (verdict.setting, verdict.fallback)):
            batches = [least for least, _ in setting.tiers]
            assert batches[0] == 1
            assert batches == sorted(set(batches))
            assert len(batches) <= 32
            assert {steps for _, steps in setting.tiers} <= set(world.steps)
        if verdict.code == "Probing":
            assert world.policy.mode == "Auto"
            assert world.policy.break_even.probe_budget_permille
            assert verdict.recheck is not None
            active = world.memory.probing.active
            assert active is not None
            assert world.now - active.began <= LONGEST[1] + 0.5
            assert verdict.fallback == active.back
        if verdict.code in {"PinnedOff", "CrashedWhileOn"}:
            assert verdict.setting.tiers == ((1, 0),)

    @invariant()
    def flips_keep_their_distance(self) -> None:
        if not hasattr(self, "spoken"):
            return
        flips = [
            (now, verdict, policy)
            for now, verdict, policy in self.spoken
            if verdict.flip and verdict.code not in FREE
        ]
        for (_, _, _), (later, verdict, policy) in pairwise(flips):
            before = [v for now, v, _ in self.spoken if now < later]
            since = [now for now, v, _ in self.spoken if now < later and v.flip]
            if before[-1].probe or not since:
                continue
            dwell = policy.dwell_off_seconds if verdict.mode == "On" else policy.dwell_on_seconds
            if verdict.mode == ("On" if before[-1].mode == "On" else "Off"):
                dwell = min(policy.dwell_off_seconds, policy.dwell_on_seconds)
            assert later - since[-1] >= dwell

    @invariant()
    def flips_keep_the_budget(self) -> None:
        if not hasattr(self, "spoken"):
            return
        now = self.world.now
        free = sum(1 for at, v, _ in self.spoken if v.code in FREE and at > now - HOUR)
        most = max(
            (p.max_flips_per_hour for at, _, p in self.spoken if at > now - HOUR), default=1
        )
        mine = [at for at in self.world.memory.flips if at > max(now - HOUR, self.life_began)]
        assert len(mine) <= most + free + 1


Life.TestCase.settings = settings(max_examples=20, stateful_step_count=25)
TestLife = Life.TestCase
