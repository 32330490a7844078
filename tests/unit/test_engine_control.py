from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specserve_engine.control import (
    Apply,
    Capability,
    Control,
    Identity,
    Order,
    Phase,
    Refusal,
    Renewed,
    Versions,
)
from specserve_engine.wire import AUTO, Code, Directive, Mode, Setting, Tier

OFF = Setting(Mode.OFF)
ON = Setting(Mode.ON, 3)
TIERS = Setting(Mode.TIERS, tiers=(Tier(1, 3), Tier(33, 0)))
UNPREPARED = Setting(Mode.ON, 7)
ALL_ORDERED = (AUTO, OFF, ON, TIERS)


def new_control(boot_id: str = "boot") -> Control:
    return Control(Identity("pod", boot_id), Versions("0.0.0", "0.1.0", proved=False))


def serving() -> Control:
    control = new_control()
    control.serve(Capability(controllable=True, available_steps=(0, 1, 3)))
    return control


def directive(epoch: int = 1, setting: Setting = OFF, **fields) -> Directive:
    base = Directive("pod", "boot", epoch, "ours", 60, setting, TIERS)
    return replace(base, **fields)


def apply(control: Control, order: Directive, now: float = 0.0) -> None:
    admission = control.admit(order, now)
    assert isinstance(admission, Apply), admission
    control.commit(admission.order)


def code(admission: object) -> Code:
    assert isinstance(admission, Refusal), admission
    return admission.code


def test_it_starts_loading_in_auto_at_epoch_zero():
    control = new_control()
    state = control.read_back(0.0)
    assert (control.phase, state["epoch"], state["mode"]) == (Phase.LOADING, 0, "auto")
    assert control.next_expiry() is None
    assert control.expire(1e9) is None
    assert code(control.admit(directive(), 0.0)) is Code.LOADING


def test_a_renewal_needs_only_what_the_read_back_shows():
    control = serving()
    apply(control, directive(reason="first", deadline_ms=300))
    renewal = directive(reason="after a restart", deadline_ms=9_000, lease_seconds=600)
    assert control.admit(renewal, 50.0) == Renewed(1)
    assert control.next_expiry() == 650.0
    assert control.expire(649.9) is None


@pytest.mark.parametrize(
    "change",
    [{"setting": ON}, {"fallback": AUTO}, {"setting": replace(OFF, draft_kv="warm")}],
    ids=str,
)
def test_an_epoch_means_one_body(change):
    control = serving()
    apply(control, directive())
    assert code(control.admit(directive(**change), 1.0)) is Code.EPOCH_REUSED


def test_a_lapsed_lease_counts_before_the_watchdog_has_seen_it():
    control = serving()
    apply(control, directive(lease_seconds=5))
    refusal = control.admit(directive(), 5.0)
    assert code(refusal) is Code.STALE_EPOCH
    assert refusal.carried == {"epoch": 2}
    assert control.expire(5.0) == Order(2, TIERS)
    # Another installation may take over before the ranks obey the fallback.
    apply(control, directive(3, ON, holder="theirs"), 5.0)
    assert control.expire(5.0) is None
    assert control.read_back(5.0)["lease"]["expirations"] == 1


def test_a_fallback_is_owed_until_it_is_obeyed():
    control = serving()
    apply(control, directive(lease_seconds=5))
    order = control.expire(6.0)
    assert order == Order(2, TIERS)
    control.fail(order)
    control.doubt(control.expire(7.0))
    assert control.expire(8.0) == order
    assert control.read_back(8.0)["epoch"] == 1
    assert control.read_back(8.0)["unresolvedEpoch"] == 2
    control.commit(order)
    state = control.read_back(8.0)
    assert (state["epoch"], state["mode"], state["lastExpiryEpoch"]) == (2, "tiers", 2)
    assert state["lease"]["expirations"] == 1
    assert control.expire(9e9) is None


def test_a_refused_directive_uses_no_epoch_up():
    control = serving()
    admission = control.admit(directive(5), 0.0)
    control.fail(admission.order)
    apply(control, directive(1, ON), 0.0)


def test_a_doubtful_order_fences_and_its_lease_counts():
    control = serving()
    apply(control, directive(1, ON, lease_seconds=600))
    control.doubt(control.admit(directive(2, OFF, lease_seconds=10), 0.0).order)
    assert code(control.admit(directive(1, ON), 1.0)) is Code.STALE_EPOCH
    assert code(control.admit(directive(2, ON), 1.0)) is Code.EPOCH_REUSED
    assert code(control.admit(directive(3, ON, holder="theirs"), 1.0)) is Code.LEASE_HELD
    assert control.expire(10.0) == Order(3, TIERS)


@pytest.mark.parametrize(
    ("epochs", "epoch", "unresolved"),
    [
        ([2, 2], 2, None),
        ([1, 1], 1, None),
        ([1, 2], 1, 2),
        ([2, None], 1, 2),
        ([None, None], 1, 2),
        ([9, 9], 1, 2),
        ([], 1, 2),
    ],
    ids=str,
)
def test_a_doubt_is_resolved_only_by_ranks_that_agree(epochs, epoch, unresolved):
    control = serving()
    apply(control, directive(1, ON))
    control.doubt(control.admit(directive(2, OFF), 0.0).order)
    control.resolve(epochs)
    state = control.read_back(0.0)
    assert (state["epoch"], state["unresolvedEpoch"]) == (epoch, unresolved)


def test_an_order_newer_than_the_owed_fallback_holds_it_back_while_in_doubt():
    control = serving()
    apply(control, directive(1, ON, lease_seconds=5))
    assert control.expire(5.0) == Order(2, TIERS)
    control.doubt(control.admit(directive(3, OFF), 5.0).order)
    assert control.expire(6.0) is None
    control.resolve([1, 1])
    assert control.expire(6.0) == Order(2, TIERS)
    control.doubt(control.admit(directive(3, OFF), 6.0).order)
    control.resolve([2, 2])
    assert control.expire(7.0) is None
    assert control.read_back(7.0)["mode"] == "tiers"


def test_of_several_doubtful_orders_the_one_that_arrived_is_found():
    control = serving()
    control.doubt(control.admit(directive(1, ON, lease_seconds=10), 0.0).order)
    control.doubt(control.admit(directive(2, OFF), 0.0).order)
    control.resolve([1, 1])
    state = control.read_back(0.0)
    assert (state["epoch"], state["mode"], state["unresolvedEpoch"]) == (1, "on", None)
    assert control.expire(10.0) == Order(2, TIERS)


def test_doubts_do_not_pile_up_and_the_newest_lease_ends_them_all():
    control = serving()
    for epoch in range(1, 200):
        control.doubt(control.admit(directive(epoch), 0.0).order)
    assert len(control._doubtful) < 200
    control.resolve([1, 1])
    assert control.doubtful.epoch == 199
    assert control.expire(60.0) == Order(200, TIERS)
    assert control.doubtful is None


def test_one_order_at_a_time():
    control = serving()
    admission = control.admit(directive(1), 0.0)
    with pytest.raises(RuntimeError, match="epoch 1 is still under way"):
        control.admit(directive(2), 0.0)
    with pytest.raises(RuntimeError, match="under way"):
        control.expire(0.0)
    with pytest.raises(RuntimeError, match="epoch 7 is not under way"):
        control.commit(Order(7, OFF))
    control.commit(admission.order)


def test_draining_still_falls_back():
    control = serving()
    apply(control, directive(1, ON, lease_seconds=5))
    control.drain()
    assert code(control.admit(directive(1, ON), 1.0)) is Code.DRAINING
    assert control.expire(5.0) == Order(2, TIERS)


class Steering(RuleBasedStateMachine):
    """Two installations, lost answers, expiries and reboots, against a model of the ranks."""

    @initialize()
    def boot(self) -> None:
        self.boots = 0
        self.now = 100.0
        self.reboot()

    @rule()
    def reboot(self) -> None:
        self.boots += 1
        self.control = new_control(f"boot-{self.boots}")
        self.control.serve(Capability(controllable=True, available_steps=(0, 1, 3)))
        self.obeyed = Order(0, AUTO)  # by the ranks
        self.steered = False  # by an operator's order, not by a fallback or the engine itself
        self.highest = 0  # epoch ever obeyed
        self.lease: tuple[str, float, Setting] | None = None  # as far as it is certain
        self.certain = True

    @rule(seconds=st.sampled_from([0.5, 4.0, 5.0, 61.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        step=st.integers(-2, 3),
        holder=st.sampled_from(["ours", "theirs"]),
        setting=st.sampled_from([*ALL_ORDERED, UNPREPARED]),
        fallback=st.sampled_from([AUTO, OFF, TIERS]),
        lease_seconds=st.sampled_from([5, 60, 600]),
        boot=st.sampled_from(["current", "current", "current", "old"]),
        outcome=st.sampled_from(["commit", "commit", "fail", "doubt-obeyed", "doubt-lost"]),
    )
    def put(self, step, holder, setting, fallback, lease_seconds, boot, outcome) -> None:
        self.lapse()
        before = self.control.read_back(self.now)
        order = Directive(
            "pod",
            f"boot-{self.boots}" if boot == "current" else "boot-0",
            max(1, self.control.epoch + step),
            holder,
            lease_seconds,
            setting,
            fallback,
        )
        admission = self.control.admit(order, self.now)
        if isinstance(admission, Refusal):
            assert self.control.read_back(self.now) == before
            return
        assert boot == "current"
        assert setting is not UNPREPARED
        if self.lease and self.certain and self.now < self.lease[1]:
            assert holder == self.lease[0]
        lease = (holder, self.now + lease_seconds, fallback)
        if isinstance(admission, Renewed):
            after = self.control.read_back(self.now)
            assert {**after, "lease": None} == {**before, "lease": None}
            self.lease = lease
            return
        assert admission.order == Order(order.epoch, setting)
        self.take(admission.order, outcome, steered=True)
        if outcome == "commit":
            self.lease, self.certain = lease, True
        elif outcome == "fail":
            assert self.control.read_back(self.now) == before
        else:
            self.certain = False

    @rule(outcome=st.sampled_from(["commit", "commit", "fail", "doubt-obeyed", "doubt-lost"]))
    def watch(self, outcome: str) -> None:
        self.lapse()
        order = self.control.expire(self.now)
        if order is None:
            return
        # It may have been obeyed unnoticed: then it is sent again.
        assert order.epoch > self.highest or order == self.obeyed
        self.take(order, outcome, steered=False)
        if outcome == "commit":
            self.certain, self.lease = True, None

    @rule()
    def read(self) -> None:
        self.control.resolve([self.obeyed.epoch, self.obeyed.epoch])
        assert self.control.doubtful is None

    @precondition(lambda self: self.control.epoch > 0)
    @rule()
    def renew_what_was_read_back(self) -> None:
        """A renewal made from the read-back alone extends the lease and changes nothing else."""
        state = self.control.read_back(self.now)
        term = self.control._in_force
        if term.lease is None or state["unresolvedEpoch"] or self.now >= term.lease.until:
            return
        renewal = Directive(
            "pod",
            state["bootID"],
            state["epoch"],
            state["lease"]["holder"],
            600,
            term.order.setting,
            term.fallback,
            reason="renewed",
        )
        for _ in range(2):
            assert self.control.admit(renewal, self.now) == Renewed(state["epoch"])
            after = self.control.read_back(self.now)
            assert {**after, "lease": None} == {**state, "lease": None}
            assert after["lease"]["remainingSeconds"] == 600
        if self.certain:
            self.lease = (renewal.holder, self.now + 600, term.fallback)

    def take(self, order: Order, outcome: str, *, steered: bool) -> None:
        """Do to the ranks what `outcome` says, and tell the control core."""
        if outcome in {"commit", "doubt-obeyed"}:
            assert order.epoch > self.highest or order == self.obeyed
            self.obeyed = order
            self.steered = steered
            self.highest = max(self.highest, order.epoch)
        getattr(self.control, outcome.split("-", maxsplit=1)[0])(order)

    def lapse(self) -> None:
        """Check that a lease known for certain expires on time, and exactly into its fallback."""
        if not (self.lease and self.certain and self.now >= self.lease[1]):
            self.control.expire(self.now)  # what time does is no refusal's doing
            return
        epoch = self.control.epoch
        expirations = self.control.read_back(self.now)["lease"]["expirations"]
        order = self.control.expire(self.now)
        assert order == Order(epoch + 1, self.lease[2])
        assert self.control.read_back(self.now)["lease"]["expirations"] == expirations + 1
        self.lease = None

    @invariant()
    def epochs_only_rise(self) -> None:
        assert self.control.epoch >= self.obeyed.epoch
        assert self.obeyed.epoch <= self.highest

    @invariant()
    def nothing_is_claimed_that_the_ranks_do_not_do(self) -> None:
        state = self.control.read_back(self.now)
        if state["unresolvedEpoch"] is None:
            assert state["epoch"] == self.obeyed.epoch
            assert state["mode"] == self.obeyed.setting.mode

    @invariant()
    def no_operator_steers_without_an_end(self) -> None:
        """Whatever was lost on the way, an operator's order in force is watched."""
        assert not self.steered or self.control.next_expiry() is not None


Steering.TestCase.settings = settings(max_examples=300, stateful_step_count=30)
TestSteering = Steering.TestCase
