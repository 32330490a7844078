"""What Kubernetes lets a value of the chart be, as regular expressions and pieces of JSON schema.

Helm holds values against values.schema.json before it writes anything. What only the API server
refuses ends an installation half way. Each is as narrow as the oldest Kubernetes that the chart
admits, and no narrower; test_shapes.py asks a real API server.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_WORD = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_WORD}(\.{_WORD})*"
_QUALIFIED = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"

NAMESPACE = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""A DNS label: names of namespaces, volumes."""
NAME = _SUBDOMAIN
"""A DNS subdomain: names of most objects; 253 characters at most."""
SERVICE = "[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
"""A name of a Service, which is the narrowest of the objects that share one."""
LABEL_KEY = f"({_SUBDOMAIN}/)?{_QUALIFIED}"
LABEL_VALUE = _QUALIFIED
ANNOTATION_KEY = f"({_SUBDOMAIN.replace('a-z', 'A-Za-z')}/)?{_QUALIFIED}"
QUANTITY = r"\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?"
"""Of a resource: not negative."""
PERCENTAGE = "(100|[0-9]{1,2})%"
VARIABLE = "[-._A-Za-z][-._A-Za-z0-9]*"
"""Name of an environment variable; Kubernetes 1.32 takes more."""

DURATION = "0|" + "".join(f"([0-9]+{unit})?" for unit in ("y", "w", "d", "h", "m", "s", "ms"))
"""Of the Prometheus operator, from its CustomResourceDefinitions."""

_PATH = "[a-z0-9]+([-._]+[a-z0-9]+)*"
_HOST = (
    rf"({_WORD.replace('a-z', 'A-Za-z').replace('[-', '[-.')}|\[[0-9A-Fa-f:]+\])(:[0-9]{{1,5}})?"
)
_TAG = "[A-Za-z0-9_][-A-Za-z0-9_.]{0,127}"
DIGEST = "sha256:[0-9a-f]{64}"
REGISTRY = f"{_HOST}(/{_PATH})*/?"
"""A host, perhaps with a port and a path; no scheme."""
REPOSITORY = f"({_HOST}/)?{_PATH}(/{_PATH})*"
TAG = f"{_TAG}(@{DIGEST})?"
IMAGE = f"{REPOSITORY}(:{_TAG})?(@{DIGEST})?"


def text(shape: str, longest: int | None = None) -> Schema:
    """A string that is empty, which is left out, or has this shape."""
    limit = {} if longest is None else {"maxLength": longest}
    return {"type": ["string", "null"], "pattern": f"^({shape})?$", **limit}


def must(shape: str, longest: int | None = None) -> Schema:
    """A string of this shape."""
    return {**text(shape, longest), "type": "string", "pattern": f"^({shape})$"}


def whole(lowest: int = 0, highest: int = 2**31 - 1) -> Schema:
    """An integer."""
    return {"type": ["integer", "null"], "minimum": lowest, "maximum": highest}


def choice(*words: str) -> Schema:
    """One of these, or left out."""
    return {"enum": [*words, None]}


def entries(key: str, value: Schema) -> Schema:
    """A map whose keys the user names."""
    return {"propertyNames": {"pattern": f"^({key})$"}, "additionalProperties": value}


def fields(*, required: tuple[str, ...] = (), more: bool = False, **known: Schema) -> Schema:
    """A map of these fields, and of others if there are `more`."""
    needed = {"required": list(required)} if required else {}
    closed = {} if more else {"additionalProperties": False}
    return {"type": ["object", "null"], **needed, "properties": known, **closed}


def each(item: Schema) -> Schema:
    """A list of such items, none of which is null."""
    kinds = [item["type"]] if isinstance(item["type"], str) else item["type"]
    (kind,) = [one for one in kinds if one != "null"]
    return {"items": {**item, "type": kind}}


YES_OR_NO: Schema = {"type": ["boolean", "null"]}
STRING: Schema = {"type": ["string", "null"]}
OBJECT: Schema = {"type": ["object", "null"]}
PORT = whole(1, 65535)

LABELS = entries(LABEL_KEY, text(LABEL_VALUE))
ANNOTATIONS = entries(ANNOTATION_KEY, STRING)
PULL_SECRETS = each(fields(required=("name",), more=True, name=must(NAME, 253)))
RESOURCES = fields(
    **dict.fromkeys(
        ("limits", "requests"),
        OBJECT
        | entries(
            LABEL_KEY,
            {"type": ["string", "number", "null"], "pattern": f"^({QUANTITY})$", "minimum": 0},
        ),
    ),
    claims={"type": ["array", "null"], **each(OBJECT)},
)
_TIMING = {
    f"{name}{unit}": whole()
    for unit, names in {
        "Seconds": ("initialDelay", "period", "timeout"),
        "Threshold": ("failure", "success"),
    }.items()
    for name in names
}
_ONE_SUCCESS = {**_TIMING, "successThreshold": whole(0, 1)}
LIVENESS = fields(**_ONE_SUCCESS, terminationGracePeriodSeconds=whole(1))
READINESS = fields(**_TIMING)
_USER = {"runAsUser": whole(), "runAsGroup": whole(), "runAsNonRoot": YES_OR_NO}
POD_SECURITY = fields(more=True, **_USER, fsGroup=whole())
SECURITY = fields(
    more=True,
    **_USER,
    allowPrivilegeEscalation=YES_OR_NO,
    privileged=YES_OR_NO,
    readOnlyRootFilesystem=YES_OR_NO,
)
VARIABLES = each(fields(required=("name",), name=must(VARIABLE), value=STRING, valueFrom=OBJECT))
VOLUMES = each(fields(required=("name",), more=True, name=must(NAMESPACE)))
MOUNTS = each(
    fields(
        required=("name", "mountPath"), more=True, name=must(NAMESPACE), mountPath=must("[^:]+")
    )
)
TOLERATIONS = each(
    fields(
        key=text(LABEL_KEY),
        operator=choice("Exists", "Equal", "Lt", "Gt"),
        value=text(LABEL_VALUE),
        effect=choice("NoSchedule", "PreferNoSchedule", "NoExecute"),
        tolerationSeconds={"type": ["integer", "null"]},
    )
)
AFFINITY = fields(nodeAffinity=OBJECT, podAffinity=OBJECT, podAntiAffinity=OBJECT)
SPREAD = each(
    fields(
        required=("maxSkew", "topologyKey", "whenUnsatisfiable"),
        more=True,
        maxSkew=whole(1),
        topologyKey=must(LABEL_KEY),
        whenUnsatisfiable={"enum": ["DoNotSchedule", "ScheduleAnyway"]},
    )
)
PEERS = each(
    fields(
        namespaceSelector=OBJECT,
        podSelector=OBJECT,
        ipBlock=fields(required=("cidr",), more=True, cidr=STRING),
    )
)
EGRESS = each(
    fields(
        to={"type": ["array", "null"], **PEERS}, ports={"type": ["array", "null"], **each(OBJECT)}
    )
)
