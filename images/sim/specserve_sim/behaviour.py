"""How an engine is told to behave: its traffic's acceptance, a scripted load, and faults.

One document describes all of it. A field left out has its default, so a `PUT` of `{}` heals an
engine. Pure: JSON values in, frozen values out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

Side = Literal["serving", "admin"]
FaultKind = Literal["hang", "reset", "refuse", "slow", "status"]
MetricsFault = Literal["nan", "drop", "gone"]
Phase = Literal["prepare", "commit", "lost", "read"]
WHOLLY_SILENT: frozenset[Phase] = frozenset({"prepare", "commit", "read"})

PROXY_BODY = "upstream connect error or disconnect/reset before headers. reset reason: overflow"
"""What an Envoy sidecar answers in the engine's place."""


class BadBehaviour(ValueError):
    """A behaviour document that cannot be used; the message names the field."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong with HTTP.

    Attributes:
        side: the port it concerns.
        kind: `hang` accepts and never answers; `reset` answers with a TCP reset; `refuse` closes
            each new connection at once; `slow` answers after `seconds`; `status` answers `status`
            with the text of a proxy in front.
        paths: beginnings of the paths concerned; empty concerns all. Not looked at by `refuse`.
        seconds: of `slow`, on the wall clock.
        status: of `status`.
    """

    side: Side
    kind: FaultKind
    paths: tuple[str, ...] = ()
    seconds: float = 0.0
    status: int = 503

    def concerns(self, path: str) -> bool:
        """Say whether a request for `path` meets this fault."""
        return not self.paths or path.startswith(self.paths)


@dataclass(frozen=True, slots=True)
class Load:
    """Running and queued requests that an engine reports instead of its own."""

    running: int
    queued: int


@dataclass(frozen=True, slots=True)
class RankFault:
    """What one tensor-parallel rank does with orders.

    Attributes:
        group: its data-parallel group.
        rank: its index in it.
        silent_in: phases it does not answer in. At the commit, a rank silent in `commit` obeys
            all the same, one silent in `lost` does not.
        objection: why it votes against every order; empty if it does not.
    """

    group: int
    rank: int
    silent_in: frozenset[Phase] = WHOLLY_SILENT
    objection: str = ""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What an engine does beside serving well.

    Attributes:
        accept_length: tokens won per verify at 3 steps by requests that name none themselves;
            None keeps the one it was started with.
        load: a scripted load; None reports the real one.
        faults: HTTP faults; the first that concerns a request counts.
        metrics: `nan` makes every gauge of /metrics NaN, `drop` leaves the request and token
            gauges out, `gone` answers 404.
        loads_gone: /v1/loads answers 404.
        frozen: /v1/loads and /metrics go on showing what they show now.
        stalled: the scheduler admits nothing and decodes nothing.
        ranks: ranks that do not do as they are told.
    """

    accept_length: float | None = None
    load: Load | None = None
    faults: tuple[Fault, ...] = ()
    metrics: MetricsFault | None = None
    loads_gone: bool = False
    frozen: bool = False
    stalled: bool = False
    ranks: tuple[RankFault, ...] = ()

    def silent(self, group: int, rank: int, phase: Phase) -> bool:
        """Say whether a rank keeps silent in a phase."""
        return any(
            (fault.group, fault.rank) == (group, rank) and phase in fault.silent_in
            for fault in self.ranks
        )

    def objection(self, group: int, rank: int) -> str:
        """Return why a rank votes against every order, or nothing."""
        for fault in self.ranks:
            if (fault.group, fault.rank) == (group, rank) and fault.objection:
                return fault.objection
        return ""

    def fault_for(self, side: Side, path: str) -> Fault | None:
        """Return the fault that a request meets."""
        for fault in self.faults:
            if fault.side == side and fault.concerns(path):
                return fault
        return None

    def refuses(self, side: Side) -> bool:
        """Say whether connections to a port are closed as they come."""
        return any(fault.side == side and fault.kind == "refuse" for fault in self.faults)

    def to_json(self) -> dict[str, Any]:
        """Return the document that `behaviour_from` reads."""
        return {
            "acceptLength": self.accept_length,
            "load": self.load and {"running": self.load.running, "queued": self.load.queued},
            "faults": [
                {
                    "side": fault.side,
                    "kind": fault.kind,
                    "paths": list(fault.paths),
                    "seconds": fault.seconds,
                    "status": fault.status,
                }
                for fault in self.faults
            ],
            "metrics": self.metrics,
            "loadsGone": self.loads_gone,
            "frozen": self.frozen,
            "stalled": self.stalled,
            "ranks": [
                {
                    "group": fault.group,
                    "rank": fault.rank,
                    "silentIn": sorted(fault.silent_in),
                    "objection": fault.objection,
                }
                for fault in self.ranks
            ],
        }


WELL = Behaviour()


def behaviour_from(document: object) -> Behaviour:
    """Read a behaviour document.

    Raises:
        BadBehaviour: for the first field that is unknown or unusable.
    """
    body = _object("", document)
    _only("", body, set(WELL.to_json()))
    load = body.get("load")
    metrics = body.get("metrics")
    if metrics is not None and metrics not in get_args(MetricsFault):
        raise BadBehaviour(f"metrics: one of {', '.join(get_args(MetricsFault))}")
    accept_length = body.get("acceptLength")
    if accept_length is not None:
        accept_length = _number("acceptLength", accept_length, 1, 4)
    return Behaviour(
        accept_length=accept_length,
        load=None if load is None else _load(load),
        faults=tuple(
            _fault(f"faults[{index}]", item)
            for index, item in enumerate(_list("faults", body.get("faults", [])))
        ),
        metrics=metrics,
        loads_gone=_flag(body, "loadsGone"),
        frozen=_flag(body, "frozen"),
        stalled=_flag(body, "stalled"),
        ranks=tuple(
            _rank_fault(f"ranks[{index}]", item)
            for index, item in enumerate(_list("ranks", body.get("ranks", [])))
        ),
    )


def _load(document: object) -> Load:
    body = _object("load", document)
    _only("load", body, {"running", "queued"})
    return Load(
        running=_count("load.running", body.get("running", 0)),
        queued=_count("load.queued", body.get("queued", 0)),
    )


def _fault(place: str, document: object) -> Fault:
    body = _object(place, document)
    _only(place, body, {"side", "kind", "paths", "seconds", "status"})
    side: Any = body.get("side", "serving")
    kind: Any = body.get("kind")
    if side not in get_args(Side):
        raise BadBehaviour(f"{place}.side: one of {', '.join(get_args(Side))}")
    if kind not in get_args(FaultKind):
        raise BadBehaviour(f"{place}.kind: one of {', '.join(get_args(FaultKind))}")
    paths = _list(f"{place}.paths", body.get("paths", []))
    if not all(isinstance(path, str) and path.startswith("/") for path in paths):
        raise BadBehaviour(f"{place}.paths: strings that begin with a slash")
    status = _count(f"{place}.status", body.get("status", 503))
    if not 400 <= status <= 599:
        raise BadBehaviour(f"{place}.status: from 400 to 599")
    return Fault(
        side=side,
        kind=kind,
        paths=tuple(paths),
        seconds=_number(f"{place}.seconds", body.get("seconds", 0), 0, 3600),
        status=status,
    )


def _rank_fault(place: str, document: object) -> RankFault:
    body = _object(place, document)
    _only(place, body, {"group", "rank", "silentIn", "objection"})
    objection = body.get("objection", "")
    if not isinstance(objection, str):
        raise BadBehaviour(f"{place}.objection: a string")
    every = [] if objection else list(WHOLLY_SILENT)
    silent_in: list[Any] = _list(f"{place}.silentIn", body.get("silentIn", every))
    if not set(silent_in) <= set(get_args(Phase)):
        raise BadBehaviour(f"{place}.silentIn: of {', '.join(get_args(Phase))}")
    return RankFault(
        group=_count(f"{place}.group", body.get("group", 0)),
        rank=_count(f"{place}.rank", body.get("rank", 0)),
        silent_in=frozenset(silent_in),
        objection=objection,
    )


def _object(place: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadBehaviour(f"{place or 'body'}: an object")
    return value


def _only(place: str, body: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(body) - known)
    if unknown:
        raise BadBehaviour(f"{place}{'.' if place else ''}{unknown[0]}: no such field")


def _list(place: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise BadBehaviour(f"{place}: a list")
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise BadBehaviour(f"{name}: true or false")
    return value


def _count(place: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadBehaviour(f"{place}: a whole number from 0 on")
    return value


def _number(place: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadBehaviour(f"{place}: a number")
    if not low <= value <= high:
        raise BadBehaviour(f"{place}: from {low:g} to {high:g}")
    return float(value)
