"""Break-even curves known beforehand: those shipped, one from a ConfigMap, and whether it fits.

The files beside this module are made by `python -m tests.golden.curves` of what was measured.
Reads no clock, and nothing but the package's own files.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Final, Literal

from specserve import api, workload
from specserve.policy.curve import Curve, CurveError

#: Key of a ConfigMap that holds a curve.
KEY: Final = "curve.json"

Reason = Literal["Calibrated", "Profile", "NoCurve", "Stale", "Unreadable"]


@dataclass(frozen=True, slots=True)
class Found:
    """The curve that a SpecServe goes by until live rounds tell more.

    Attributes:
        curve: The curve, None if there is none that can be used.
        reason: Which one it is, or why there is none; a reason of the condition CurveKnown.
        message: The same for people.
    """

    curve: Curve | None
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class ConfigMapText:
    """What was read of a ConfigMap, or of a file that stands for one.

    Attributes:
        name: Its name.
        text: The value of its key, None if there is none.
        problem: Why, in words.
        kind: What it is.
    """

    name: str
    text: str | None
    problem: str = ""
    kind: Literal["ConfigMap", "file"] = "ConfigMap"


def shipped_names() -> tuple[str, ...]:
    """Names of the curves that come with the operator."""
    found = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name[:-5] for name in found if name.endswith(".json")))


@cache
def shipped(name: str) -> Curve:
    """One of the curves that come with the operator.

    Raises:
        CurveError: There is none of this name.
    """
    if name not in shipped_names():
        raise CurveError(f"no profile {name}; there are {', '.join(shipped_names())}")
    text = (files(__name__) / f"{name}.json").read_text(encoding="utf-8")
    return Curve.from_json(text, "Profile")


def find(
    spec: api.SpecServeSpec, config_map: ConfigMapText | None, sglang: Iterable[str] = ()
) -> Found:
    """The best curve that the policy names and that fits.

    Args:
        spec: Names the curves, and what they must be of.
        config_map: What `policy.breakEven.curveConfigMap` holds, None if it names none.
        sglang: Versions that the engines report, as far as they are read.
    """
    chosen = spec.policy.break_even
    calibrated = None if config_map is None else _calibrated(spec, config_map, sglang)
    if calibrated is not None and (calibrated.curve is not None or chosen.profile is None):
        return calibrated
    if chosen.profile is None:
        return Found(None, "NoCurve", "policy.breakEven names no profile and no curveConfigMap")
    profile = _profile(spec, chosen.profile)
    if calibrated is None:
        return profile
    # The one that should have been used comes first: it is the one to mend.
    return Found(profile.curve, calibrated.reason, f"{calibrated.message}; {profile.message}")


def _calibrated(
    spec: api.SpecServeSpec, config_map: ConfigMapText, sglang: Iterable[str]
) -> Found:
    where = f"{config_map.kind} {config_map.name}"
    if config_map.text is None:
        return Found(None, "Unreadable", f"{where}: {config_map.problem}")
    try:
        curve = _parsed(config_map.text)
    except CurveError as error:
        return Found(None, "Unreadable", f"{where}, {KEY}: {error}")
    origin = curve.provenance
    wanted: tuple[tuple[str, object, object], ...] = (
        ("model", origin.model, spec.model.source),
        ("draft", origin.draft, spec.draft.source),
        ("tensorParallel", origin.tensor_parallel, _tensor_parallel(spec)),
        *(("sglang", origin.sglang, version) for version in sorted(set(sglang))),
    )
    for name, theirs, ours in wanted:
        if theirs is not None and ours is not None and theirs != ours:
            return Found(
                None, "Stale", f"{where} was measured with {name} {theirs}, and here it is {ours}"
            )
    return Found(curve, "Calibrated", _words(where, curve))


def _tensor_parallel(spec: api.SpecServeSpec) -> int:
    """GPUs of one engine, where the user's arguments win; a spec that is refused has its own."""
    try:
        return workload.layout_of(spec).tensor
    except workload.UnusableSpec:
        return spec.engine.tensor_parallel


def _profile(spec: api.SpecServeSpec, name: str) -> Found:
    try:
        curve = shipped(name)
    except CurveError as error:
        return Found(None, "Unreadable", f"policy.breakEven.profile: {error}")
    # A profile is of another model anyway; the parallel size is another order of magnitude.
    theirs, ours = curve.provenance.tensor_parallel, _tensor_parallel(spec)
    if theirs != ours:
        return Found(
            None,
            "Stale",
            f"profile {name} was measured with tensorParallel {theirs}, and here it is {ours}",
        )
    return Found(curve, "Profile", _words(f"profile {name}", curve))


# As many as there are SpecServes with one: parsing takes a millisecond, and is asked for often.
@lru_cache(maxsize=1024)
def _parsed(text: str) -> Curve:
    return Curve.from_json(text)


def _words(where: str, curve: Curve) -> str:
    origin = curve.provenance
    date = f", {origin.date}" if origin.date else ""
    return f"{where}: {origin.source or 'source not told'}{date}"
