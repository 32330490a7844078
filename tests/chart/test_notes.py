"""What Helm tells who has just installed: true for these values, and fit to be pasted."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from specserve import api
from tests.chart.rendering import CHART, NAMESPACE, helm

LOST = "when this one is lost"
STOPPED = "no operator runs"
READABLE = "read the operator's metrics"
OPEN = "Nothing but its token"
LEAVES = "helm uninstall leaves"
DELETES = "helm uninstall deletes"
LACKS_KIND = "not part of this release"
LACKS_RIGHTS = "no rights of this release"
ALL = {LOST, STOPPED, READABLE, OPEN, LEAVES, DELETES, LACKS_KIND, LACKS_RIGHTS}


def notes(values):
    command = ("install", "specserve", str(CHART), "-n", NAMESPACE, "--dry-run=client", "-f", "-")
    return helm(*command, stdin=json.dumps(values)).partition("\nNOTES:\n")[2]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, {LOST, READABLE, LEAVES}),
        ({"replicas": None, "networkPolicy": None, "crds": None}, {LOST, READABLE, LEAVES}),
        ({"replicas": 0}, {STOPPED, READABLE, LEAVES}),
        ({"replicas": 2}, {READABLE, LEAVES}),
        ({"networkPolicy": {"metricsFrom": [{"podSelector": {}}]}}, {LOST, LEAVES}),
        (
            {"networkPolicy": {"enabled": False, "metricsFrom": [{"podSelector": {}}]}},
            {LOST, READABLE, LEAVES},
        ),
        ({"networkPolicy": {"engines": False}}, {LOST, READABLE, OPEN, LEAVES}),
        ({"crds": {"keep": False}}, {LOST, READABLE, DELETES}),
        (
            {"crds": {"enabled": False, "keep": False}, "rbac": {"create": False}},
            {LOST, READABLE, LEAVES, LACKS_KIND, LACKS_RIGHTS},
        ),
    ],
)
def test_notes_tell_what_holds_for_these_values(values, told):
    text = notes(values)
    assert {line for line in ALL if line in text} == told


@pytest.mark.parametrize(
    ("values", "namespace", "listing"),
    [
        ({}, "default", "get specserves --all-namespaces -o wide"),
        # Who has rights in some namespaces may not list in all.
        ({"watchNamespaces": ["team-a", "team-b"]}, "team-a", "-n team-a get specserves -o wide"),
        ({"engineDefaults": {"image": "a/b:1"}}, "default", "get specserves --all-namespaces"),
    ],
)
def test_example_can_be_pasted_into_a_shell(values, namespace, listing):
    _, mark, rest = notes(values).partition("kubectl apply -f -")
    snippet = mark + rest.partition("\n\n")[0]
    shown = 'kubectl() { if [ "$1" = apply ]; then cat; else echo "# $*"; fi; }\n' + snippet
    said = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    assert said.stderr == ""
    made = yaml.safe_load(said.stdout)
    api.SpecServeSpec.model_validate(made["spec"])
    assert made["metadata"]["namespace"] == namespace
    assert f"# {listing}" in said.stdout


def test_release_without_the_kind_tells_how_to_get_it():
    text = notes({"crds": {"enabled": False}})
    (command,) = [line for line in text.splitlines() if "--show-only" in line]
    arguments = command.partition("|")[0].split()[1:]
    (crd,) = yaml.safe_load_all(helm(*(str(CHART) if a == "CHART" else a for a in arguments)))
    assert crd["kind"] == "CustomResourceDefinition"
