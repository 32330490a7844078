"""Why pods are replaced: pod templates compared with one another."""

import hashlib
import json
from typing import Any

Manifest = dict[str, Any]


def template_hash(deployment: Manifest) -> str:
    """Sixteen hexadecimal digits that differ whenever the pod template differs.

    The order of keys in mappings does not count, that of lists does.
    """
    text = json.dumps(deployment["spec"]["template"], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_difference(old: Manifest, new: Manifest) -> str | None:
    """Path of the first difference between the pod templates of two desired Deployments.

    The path has no values in it, as they may be secret.

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
