"""A SpecServe from a file is judged as a real API server judges it, on the same cases."""

import datetime
from pathlib import Path

import pytest
import yaml

from specserve import document, names, rules, schema
from tests.golden.render import cases

REJECTED = sorted((Path(__file__).parents[1] / "integration" / "rejected").glob("*.yaml"))
MINIMAL = {
    "apiVersion": names.API_VERSION,
    "kind": "SpecServe",
    "metadata": {"name": "chat"},
    "spec": {"model": {"source": "hf://a/b"}},
}
VERSION = f"apiVersion: {names.API_VERSION}\n"


def text(**spec):
    return yaml.safe_dump(MINIMAL | {"spec": MINIMAL["spec"] | spec})


def every(node):
    yield from node.get("x-kubernetes-validations", ())
    children = [*node.get("properties", {}).values(), node.get("items")]
    for child in [*children, node.get("additionalProperties")]:
        if isinstance(child, dict):
            yield from every(child)


def test_every_rule_of_the_schema_has_a_judge_and_no_judge_is_left_over():
    [version] = schema.document()["spec"]["versions"]
    written = {rule["rule"] for rule in every(version["schema"]["openAPIV3Schema"])}
    assert written == set(rules.JUDGES)


@pytest.mark.parametrize("path", cases().values(), ids=lambda path: path.stem)
def test_what_the_server_accepts_is_read(path):
    assert document.read(path.read_text(encoding="utf-8")).spec.model.source


#: What the server says of types and bounds; pydantic has other words for them.
STRUCTURAL = ("should be", "should match", "must be of type", "supported values", "Required")


@pytest.mark.parametrize("path", REJECTED, ids=lambda path: path.stem)
def test_what_the_server_refuses_is_refused_with_the_field_and_its_words(path):
    body = path.read_text(encoding="utf-8")
    field, message = (line.split(": ", 1)[1] for line in body.splitlines()[:2])
    with pytest.raises(document.BadDocument) as caught:
        document.read(body)
    assert field in str(caught.value)
    if not message.startswith(STRUCTURAL):
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "field", "word"),
    [
        ({"mode": False}, "mode", "Off"),
        ({"mode": True}, "mode", "On"),
        ({"onSignalLoss": False}, "onSignalLoss", "Off"),
    ],
)
def test_a_boolean_for_a_mode_is_told_to_want_quotes(policy, field, word):
    with pytest.raises(document.BadDocument) as caught:
        document.read(text(policy=policy))
    assert str(caught.value).startswith(f"spec.policy.{field}: Input should be ")
    assert str(caught.value).endswith(f"so write it in quotes: '{word}'")


@pytest.mark.parametrize("policy", [{"mode": 0}, {"mode": "off"}, {"signal": False}])
def test_other_mistakes_are_told_nothing_of_quotes(policy):
    with pytest.raises(document.BadDocument) as caught:
        document.read(text(policy=policy))
    assert "quotes" not in str(caught.value)


def test_numbers_of_a_rule_are_in_its_words():
    with pytest.raises(document.BadDocument) as caught:
        document.read(text(policy={"threshold": {"offAbove": 40, "onBelow": 50}}))
    assert str(caught.value) == (
        "spec.policy.threshold.onBelow: onBelow (50) must be below offAbove (40)"
    )


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"polcy": {}}, "spec.polcy"),
        ({"policy": {"treshold": {}}}, "spec.policy.treshold"),
        ({"policy": {"tiers": [{"minBatch": 1, "step": 3, "steps": 3}]}}, "spec.policy.tiers[0]"),
    ],
)
def test_a_misspelt_field_is_no_field_left_out(spec, field):
    with pytest.raises(document.BadDocument, match="unknown field") as caught:
        document.read(text(**spec))
    assert field in str(caught.value)


def test_what_is_handed_on_to_the_pod_has_fields_of_its_own():
    given = {"affinity": {"nodeAffinity": {"anything": 1}}, "labels": {"a": "b"}}
    assert document.read(text(pod=given)).spec.pod.labels == {"a": "b"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("a: [", "no YAML: line 1"),
        ("kind: SpecServe\nspec: !!bool maybe", "no YAML: line 2: this is no bool"),
        ("kind: SpecServe\nspec: !!timestamp soon", "no YAML: line 2: this is no timestamp"),
        ("[" * 10_000, "nested too deeply"),
        ("kind: Pod", "0 objects of kind SpecServe"),
        ("kind: SpecServe\n---\nkind: SpecServe", "2 objects of kind SpecServe"),
        (f"{VERSION}kind: SpecServe\nspec: 3", "spec"),
        (
            "apiVersion: specserve.dev/v1\nkind: SpecServe",
            "apiVersion: there is no SpecServe in specserve.dev/v1: write specserve.dev/v1alpha1",
        ),
        ("kind: SpecServe", "apiVersion is missing: write specserve.dev/v1alpha1"),
    ],
)
def test_a_file_without_one_specserve_is_refused(body, why):
    with pytest.raises(document.BadDocument, match=why):
        document.read(body)


@pytest.mark.parametrize(
    ("memory", "field"),
    [
        ({"sharedMemory": "16GB"}, "spec.engine.sharedMemory: '16GB' should match"),
        # Valid for the schema, and still no number: the rule that needs one is not held.
        ({"sharedMemory": "1e1.5"}, "spec.engine: '1e1.5' is no quantity"),
        ({"resources": {"limits": {"memory": "16GB"}}}, "spec.engine.resources.limits.memory: "),
        ({"memFractionStatic": "a lot"}, "spec.engine.memFractionStatic: "),
    ],
)
def test_what_a_rule_reckons_with_is_judged_before_the_rule(memory, field):
    limits = {"resources": {"limits": {"memory": "64Gi"}}, "sharedMemory": "16Gi"}
    with pytest.raises(document.BadDocument) as caught:
        document.read(text(engine=limits | memory))
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    ("meta", "field"),
    [
        ({"name": 123}, "metadata.name: "),
        ({"name": ["chat"]}, "metadata.name: "),
        ({"name": "chat", "namespace": 7}, "metadata.namespace: "),
        ("chat", "metadata: "),
    ],
)
def test_a_name_is_a_text(meta, field):
    with pytest.raises(document.BadDocument, match=f"^{field}Input should be a valid"):
        document.read(yaml.safe_dump(MINIMAL | {"metadata": meta}))


def test_a_part_that_holds_itself_is_refused():
    endless = "pod: {affinity: &a {nodeAffinity: *a}}"
    with pytest.raises(document.BadDocument, match=r"^spec: "):
        document.read(
            f"{VERSION}kind: SpecServe\nspec:\n  model: {{source: 'hf://a/b'}}\n  {endless}"
        )


@pytest.mark.parametrize("until", ["2030-01-31T12:00:00Z", "2030-02-30T00:00:00Z"])
def test_a_time_is_a_text_without_quotes_too(until):
    body = yaml.safe_dump(MINIMAL) + f"  policy: {{mode: 'Off', modeUntil: {until}}}\n"
    assert document.read(body).spec.policy.mode_until == until


def test_others_read_yaml_as_ever():
    document.read(text())
    assert yaml.safe_load("2030-01-31") == datetime.date(2030, 1, 31)


@pytest.mark.parametrize(
    ("words", "value"),
    [("64Gi", 2**36), ("1500m", 1.5), ("2e3", 2000), ("0.8", 0.8), (3, 3), ("1E", 10**18)],
)
def test_quantities(words, value):
    assert float(rules.quantity(words)) == value
