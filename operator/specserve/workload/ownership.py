"""Whose fields are whose in a live Service, as server-side apply keeps account of it.

Apply removes what its own manager gave up, never what another one has set. So a second port that
somebody added by hand stays beside ours, and where the two cannot stand together every apply is
refused from then on. What counts as ours goes with the next apply.
"""

import copy
from typing import Any, Final

from specserve import names

Manifest = dict[str, Any]

#: Fields of the spec that may leave no room for ours. Where a Service is to be found from (`type`
#: LoadBalancer, say) stays its user's, but for ExternalName, which has neither ports nor pods.
_PORTS: Final = ("f:ports",)
_EXTERNAL_NAME: Final = ("f:ports", "f:externalName", "f:type")


def taken_over(service: Manifest) -> list[Manifest] | None:
    """The `metadata.managedFields` of a Service after the operator has taken its ports over.

    Only what was written once, by hand or by a patch, is taken: another manager that applies
    would write it again.

    Args:
        service: The live object. It is not changed.

    Returns:
        The new list, None if nothing is there to be taken.
    """
    entries = copy.deepcopy(service["metadata"].get("managedFields") or [])
    ours = next((e for e in entries if (e["manager"], e["operation"]) == _APPLIED), None)
    external = service["spec"].get("type") == "ExternalName"
    found: Manifest = {}
    for entry in entries:
        if entry["operation"] != "Update" or entry.get("subresource"):
            continue
        spec = entry.get("fieldsV1", {}).get("f:spec", {})
        for field in _EXTERNAL_NAME if external else _PORTS:
            if field in spec:
                found = _union(found, {field: spec.pop(field)})
    if ours is None or not found:
        return None
    ours["fieldsV1"] = _union(ours.get("fieldsV1", {}), {"f:spec": found})
    return entries


_APPLIED: Final = (names.MANAGER, "Apply")


def _union(left: Manifest, right: Manifest) -> Manifest:
    """Two sets of fields as one: a set is a tree of mappings, in which a leaf is empty."""
    return left | {key: _union(left.get(key, {}), below) for key, below in right.items()}
