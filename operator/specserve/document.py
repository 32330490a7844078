"""A SpecServe in a YAML text, read without an API server. Pure."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml.constructor import ConstructorError

from specserve import api, names, rules, schema


class _Loader(yaml.SafeLoader):
    """Reads YAML as `kubectl` does, for which a time is a text, and says where it cannot."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the library has it
        first: [(tag, words) for tag, words in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            # Such as `!!bool maybe`: the library has no words of its own for it.
            tag = node.tag.rpartition(":")[2]
            raise ConstructorError(
                problem=f"this is no {tag}", problem_mark=node.start_mark
            ) from error


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
    documents = _loaded(text)
    found = [each for each in documents if each.get("kind") == names.KIND]
    if len(found) != 1:
        raise BadDocument(f"it holds {len(found)} objects of kind {names.KIND} instead of one")
    _of_our_version(found[0].get("apiVersion"))
    name, namespace = _named(found[0].get("metadata") or {})
    written = found[0].get("spec") or {}
    try:
        spec = api.SpecServeSpec.model_validate(written)
    except ValidationError as error:
        raise BadDocument(first(error)) from None
    for field in rules.unknown(_schema()["properties"]["spec"], written, "spec"):
        raise BadDocument(f"unknown field {field}")
    try:
        judged = {"metadata": {"name": name}, "spec": rules.with_defaults(spec)}
    except ValueError as error:  # an alias within what it stands for
        raise BadDocument(f"spec: {error}") from None
    for refusal in rules.broken(_schema(), judged):
        raise BadDocument(refusal)
    return Document(
        name=name,
        namespace=namespace,
        spec=spec,
        written=written,
    )


def _loaded(text: str) -> list[dict[Any, Any]]:
    try:
        loaded = yaml.load_all(text, _Loader)
        return [each for each in loaded if isinstance(each, dict)]
    except yaml.YAMLError as error:
        raise BadDocument(f"no YAML: {_where(error)}") from None
    except RecursionError:
        raise BadDocument("no YAML: it is nested too deeply") from None


def _where(error: yaml.YAMLError) -> str:
    """What is wrong with a YAML text, and in which line."""
    mark = getattr(error, "problem_mark", None)
    said = getattr(error, "problem", None) or str(error).splitlines()[0]
    return said if mark is None else f"line {mark.line + 1}: {said}"


def _of_our_version(given: Any) -> None:
    if given is None:
        raise BadDocument(f"apiVersion is missing: write {names.API_VERSION}")
    if given != names.API_VERSION:
        raise BadDocument(
            f"apiVersion: there is no {names.KIND} in {given}: write {names.API_VERSION}"
        )


def _named(meta: Any) -> tuple[str, str]:
    """Name and namespace of an object, by its metadata."""
    if not isinstance(meta, dict):
        raise BadDocument("metadata: Input should be a valid dictionary")
    for field in ("name", "namespace"):
        if not isinstance(meta.get(field), str | None):
            raise BadDocument(f"metadata.{field}: Input should be a valid string")
    return meta.get("name") or names.SINGULAR, meta.get("namespace") or "default"


@cache
def _schema() -> dict[str, Any]:
    [version] = schema.document()["spec"]["versions"]
    root: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return root


def first(error: ValidationError) -> str:
    """The first field of a spec that is not valid, and why."""
    details = error.errors()[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    return f"spec{''.join(parts)}: {details['msg']}{_unquoted(details)}"


def _unquoted(details: ErrorDetails) -> str:
    """What to write where YAML made a boolean of a bare On or Off; empty if that is not it."""
    wanted, given = (details.get("ctx") or {}).get("expected", ""), details["input"]
    meant = "'On'" if given is True else "'Off'" if given is False else None
    if meant is None or meant not in str(wanted):
        return ""
    return f"; for YAML a bare {meant[1:-1]} is a boolean, so write it in quotes: {meant}"
