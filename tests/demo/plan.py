"""What a run is about: the SpecServes, their pods, the load. Pure, and handed on as JSON."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from tests.demo.curve import Curve

if TYPE_CHECKING:
    from collections.abc import Mapping

ArmKey = Literal["alwaysOn", "alwaysOff", "specserve"]

SPECSERVE: ArmKey = "specserve"

TITLES: dict[ArmKey, str] = {
    "specserve": "SpecServe",
    "alwaysOn": "always on",
    "alwaysOff": "always off",
}

LOW, HIGH = 28, 150
"""Requests in flight in each pod at the bottom and on top of a wave."""

WAVE_SECONDS = 55.0
"""About the length of a wave; the shortest run is one wave of it."""

_MODES: dict[ArmKey, str] = {"specserve": "Auto", "alwaysOn": "On", "alwaysOff": "Off"}
_SUFFIXES: dict[ArmKey, str] = {
    "specserve": "",
    "alwaysOn": "-always-on",
    "alwaysOff": "-always-off",
}
_SCALE = "--sim-time-scale="


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
        curve: the load of each pod.
        off_above: the policy's upper bound.
        on_below: its lower one.
        slow_motion: wall-clock seconds for one second of the engines.
    """

    namespace: str
    arms: tuple[Arm, ...]
    curve: Curve
    off_above: int
    on_below: int
    slow_motion: float

    def to_json(self) -> dict[str, Any]:
        """The document that `plan_from` reads; it holds the engines' tokens."""
        return asdict(self)


def plan_from(document: Mapping[str, Any]) -> Plan:
    """Reads a plan back."""
    arms = tuple(
        Arm(**{**arm, "pods": tuple(Pod(**pod) for pod in arm["pods"])})
        for arm in document["arms"]
    )
    return Plan(**{**document, "arms": arms, "curve": Curve(**document["curve"])})


def curve_for(seconds: float) -> Curve:
    """The load of a run of this length: one wave, or more in a longer one."""
    return Curve(seconds, LOW, HIGH, max(1, round(seconds / WAVE_SECONDS)))


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
    for argument in example["spec"]["engine"].get("args", ()):
        if argument.startswith(_SCALE):
            return 1 / float(argument.removeprefix(_SCALE))
    return 1.0
