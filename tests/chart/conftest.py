from __future__ import annotations

import pytest

from tests.cluster.light import light_cluster as start_light_cluster

_NAMESPACES = ("specserve-system", "team-a", "team-b")
_MONITORS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")


def _monitor(kind: str) -> dict:
    plural = kind.lower() + "s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "x-kubernetes-preserve-unknown-fields": True,
                        }
                    },
                }
            ],
        },
    }


@pytest.fixture(scope="session")
def api_server():
    """A control plane with the namespaces of the matrix and the Prometheus operator's kinds."""
    with start_light_cluster(controllers="*,-node-lifecycle-controller") as cluster:
        namespaces = [
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {
                    "name": name,
                    "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
                },
            }
            for name in _NAMESPACES
        ]
        cluster.apply(*namespaces, *map(_monitor, _MONITORS))
        cluster.kubectl(
            *("wait", "--for=condition=Established", "--timeout=30s", "crd"),
            *(f"{kind.lower()}s.monitoring.coreos.com" for kind in _MONITORS),
        )
        yield cluster
