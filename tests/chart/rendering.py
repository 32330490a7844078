"""Renders the chart with Helm and reads what comes out."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.binaries import resolve

CHART = Path(__file__).resolve().parents[2] / "charts" / "specserve"
NAMESPACE = "specserve-system"

Manifest = dict[str, Any]


class Refused(Exception):
    """Helm did not render; the message is Helm's."""


def helm(*arguments: str, stdin: str = "", binary: str = "") -> str:
    """Runs helm, the usual one or another, without a cluster and anything of the user's."""
    done = subprocess.run(
        [binary or resolve(("helm",))["helm"], *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "KUBECONFIG": "/nonexistent",
            **{f"HELM_{name}_HOME": "/nonexistent" for name in ("CACHE", "CONFIG", "DATA")},
        },
    )
    if done.returncode:
        raise Refused(done.stderr or done.stdout)
    return done.stdout


# Of the chart itself, which no test changes.
_helm_once = functools.cache(helm)


def render(
    values: Any = None,
    *,
    chart: Path = CHART,
    release: str = "specserve",
    namespace: str = NAMESPACE,
    binary: str = "",
) -> list[Manifest]:
    """The manifests of the chart under these values, which may be a dict or text."""
    # As JSON: what YAML dumps bare, such as y, Helm would read as a boolean.
    given = values if isinstance(values, str) else json.dumps(values or {})
    command = ("template", release, str(chart), "-n", namespace, "-f", "-")
    ask = _helm_once if chart == CHART else helm
    text = ask(*command, stdin=given, binary=binary)
    assert "<no value>" not in text
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Those of one kind."""
    return [one for one in manifests if one["kind"] == kind]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """The one of a kind."""
    (found,) = of_kind(manifests, kind)
    return found


def container(manifests: list[Manifest]) -> Manifest:
    """The operator's container."""
    (found,) = only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def environment(manifests: list[Manifest]) -> dict[str, str]:
    """Literal environment variables of the operator."""
    return {e["name"]: e["value"] for e in container(manifests)["env"] if "value" in e}


def copy(into: Path, **fields: str) -> Path:
    """A copy of the chart with other fields in Chart.yaml."""
    target = into / "specserve"
    shutil.copytree(CHART, target)
    meta = yaml.safe_load((target / "Chart.yaml").read_text()) | fields
    (target / "Chart.yaml").write_text(yaml.safe_dump(meta))
    return target


def edit_schema(chart: Path, change: Callable[[Any], None]) -> Path:
    """Change the schema of `spec` in a copy of the chart, as another version of it has one."""
    file = chart / "templates" / "crd.yaml"
    head, _, rest = file.read_text().partition("\nspec:\n")
    body, end = rest.rsplit("{{- end }}", 1)
    crd = yaml.safe_load(f"spec:\n{body}")
    (version,) = crd["spec"]["versions"]
    change(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    file.write_text(f"{head}\n{yaml.safe_dump(crd)}{{{{- end }}}}{end}")
    return chart


def nulls(node: Any, path: str = "") -> list[str]:
    """Where a manifest has null."""
    if isinstance(node, dict):
        return [each for key, value in node.items() for each in nulls(value, f"{path}.{key}")]
    if isinstance(node, list):
        return [each for i, value in enumerate(node) for each in nulls(value, f"{path}[{i}]")]
    return [path] if node is None else []
