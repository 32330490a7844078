"""What a SpecServe asks for in place of a GPU's name, which SGLang 0.5.16 does not tell."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from specserve.api import SpecServeSpec
from specserve.workload.pod import is_extended

#: Begins the words, so that nobody takes them for the name of a GPU.
_ASKED_FOR: Final = "asked for: "


def hardware(spec: SpecServeSpec) -> str:
    """The devices of a pod and the nodes that it may run on, in words that are equal if they are.

    Nodes are no business of the operator's, so it cannot look what GPU is in them; what decides
    it are the resource's name, the node selector and the required node affinity.
    """
    limits = spec.engine.resources.limits
    devices = [f"{limits[name]} x {name}" for name in sorted(limits) if is_extended(name)]
    selector = [f"{key}={value}" for key, value in sorted(spec.pod.node_selector.items())]
    parts = [*devices, *selector, *_affinity(spec.pod.affinity or {})]
    return _ASKED_FOR + (", ".join(parts) or "no device")


def is_hardware(text: str) -> bool:
    """Whether this is what `hardware` makes, and no name that an engine told."""
    return text.startswith(_ASKED_FOR)


def _affinity(affinity: Mapping[str, Any]) -> Iterator[str]:
    node = affinity.get("nodeAffinity") or {}
    required = node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms") or ():
        for entry in term.get("matchExpressions") or ():
            values = "|".join(map(str, entry.get("values") or ()))
            yield " ".join(filter(None, (entry.get("key"), entry.get("operator"), values)))
