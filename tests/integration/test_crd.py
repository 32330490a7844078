"""What a real API server makes of the CustomResourceDefinition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve import names
from specserve.api import SpecServeSpec, SpecServeStatus
from tests.cluster.errors import CommandError
from tests.golden.render import cases, manifests

HERE = Path(__file__).parent
REJECTED = sorted((HERE / "rejected").glob("*.yaml"))
ACCEPTED = cases()
MINIMAL = {"model": {"source": "hf://example-org/chat"}, "engine": {"image": "engine:1"}}

pytestmark = pytest.mark.usefixtures("unserved")


def resource(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {**MINIMAL, **spec},
    }


@pytest.fixture
def kubectl(light_cluster, namespace):
    """Runs kubectl in the namespace of the test; a manifest goes to its standard input."""

    def run(*arguments: str, manifest: dict[str, Any] | str | None = None) -> str:
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        return light_cluster.kubectl(
            "-n", namespace, *arguments, stdin=None if manifest is None else text
        )

    return run


@pytest.fixture
def refused(kubectl):
    """The server's words when it refuses a command; no word from it is a failure."""

    def run(*arguments: str, manifest: dict[str, Any] | str | None = None) -> str:
        with pytest.raises(CommandError) as caught:
            kubectl(*arguments, manifest=manifest)
        return str(caught.value)

    return run


@pytest.fixture
def created(kubectl):
    """Creates a SpecServe and returns it as the server stored it."""

    def run(name: str, **spec: Any) -> dict[str, Any]:
        text = kubectl("create", "-o", "json", "-f", "-", manifest=resource(name, **spec))
        return json.loads(text)

    return run


def test_the_schema_is_structural_and_its_rules_fit_the_budget(light_cluster):
    crd = light_cluster.get("crd", f"{names.PLURAL}.{names.GROUP}")
    conditions = {item["type"]: item["status"] for item in crd["status"]["conditions"]}
    assert conditions == {"Established": "True", "NamesAccepted": "True"}


# Accepted and refused.


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_example_is_accepted_by_a_strict_server(kubectl, namespace, name):
    body = yaml.safe_load(ACCEPTED[name].read_text(encoding="utf-8"))
    body["metadata"] = {"name": body["metadata"]["name"]}
    kubectl("create", "-f", "-", manifest=body)


@pytest.mark.parametrize("path", REJECTED, ids=lambda path: path.stem)
def test_a_mistake_is_refused_with_its_field_and_the_reason(refused, path):
    text = path.read_text(encoding="utf-8")
    field, message = (line.split(": ", 1)[1] for line in text.splitlines()[:2])
    answer = refused("create", "-f", "-", manifest=text)
    assert field in answer
    assert message in answer


def test_a_rule_holds_for_a_change_as_well(created, refused):
    created("a")
    patch = {"spec": {"policy": {"threshold": {"onBelow": 500}}}}
    answer = refused("patch", "specserve", "a", "--type=merge", "-p", json.dumps(patch))
    assert "spec.policy.threshold.onBelow: Invalid value" in answer
    assert "onBelow (500) must be below offAbove (48)" in answer


def test_unknown_fields_are_pruned_where_the_client_asks_for_no_validation(kubectl):
    body = resource("pruned", polcy={"mode": "Off"}, engine={"image": "engine:1", "imge": "x"})
    kubectl("create", "--validate=ignore", "-f", "-", manifest=body)
    stored = json.loads(kubectl("get", "specserve", "pruned", "-o", "json"))["spec"]
    assert "polcy" not in stored
    assert "imge" not in stored["engine"]
    assert stored["policy"]["mode"] == "Auto"


def test_unknown_fields_are_refused_by_server_side_apply(refused):
    body = resource("typo", polcy={"mode": "Off"})
    answer = refused("apply", "--server-side", "-f", "-", manifest=body)
    assert ".spec.polcy: field not declared in schema" in answer


def test_parts_of_a_pod_are_stored_whole(created):
    pod = {
        "affinity": {"podAntiAffinity": {"x": [{"y": 1}]}},
        "tolerations": [{"key": "a", "anything": {"b": [True, None, 1.5]}}],
        "securityContext": {"runAsUser": 0},
        "initContainers": [{"name": "i", "image": "x", "unheardOf": "kept"}],
    }
    stored = created("whole", pod=pod)["spec"]["pod"]
    assert {key: stored[key] for key in pod} == pod


# Defaults and nulls.


def as_parsed(spec: dict[str, Any]) -> dict[str, Any]:
    parsed = SpecServeSpec.model_validate(spec)
    return parsed.model_dump(by_alias=True, exclude_none=True)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"policy": {"threshold": {"offAbove": 100}}, "draft": {"method": "NGRAM"}},
        {"pod": {"labels": {"a": "b"}}, "rollout": {"type": "Recreate"}},
        {"model": {"source": "hf://a/b", "tokenSecretRef": {"name": "hub"}}},
    ],
)
def test_server_and_operator_fill_in_the_same_defaults(created, spec):
    """Else the operator would act on values that nobody can read in the object."""
    stored = created("defaults", **spec)["spec"]
    assert stored == as_parsed({**MINIMAL, **spec})


def test_no_replicas_stay_no_replicas(created):
    assert created("zero", replicas=0)["spec"]["replicas"] == 0


@pytest.mark.parametrize("way", [["create"], ["apply"], ["apply", "--server-side"]])
def test_null_means_the_default_where_there_is_one(kubectl, way):
    body = resource("nulls", policy=None, replicas=None, pod={"labels": None}, draft=None)
    kubectl(*way, "-f", "-", manifest=body)
    stored = json.loads(kubectl("get", "specserve", "nulls", "-o", "json"))["spec"]
    assert stored == as_parsed(MINIMAL)


def test_null_for_an_object_without_a_default_is_never_stored(kubectl, refused):
    body = resource("null", model={"source": "hf://a/b", "tokenSecretRef": None})
    answer = refused("apply", "--server-side", "-f", "-", manifest=body)
    assert "spec.model.tokenSecretRef in body must be of type object" in answer
    kubectl("create", "-f", "-", manifest=body)
    stored = json.loads(kubectl("get", "specserve", "null", "-o", "json"))["spec"]
    assert "tokenSecretRef" not in stored["model"]


# Subresources and what people see.

STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "replicas": 3,
    "readyReplicas": 2,
    "ready": "2/3",
    "why": "chat-1: off: 96 in flight above 48",
    "curve": "Measured",
    "selector": names.selector_string("seen"),
    "speculation": {
        "mode": "Mixed",
        "wanted": "Off",
        "summary": "Off 1/2",
        "on": 1,
        "off": 1,
        "drifted": 1,
        "unknown": 0,
        "epoch": 7,
        "controlMode": "Live",
        "controlReason": "ready",
        "lastSwitchTime": "2026-01-02T03:04:05Z",
        "lastSwitchReason": "96 in flight above 48",
        "acceptLengthCenti": 231,
        "samplePeriodMilliseconds": 750,
        "decisions": [
            {
                "time": "2026-07-01T00:00:00Z",
                "pod": "chat-1",
                "mode": "Off",
                "reason": "off: 96 in flight above 48",
            }
        ],
    },
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Settled",
            "message": "all pods report Off",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
            "observedGeneration": 1,
        }
    ],
}


def write_status(kubectl: Any, name: str, status: dict[str, Any]) -> dict[str, Any]:
    text = kubectl(
        "patch", "specserve", name, "--subresource=status", "--type=merge", "-o", "json",
        "-p", json.dumps({"status": status}),
    )  # fmt: skip
    return json.loads(text)


def test_every_field_of_the_status_survives(created, kubectl):
    """A field that the schema does not know would be dropped, and written again for ever."""
    parsed = SpecServeStatus.model_validate(STATUS)
    assert parsed.model_dump(by_alias=True, exclude_none=False) == STATUS, "a field is missing"
    created("seen")
    assert write_status(kubectl, "seen", STATUS)["status"] == STATUS


def test_the_status_moves_no_generation_and_changes_no_spec(created, kubectl):
    before = created("apart")
    after = write_status(kubectl, "apart", STATUS)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert after["spec"] == before["spec"]


def test_scale_writes_replicas_and_shows_the_selector(created, kubectl, light_cluster, namespace):
    before = created("scaled")["metadata"]["generation"]
    write_status(kubectl, "scaled", {**STATUS, "selector": names.selector_string("scaled")})
    kubectl("scale", "specserve", "scaled", "--replicas=4")
    stored = json.loads(kubectl("get", "specserve", "scaled", "-o", "json"))
    assert stored["spec"]["replicas"] == 4
    assert stored["metadata"]["generation"] == before + 1
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}/scaled/scale"
    scale = json.loads(light_cluster.kubectl("get", "--raw", path))
    assert scale["spec"] == {"replicas": 4}
    assert scale["status"] == {"replicas": 3, "selector": names.selector_string("scaled")}


def columns(text: str) -> dict[str, str]:
    """Header and value, cut where the columns of the header begin."""
    header, row = text.splitlines()[:2]
    starts = [i for i, c in enumerate(header) if c != " " and (i == 0 or header[i - 1] == " ")]
    ends = [*starts[1:], None]
    return {
        header[start:end].strip(): row[start:end].strip()
        for start, end in zip(starts, ends, strict=True)
    }


def test_get_shows_what_matters(created, kubectl):
    created("seen")
    write_status(kubectl, "seen", STATUS)
    shown = columns(kubectl("get", "sps"))
    assert shown.pop("AGE")
    assert shown == {"NAME": "seen", "READY": "True", "SPECULATION": "Off 1/2", "PODS": "2/3"}
    wide = columns(kubectl("get", "specserves", "-o", "wide"))
    assert wide["MODEL"] == "hf://example-org/chat"
    assert wide["WHY"] == STATUS["why"]
    assert wide["CURVE"] == "Measured"


def test_get_works_before_there_is_a_status(created, kubectl):
    created("young")
    assert columns(kubectl("get", "specserve"))["NAME"] == "young"


@pytest.mark.parametrize("category", names.CATEGORIES)
def test_it_belongs_to_its_categories(created, kubectl, category):
    created("listed")
    assert "specserve.specserve.dev/listed" in kubectl("get", category, "-o", "name")


def test_wait_for_ready_works(created, kubectl):
    created("awaited")
    write_status(kubectl, "awaited", STATUS)
    kubectl("wait", "specserve/awaited", "--for=condition=Ready", "--timeout=20s")


@pytest.mark.parametrize("path", ["", ".spec", ".spec.policy", ".spec.engine", ".status"])
def test_explain_leaves_no_field_without_words(light_cluster, path):
    text = light_cluster.kubectl("explain", f"specserve{path}")
    # The server's own apiVersion, kind and metadata are described by the server.
    assert "<no description>" not in text


# The objects made of it.


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_rendered_is_accepted(kubectl, namespace, name):
    for manifest in manifests(ACCEPTED[name]):
        manifest["metadata"]["namespace"] = namespace
        kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", manifest=manifest)
