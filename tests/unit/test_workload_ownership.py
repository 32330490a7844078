"""Whose the ports of a Service are, after somebody has patched them."""

from typing import Any

import pytest

from specserve.workload import taken_over


def entry(manager: str, operation: str, **spec: Any) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "fieldsV1": {"f:spec": spec}}


def test_ports_that_were_patched_become_ours():
    service = {
        "metadata": {
            "managedFields": [
                entry("specserve", "Apply", **{"f:ports": {'k:{"port":30000}': {".": {}}}}),
                entry(
                    "kubectl-patch",
                    "Update",
                    **{"f:ports": {'k:{"port":80}': {".": {}, "f:name": {}}}, "f:type": {}},
                ),
                {**entry("cloud", "Update", **{"f:ports": {}}), "subresource": "status"},
                entry("argocd", "Apply", **{"f:ports": {'k:{"port":81}': {".": {}}}}),
            ]
        },
        "spec": {"type": "LoadBalancer"},
    }
    ours, hand, *rest = taken_over(service)
    assert ours["fieldsV1"]["f:spec"]["f:ports"] == {
        'k:{"port":30000}': {".": {}},
        'k:{"port":80}': {".": {}, "f:name": {}},
    }
    assert hand["fieldsV1"]["f:spec"] == {"f:type": {}}
    assert rest == service["metadata"]["managedFields"][2:]
    service["spec"]["type"] = "ExternalName"
    ours, hand, *_ = taken_over(service)
    assert "f:type" in ours["fieldsV1"]["f:spec"]
    assert hand["fieldsV1"]["f:spec"] == {}


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [entry("specserve", "Apply", **{"f:ports": {}})],
        [entry("kubectl-patch", "Update", **{"f:ports": {}})],
    ],
)
def test_nothing_is_taken_where_there_is_nothing_or_no_account_of_ours(entries):
    assert taken_over({"metadata": {"managedFields": entries}, "spec": {}}) is None
