"""The values under which the chart is tried."""

from __future__ import annotations

from typing import Any

MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "namespaces": {"watchNamespaces": ["team-a", "team-b"]},
    "namespaces-own": {"watchNamespaces": ["specserve-system"]},
    "namespaces-all": {"watchNamespaces": ["*"]},
    "no-cluster-rights": {
        "watchNamespaces": ["team-a"],
        "rbac": {"clusterScoped": False},
        "crds": {"enabled": False},
    },
    "prometheus": {
        "prometheus": {
            "hosts": ["*.monitoring.svc", "127.0.0.1"],
            "tokenFiles": {"b.monitoring.svc": "/tokens/b", "a.monitoring.svc": "/tokens/a"},
        },
    },
    "two-replicas": {
        "replicas": 2,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "specserve"}},
            }
        ],
    },
    "monitors": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podMonitor": {
            "enabled": True,
            "metricRelabelings": [{"action": "labeldrop", "regex": "le"}],
        },
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "closed": {
        "networkPolicy": {
            "metricsFrom": [
                {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "mon"}}}
            ],
            "egress": {
                "enabled": True,
                "extra": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
            },
        }
    },
    "open": {"networkPolicy": {"enabled": False, "engines": False}},
    "private-registry": {
        "global": {
            "imageRegistry": "mirror.example:5000",
            "imagePullSecrets": [{"name": "pull-a"}],
        },
        "imagePullSecrets": [{"name": "pull-o"}],
        "engineDefaults": {
            "image": "sglang-specserve:1",
            "imagePullSecrets": [{"name": "pull-b"}],
        },
    },
    "digest": {"image": {"registry": "reg.example", "digest": "sha256:" + "0" * 64}},
    "own-account": {
        "serviceAccount": {"create": False, "name": "mine"},
        "rbac": {"create": False},
    },
    "extras": {
        "commonLabels": {"team": "x", "app.kubernetes.io/name": "other"},
        "podLabels": {"app.kubernetes.io/instance": "other", "tier": "ops"},
        "podAnnotations": {"example.com/a": "b"},
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraArgs": ["--help"],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca", "readOnly": True}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 1, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname"}}
                ]
            }
        },
        "priorityClassName": "system-cluster-critical",
        "crds": {"keep": False, "annotations": {"example.com/c": "d"}},
        "serviceAccount": {"annotations": {"example.com/e": "f"}},
        "service": {"port": 9090, "annotations": {"prometheus.io/scrape": "true"}},
    },
    "named": {"fullnameOverride": "steering", "leaderElection": {"leaseName": "other"}},
    "openshift": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None}},
}
