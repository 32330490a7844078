"""What a run is about: the SpecServes, their pods, the load. Pure, and handed on as JSON."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from specserve import curves
from tests.demo.curve import Curve, curve_from

if TYPE_CHECKING:
    from collections.abc import Mapping

ArmKey = Literal["alwaysOn", "alwaysOff", "specserve"]

SPECSERVE: ArmKey = "specserve"

TITLES: dict[ArmKey, str] = {
    "specserve": "SpecServe",
    "alwaysOn": "always on",
    "alwaysOff": "always off",
}

STORY = Curve(
    seconds=126.0,
    load=((0, 28), (14, 28), (19, 150), (31, 150), (35, 28), (126, 28)),
    acceptance=((0, 2.0), (42, 1.2), (93, 2.0)),
)
"""A peak of load, then other prompts, then those of before.

Between peak and drop there is time for speculation to come back. While it is off for the drop,
nobody sees the acceptance; the first look at it is due a minute after the switch, by which time
the requests of the drop have ended.
"""

STEPS = 3
"""Draft steps that the example's engines speculate with."""

_MODES: dict[ArmKey, str] = {"specserve": "Auto", "alwaysOn": "On", "alwaysOff": "Off"}
_SUFFIXES: dict[ArmKey, str] = {
    "specserve": "",
    "alwaysOn": "-always-on",
    "alwaysOff": "-always-off",
}
_SCALE = "--sim-time-scale="
_PROFILE = "--sim-profile="


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod and where it is reached."""

    name: str
    ip: str


@dataclass(frozen=True, slots=True)
class Arm:
    """One SpecServe of the comparison.

    Attributes:
        key: which.
        name: of the object.
        pods: its pods, by name.
        token: of its engines' admin ports.
    """

    key: ArmKey
    name: str
    pods: tuple[Pod, ...]
    token: str

    def __repr__(self) -> str:
        """Keep the token out of logs and tracebacks."""
        return f"Arm({self.name})"

    @property
    def title(self) -> str:
        """For people."""
        return TITLES[self.key]


@dataclass(frozen=True, slots=True)
class Plan:
    """A run.

    Attributes:
        namespace: of the objects.
        arms: the SpecServes.
        curve: the traffic of each pod.
        profile: name of the round times that the engines simulate.
        operator_port: where the operator tells its metrics and decisions, on loopback.
        slow_motion: wall-clock seconds for one second of the engines.
    """

    namespace: str
    arms: tuple[Arm, ...]
    curve: Curve
    profile: str
    operator_port: int
    slow_motion: float

    def break_even(self, load: int) -> float:
        """Tokens that a verify must win to pay with so many requests in a pod, as measured."""
        return curves.shipped(self.profile).ratio(max(1, load), STEPS)

    def to_json(self) -> dict[str, Any]:
        """The document that `plan_from` reads; it holds the engines' tokens."""
        return asdict(self)


def plan_from(document: Mapping[str, Any]) -> Plan:
    """Reads a plan back."""
    arms = tuple(
        Arm(**{**arm, "pods": tuple(Pod(**pod) for pod in arm["pods"])})
        for arm in document["arms"]
    )
    return Plan(**{**document, "arms": arms, "curve": curve_from(document["curve"])})


def arm_manifest(
    example: Mapping[str, Any], key: ArmKey, *, image: str, gpus: bool
) -> dict[str, Any]:
    """The SpecServe of an arm: the example, of which the others differ in name and mode alone.

    Args:
        example: the SpecServe as in examples/demo.yaml.
        key: which arm.
        image: the simulated engine's image where the cluster finds it.
        gpus: whether the cluster has GPUs to ask for, pretended or real.
    """
    manifest = copy.deepcopy(dict(example))
    manifest["metadata"]["name"] += _SUFFIXES[key]
    spec = manifest["spec"]
    spec["policy"]["mode"] = _MODES[key]
    spec["engine"]["image"] = image
    if not gpus:
        spec["engine"].get("resources", {}).pop("limits", None)
    return manifest


def slow_motion(example: Mapping[str, Any]) -> float:
    """How many seconds the example's engines take for one of their own."""
    return 1 / float(_argument(example, _SCALE) or 1)


def profile(example: Mapping[str, Any]) -> str:
    """The round times that the example's engines simulate."""
    return _argument(example, _PROFILE) or "h200-a"


def _argument(example: Mapping[str, Any], beginning: str) -> str:
    found = [a for a in example["spec"]["engine"].get("args", ()) if a.startswith(beginning)]
    return found[-1].removeprefix(beginning) if found else ""
