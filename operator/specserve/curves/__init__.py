"""Break-even curves known beforehand: those shipped, one from a ConfigMap, and whether it fits.

The files beside this module are made by `python -m tests.golden.curves` of what was measured.
Reads no clock, and nothing but the package's own files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Final, Literal

from specserve import api, workload
from specserve.policy.curve import Curve, CurveError, Provenance

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
        doubt: What of it could not be compared with what runs, for people; in `message`, too.
    """

    curve: Curve | None
    reason: Reason
    message: str
    doubt: str = ""


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


@dataclass(frozen=True, slots=True)
class Seen:
    """What the engines report of themselves, as far as they are read.

    Attributes:
        sglang: Versions of SGLang.
        plugin: Versions of the plugin.
        gpus: GPUs, where the engines tell.
    """

    sglang: frozenset[str] = frozenset()
    plugin: frozenset[str] = frozenset()
    gpus: frozenset[str] = frozenset()


NOTHING_SEEN: Final = Seen()


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
    spec: api.SpecServeSpec,
    named: ConfigMapText | None,
    seen: Seen = NOTHING_SEEN,
    own: ConfigMapText | None = None,
) -> Found:
    """The best curve there is that fits: one that is named, one measured here, a profile.

    Args:
        spec: Names the curves, and what they must be of.
        named: What `policy.breakEven.curveConfigMap` holds, None if it names none.
        seen: What runs.
        own: What a calibration in the cluster has written, None if there was none.
    """
    chosen = spec.policy.break_even
    candidates = []
    if named is not None:
        candidates.append(judge(spec, named, seen))
    if own is not None:
        candidates.append(judge(spec, own, seen, own=True))
    if chosen.profile is not None:
        candidates.append(_profile(spec, chosen.profile))
    if not candidates:
        return Found(
            None,
            "NoCurve",
            "no curve was calibrated, and policy.breakEven names no profile and no curveConfigMap",
        )
    first = candidates[0]
    for found in candidates:
        if found.curve is not None:
            break
    else:
        found = candidates[-1]
    if found is first:
        return first
    # The one that should have been used comes first: it is the one to mend.
    return Found(found.curve, first.reason, f"{first.message}; {found.message}", found.doubt)


def judge(
    spec: api.SpecServeSpec, config_map: ConfigMapText, seen: Seen, *, own: bool = False
) -> Found:
    """Whether the curve of a ConfigMap can be read, and is of what runs.

    Args:
        spec: What is to run.
        config_map: What it holds.
        seen: What runs.
        own: Whether the operator has had it measured: the GPU is then in words that it can
            compare with its own.
    """
    where = f"{config_map.kind} {config_map.name}"
    if config_map.text is None:
        return Found(None, "Unreadable", f"{where}: {config_map.problem}")
    try:
        curve = _parsed(config_map.text)
    except CurveError as error:
        return Found(None, "Unreadable", f"{where}, {KEY}: {error}")
    changed = [
        f"with {name} {theirs}, and here it is {ours}"
        for name, theirs, ours in _pairs(spec, curve.provenance, seen, own=own)
        if theirs is not None and ours is not None and theirs != ours
    ]
    if changed:
        return Found(None, "Stale", f"{where} was measured {'; '.join(changed)}")
    words = _words(where, curve)
    doubt = _doubt(curve.provenance, seen) if own else ""
    return Found(curve, "Calibrated", f"{words}; {doubt}" if doubt else words, doubt)


def _doubt(origin: Provenance, seen: Seen) -> str:
    """Whether a change of the GPU would go unnoticed, in words; empty if it would not."""
    # Before an engine was read nothing is known of it.
    if origin.gpu is None or workload.is_hardware(origin.gpu) or seen.gpus or not seen.sglang:
        return ""
    return f"measured on {origin.gpu}; what GPU the engines have now is not known"


def _pairs(
    spec: api.SpecServeSpec, origin: Provenance, seen: Seen, *, own: bool
) -> Iterator[tuple[str, object, object]]:
    """What a curve was measured with beside what is here; None where that is not known."""
    for name, theirs, part in (
        ("model", origin.model, spec.model),
        ("draft", origin.draft, spec.draft),
    ):
        # A curve that names no revision may be of any.
        plain = theirs is not None and theirs == part.source
        yield name, theirs, part.source if plain else weights_named(part)
    yield "tensorParallel", origin.tensor_parallel, _tensor_parallel(spec)
    for version in sorted(seen.sglang):
        yield "sglang", origin.sglang, version
    for version in sorted(seen.plugin):
        yield "plugin", origin.plugin, version
    if own and origin.gpu is not None and origin.gpu != workload.hardware(spec):
        if seen.gpus:
            for gpu in sorted(seen.gpus):
                yield "gpu", origin.gpu, gpu
        elif workload.is_hardware(origin.gpu):
            yield "gpu", origin.gpu, workload.hardware(spec)


def weights_named(part: api.Model | api.Draft) -> str | None:
    """A model or draft as a curve names it: its source, and its revision where one is pinned."""
    return part.source if part.revision is None else f"{part.source}@{part.revision}"


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
