"""Which directive holds: admission, epoch fencing, leases and their expiry.

Pure: no IO, no clock, no asyncio. `now` is seconds of any monotonic clock, always the same one.

The path of an order. `Control.admit` judges a directive and changes nothing but a lease. If it
answers `Apply`, the caller takes the order to the scheduler ranks and reports what came of it with
exactly one of `commit` (all ranks apply it), `fail` (no rank does) or `doubt` (unknown). An expired
lease makes such an order too: `expire` hands it out until it is committed or overtaken. The caller
lets one order at a time be under way.

Doubt. An order whose outcome is unknown may be in force, so it fences older epochs and its lease
counts; the engine's state is resolved by what the ranks themselves report (`resolve`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from specserve_engine.wire import STATUS, Code, Directive, Setting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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


class Control:
    """One engine process's state machine over directives.

    It begins `Phase.LOADING`, at epoch 0, in mode `auto`, without a lease.
    """

    def __init__(self, identity: Identity, versions: Versions) -> None: ...

    def serve(self, capability: Capability) -> None:
        """Enter `Phase.SERVING` with what the loaded engine can do."""

    def drain(self) -> None:
        """Enter `Phase.DRAINING`: directives are refused, an expiring lease still falls back."""

    def die(self, reason: str) -> None:
        """Enter `Phase.DEAD`."""

    def admit(self, directive: Directive, now: float) -> Admission:
        """Judge a directive that arrived at `now`."""
        raise NotImplementedError

    def commit(self, order: Order) -> None:
        """Record that every rank applies `order`."""

    def fail(self, order: Order) -> None:
        """Record that no rank applies `order`: all stays as it was."""

    def doubt(self, order: Order) -> None:
        """Record that some rank did not say whether it applies `order`."""

    def resolve(self, rank_epochs: Iterable[int | None]) -> None:
        """Settle a doubt by the epochs that the ranks report, None for a silent rank."""

    def expire(self, now: float) -> Order | None:
        """Return the fallback's order if a lease ran out and no rank set obeys it yet."""
        raise NotImplementedError

    def next_expiry(self) -> float | None:
        """Return when a lease runs out or ran out, None without a lease."""
        raise NotImplementedError

    def read_back(self, now: float) -> dict[str, Any]:
        """Return the read-back without its `groups`."""
        raise NotImplementedError
