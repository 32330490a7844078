"""Which directive holds: admission, epoch fencing, leases and their expiry.

Pure: no IO, no clock, no asyncio. `now` is seconds of any monotonic clock, always the same one.

The path of an order. `Control.admit` judges a directive and changes nothing but a lease. If it
answers `Apply`, the caller takes the order to the scheduler ranks and reports what came of it by
exactly one of `commit` (all ranks obey it), `fail` (no rank does) or `doubt` (unknown). An expired
lease makes such an order too: `expire` hands it out until it is committed or overtaken. The
caller lets one order at a time be under way.

Doubt. An order whose outcome is unknown may be in force, so it fences older epochs and its lease
counts; the engine's state is resolved by what the ranks themselves report (`resolve`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from specserve_engine.wire import AUTO, STATUS, Code, setting_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from specserve_engine.wire import Directive, Setting


MAX_DOUBTFUL: Final = 32
"""Orders in doubt that are remembered; any other that is obeyed ends with the newest's lease."""


class Phase(StrEnum):
    """Where the engine process stands in its life."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"  # its scheduler is gone; only a new process helps


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this engine is: the pod's UID, and an id that is new with each process."""

    pod_uid: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class Versions:
    """What runs here; `proved` says that this plugin was tested with this SGLang version."""

    sglang: str
    plugin: str
    proved: bool


@dataclass(frozen=True, slots=True)
class Capability:
    """What this engine can be ordered to do, known once it has loaded.

    Attributes:
        controllable: Whether its steps can be changed in the live process.
        reason: Why not, in one line; empty if controllable.
        available_steps: The step counts it has prepared, ascending.
    """

    controllable: bool
    reason: str = ""
    available_steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """What goes to the scheduler ranks: from their next decode batch on, obey `setting`."""

    epoch: int
    setting: Setting


@dataclass(frozen=True, slots=True)
class Apply:
    """The directive is to be applied: take `order` to the ranks."""

    order: Order


@dataclass(frozen=True, slots=True)
class Renewed:
    """The directive holds already; its lease was extended, and nothing else is to be done."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer. `carried` are further members of its body."""

    code: Code
    message: str
    carried: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.code]

    def to_json(self) -> dict[str, Any]:
        """Return the answer's body."""
        return {"code": str(self.code), "message": self.message, **self.carried}


Admission = Apply | Renewed | Refusal


@dataclass(frozen=True, slots=True)
class _Lease:
    holder: str
    until: float


@dataclass(frozen=True, slots=True)
class _Term:
    """An order with its lease, and what follows when that runs out.

    The start and an applied fallback are terms without a lease.
    """

    order: Order
    fallback: Setting | None = None
    lease: _Lease | None = None

    def is_that_of(self, directive: Directive) -> bool:
        """Say whether `directive` has this term's body.

        The body is what the read-back shows: setting, fallback and holder. Reason, deadline and
        lease length are left out, so that an operator which restarted without a memory can renew
        an order it reads back, and its restart changes nothing in any engine.
        """
        return (
            self.lease is not None
            and self.lease.holder == directive.holder
            and self.order.setting == directive.setting
            and self.fallback == directive.fallback
        )


class Control:
    """One engine process's state machine over directives.

    It begins `Phase.LOADING`, at epoch 0, in mode `auto`, without a lease.

    Attributes:
        identity: Who this engine is.
        phase: Where it stands in its life.
        capability: What it can be ordered to do; nothing until it has loaded.
    """

    def __init__(self, identity: Identity, versions: Versions) -> None:
        self.identity = identity
        self.phase = Phase.LOADING
        self.capability = Capability(controllable=False, reason="the engine is loading")
        self._versions = versions
        self._in_force = _Term(Order(0, AUTO))
        self._doubtful: tuple[_Term, ...] = ()  # by rising epoch, all newer than what is owed
        self._under_way: _Term | None = None
        self._owed: Order | None = None
        self._expirations = 0
        self._last_expiry_epoch: int | None = None

    @property
    def epoch(self) -> int:
        """The fence: the highest epoch that may be in force or is owed to an expired lease."""
        return max(
            self._in_force.order.epoch,
            self._newest.order.epoch,
            self._owed.epoch if self._owed else 0,
        )

    @property
    def doubtful(self) -> Order | None:
        """The newest order whose outcome is unknown, if there is one."""
        return self._doubtful[-1].order if self._doubtful else None

    def serve(self, capability: Capability) -> None:
        """Enter `Phase.SERVING` with what the loaded engine can do."""
        self.phase = Phase.SERVING
        self.capability = capability

    def drain(self) -> None:
        """Enter `Phase.DRAINING`: directives are refused, an expiring lease still falls back."""
        self.phase = Phase.DRAINING

    def die(self, reason: str) -> None:
        """Enter `Phase.DEAD`, from which only a new process leads out."""
        self.phase = Phase.DEAD
        self.capability = Capability(controllable=False, reason=reason)

    def admit(self, directive: Directive, now: float) -> Admission:
        """Judge a directive that arrived at `now`.

        A refusal changes nothing. Checked in this order: addressee, phase, lease, epoch,
        capability; the fields were checked by `wire.parse_directive`.

        Raises:
            RuntimeError: Another order is under way.
        """
        self._nothing_under_way()
        # Time decides, not whether the watchdog woke before the request was read.
        self._lapse(now)
        term = _Term(
            Order(directive.epoch, directive.setting),
            directive.fallback,
            _Lease(directive.holder, now + directive.lease_seconds),
        )
        refusal = (
            self._wrong_addressee(directive)
            or self._not_serving()
            or self._lease_held(directive, now)
            or self._fenced(directive)
            or self._incapable(directive)
        )
        if refusal:
            return refusal
        if directive.epoch == self._in_force.order.epoch:
            self._in_force = term
            return Renewed(directive.epoch)
        self._under_way = term
        return Apply(term.order)

    def commit(self, order: Order) -> None:
        """Record that every rank obeys `order`; its lease has run since it was admitted."""
        if order == self._owed:
            self._in_force = _Term(order, self._in_force.fallback)
        else:
            self._in_force = self._finish(order)
        self._doubtful = ()
        self._owed = None

    def fail(self, order: Order) -> None:
        """Record that no rank obeys `order`: all stays as it was."""
        if order != self._owed:
            self._finish(order)

    def doubt(self, order: Order) -> None:
        """Record that some rank did not say whether it obeys `order`.

        Until this is resolved, its epoch fences and its lease counts instead of the former one.
        """
        if order != self._owed:
            doubtful = self._finish(order)
            # An older one may be what the ranks obey, if this one got lost. A repetition of the
            # same order takes its place.
            older = tuple(term for term in self._doubtful if term.order != order)
            self._doubtful = (*older[1 - MAX_DOUBTFUL :], doubtful)

    def resolve(self, rank_epochs: Iterable[int | None]) -> None:
        """Settle a doubt by what the ranks report, read after the doubtful order was sent.

        Args:
            rank_epochs: The epoch each rank obeys; None for a silent rank. Ranks that are silent
                or disagree leave the doubt as it is.
        """
        epochs = set(rank_epochs)
        epoch = epochs.pop() if len(epochs) == 1 else None
        if epoch is None or not self._doubtful:
            return
        found = next((term for term in self._doubtful if term.order.epoch == epoch), None)
        if found is not None:
            self._in_force = found
            self._owed = None
        elif self._owed is not None and epoch == self._owed.epoch:
            self._in_force = _Term(self._owed, self._in_force.fallback)
            self._owed = None
        elif epoch != self._in_force.order.epoch and (
            # Before the owed order anything may be obeyed; it is sent until it is.
            self._owed is None or epoch > self._owed.epoch
        ):
            return
        self._doubtful = ()

    def expire(self, now: float) -> Order | None:
        """Return the fallback's order if a lease ran out and the ranks don't obey it yet.

        The first call after the lease's end raises the epoch by one and counts the expiration;
        the order is the same in every call until it is committed or a newer directive is.

        Raises:
            RuntimeError: Another order is under way.
        """
        self._nothing_under_way()
        self._lapse(now)
        # A doubtful order is newer than the owed one: it may have overtaken it.
        return None if self._doubtful else self._owed

    def next_expiry(self) -> float | None:
        """Return when `expire` next has an order: minus infinity for at once, None for never."""
        if self._owed is not None and not self._doubtful:
            return -math.inf
        lease = self._lease()
        return lease.until if lease else None

    def read_back(self, now: float) -> dict[str, Any]:
        """Return the read-back without its `groups`.

        Members are those of the contract, and `unresolvedEpoch`: the epoch of an order that may
        or may not be in force, or that an expired lease owes to the ranks; null as a rule.
        """
        lease = self._lease()
        unresolved = self.epoch
        return {
            "podUID": self.identity.pod_uid,
            "bootID": self.identity.boot_id,
            "epoch": self._in_force.order.epoch,
            **setting_json(self._in_force.order.setting),
            "fallback": setting_json(self._in_force.fallback) if self._in_force.fallback else None,
            "controllable": self.capability.controllable,
            "reason": self.capability.reason,
            "availableSteps": list(self.capability.available_steps),
            "versions": {
                "sglang": self._versions.sglang,
                "plugin": self._versions.plugin,
                "proved": self._versions.proved,
            },
            "lease": {
                "holder": lease.holder if lease else None,
                "remainingSeconds": _remaining(lease, now) if lease else None,
                "expirations": self._expirations,
            },
            "lastExpiryEpoch": self._last_expiry_epoch,
            "unresolvedEpoch": unresolved if unresolved != self._in_force.order.epoch else None,
        }

    @property
    def _newest(self) -> _Term:
        return self._doubtful[-1] if self._doubtful else self._in_force

    def _lease(self) -> _Lease | None:
        return self._newest.lease

    def _lapse(self, now: float) -> None:
        term = self._newest
        if term.lease is None or term.fallback is None or now < term.lease.until:
            return
        self._owed = Order(self.epoch + 1, term.fallback)
        self._expirations += 1
        self._last_expiry_epoch = self._owed.epoch
        # The owed order comes after the doubtful ones on the same path: whether those were
        # obeyed for a while no longer matters.
        self._doubtful = ()
        self._in_force = replace(self._in_force, fallback=term.fallback, lease=None)

    def _nothing_under_way(self) -> None:
        if self._under_way is not None:
            raise RuntimeError(f"epoch {self._under_way.order.epoch} is still under way")

    def _finish(self, order: Order) -> _Term:
        term = self._under_way
        if term is None or term.order != order:
            raise RuntimeError(f"epoch {order.epoch} is not under way")
        self._under_way = None
        return term

    def _wrong_addressee(self, directive: Directive) -> Refusal | None:
        if directive.pod_uid != self.identity.pod_uid:
            code, message = Code.WRONG_POD, "this is another pod"
        elif directive.boot_id != self.identity.boot_id:
            code, message = Code.REBOOTED, "this is another engine process; read back first"
        else:
            return None
        return Refusal(
            code,
            message,
            {"podUID": self.identity.pod_uid, "bootID": self.identity.boot_id},
        )

    def _not_serving(self) -> Refusal | None:
        match self.phase:
            case Phase.SERVING:
                return None
            case Phase.LOADING:
                return Refusal(Code.LOADING, "the engine is loading")
            case Phase.DRAINING:
                return Refusal(Code.DRAINING, "the engine is draining")
            case Phase.DEAD:
                # Nothing is left but the process's end, which is what a drain leads to as well.
                return Refusal(
                    Code.DRAINING, f"the engine is going down: {self.capability.reason}"
                )

    def _lease_held(self, directive: Directive, now: float) -> Refusal | None:
        lease = self._lease()
        if lease is None or lease.holder == directive.holder:
            return None
        return Refusal(
            Code.LEASE_HELD,
            f"{lease.holder} holds the lease",
            {
                "holder": lease.holder,
                "remainingSeconds": _remaining(lease, now),
                "epoch": self.epoch,
            },
        )

    def _fenced(self, directive: Directive) -> Refusal | None:
        if directive.epoch > self.epoch:
            return None
        if directive.epoch < self.epoch:
            message = f"epoch {directive.epoch} is older than {self.epoch}"
            return Refusal(Code.STALE_EPOCH, message, {"epoch": self.epoch})
        if self._newest.order.epoch == self.epoch and self._newest.is_that_of(directive):
            return None
        return Refusal(
            Code.EPOCH_REUSED,
            f"epoch {self.epoch} was given to something else",
            {"epoch": self.epoch},
        )

    def _incapable(self, directive: Directive) -> Refusal | None:
        capability = self.capability
        carried = {
            "availableSteps": list(capability.available_steps),
            "reason": capability.reason,
            "epoch": self.epoch,
        }
        if not capability.controllable:
            return Refusal(Code.NOT_CONTROLLABLE, capability.reason, carried)
        for where, setting in (("", directive.setting), ("fallback: ", directive.fallback)):
            unknown = setting.needed_steps() - set(capability.available_steps)
            if unknown:
                steps = ", ".join(map(str, sorted(unknown)))
                message = f"{where}mode {setting.mode} needs steps {steps}, which are not prepared"
                return Refusal(Code.UNKNOWN_STEPS, message, {**carried, "reason": message})
        return None


def _remaining(lease: _Lease, now: float) -> float:
    return round(max(0.0, lease.until - now), 3)
