"""Any history of load, faults, restarts and edits keeps the promises of the regulation loop."""

import asyncio
import dataclasses
import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specserve import api
from specserve.observed import Key, Pod
from specserve.regulate import Regulator
from specserve.target import Override, Standing, Target
from tests.unit.engines import Decoding, FakeEngine, FakeEngines, pod
from tests.unit.virtual_time import VirtualLoop

KEY: Key = ("team", "chat")
HOLDER = "specserve-system/specserve"
PODS = ("u0", "u1")
BUSY, QUIET = 30, 1
POLICY: dict[str, Any] = {
    "threshold": {"offAbove": 10, "onBelow": 5},
    "maxFlipsPerHour": 3600,
    # What throughput says of a flip is tried elsewhere; here it would hold modes for minutes.
    "flipGuard": {"tolerancePercent": 100},
    "draftGuard": {"action": "Report"},
    # Long, so that much of its life fits into one example.
    "samplePeriodMilliseconds": 2000,
    "staleAfterSeconds": 10,
}
policies = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["Auto", "Auto", "Auto", "On", "Off", "Observe"]),
        "leaseSeconds": st.sampled_from([15, 60]),
        "dwellOnSeconds": st.sampled_from([0, 5]),
        "dwellOffSeconds": st.sampled_from([0, 5]),
        "strategy": st.sampled_from(["Threshold", "BreakEven"]),
        "scope": st.sampled_from(["Pod", "Pod", "Fleet"]),
    }
)
which = st.sampled_from(PODS)
FAULTS = {
    "load": ["hang", "reset", "refused"],
    "read": ["hang", "reset", "refused"],
    "switch": ["hang", "reset", "refused", "lost", "unproved", "late"],
}
faults = st.sampled_from([(kind, how) for kind, hows in FAULTS.items() for how in hows])


class Loop(RuleBasedStateMachine):
    @initialize(policy=policies)
    def begin(self, policy: dict[str, Any]) -> None:
        self.loop = VirtualLoop()
        self.addresses = itertools.count(1)
        self.engines = FakeEngines()
        self.policy = policy
        self.standing = Standing()
        self.pods: dict[str, Pod] = {}
        self.of: dict[str, FakeEngine] = {}
        self.starts = itertools.count(1)
        self.start()
        for uid in PODS:
            self.appear(uid)

    def start(self) -> None:
        self.regulator = Regulator(
            self.engines,
            holder=HOLDER,
            changed=lambda _: None,
            notice=lambda _: None,
            clock=self.loop.time,
            wall=self.loop.time,
        )
        self.regulator.override(self.standing)
        self.run = self.loop.create_task(self.regulator.run())
        self.configure()
        for one in self.pods.values():
            self.regulator.observe(None, one)

    def stop(self) -> None:
        self.run.cancel()
        self.loop.run_until_complete(asyncio.gather(self.run, return_exceptions=True))

    def configure(self) -> None:
        self.regulator.configure(
            Target(
                key=KEY,
                policy=api.Policy.model_validate({**POLICY, **self.policy}),
                draft=api.Draft.model_validate({"method": "EAGLE", "source": "hf://a/b"}),
                tokens=("t",),
                api_key=None,
                model="m",
            )
        )

    def appear(self, uid: str) -> None:
        ip = f"10.0.0.{next(self.addresses)}"
        self.of[uid] = self.engines.at[ip] = FakeEngine(uid, decoding=Decoding())
        self.show(pod(KEY, uid, ip))

    def show(self, new: Pod) -> None:
        self.engines.usable[new.uid] = new.usable
        self.regulator.observe(self.pods.get(new.uid), new)
        self.pods[new.uid] = new

    def change(self, uid: str, **changes: Any) -> None:
        self.show(dataclasses.replace(self.pods[uid], **changes))

    @rule(seconds=st.sampled_from([0.003, 0.1, 0.5, 0.6, 2.5, 7.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(uid=which, running=st.sampled_from([QUIET, 7, BUSY]))
    def load(self, uid: str, running: int) -> None:
        self.of[uid].running = running

    @rule(uid=which, accept=st.sampled_from([0.05, 0.4, 0.9]))
    def traffic(self, uid: str, accept: float) -> None:
        self.of[uid].decoding = Decoding(accept)

    @rule(mode=st.sampled_from([None, "On", "Off", "Observe"]), seconds=st.sampled_from([5, 900]))
    def override(self, mode: Any, seconds: int) -> None:
        until = self.loop.time() + seconds
        self.standing = Standing(None if mode is None else Override(mode, until))
        self.regulator.override(self.standing)

    @rule(uid=which, what=faults)
    def break_down(self, uid: str, what: tuple[str, str]) -> None:
        self.of[uid].faults[what[0]] = what[1]

    @rule(uid=which)
    def heal(self, uid: str) -> None:
        self.of[uid].faults.clear()

    @rule(uid=which, told=st.booleans())
    def reboot(self, uid: str, told: bool) -> None:
        self.of[uid].boot()
        if told:
            self.change(uid, boot=f"c#{next(self.starts)}")

    @rule(uid=which, usable=st.booleans())
    def turn(self, uid: str, usable: bool) -> None:
        self.change(uid, usable=usable)

    @rule(uid=which)
    def move(self, uid: str) -> None:
        old = self.pods[uid].ip
        ip = f"10.0.0.{next(self.addresses)}"
        self.engines.at[ip] = self.engines.at.pop(old)
        self.change(uid, ip=ip)

    @rule(uid=which)
    def replace(self, uid: str) -> None:
        """A pod vanishes and one of another identity takes over its address and its work."""
        gone = self.pods.pop(uid)
        self.engines.usable[uid] = False
        self.regulator.observe(gone, None)
        heir = self.engines.at[gone.ip] = self.of[uid] = FakeEngine(uid, decoding=Decoding())
        heir.boot()
        self.show(pod(KEY, uid, gone.ip))

    @rule(uid=which, mode=st.sampled_from(["on", "off", "auto"]), ours=st.booleans())
    def other_hand(self, uid: str, mode: str, ours: bool) -> None:
        holder = HOLDER if ours else "else/where"
        self.loop.run_until_complete(self._steer(self.of[uid], mode, holder))

    async def _steer(self, engine: FakeEngine, mode: str, holder: str) -> None:
        if engine.read_back()["lease"]["holder"] in (None, holder):
            engine.steer(mode, holder=holder, lease=30)

    @rule(policy=policies)
    def edit(self, policy: dict[str, Any]) -> None:
        self.policy = policy
        self.configure()

    @rule()
    def restart_operator(self) -> None:
        self.stop()
        self.start()

    @rule(again=st.booleans())
    def delete(self, again: bool) -> None:
        self.regulator.release(KEY)
        if not again:
            self.wait(3.5)
            calls = len(self.engines.calls)
            self.wait(20.0)
            assert len(self.engines.calls) == calls
        self.configure()

    @rule()
    def converge(self) -> None:
        """Once faults stop, every usable engine does what the policy wants of it."""
        for engine in self.of.values():
            engine.faults.clear()
            if engine.running not in (QUIET, BUSY):
                engine.running = BUSY
        self.standing = Standing()
        self.regulator.override(self.standing)
        self.wait(90.0)
        for uid, engine in self.of.items():
            if self.pods[uid].usable and self.policy["mode"] != "Observe":
                self.loop.run_until_complete(self._check(uid, engine))

    async def _check(self, uid: str, engine: FakeEngine) -> None:
        told = next(e for e in self.regulator.engines(KEY) if e.name == self.pods[uid].name)
        assert (told.difference, told.control_error) == (None, None)
        assert told.on is (told.wanted == "On")
        mode = self.policy["mode"]
        by_load = self.policy["strategy"] == "Threshold" and self.policy["scope"] == "Pod"
        if mode == "Auto" and by_load:
            mode = "Off" if engine.running == BUSY else "On"
        if mode != "Auto":
            assert told.wanted == mode
            assert (engine.active_steps > 0) is (mode == "On")
        elif self.policy["scope"] == "Pod" and not self.probing:
            assert (engine.active_steps > 0) is told.on

    @property
    def probing(self) -> bool:
        fleet = self.regulator._fleets[KEY]
        return any(steered.looking for steered in fleet.pods.values())

    @invariant()
    def promises(self) -> None:
        if not hasattr(self, "engines"):
            return
        assert self.engines.violations == []
        for fleet in self.regulator._fleets.values():
            looking = [s for s in fleet.usable if s.memory.probing.active is not None]
            assert len(looking) <= 1

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.converge()
            self.stop()
            self.loop.close()


TestLoop = Loop.TestCase
TestLoop.settings = settings(max_examples=60, stateful_step_count=30)
