"""From the pydantic models to the CustomResourceDefinition in `crds/`.

pydantic speaks JSON Schema, the API server wants a *structural* schema: no references, no unions,
a type on every node. `structural` rewrites the one into the other, `problems` judges the result
by rules of its own, so that a model the server would refuse (or silently weaken) fails here, by
the path of the node, before a server has seen it.

`python -m specserve.schema` writes the file, `--check` fails if the file differs.
"""

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel

from specserve import names
from specserve.api import SpecServeSpec, SpecServeStatus

Schema = dict[str, Any]

#: A name of 52 characters leaves 11 for the suffixes of a Deployment's pods and replica sets.
NAME_LIMIT: Final = 52

_SCALARS: Final = frozenset({"string", "integer", "boolean"})
_INT_OR_STRING: Final = "x-kubernetes-int-or-string"
_PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
_LIST_TYPE: Final = "x-kubernetes-list-type"
_MAP_KEYS: Final = "x-kubernetes-list-map-keys"
_RULES: Final = "x-kubernetes-validations"

#: Keywords a node may carry. `title`, `nullable` and `format` other than date-time are legal for
#: the server, but say nothing a reader needs.
#: In the order in which they are written, so that the file does not follow pydantic's.
_KEYWORDS: Final = (
    "description", "type", "format", _INT_OR_STRING, _PRESERVE, _LIST_TYPE, _MAP_KEYS,
    "x-kubernetes-map-type", "default", "enum", "pattern", "minimum", "exclusiveMinimum",
    "maximum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems",
    "minProperties", "maxProperties", "required", _RULES, "properties", "additionalProperties",
    "items",
)  # fmt: skip
_REASONS: Final = frozenset(
    {"FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired", "FieldValueDuplicate"}
)
_PYTHON_TYPES: Final[Mapping[str, type]] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "object": dict,
    "array": list,
}


class NotStructural(TypeError):
    """A model that has no structural schema, or one that breaks a rule of `problems`.

    The message names the path of each node at fault.
    """


def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of `model`.

    Raises:
        NotStructural: it holds something a CustomResourceDefinition cannot say, such as a union
            of two types, a tuple, or a model that contains itself.
    """
    root = model.model_json_schema(by_alias=True, mode="validation")
    return _rewrite(root, root.get("$defs", {}), model.__name__, frozenset())


def _rewrite(node: Schema, models: Schema, path: str, inside: frozenset[str]) -> Schema:
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name in inside:
            raise NotStructural(f"{path}: {name} contains itself")
        # What stands beside a reference (description, default) is closer to the field: it wins.
        return _rewrite(models[name] | _without(node, "$ref"), models, path, inside | {name})
    for keyword in ("allOf", "anyOf"):
        if keyword in node:
            return _collapse(node, keyword, models, path, inside)
    for keyword in ("oneOf", "not", "prefixItems", "patternProperties", "if"):
        if keyword in node:
            raise NotStructural(f"{path}: {keyword} cannot be said in a CustomResourceDefinition")
    return _ordered(_rewrite_children(_rewrite_keywords(node), models, path, inside))


def _rewrite_keywords(node: Schema) -> Schema:
    out = _without(node, "title", "$defs", "const", "examples", "discriminator", "uniqueItems")
    if out.get("default", ...) is None:
        del out["default"]
    if "const" in node:
        out["enum"] = [node["const"]]
    if node.get("uniqueItems"):
        out[_LIST_TYPE] = "set"
    for strict, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if strict in out:
            out[bound], out[strict] = out[strict], True
    if "description" in out:
        out["description"] = " ".join(out["description"].split())
    if not out.get("required", True):
        del out["required"]
    return out


def _ordered(node: Schema) -> Schema:
    known = [key for key in _KEYWORDS if key in node]
    return {key: node[key] for key in [*known, *sorted(node.keys() - set(known))]}


def _rewrite_children(out: Schema, models: Schema, path: str, inside: frozenset[str]) -> Schema:
    if "properties" in out:
        out.pop("additionalProperties", None)
        out["properties"] = {
            key: _rewrite(child, models, f"{path}.{key}", inside)
            for key, child in out["properties"].items()
        }
    elif out.get("type") == "object":
        values = out.pop("additionalProperties", True)
        if isinstance(values, dict):
            out["additionalProperties"] = _rewrite(values, models, f"{path}{{}}", inside)
        else:
            out[_PRESERVE] = True
    if isinstance(out.get("items"), dict):
        out["items"] = _rewrite(out["items"], models, f"{path}[]", inside)
    return out


def _collapse(
    node: Schema, keyword: str, models: Schema, path: str, inside: frozenset[str]
) -> Schema:
    """One node out of a union: an optional field, a lone reference or int-or-string."""
    rest = _without(node, keyword)
    arms = [arm for arm in node[keyword] if arm.get("type") != "null"]
    if len(arms) == 1:
        return _rewrite(arms[0] | rest, models, path, inside)
    if keyword == "anyOf" and sorted(arm.get("type", "") for arm in arms) == ["integer", "string"]:
        merged = {key: value for arm in arms for key, value in arm.items() if key != "type"}
        return _rewrite({**merged, **rest, _INT_OR_STRING: True}, models, path, inside)
    raise NotStructural(f"{path}: {keyword} of {len(arms)} types; use one object and a CEL rule")


def _without(node: Schema, *keys: str) -> Schema:
    return {key: value for key, value in node.items() if key not in keys}


def problems(node: Schema, path: str = "") -> Iterator[str]:
    """Everything wrong with a schema node and all below it, each as `path: what`.

    Three kinds of rules: what the server refuses (`$ref`, unions, `uniqueItems`, a node without a
    type, numeric exclusive bounds, lists without items), what it accepts and then does not do
    (`additionalProperties: false`, int-or-string with a type, a null default), and what this
    project wants of every field: a description, whole numbers, and bounds on the length of
    strings, lists and maps, without which the cost of CEL rules cannot be estimated.
    """
    at = path or "."
    for keyword in sorted(node.keys() - set(_KEYWORDS)):
        yield f"{at}: {keyword} is not allowed in a structural schema"
    yield from (f"{at}: {found}" for found in _type_problems(node))
    yield from (f"{at}: {found}" for found in _default_problems(node))
    yield from (f"{at}: {found}" for found in _rule_problems(node))

    properties = node.get("properties", {})
    for key in node.get("required", ()):
        if key not in properties:
            yield f"{at}: required field {key} is not declared"
    for key, child in properties.items():
        if not child.get("description") and not f"{path}.{key}".startswith(".metadata"):
            yield f"{path}.{key}: no description"
        yield from problems(child, f"{path}.{key}")
    if isinstance(node.get("additionalProperties"), dict):
        yield from problems(node["additionalProperties"], f"{path}{{}}")
    if isinstance(node.get("items"), dict):
        yield from problems(node["items"], f"{path}[]")


def _type_problems(node: Schema) -> Iterator[str]:
    kind = node.get("type")
    if node.get(_INT_OR_STRING):
        if kind is not None:
            yield "int-or-string takes no type"
    elif kind is None:
        yield "no type"
    elif not isinstance(kind, str) or kind not in _PYTHON_TYPES:
        yield f"type {kind!r} is not one of {', '.join(sorted(_PYTHON_TYPES))}"
    for strict in ("exclusiveMinimum", "exclusiveMaximum"):
        if strict in node and not isinstance(node[strict], bool):
            yield f"{strict} must be true or false beside the bound"
    text = kind == "string" or node.get(_INT_OR_STRING)
    if text and not node.keys() & {"maxLength", "enum", "format"}:
        yield "no maxLength"
    if kind == "array":
        yield from _list_problems(node)
    if kind == "object":
        yield from _object_problems(node)


def _object_problems(node: Schema) -> Iterator[str]:
    values = node.get("additionalProperties")
    if isinstance(values, bool):
        yield "additionalProperties must be a schema; unknown fields are pruned without it"
    if "properties" in node and values is not None:
        yield "properties and additionalProperties exclude each other"
    if isinstance(values, dict) and "maxProperties" not in node:
        yield "no maxProperties"


def _list_problems(node: Schema) -> Iterator[str]:
    items = node.get("items")
    if not isinstance(items, dict):
        yield "a list needs one schema for all its items"
        return
    if "maxItems" not in node:
        yield "no maxItems"
    kind = node.get(_LIST_TYPE)
    if kind == "set" and items.get("type") not in _SCALARS:
        yield "a list of type set needs scalar items"
    if kind == "map":
        keys = node.get(_MAP_KEYS) or []
        if not keys:
            yield "a list of type map needs keys"
        for key in keys:
            field = items.get("properties", {}).get(key)
            if field is None or field.get("type") not in _SCALARS:
                yield f"list key {key} is not a scalar field of the items"
            elif key not in items.get("required", ()) and "default" not in field:
                yield f"list key {key} must be required or have a default"


def _default_problems(node: Schema) -> Iterator[str]:
    if "default" not in node:
        return
    default, kind = node["default"], node.get("type")
    wanted = _PYTHON_TYPES.get(kind, object) if isinstance(kind, str) else object
    # True is an int for Python, never for the API server.
    mistyped = not isinstance(default, wanted) or (wanted is int and isinstance(default, bool))
    if default is None:
        yield "a default cannot be null"
    elif mistyped:
        yield f"default {default!r} is no {kind}"
    elif "enum" in node and default not in node["enum"]:
        yield f"default {default!r} is not in the enum"
    elif isinstance(default, dict) and "properties" in node:
        for key in default.keys() - node["properties"].keys():
            yield f"default sets {key}, which is not declared"
        for key in node.get("required", ()):
            if key not in default:
                yield f"default lacks the required field {key}"


def _rule_problems(node: Schema) -> Iterator[str]:
    for rule in node.get(_RULES, ()):
        if not rule.get("rule") or not rule.get("message"):
            yield "a CEL rule needs rule and message"
        if rule.get("reason", "FieldValueInvalid") not in _REASONS:
            yield f"reason {rule['reason']} is not one of {', '.join(sorted(_REASONS))}"
        if "string(" in rule.get("messageExpression", ""):
            yield "string() in a messageExpression exceeds the CEL budget; use format"


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Where two schemas of the resource differ.

    Descriptions, defaults and bounds are left out: they change what is refused, not what is kept.

    Returns:
        Paths of fields and enum values that only `ours` has, and those that only `theirs` has.
    """
    own, other = (set(_paths(each, "")) for each in (ours, theirs))
    return sorted(own - other), sorted(other - own)


def _paths(node: Mapping[str, Any], path: str) -> Iterator[str]:
    for value in node.get("enum", ()):
        yield f"{path}={value}"
    for name, child in node.get("properties", {}).items():
        # What every object has is the API server's own.
        if not path and name in {"apiVersion", "kind", "metadata"}:
            continue
        below = f"{path}.{name}" if path else name
        yield below
        yield from _paths(child, below)
    if isinstance(node.get("items"), dict):
        yield from _paths(node["items"], f"{path}[]")


def document() -> dict[str, Any]:
    """The whole CustomResourceDefinition as a manifest.

    Raises:
        NotStructural: its schema breaks a rule of `problems`; all of them are listed.
    """
    schema: Schema = {
        "type": "object",
        "description": "SpecServe serves a model with a draft, and keeps speculative decoding on "
        "in its live pods exactly while that pays.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {
                "type": "string",
                "maxLength": 253,
                "description": "Version of this schema.",
            },
            "kind": {"type": "string", "maxLength": 63, "description": "Always SpecServe."},
            # Named here so that rules can point at the name; the server takes nothing else of it.
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 253}},
            },
            "spec": structural(SpecServeSpec),
            "status": structural(SpecServeStatus),
        },
        _RULES: [
            {
                "rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "message": "metadata.name must begin with a letter and hold lower-case letters, "
                "digits and dashes only, because a Service takes this name",
                "fieldPath": ".metadata.name",
            },
            {
                "rule": f"size(self.metadata.name) <= {NAME_LIMIT}",
                "message": f"metadata.name must be at most {NAME_LIMIT} characters long, because "
                "pods and replica sets add theirs to it",
                "fieldPath": ".metadata.name",
            },
        ],
    }
    if found := list(problems(schema)):
        raise NotStructural("\n".join(found))
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names.PLURAL}.{names.GROUP}",
            "labels": {names.LABEL_NAME: names.MANAGER, names.LABEL_PART_OF: names.MANAGER},
        },
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": list(names.CATEGORIES),
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": _columns(),
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _columns() -> list[dict[str, Any]]:
    def column(name: str, path: str, text: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "type": "string", "jsonPath": path, "description": text, **more}

    return [
        column("Ready", '.status.conditions[?(@.type=="Ready")].status', "Condition Ready."),
        column(
            "Speculation",
            ".status.speculation.summary",
            "Mode that the engines report, and in how many of the ready pods.",
        ),
        column("Pods", ".status.ready", "Ready and desired pods."),
        column("Model", ".spec.model.source", "Source of the model.", priority=1),
        column(
            "Why",
            ".status.why",
            "What keeps it from being ready; once it is, why speculation was last switched.",
            priority=1,
        ),
        column(
            "Curve",
            ".status.curve",
            "Reason of the condition Calibrated: whether a curve was measured in the cluster. "
            "Empty where none was and the strategy would use none.",
            priority=1,
        ),
        column("Age", ".metadata.creationTimestamp", "Time since creation.", type="date"),
    ]


class _Plain(yaml.SafeDumper):
    """Writes a value out each time, where PyYAML would use anchors and aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class's signature
        return True


def render() -> str:
    """The CustomResourceDefinition as YAML.

    PyYAML quotes `'On'` and `'Off'` by itself, as YAML 1.1 readers would take them for booleans.
    """
    body = yaml.dump(document(), Dumper=_Plain, sort_keys=False, width=99, allow_unicode=True)
    return f"# Generated by `make generate` from specserve/api.py.\n{body}"


def main(argv: list[str] | None = None) -> int:
    """Write the CustomResourceDefinition, or with `--check` compare it with the file.

    Returns:
        0, or 1 if `--check` found a difference (printed as a diff).
    """
    parser = argparse.ArgumentParser(prog="python -m specserve.schema", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("crds") / f"{names.GROUP}_{names.PLURAL}.yaml",
        help="file to write or compare (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    path, wanted = arguments.output, render()
    if not arguments.check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted, encoding="utf-8")
        return 0
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    sys.stdout.writelines(
        difflib.unified_diff(
            found.splitlines(keepends=True),
            wanted.splitlines(keepends=True),
            fromfile=str(path),
            tofile="generated",
        )
    )
    return int(found != wanted)


if __name__ == "__main__":
    sys.exit(main())
