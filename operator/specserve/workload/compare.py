"""Why pods are replaced: pod templates compared with one another."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from specserve import names

Manifest = dict[str, Any]

_ENGINE: Final = f"spec.containers[{names.ENGINE_CONTAINER}]"
_VOLUMES: Final[Mapping[str, str]] = {
    "[specserve-model]": "spec.model.source",
    "[specserve-draft]": "spec.draft.source",
    "[specserve-adaptive]": "spec.draft",
    "[specserve-shared-memory]": "spec.engine.sharedMemory",
}
#: Beginnings of paths in a pod template, the first that fits counts, and what they are made of. A
#: dot at the end: what follows is the same on both sides.
_FIELDS: Final[Mapping[str, str]] = {
    f"metadata.annotations.{names.ANNOTATION_ADAPTIVE}": "spec.draft",
    f"metadata.annotations.{names.ANNOTATION_API_KEY}": "spec.engine.apiKeySecretRef",
    "metadata.annotations.": "spec.pod.annotations.",
    "metadata.labels.": "spec.pod.labels.",
    f"{_ENGINE}.args[--model-path]": "spec.model.source",
    f"{_ENGINE}.args[--served-model-name]": "spec.model.servedName",
    f"{_ENGINE}.args[--revision]": "spec.model.revision",
    f"{_ENGINE}.args[--quantization]": "spec.model.quantization",
    f"{_ENGINE}.args[--context-length]": "spec.model.contextLength",
    f"{_ENGINE}.args[--trust-remote-code]": "spec.model.trustRemoteCode",
    f"{_ENGINE}.args[--tp-size]": "spec.engine.tensorParallel",
    f"{_ENGINE}.args[--dp-size]": "spec.engine.dataParallel",
    f"{_ENGINE}.args[--max-running-requests]": "spec.engine.maxRunningRequests",
    f"{_ENGINE}.args[--mem-fraction-static]": "spec.engine.memFractionStatic",
    f"{_ENGINE}.args[--speculative": "spec.draft",
    f"{_ENGINE}.args": "spec.engine.args",
    f"{_ENGINE}.command": "spec.engine.command",
    f"{_ENGINE}.env[{names.ENV_STEPS}]": "spec.draft",
    f"{_ENGINE}.env[{names.ENV_REQUIRE_LIVE}]": "spec.draft",
    f"{_ENGINE}.env[{names.ENV_HUB_TOKEN}]": "spec.model.tokenSecretRef or spec.engine.env",
    f"{_ENGINE}.imagePullPolicy": "spec.engine.imagePullPolicy",
    f"{_ENGINE}.image": "spec.engine.image",
    f"{_ENGINE}.lifecycle": "spec.pod.terminationGracePeriodSeconds",
    f"{_ENGINE}.resources.": "spec.engine.resources.",
    f"{_ENGINE}.startupProbe": "spec.engine.startupBudgetSeconds",
    **{f"{_ENGINE}.volumeMounts{volume}": field for volume, field in _VOLUMES.items()},
    f"{_ENGINE}.volumeMounts": "spec.pod.volumeMounts",
    f"{_ENGINE}.env": "spec.engine.env",
    "spec.automountServiceAccountToken": "spec.pod.serviceAccountName",
    "spec.serviceAccount": "spec.pod.serviceAccountName",
    **{f"spec.volumes{volume}": field for volume, field in _VOLUMES.items()},
    "spec.volumes": "spec.pod.volumes",
    "spec.initContainers": "spec.pod.initContainers",
    "spec.imagePullSecrets": "spec.pod.imagePullSecrets",
    "spec.topologySpreadConstraints": "spec.pod.topologySpreadConstraints",
    "spec.tolerations": "spec.pod.tolerations",
    "spec.affinity": "spec.pod.affinity",
    "spec.nodeSelector": "spec.pod.nodeSelector",
    "spec.securityContext": "spec.pod.securityContext",
    "spec.enableServiceLinks": "spec.pod.enableServiceLinks",
    "spec.hostIPC": "spec.pod.hostIPC",
    "spec.priorityClassName": "spec.pod.priorityClassName",
    "spec.runtimeClassName": "spec.pod.runtimeClassName",
    "spec.schedulerName": "spec.pod.schedulerName",
    "spec.terminationGracePeriodSeconds": "spec.pod.terminationGracePeriodSeconds",
}


def field_of(path: str) -> str | None:
    """The field of a SpecServe that a path in its pod template is made of, None if none is.

    Args:
        path: As `first_difference` names it.
    """
    for beginning, field in _FIELDS.items():
        if path.startswith(beginning):
            return field + path.removeprefix(beginning) if field.endswith(".") else field
    return None


def template_hash(deployment: Manifest) -> str:
    """Sixteen hexadecimal digits that differ whenever the pod template differs.

    The order of keys in mappings does not count, that of lists does.
    """
    text = json.dumps(deployment["spec"]["template"], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_difference(old: Manifest, new: Manifest) -> str | None:
    """Path of the first difference between the pod templates of two Deployments.

    The path has no values in it, as they may be secret. Items of lists are called by their names,
    arguments by their flags.

    Returns:
        A path such as `spec.containers[engine].image`, or None if the templates are equal.
    """
    return _difference(old["spec"]["template"], new["spec"]["template"], "")


def _difference(old: Any, new: Any, path: str) -> str | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            below = f"{path}.{key}" if path else str(key)
            if (key in old) != (key in new):
                return below
            if found := _difference(old[key], new[key], below):
                return found
        return None
    if isinstance(old, list) and isinstance(new, list):
        return _list_difference(old, new, path)
    return None if type(old) is type(new) and old == new else path


def _list_difference(old: list[Any], new: list[Any], path: str) -> str | None:
    only_one_has = (word for word in (*old, *new) if (word in old) != (word in new))
    for word in only_one_has:
        if isinstance(word, str) and word.startswith("--"):
            return f"{path}[{word.partition('=')[0]}]"
    for position, (left, right) in enumerate(zip(old, new, strict=False)):
        label: object = position
        if isinstance(left, dict) and isinstance(right, dict):
            if left.get("name") != right.get("name"):
                return f"{path}[{left.get('name', position)}]"
            label = left.get("name", position)
        if found := _difference(left, right, f"{path}[{label}]"):
            return found
    if len(old) != len(new):
        longer = max(old, new, key=len)
        position = min(len(old), len(new))
        item = longer[position]
        label = item.get("name", position) if isinstance(item, dict) else position
        return f"{path}[{label}]"
    return None
