"""The generator and the checker of the schema. What the API server says: integration/test_crd."""

from importlib import resources
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field

from specserve import curves, schema
from specserve.api import PROFILES, SpecServeSpec, SpecServeStatus


class Inner(BaseModel):
    """Docstring of the inner one."""

    size: Annotated[int, Field(gt=0, lt=10)] = 3


class Sample(BaseModel):
    """Docstring
    over two lines.
    """

    text: Annotated[str, Field(max_length=8)]
    optional: Annotated[str, Field(max_length=8)] | None = None
    one: Literal["only"] = "only"
    some: Literal["On", "Off"] = "On"
    either: int | str = Field(default=1, json_schema_extra={"maxLength": 4})
    inner: Inner = Field(default={"size": 4}, description="Closer to the field.")
    inner_by_itself: Inner | None = None
    numbers: Annotated[
        list[int], Field(max_length=4, json_schema_extra={"uniqueItems": True})
    ] = []
    free: dict[str, Any] = {}
    mapping: Annotated[dict[str, Inner], Field(max_length=2)] = {}


def field(name: str) -> dict[str, Any]:
    return schema.structural(Sample)["properties"][name]


def test_a_reference_becomes_the_thing_itself_and_the_field_s_words_win():
    assert field("inner") == {
        "description": "Closer to the field.",
        "type": "object",
        "default": {"size": 4},
        "properties": {
            "size": {
                "type": "integer",
                "default": 3,
                "minimum": 0,
                "exclusiveMinimum": True,
                "maximum": 10,
                "exclusiveMaximum": True,
            }
        },
    }
    assert field("inner_by_itself")["description"] == "Docstring of the inner one."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("text", {"type": "string", "maxLength": 8}),
        ("optional", {"type": "string", "maxLength": 8}),
        ("one", {"type": "string", "default": "only", "enum": ["only"]}),
        ("either", {"x-kubernetes-int-or-string": True, "default": 1, "maxLength": 4}),
        (
            "numbers",
            {
                "type": "array",
                "x-kubernetes-list-type": "set",
                "default": [],
                "maxItems": 4,
                "items": {"type": "integer"},
            },
        ),
        (
            "free",
            {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "default": {}},
        ),
    ],
)
def test_a_field_is_rewritten(name, expected):
    assert field(name) == expected


def test_a_map_keeps_the_schema_of_its_values():
    assert field("mapping")["additionalProperties"]["properties"].keys() == {"size"}
    assert "x-kubernetes-preserve-unknown-fields" not in field("mapping")


def test_the_model_is_described_in_one_line_and_has_no_title():
    rewritten = schema.structural(Sample)
    assert rewritten["description"] == "Docstring over two lines."
    assert rewritten["required"] == ["text"]
    assert "title" not in str(rewritten)


class Tree(BaseModel):
    children: Annotated[list["Tree"], Field(max_length=2)] = []


class Union(BaseModel):
    value: int | bool = 1


class Pair(BaseModel):
    pair: tuple[int, str]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Tree, r"Tree.*: Tree contains itself"),
        (Union, r"Union\.value: anyOf of 2 types"),
        (Pair, r"Pair\.pair: prefixItems"),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_path(model, message):
    with pytest.raises(schema.NotStructural, match=message):
        schema.structural(model)


TEXT = {"type": "string", "maxLength": 4, "description": "A text."}


def at_a(node: dict[str, Any]) -> dict[str, Any]:
    described = {"description": "A field.", **node}
    return {"type": "object", "properties": {"a": described}}


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"$ref": "#/x"}, ".a: $ref is not allowed"),
        ({"anyOf": [TEXT, {"type": "null"}]}, ".a: anyOf is not allowed"),
        ({**TEXT, "title": "A"}, ".a: title is not allowed"),
        ({**TEXT, "nullable": True}, ".a: nullable is not allowed"),
        ({**TEXT, "const": "x"}, ".a: const is not allowed"),
        ({**TEXT, "examples": ["x"]}, ".a: examples is not allowed"),
        ({"type": "array", "maxItems": 1, "uniqueItems": True, "items": TEXT}, "uniqueItems"),
        ({"type": "array", "maxItems": 1, "prefixItems": [TEXT]}, "prefixItems"),
        ({"type": "array", "maxItems": 1}, ".a: a list needs one schema for all its items"),
        ({"type": "array", "items": TEXT}, ".a: no maxItems"),
        ({}, ".a: no type"),
        ({"type": "number"}, ".a: type 'number' is not one of"),
        ({"type": ["string", "null"]}, ".a: type ['string', 'null'] is not one of"),
        ({"type": "string"}, ".a: no maxLength"),
        ({"x-kubernetes-int-or-string": True}, ".a: no maxLength"),
        (
            {"x-kubernetes-int-or-string": True, "type": "integer", "maxLength": 4},
            ".a: int-or-string takes no type",
        ),
        ({"type": "integer", "exclusiveMinimum": 3}, ".a: exclusiveMinimum must be true or false"),
        ({"type": "object", "additionalProperties": False}, ".a: additionalProperties must be"),
        ({"type": "object", "additionalProperties": TEXT}, ".a: no maxProperties"),
        (
            {
                "type": "object",
                "properties": {},
                "additionalProperties": TEXT,
                "maxProperties": 1,
            },
            ".a: properties and additionalProperties exclude each other",
        ),
        ({"type": "object", "properties": {}, "required": ["b"]}, "required field b is not"),
        ({**TEXT, "default": None}, ".a: a default cannot be null"),
        ({"type": "integer", "default": True}, ".a: default True is no integer"),
        ({"type": "integer", "default": "1"}, ".a: default '1' is no integer"),
        ({"type": "string", "enum": ["x"], "default": "y"}, ".a: default 'y' is not in the enum"),
        (
            {"type": "object", "properties": {"b": TEXT}, "default": {"c": 1}},
            ".a: default sets c, which is not declared",
        ),
        (
            {"type": "object", "properties": {"b": TEXT}, "required": ["b"], "default": {}},
            ".a: default lacks the required field b",
        ),
        (
            {
                "type": "array",
                "maxItems": 1,
                "x-kubernetes-list-type": "set",
                "items": {"type": "object", "properties": {}},
            },
            ".a: a list of type set needs scalar items",
        ),
        (
            {
                "type": "array",
                "maxItems": 1,
                "x-kubernetes-list-type": "map",
                "items": {"type": "object", "properties": {}},
            },
            ".a: a list of type map needs keys",
        ),
        (
            {
                "type": "array",
                "maxItems": 1,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["b"],
                "items": {"type": "object", "properties": {"b": TEXT}},
            },
            ".a: list key b must be required or have a default",
        ),
        (
            {
                "type": "array",
                "maxItems": 1,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["c"],
                "items": {"type": "object", "properties": {"b": TEXT}},
            },
            ".a: list key c is not a scalar field of the items",
        ),
        ({**TEXT, "x-kubernetes-validations": [{"rule": "true"}]}, "needs rule and message"),
        (
            {**TEXT, "x-kubernetes-validations": [{"rule": "r", "message": "m", "reason": "Bad"}]},
            ".a: reason Bad is not one of",
        ),
        (
            {
                **TEXT,
                "x-kubernetes-validations": [
                    {"rule": "r", "message": "m", "messageExpression": "'a' + string(self)"}
                ],
            },
            ".a: string() in a messageExpression exceeds the CEL budget",
        ),
        ({**TEXT, "description": ""}, ".a: no description"),
        ({"type": "array", "maxItems": 1, "items": {"type": "string"}}, ".a[]: no maxLength"),
        (
            {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "string"}},
            ".a{}: no maxLength",
        ),
    ],
)
def test_a_problem_is_named_with_its_path(node, problem):
    found = list(schema.problems(at_a(node)))
    assert any(problem in line for line in found), found


@pytest.mark.parametrize("model", [SpecServeSpec, SpecServeStatus])
def test_our_models_are_structural_and_every_field_is_described(model):
    assert list(schema.problems(schema.structural(model))) == []


def test_a_number_with_a_unit_names_it():
    """Integers are counts, or say what they count in name or description."""

    def walk(node: dict[str, Any], path: str) -> list[str]:
        below = [
            line
            for key, child in node.get("properties", {}).items()
            for line in walk(child, f"{path}.{key}")
        ]
        below += walk(node["items"], f"{path}[]") if "items" in node else []
        words = f"{path} {node.get('description', '')}".lower()
        units = ("seconds", "second", "milliseconds", "tokens", "times 100", "thousandths")
        timed = any(
            stem in path.lower() for stem in ("dwell", "period", "budget", "stale", "lease")
        )
        missing = node.get("type") == "integer" and timed and not any(u in words for u in units)
        return [path] * missing + below

    assert walk(schema.structural(SpecServeSpec), "spec") == []


def test_parents_of_defaults_have_defaults():
    """Else the server would not fill in what lies below an absent parent."""

    def walk(node: dict[str, Any], path: str) -> list[str]:
        found = []
        for key, child in node.get("properties", {}).items():
            below = f"{path}.{key}"
            inner = child.get("properties", {})
            has_rules_below = any("default" in grandchild for grandchild in inner.values())
            optional = key not in node.get("required", ())
            if optional and has_rules_below and "default" not in child:
                found.append(below)
            found += walk(child, below)
        return found

    # A reference to a Secret or to a server is not there unless somebody names one.
    assert walk(schema.structural(SpecServeSpec), "spec") == [
        "spec.model.tokenSecretRef",
        "spec.policy.prometheus",
        "spec.policy.prometheus.bearerTokenSecretRef",
        "spec.policy.prometheus.basicAuthSecretRef",
        "spec.policy.prometheus.caSecretRef",
        "spec.engine.apiKeySecretRef",
    ]


def test_the_document_is_small_and_says_on_and_off_in_quotes():
    text = schema.render()
    # kubectl apply keeps a copy in an annotation, and those may hold 256 KiB together.
    assert len(text.encode()) < 256 * 1024
    assert "- 'On'\n" in text
    assert "- 'Off'\n" in text
    assert "&id" not in text
    assert yaml.safe_load(text) == schema.document()


def test_the_document_names_each_broken_rule(monkeypatch):
    monkeypatch.setattr(schema, "structural", lambda _: {"type": "string", "description": "x"})
    with pytest.raises(schema.NotStructural, match=r"(?s)\.spec: no maxLength.*\.status: no"):
        schema.document()


def test_main_writes_and_check_tells_a_difference(tmp_path, capsys):
    path = tmp_path / "crds" / "crd.yaml"
    assert schema.main(["--check", "--output", str(path)]) == 1
    assert schema.main(["--output", str(path)]) == 0
    assert schema.main(["--check", "--output", str(path)]) == 0
    path.write_text(path.read_text().replace("kind: SpecServe\n", "kind: Other\n"))
    capsys.readouterr()
    assert schema.main(["--check", "--output", str(path)]) == 1
    assert "+    kind: SpecServe\n" in capsys.readouterr().out


def test_the_profiles_that_can_be_named_are_those_that_are_shipped():
    shipped = {file.name for file in resources.files(curves).iterdir()}
    assert {f"{name}.json" for name in PROFILES} == {
        name for name in shipped if name.endswith(".json")
    }
