"""A SpecServe in a YAML text, read without an API server. Pure."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from pydantic import ValidationError

from specserve import api, names, rules, schema


class BadDocument(ValueError):
    """A text holds no SpecServe that can be used; the message says where it is wrong, and how."""


@dataclass(frozen=True, slots=True)
class Document:
    """A SpecServe as it is written.

    Attributes:
        name: Its name; that of its kind where it has none.
        namespace: Its namespace, `default` where it names none.
        spec: What it asks for, with all defaults.
        written: Its spec as it stands in the text.
    """

    name: str
    namespace: str
    spec: api.SpecServeSpec
    written: dict[str, Any]


def read(text: str) -> Document:
    """The one SpecServe in a YAML text, judged as an API server with our schema would judge it.

    Raises:
        BadDocument: There is none, or more than one, or it is not valid.
    """
    try:
        documents = [each for each in yaml.safe_load_all(text) if isinstance(each, dict)]
    except yaml.YAMLError as error:
        raise BadDocument(f"no YAML: {str(error).splitlines()[0]}") from None
    found = [each for each in documents if each.get("kind") == names.KIND]
    if len(found) != 1:
        raise BadDocument(f"it holds {len(found)} objects of kind {names.KIND} instead of one")
    meta = found[0].get("metadata")
    meta = meta if isinstance(meta, dict) else {}
    written = found[0].get("spec") or {}
    try:
        spec = api.SpecServeSpec.model_validate(written)
    except ValidationError as error:
        raise BadDocument(first(error)) from None
    for field in rules.unknown(_schema()["properties"]["spec"], written, "spec"):
        raise BadDocument(f"unknown field {field}")
    named = {"name": meta.get("name") or names.SINGULAR}
    judged = {"metadata": named, "spec": rules.with_defaults(spec)}
    for refusal in rules.broken(_schema(), judged):
        raise BadDocument(refusal)
    return Document(
        name=str(meta.get("name") or names.SINGULAR),
        namespace=str(meta.get("namespace") or "default"),
        spec=spec,
        written=written,
    )


@cache
def _schema() -> dict[str, Any]:
    [version] = schema.document()["spec"]["versions"]
    root: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return root


def first(error: ValidationError) -> str:
    """The first field of a spec that is not valid, and why."""
    details = error.errors()[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    return f"spec{''.join(parts)}: {details['msg']}"
