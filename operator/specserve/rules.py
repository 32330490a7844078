"""The cross-field rules of the resource, judged without an API server. Pure.

The rules stand in `api` once, in CEL, with the words of their refusals. Here is what each of them
asks, by its text, so that none can be changed there and forgotten here: a test holds the two
together.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from specserve import api

Judge = Callable[[Any], bool]

_FACTORS: Final[Mapping[str, Decimal]] = {
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("num", -3)},
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}
_QUANTITY: Final = re.compile(r"([+-]?[0-9.]+)([numkKMGTPE]i?|[eE][+-]?[0-9]+)?")
_EXPRESSION: Final = re.compile(r"'(.*)'\.format\(\[(.*)\]\)")
_SOURCE: Final = re.compile(r"(hf|pvc|oci|path)://\S+")
_CLAIM: Final = re.compile(r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?")
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NOT_CHOSEN: Final = frozenset(
    {
        *("authorization", "proxy-authorization", "cookie", "host", "connection"),
        *("content-length", "transfer-encoding"),
    }
)


def quantity(text: int | str) -> Decimal:
    """A resource.Quantity as a number.

    Raises:
        ValueError: It is none.
    """
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    unit = found[2] or ""
    if unit[:1] in {"e", "E"} and len(unit) > 1 and unit != "Ei":
        return Decimal(found[1] + unit)
    return Decimal(found[1]) * _FACTORS[unit]


def _below(this: str, that: str) -> Judge:
    return lambda node: bool(node[this] < node[that])


def _not_both(this: str, that: str) -> Judge:
    return lambda node: not (this in node and that in node)


def _periods(field: str, count: int) -> Judge:
    return lambda policy: bool(policy[field] * 1000 >= count * policy["samplePeriodMilliseconds"])


def _shared_memory_fits(engine: Mapping[str, Any]) -> bool:
    limits = engine["resources"].get("limits") or {}
    if "sharedMemory" not in engine or "memory" not in limits:
        return True
    return quantity(engine["sharedMemory"]) < quantity(limits["memory"])


def _batches(tiers: list[Mapping[str, Any]]) -> list[int]:
    return [tier["minBatch"] for tier in tiers]


#: What each rule asks, by its CEL text.
JUDGES: Final[Mapping[str, Judge]] = {
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')": lambda root: (
        _NAME.fullmatch(root["metadata"]["name"]) is not None
    ),
    "size(self.metadata.name) <= 52": lambda root: len(root["metadata"]["name"]) <= 52,
    "!has(self.policy.steps) || self.policy.steps in self.draft.steps": lambda spec: (
        spec["policy"].get("steps", 0) in {0, *spec["draft"]["steps"]}
    ),
    "self.policy.tiers.all(t, t.steps in self.draft.steps)": lambda spec: all(
        tier["steps"] in spec["draft"]["steps"] for tier in spec["policy"]["tiers"]
    ),
    "self.draft.method != 'None' || self.policy.mode != 'On'": lambda spec: (
        spec["draft"]["method"] != "None" or spec["policy"]["mode"] != "On"
    ),
    "!has(self.revision) || self.source.startsWith('hf://')": lambda model: (
        "revision" not in model or model["source"].startswith("hf://")
    ),
    "self.matches('^(hf|pvc|oci|path)://\\\\S+$')": lambda source: (
        _SOURCE.fullmatch(source) is not None
    ),
    "!self.contains(':') && self.trim() == self": lambda name: (
        ":" not in name and name.strip() == name
    ),
    "!self.startsWith('path://') || self.startsWith('path:///')": lambda source: (
        not source.startswith("path://") or source.startswith("path:///")
    ),
    "!self.startsWith('pvc://') || "
    "self.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?$')": lambda source: (
        not source.startswith("pvc://") or _CLAIM.fullmatch(source) is not None
    ),
    "self.method in ['NEXTN', 'NGRAM', 'None'] || has(self.source)": lambda draft: (
        draft["method"] in {"NEXTN", "NGRAM", "None"} or "source" in draft
    ),
    "self.method != 'None' || !has(self.source)": lambda draft: (
        draft["method"] != "None" or "source" not in draft
    ),
    "!has(self.revision) || (has(self.source) && self.source.startsWith('hf://'))": lambda draft: (
        "revision" not in draft or draft.get("source", "").startswith("hf://")
    ),
    "0 in self && self.exists(s, s > 0)": lambda steps: 0 in steps and max(steps) > 0,
    "self.onBelow < self.offAbove": _below("onBelow", "offAbove"),
    "!(self.lowerAscii() in ['authorization', 'proxy-authorization', 'cookie', 'host', "
    "'connection', 'content-length', 'transfer-encoding'])": lambda name: (
        name.lower() not in _NOT_CHOSEN
    ),
    "!(has(self.bearerTokenSecretRef) && has(self.basicAuthSecretRef))": _not_both(
        "bearerTokenSecretRef", "basicAuthSecretRef"
    ),
    "!('query' in self) && !('time' in self)": lambda params: not {"query", "time"} & {*params},
    "self.staleAfterSeconds * 1000 >= 2 * self.samplePeriodMilliseconds": _periods(
        "staleAfterSeconds", 2
    ),
    "self.leaseSeconds * 1000 >= 3 * self.samplePeriodMilliseconds": _periods("leaseSeconds", 3),
    "self.source != 'Prometheus' || has(self.prometheus)": lambda policy: (
        policy["source"] != "Prometheus" or "prometheus" in policy
    ),
    "size(self) == 0 || self[0].minBatch == 1": lambda tiers: _batches(tiers)[:1] in ([], [1]),
    "self.all(t, self.exists_one(u, u.minBatch == t.minBatch))": lambda tiers: (
        len(set(_batches(tiers))) == len(tiers)
    ),
    "self.map(t, t.minBatch).isSorted()": lambda tiers: _batches(tiers) == sorted(_batches(tiers)),
    "!(has(self.value) && has(self.valueFrom))": _not_both("value", "valueFrom"),
    "!has(self.sharedMemory) || !('memory' in self.resources.limits) || "
    "quantity(string(self.sharedMemory)).isLessThan("
    "quantity(string(self.resources.limits['memory'])))": _shared_memory_fits,
    "!has(self.maxRunningRequests) || !has(self.dataParallel) || "
    "self.maxRunningRequests >= self.dataParallel": lambda engine: (
        engine["maxRunningRequests"] >= engine["dataParallel"]
    ),
    "self.all(e, !e.name.startsWith('SPECSERVE_'))": lambda variables: (
        not any(variable["name"].startswith("SPECSERVE_") for variable in variables)
    ),
    "quantity(self).compareTo(quantity('0.1')) >= 0 && "
    "quantity(self).compareTo(quantity('0.95')) <= 0": lambda share: (
        Decimal("0.1") <= quantity(share) <= Decimal("0.95")
    ),
    "self.type == 'Recreate' || self.maxSurge > 0 || self.maxUnavailable > 0": lambda rollout: (
        rollout["type"] == "Recreate" or rollout["maxSurge"] + rollout["maxUnavailable"] > 0
    ),
}


def broken(schema: Mapping[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """What a value breaks that pydantic does not judge, with the words of the API server.

    Only the first counts for sure: rules are asked even if what they go by was refused before.

    Args:
        schema: A structural schema, as `specserve.schema` makes it.
        value: With all defaults.
        path: Where it stands.
    """
    where = path.lstrip(".")
    pattern = schema.get("pattern")
    if pattern is not None and isinstance(value, str) and re.search(pattern, value) is None:
        yield f"{where}: {value!r} should match '{pattern}'"
    known = schema.get("enum")
    if known is not None and value not in known:
        listed = ", ".join(f'"{each}"' for each in known)
        yield f'{where}: Unsupported value: "{value}": supported values: {listed}'
    keys = schema.get("x-kubernetes-list-map-keys")
    for position in _twice(schema.get("x-kubernetes-list-type"), keys, value):
        shown = {name: value[position][name] for name in keys} if keys else value[position]
        yield f"{where}[{position}]: Duplicate value: {shown}"
    # First: a rule may take for granted that what is below is valid, as in the API server.
    for child, inner, name in _children(schema, value):
        yield from broken(child, inner, f"{path}{name}")
    for rule in schema.get("x-kubernetes-validations") or ():
        judge = JUDGES[rule["rule"]]
        try:
            holds = judge(value)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            # An API server refuses what a rule cannot be evaluated for, too.
            yield f"{where}: {error}".lstrip(".")
            continue
        if not holds:
            yield f"{where}{rule.get('fieldPath', '')}: {_words(rule, value)}".lstrip(".")


def _words(rule: Mapping[str, str], value: Any) -> str:
    """The refusal with its numbers, if it has any."""
    found = _EXPRESSION.fullmatch(rule.get("messageExpression", ""))
    if found is None:
        return rule["message"]
    return found[1] % tuple(value[name.strip()[len("self.") :]] for name in found[2].split(","))


def _twice(kind: str | None, keys: Any, value: Any) -> Iterator[int]:
    """Places of a list's items that may stand in it once only, and do so again."""
    if kind not in {"set", "map"} or not isinstance(value, list):
        return
    seen = []
    for position, item in enumerate(value):
        known = [item.get(key) for key in keys] if keys else item
        if known in seen:
            yield position
        seen.append(known)


def unknown(schema: Mapping[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """The fields of a value that a schema does not have, as `kubectl` refuses them."""
    if isinstance(value, Mapping) and "properties" in schema:
        yield from (
            f"{path}.{name}".lstrip(".") for name in value if name not in schema["properties"]
        )
    for child, inner, name in _children(schema, value):
        yield from unknown(child, inner, f"{path}{name}")


def _children(schema: Mapping[str, Any], value: Any) -> Iterator[tuple[Any, Any, str]]:
    if isinstance(value, Mapping):
        named = schema.get("properties") or {}
        for name, inner in value.items():
            child = named.get(name, schema.get("additionalProperties"))
            if isinstance(child, Mapping):
                yield child, inner, f".{name}"
    elif isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for position, inner in enumerate(value):
            yield schema["items"], inner, f"[{position}]"


def with_defaults(spec: api.SpecServeSpec) -> dict[str, Any]:
    """A spec as the API server judges it: with all defaults, and without what is not set."""
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True)
