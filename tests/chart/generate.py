"""Writes what the chart holds of other sources: CRD, values schema and README.

`python -m tests.chart.generate` writes the files; git tells whether they differ.

- templates/crd.yaml is crds/*.yaml with a switch around it and annotations inside.
- values.schema.json and the table of README.md come from values.yaml and its comments.
- examples/install/workload.yaml is what the chart renders, for people without Helm. kubectl takes
  the files of a folder by their names: rbac.yaml, which has the namespace, must be the first.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.chart import rendering, shapes

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "specserve"
PLAIN_FILE = ROOT / "examples" / "install" / "workload.yaml"
PLAIN = "specserve-operator"

_CRD_HEAD = """\
{{- /* Made by `make generate` from crds/. A template, because Helm never upgrades what lies in a
chart's folder crds/. */}}
{{- if eq "true" (include "specserve.on" (list .Values.crds "enabled")) }}
"""
_CRD_ANNOTATIONS = """\
metadata:
  {{- $keep := eq "true" (include "specserve.on" (list .Values.crds "keep")) }}
  {{- if or $keep (include "specserve.yaml" (.Values.crds).annotations) }}
  annotations:
    {{- if $keep }}
    helm.sh/resource-policy: keep
    {{- end }}
    {{- with include "specserve.yaml" (.Values.crds).annotations }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- end }}
"""

_SECONDS = {"type": ["number", "null"], "minimum": 1}
_MORE: dict[str, dict[str, Any]] = {
    # Dots become hyphens.
    "nameOverride": shapes.text("[a-z]([-.a-z0-9]*[a-z0-9])?"),
    "fullnameOverride": shapes.text("[a-z]([-a-z0-9]*[a-z0-9])?"),
    "commonLabels": shapes.LABELS,
    "global.imageRegistry": shapes.text(shapes.REGISTRY),
    "global.imagePullSecrets": shapes.PULL_SECRETS,
    "image.registry": shapes.text(shapes.REGISTRY),
    "image.repository": shapes.text(shapes.REPOSITORY),
    "image.tag": shapes.text(shapes.TAG),
    "image.digest": shapes.text(shapes.DIGEST),
    "image.pullPolicy": shapes.choice("Always", "IfNotPresent", "Never"),
    "imagePullSecrets": shapes.PULL_SECRETS,
    "engineDefaults.image": shapes.text(shapes.IMAGE, 512),
    "engineDefaults.imagePullSecrets": shapes.PULL_SECRETS,
    "watchNamespaces": shapes.each(shapes.must(rf"\*|{shapes.NAMESPACE}")),
    "replicas": {"maximum": 10},
    "operator.logLevel": shapes.choice("DEBUG", "INFO", "WARNING", "ERROR"),
    "operator.samplesPerSecond": {"minimum": 1},
    "operator.readBackSeconds": _SECONDS,
    "operator.workers": {"minimum": 1},
    "operator.apiConnections": {"minimum": 4},
    # Both reach the operator as a list with commas.
    "prometheus.hosts": shapes.each(shapes.must(r"[^\s,]+")),
    "prometheus.tokenFiles": shapes.entries(r"[^\s,=]+", shapes.text("/[^,]+")),
    # A ConfigMap has its name and `-override`.
    "leaderElection.leaseName": shapes.text(shapes.NAME, 244),
    "leaderElection.leaseSeconds": _SECONDS,
    "leaderElection.renewSeconds": _SECONDS,
    "leaderElection.retrySeconds": {**_SECONDS, "minimum": 0.1},
    "crds.annotations": shapes.ANNOTATIONS,
    "serviceAccount.name": shapes.text(shapes.NAME, 253),
    "serviceAccount.annotations": shapes.ANNOTATIONS,
    "networkPolicy.metricsFrom": shapes.PEERS,
    "networkPolicy.egress.apiServerPorts": shapes.each(shapes.PORT),
    "networkPolicy.egress.extra": shapes.EGRESS,
    "service.port": shapes.PORT,
    "service.annotations": shapes.ANNOTATIONS,
    **{
        f"{monitor}.{key}": shape
        for monitor in ("serviceMonitor", "podMonitor")
        for key, shape in {
            "interval": shapes.text(shapes.DURATION),
            "labels": shapes.LABELS,
            "metricRelabelings": shapes.each(shapes.OBJECT),
        }.items()
    },
    "prometheusRule.labels": shapes.LABELS,
    "podDisruptionBudget.maxUnavailable": {
        **shapes.must(shapes.PERCENTAGE),
        "type": ["integer", "string", "null"],
    },
    "resources": shapes.RESOURCES,
    "podSecurityContext": shapes.POD_SECURITY,
    "securityContext": shapes.SECURITY,
    "startupProbe": shapes.LIVENESS,
    "livenessProbe": shapes.LIVENESS,
    "readinessProbe": shapes.READINESS,
    "extraEnv": shapes.VARIABLES,
    "extraArgs": shapes.each(shapes.STRING),
    "extraVolumes": shapes.VOLUMES,
    "extraVolumeMounts": shapes.MOUNTS,
    "podLabels": shapes.LABELS,
    "podAnnotations": shapes.ANNOTATIONS,
    "nodeSelector": shapes.LABELS,
    "tolerations": shapes.TOLERATIONS,
    "affinity": shapes.AFFINITY,
    "topologySpreadConstraints": shapes.SPREAD,
    "priorityClassName": shapes.text(shapes.NAME, 253),
}
_TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Value:
    """One line of values.yaml.

    Attributes:
        path: keys joined by dots.
        default: its value.
        text: the comment above it.
        leaf: whether it stands in the table: not a map that is explained key by key.
    """

    path: str
    default: Any
    text: str
    leaf: bool


def values(text: str) -> list[Value]:
    """The values with their comments, in the order of the file."""
    defaults = yaml.safe_load(text)
    found: list[Value] = []
    comment: list[str] = []
    path: list[str] = []
    for line in text.splitlines():
        if remark := re.match(r"\s*# ?(.*)", line):
            comment.append(remark[1])
            continue
        key = re.match(r"(\s*)([A-Za-z]+):", line)
        if key is None:
            comment = []
            continue
        path = [*path[: len(key[1]) // 2], key[2]]
        default = defaults
        for part in path:
            default = default[part]
        if comment or not (isinstance(default, str | int | list)):
            leaf = bool(comment)
            if not any(one.leaf and ".".join(path).startswith(f"{one.path}.") for one in found):
                found.append(Value(".".join(path), default, " ".join(comment), leaf))
        comment = []
    return found


def undocumented(text: str) -> list[str]:
    """Paths of values that no comment explains."""
    explained = {one.path for one in values(text) if one.leaf}

    def walk(node: Any, path: str) -> list[str]:
        if path in explained:
            return []
        if isinstance(node, dict) and node:
            return [
                each for key, v in node.items() for each in walk(v, f"{path}.{key}".lstrip("."))
            ]
        return [path]

    return walk(yaml.safe_load(text), "")


def schema(text: str) -> dict[str, Any]:
    """JSON schema of the values. Null stands for "left out" everywhere."""
    texts = {one.path: one.text for one in values(text)}

    def node(default: Any, path: str) -> dict[str, Any]:
        out: dict[str, Any] = {"type": [_TYPES[type(default)], "null"]}
        if texts.get(path):
            out["description"] = texts[path]
        if type(default) is int:
            out["minimum"] = 0
        shape = _MORE.get(path, {})
        if isinstance(default, dict) and default and "properties" not in shape:
            out["properties"] = {k: node(v, f"{path}.{k}".lstrip(".")) for k, v in default.items()}
            # Other charts share it.
            if path != "global":
                out["additionalProperties"] = False
        return {**out, **shape}

    root = node(yaml.safe_load(text), "")
    root["type"] = "object"
    # A parent chart adds the two that Helm itself knows.
    root["properties"] |= {"enabled": {}, "tags": {}}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **root}


def table(text: str) -> str:
    """The table of README.md."""
    rows = ["| value | default | what it is |", "| --- | --- | --- |"]
    for one in values(text):
        if one.leaf:
            default = json.dumps(one.default).replace("|", "\\|")
            shown = f"`{default}`" if len(default) < 60 else "see values.yaml"
            rows.append(f"| `{one.path}` | {shown} | {one.text} |")
    return "\n".join(rows)


def crd() -> str:
    """The template of the CustomResourceDefinitions."""
    parts = []
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        body = "".join(line for line in file.read_text().splitlines(True) if line[0] != "#")
        # Helm would take the braces of an example for its own.
        body = body.replace("{{", '{{ "{{" }}')
        parts.append("---\n" + body.replace("metadata:\n", _CRD_ANNOTATIONS, 1))
    return _CRD_HEAD + "".join(parts) + "{{- end }}\n"


def plain() -> str:
    """The manifests beside rbac.yaml for `kubectl apply`: Deployment, Service, NetworkPolicy."""
    values = {
        "fullnameOverride": PLAIN,
        "leaderElection": {"leaseName": "specserve"},
        "networkPolicy": {"engines": False},
    }
    kinds = {"Deployment", "Service", "NetworkPolicy"}
    manifests = [m for m in rendering.render(values, release=PLAIN) if m["kind"] in kinds]
    for manifest in manifests:
        for meta in (manifest["metadata"], *_template(manifest)):
            labels = meta["labels"]
            labels.pop("helm.sh/chart", None)
            labels.pop("app.kubernetes.io/managed-by", None)
        if manifest["kind"] == "Deployment":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            # The rights in rbac.yaml have none on NetworkPolicies.
            drop = {"SPECSERVE_OPERATOR_NETWORK_POLICIES", "SPECSERVE_OPERATOR_POD_LABELS"}
            container["env"] = [one for one in container["env"] if one["name"] not in drop]
    head = "# Made by `make generate` from charts/specserve; goes with rbac.yaml and crds/.\n"
    return head + yaml.safe_dump_all(manifests, sort_keys=False)


def _template(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    template = manifest["spec"].get("template")
    return [template["metadata"]] if template else []


def readme(text: str) -> str:
    """README.md with a new table between its two marks."""
    before, mark, rest = (CHART / "README.md").read_text().partition("<!-- values -->\n")
    _, end, after = rest.partition("<!-- end of values -->\n")
    assert mark, "README.md has lost the mark of its table"
    assert end, "README.md has lost the end of its table"
    return before + mark + table(text) + "\n" + end + after


def main() -> None:
    """Writes the files."""
    text = (CHART / "values.yaml").read_text()
    (CHART / "templates" / "crd.yaml").write_text(crd())
    (CHART / "values.schema.json").write_text(json.dumps(schema(text), indent=2) + "\n")
    (CHART / "README.md").write_text(readme(text))
    PLAIN_FILE.write_text(plain())


if __name__ == "__main__":
    main()
