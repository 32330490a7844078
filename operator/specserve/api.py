"""The SpecServe resource: pydantic models of spec and status.

`schema.py` turns them into the CustomResourceDefinition, so descriptions, bounds, defaults and
cross-field rules (CEL, under `x-kubernetes-validations`) are written here once. The API server
judges objects; the operator parses what the server has accepted and ignores fields it does not
know, so that a newer schema never stops an older operator.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Rule = dict[str, str]


def rules(*items: Rule) -> dict[str, Any]:
    """Attach CEL rules to the schema node of a model or a field."""
    return {"x-kubernetes-validations": list(items)}


class Node(BaseModel):
    """Base of all nodes: camelCase on the wire, immutable in the process."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore"
    )


ObjectName = Annotated[str, Field(min_length=1, max_length=253)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Quantity = Annotated[
    int | str,
    Field(
        json_schema_extra={
            "maxLength": 32,
            # The API machinery's own expression for a resource.Quantity.
            "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
            r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
        }
    ),
]
Fraction = Annotated[
    str,
    Field(
        pattern=r"^0\.[0-9]{1,4}$",
        json_schema_extra={
            "maxLength": 6,
            **rules(
                {
                    "rule": "quantity(self).compareTo(quantity('0.1')) >= 0 && "
                    "quantity(self).compareTo(quantity('0.95')) <= 0",
                    "message": "must be from 0.1 to 0.95",
                }
            ),
        },
    ),
]
#: A piece of a pod handed on unchanged; the API server judges it when the Deployment is applied.
PassThrough = dict[str, Any]
Steps = Annotated[int, Field(ge=0, le=16)]
Source = Annotated[
    str,
    Field(
        max_length=512,
        json_schema_extra=rules(
            {
                "rule": "self.matches('^(hf|pvc|oci|path)://\\\\S+$')",
                "message": "must begin with hf://, pvc://, oci:// or path:// and hold no space, "
                "such as hf://ORG/NAME",
            },
            {
                "rule": "!self.startsWith('path://') || self.startsWith('path:///')",
                "message": "path:// takes an absolute directory: path:///DIR",
            },
            {
                "rule": "!self.startsWith('pvc://') || "
                "self.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?$')",
                "message": "pvc:// takes the name of a volume claim, then a path inside it: "
                "pvc://CLAIM/PATH",
            },
        ),
    ),
]


class SecretKeyRef(Node):
    """A key of a Secret in the namespace of the SpecServe."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: ObjectName = Field(default="token", description="Key inside the Secret.")


class Model(Node):
    """The model to serve."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": "!has(self.revision) || self.source.startsWith('hf://')",
                "message": "revision is only for hf:// sources; remove it or change model.source",
                "fieldPath": ".revision",
                "reason": "FieldValueForbidden",
            }
        )
    )

    source: Source = Field(
        description="Where the weights are: `hf://ORG/NAME` (a model hub), `pvc://CLAIM/PATH` (a "
        "volume claim of this namespace, mounted read-only), `oci://IMAGE` (an image volume) or "
        "`path:///DIR` (a directory of the engine image or of a volume named in spec.pod)."
    )
    revision: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None, description="Branch, tag or commit of an hf:// source."
    )
    served_name: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        default=None,
        description="Model name that clients ask for; the source without its scheme if unset, "
        "with dashes for colons.",
        json_schema_extra=rules(
            {
                "rule": "!self.contains(':') && self.trim() == self",
                "message": "must hold no colon, which SGLang keeps for MODEL:ADAPTER, and neither "
                "begin nor end with a space",
            }
        ),
    )
    quantization: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="Value of SGLang's --quantization; unset leaves it to the model."
    )
    context_length: Annotated[int, Field(ge=1, le=100_000_000)] | None = Field(
        default=None, description="Longest sequence in tokens; unset leaves it to the model."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the weights."
    )
    token_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Hub token. It reaches every container that may fetch weights (target and "
        "draft) as the environment variable HF_TOKEN.",
    )


class Draft(Node):
    """The draft that speculates, and the step counts the engine must hold ready."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": "self.method in ['NEXTN', 'NGRAM', 'None'] || has(self.source)",
                "message": "draft.source is required for this draft.method",
                "fieldPath": ".source",
                "reason": "FieldValueRequired",
            },
            {
                "rule": "self.method != 'None' || !has(self.source)",
                "message": "draft.source needs a draft.method: EAGLE, EAGLE3, NEXTN or "
                "STANDALONE; to serve without a draft, leave draft.source out",
                "fieldPath": ".method",
            },
            {
                "rule": "!has(self.revision) || (has(self.source) && "
                "self.source.startsWith('hf://'))",
                "message": "revision is only for hf:// sources; remove it or change draft.source",
                "fieldPath": ".revision",
                "reason": "FieldValueForbidden",
            },
        )
    )

    method: Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "None"] = Field(
        default="None",
        description="Speculative algorithm. EAGLE, EAGLE3 and NEXTN switch in a live pod; "
        "STANDALONE and NGRAM run as the engine started; None serves without a draft.",
    )
    source: Source | None = Field(
        default=None, description="Where the draft weights are; forms as in model.source."
    )
    revision: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None, description="Branch, tag or commit of an hf:// source."
    )
    steps: Annotated[
        list[Steps],
        Field(
            min_length=2,
            max_length=8,
            json_schema_extra={
                "uniqueItems": True,
                **rules(
                    {
                        "rule": "0 in self && self.exists(s, s > 0)",
                        "message": "steps must contain 0 (off) and at least one count above 0",
                    }
                ),
            },
        ),
    ] = Field(
        default=[0, 3],
        description="Draft step counts that the engine prepares at start; only these can be "
        "switched to. 0 means off. Each further count costs GPU memory and start-up time.",
    )


class Threshold(Node):
    """Two bounds on the signal, with a gap between them so that noise cannot flip the mode."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": "self.onBelow < self.offAbove",
                "message": "onBelow must be below offAbove",
                "messageExpression": "'onBelow (%d) must be below offAbove (%d)'"
                ".format([self.onBelow, self.offAbove])",
                "fieldPath": ".onBelow",
            }
        )
    )

    off_above: Annotated[int, Field(ge=2, le=65_535)] = Field(
        default=48,
        description="Speculation goes off when the signal is above this many requests in one pod "
        "(all data-parallel ranks of the pod added up).",
    )
    on_below: Annotated[int, Field(ge=1, le=65_534)] = Field(
        default=32,
        description="Speculation goes back on when the signal is below this many requests in one "
        "pod. Between the two bounds the mode stays as it is.",
    )


class Tier(Node):
    """One step of a batch-size table inside the engine."""

    min_batch: Annotated[int, Field(ge=1, le=65_536)] = Field(
        description="Smallest number of running requests this tier is for, in one data-parallel "
        "rank."
    )
    steps: Steps = Field(description="Draft steps to use; 0 is off.")


DEFAULT_CALIBRATION: dict[str, Any] = {
    "lastPod": "Keep",
    "sizes": [],
    "repeats": 3,
    "promptTokens": 128,
    "maxNewTokens": 256,
    "deadlineSeconds": 3600,
}


class Calibration(Node):
    """How a calibration sweeps that the annotation specserve.dev/calibrate asks for."""

    last_pod: Literal["Keep", "Take"] = Field(
        default="Keep",
        description="Keep takes a pod out of its Service only while another one serves. Take "
        "takes the only one, too: clients are refused meanwhile.",
    )
    sizes: Annotated[
        list[Annotated[int, Field(ge=1, le=65_536)]],
        Field(max_length=16, json_schema_extra={"uniqueItems": True}),
    ] = Field(
        default=[],
        description="Batch sizes to hold; empty means 1, 2, 4 and so on to 256, as far as the "
        "engine goes.",
    )
    repeats: Annotated[int, Field(ge=1, le=20)] = Field(
        default=3, description="Visits of each batch size and step count."
    )
    prompt_tokens: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=128,
        description="Length of each prompt, in tokens. Rounds take longer with the context: "
        "choose lengths like those of your traffic.",
    )
    max_new_tokens: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=256, description="Length of each answer, in tokens."
    )
    deadline_seconds: Annotated[int, Field(ge=60, le=86_400)] = Field(
        default=3600,
        description="Time in seconds after which the Job of a calibration has failed.",
    )


#: Break-even curves that are shipped, by the names of their files in `specserve.curves`.
PROFILES = ("h200-a", "h200-b", "h200x2-nvlink", "h200x2-nccl", "h200x2-hostmem")


class BreakEven(Node):
    """How the BreakEven strategy weighs acceptance against the cost of a round."""

    margin_percent: Annotated[int, Field(ge=0, le=50)] = Field(
        default=2,
        description="A step count replaces the present one only if it is better by this much, in "
        "percent of tokens per second.",
    )
    profile: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None,
        description="Break-even curve shipped with the operator, used until live rounds of the "
        "engines tell more.",
        # Of the schema alone: an operator that lacks a profile says so in CurveKnown.
        json_schema_extra={"enum": list(PROFILES)},
    )
    curve_config_map: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        default=None,
        description="ConfigMap of this namespace whose key curve.json holds a calibrated curve of "
        "this model, draft, engine version and GPU. Takes precedence over NAME-curve, which a "
        "calibration in the cluster writes, and that over profile.",
    )
    calibration: Calibration = Field(
        default=DEFAULT_CALIBRATION,
        validate_default=True,
        description="How a calibration in the cluster sweeps; the annotation "
        "specserve.dev/calibrate asks for one.",
    )
    probe_budget_permille: Annotated[int, Field(ge=0, le=100)] = Field(
        default=10,
        description="Largest share of throughput, in thousandths, to spend on short probes of the "
        "step counts not in use. 0 never probes: acceptance is then not seen while off.",
    )
    grace_milliseconds: Annotated[int, Field(ge=0, le=60_000)] = Field(
        default=0,
        description="Time in milliseconds after a cold off in which acceptance is not judged.",
    )


class DraftGuard(Node):
    """What to do about a draft whose tokens are hardly ever accepted."""

    action: Literal["Off", "Report"] = Field(
        default="Off",
        description="Off switches speculation off and looks again now and then; Report only sets "
        "the condition DraftEffective to False.",
    )
    accept_length_centi: Annotated[int, Field(ge=100, le=400)] = Field(
        default=105,
        description="Tokens won per verify step, times 100, up to which the draft counts as "
        "ineffective. 100 means that no draft token was accepted.",
    )
    windows: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=6,
        description="Readings in a row, each with traffic, after which it counts as ineffective.",
    )


class FlipGuard(Node):
    """What to do about a flip that made things worse."""

    tolerance_percent: Annotated[int, Field(ge=5, le=100)] = Field(
        default=15,
        description="Loss of tokens per second and request, at a like load, above which a flip is "
        "taken back. 100 takes nothing back.",
    )
    freeze_seconds: Annotated[int, Field(ge=0, le=86_400)] = Field(
        default=900,
        description="Time in seconds for which the mode then stays as it is, unless the load "
        "halves or doubles.",
    )


LabelName = Annotated[str, Field(max_length=128, pattern="^[a-zA-Z_][a-zA-Z0-9_]*$")]


class CertificateKeyRef(Node):
    """A key with certificates of a Secret in the namespace of the SpecServe."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: ObjectName = Field(default="ca.crt", description="Key inside the Secret.")


class BasicAuthRef(Node):
    """A Secret with a user name and a password, in the namespace of the SpecServe."""

    name: ObjectName = Field(description="Name of the Secret.")
    username_key: ObjectName = Field(default="username", description="Key of the user name.")
    password_key: ObjectName = Field(default="password", description="Key of the password.")


class Header(Node):
    """A request header."""

    name: Annotated[str, Field(max_length=64, pattern="^[A-Za-z0-9-]+$")] = Field(
        description="Name of the header.",
        json_schema_extra=rules(
            {
                "rule": "!(self.lowerAscii() in ['authorization', 'proxy-authorization', "
                "'cookie', 'host', 'connection', 'content-length', 'transfer-encoding'])",
                "message": "not a header that can be chosen; credentials come from "
                "bearerTokenSecretRef or basicAuthSecretRef",
            }
        ),
    )
    value: Annotated[str, Field(min_length=1, max_length=512, pattern="^[!-~]([ -~]*[!-~])?$")] = (
        Field(description="Its value; no secret, since it stands here for all to read.")
    )


class LabelMatcher(Node):
    """A condition on a label of the series."""

    name: LabelName = Field(description="Name of the label.")
    operator: Literal["=", "!=", "=~", "!~"] = Field(
        default="=", description="As in PromQL; the two with a tilde take a regular expression."
    )
    value: Annotated[str, Field(max_length=512)] = Field(
        description="What it is compared with; escaped as needed."
    )


class Prometheus(Node):
    """Where and how to read the load of the pods from a Prometheus server."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": "!(has(self.bearerTokenSecretRef) && has(self.basicAuthSecretRef))",
                "message": "bearerTokenSecretRef and basicAuthSecretRef exclude each other",
                "fieldPath": ".basicAuthSecretRef",
            },
        )
    )

    url: Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")] = (
        Field(
            description="Address of the server or of a querier with the same API (Thanos, Mimir, "
            "VictoriaMetrics), with its path prefix and without /api/v1. The operator calls it; "
            "its installation may limit the hosts.",
        )
    )
    scrape_interval_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=30,
        description="Time in seconds between two readings of an engine by the server. Samples "
        "older than three of these (or staleAfterSeconds, if that is longer) count as lost, and "
        "the server is asked about four times in each.",
    )
    bearer_token_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Token to send as `Authorization: Bearer`."
    )
    basic_auth_secret_ref: BasicAuthRef | None = Field(
        default=None, description="User name and password to send."
    )
    ca_secret_ref: CertificateKeyRef | None = Field(
        default=None,
        description="Certificates, in PEM, that the server's one must come from; those of the "
        "operator's system if unset. Certificates are always verified: put a self-signed one "
        "here.",
    )
    headers: Annotated[
        list[Header],
        Field(
            max_length=16,
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
        ),
    ] = Field(default=[], description="Further headers, such as X-Scope-OrgID for a tenant.")
    query_params: dict[str, Annotated[str, Field(max_length=512)]] = Field(
        default={},
        description="Further parameters of the query's URL, such as namespace or "
        "partial_response.",
        json_schema_extra={
            "maxProperties": 16,
            **rules(
                {
                    "rule": "!('query' in self) && !('time' in self)",
                    "message": "query and time belong to the operator",
                }
            ),
        },
    )
    label_matchers: Annotated[list[LabelMatcher], Field(max_length=16)] = Field(
        default=[],
        description="Further conditions on the series of the built-in queries, beside namespace "
        "and pod.",
    )
    namespace_label: LabelName = Field(
        default="namespace", description="Label that holds the namespace of the pod."
    )
    pod_label: LabelName = Field(default="pod", description="Label that holds its name.")
    replica_labels: Annotated[list[LabelName], Field(max_length=16)] = Field(
        default=[],
        description="Further labels by which copies of one series differ (prometheus, "
        "prometheus_replica, replica, instance, job and the like are known): the newer copy "
        "counts.",
    )
    running_query: Annotated[str, Field(min_length=1, max_length=2048)] | None = Field(
        default=None,
        description="PromQL for requests running, instead of the built-in query. Its series need "
        "the labels for namespace and pod. Prefer a plain selector: an expression hides how old "
        "its samples are.",
    )
    queued_query: Annotated[str, Field(min_length=1, max_length=2048)] | None = Field(
        default=None, description="The same for requests waiting."
    )


DEFAULT_THRESHOLD: dict[str, Any] = {"offAbove": 48, "onBelow": 32}
DEFAULT_BREAK_EVEN: dict[str, Any] = {
    "marginPercent": 2,
    "probeBudgetPermille": 10,
    "graceMilliseconds": 0,
    "calibration": DEFAULT_CALIBRATION,
}
DEFAULT_DRAFT_GUARD: dict[str, Any] = {"action": "Off", "acceptLengthCenti": 105, "windows": 6}
DEFAULT_FLIP_GUARD: dict[str, Any] = {"tolerancePercent": 15, "freezeSeconds": 900}
DEFAULT_POLICY: dict[str, Any] = {
    "mode": "Auto",
    "strategy": "Threshold",
    "source": "Engine",
    "scope": "Pod",
    "signal": "InFlight",
    "threshold": DEFAULT_THRESHOLD,
    "breakEven": DEFAULT_BREAK_EVEN,
    "draftGuard": DEFAULT_DRAFT_GUARD,
    "flipGuard": DEFAULT_FLIP_GUARD,
    "dwellOnSeconds": 10,
    "dwellOffSeconds": 10,
    "maxFlipsPerHour": 60,
    "samplePeriodMilliseconds": 500,
    "staleAfterSeconds": 5,
    "onSignalLoss": "Hold",
    "leaseSeconds": 60,
    "draftKv": "Cold",
    "tiers": [],
}


class Policy(Node):
    """When to speculate. Changes of this block never restart a pod."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": "self.staleAfterSeconds * 1000 >= 2 * self.samplePeriodMilliseconds",
                "message": "staleAfterSeconds must be at least two sample periods, or every "
                "second sample would count as stale",
                "fieldPath": ".staleAfterSeconds",
            },
            {
                "rule": "self.leaseSeconds * 1000 >= 3 * self.samplePeriodMilliseconds",
                "message": "leaseSeconds must be at least three sample periods, or leases would "
                "run out between two visits of a pod",
                "fieldPath": ".leaseSeconds",
            },
            {
                "rule": "self.source != 'Prometheus' || has(self.prometheus)",
                "message": "source Prometheus needs policy.prometheus with a url",
                "fieldPath": ".prometheus",
                "reason": "FieldValueRequired",
            },
        )
    )

    mode: Literal["Auto", "On", "Off", "Observe"] = Field(
        default="Auto",
        description="Auto lets the strategy decide. On and Off pin the mode by hand. Observe "
        "decides and reports what it would do, and never sends anything to a pod. In YAML, write "
        "'On' and 'Off' in quotes: bare, they are booleans.",
    )
    mode_until: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = Field(
        default=None,
        description="When the modes On and Off end: from this time on the mode is Auto.",
    )
    strategy: Literal["Threshold", "BreakEven"] = Field(
        default="Threshold",
        description="How Auto and Observe decide. Threshold compares the load with two bounds. "
        "BreakEven weighs the acceptance of the traffic against what a round costs at this batch "
        "size, learnt from live rounds or from a curve; where neither is known it does as "
        "Threshold.",
    )
    scope: Literal["Pod", "Fleet"] = Field(
        default="Pod",
        description="Whose load decides: each pod its own, or the mean over the pods with a "
        "fresh reading, so that all switch together.",
    )
    signal: Literal["InFlight", "Running", "Queued"] = Field(
        default="InFlight",
        description="What the threshold is compared with, per pod: requests running, queued, or "
        "in flight (both). Running alone never exceeds the engine's request cap.",
    )
    source: Literal["Engine", "Prometheus"] = Field(
        default="Engine",
        description="Who is asked for the load: each engine itself, or a Prometheus server that "
        "reads them. Prometheus is slower by up to a scrape interval; acceptance, round times and "
        "switches go to the engines in any case.",
    )
    prometheus: Prometheus | None = Field(
        default=None, description="Where and how to read the load with source Prometheus."
    )
    threshold: Threshold = Field(
        default=DEFAULT_THRESHOLD,
        validate_default=True,
        description="Bounds of the Threshold strategy.",
    )
    break_even: BreakEven = Field(
        default=DEFAULT_BREAK_EVEN,
        validate_default=True,
        description="Settings of the BreakEven strategy.",
    )
    draft_guard: DraftGuard = Field(
        default=DEFAULT_DRAFT_GUARD,
        validate_default=True,
        description="What to do about a draft whose tokens are hardly ever accepted.",
    )
    flip_guard: FlipGuard = Field(
        default=DEFAULT_FLIP_GUARD,
        validate_default=True,
        description="What to do about a flip that made things worse.",
    )
    dwell_on_seconds: Annotated[int, Field(ge=0, le=86_400)] = Field(
        default=10, description="Shortest time in seconds that speculation stays on once it is on."
    )
    dwell_off_seconds: Annotated[int, Field(ge=0, le=86_400)] = Field(
        default=10,
        description="Shortest time in seconds that speculation stays off once it is off.",
    )
    max_flips_per_hour: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=60,
        description="Most flips of one pod within any 60 minutes; when spent, the mode holds.",
    )
    sample_period_milliseconds: Annotated[int, Field(ge=100, le=600_000)] = Field(
        default=500,
        description="Time in milliseconds between two readings of one pod. Stretched, and "
        "reported, when one operator steers more pods than it can read so often.",
    )
    stale_after_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=5,
        description="Age in seconds above which a reading counts as lost (see onSignalLoss).",
    )
    on_signal_loss: Literal["Hold", "On", "Off"] = Field(
        default="Hold",
        description="What to do with a pod whose load is unknown: Hold keeps its mode. Unknown "
        "is never taken for zero.",
    )
    lease_seconds: Annotated[int, Field(ge=15, le=600)] = Field(
        default=60,
        description="Life of a directive in seconds. An engine that hears nothing for so long "
        "follows the directive's fallback: under Threshold the bounds as a table over its own "
        "batch size, under BreakEven the present table, of a pin the pin. "
        "Renewed after a third of it.",
    )
    draft_kv: Literal["Cold", "Warm", "Auto"] = Field(
        default="Cold",
        description="What off does to the draft's KV cache. Cold skips the draft entirely; Warm "
        "keeps it filled, which costs up to 42 % of throughput while off, and suits short offs; "
        "Auto goes by how long offs have been lasting.",
    )
    steps: Annotated[int, Field(ge=1, le=16)] | None = Field(
        default=None,
        description="Draft steps while on; one of draft.steps. The largest of them if unset.",
    )
    tiers: Annotated[
        list[Tier],
        Field(
            max_length=16,
            json_schema_extra=rules(
                {
                    "rule": "size(self) == 0 || self[0].minBatch == 1",
                    "message": "the first tier must have minBatch 1",
                },
                {
                    "rule": "self.all(t, self.exists_one(u, u.minBatch == t.minBatch))",
                    "message": "each tier needs its own minBatch",
                },
                {
                    "rule": "self.map(t, t.minBatch).isSorted()",
                    "message": "tiers must ascend by minBatch",
                },
            ),
        ),
    ] = Field(
        default=[],
        description="Batch-size table the engine follows by itself while on, ascending by "
        "minBatch; empty means one step count for every batch size.",
    )


class EnvVar(Node):
    """An environment variable of the engine container."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": "!(has(self.value) && has(self.valueFrom))",
                "message": "value and valueFrom exclude each other",
                "fieldPath": ".valueFrom",
            }
        )
    )

    name: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, Field(max_length=4096)] | None = Field(
        default=None, description="Literal value."
    )
    value_from: PassThrough | None = Field(
        default=None, description="Source of the value, as in a container."
    )


class Resources(Node):
    """Requests and limits of the engine container."""

    requests: dict[str, Quantity] = Field(
        default={},
        description="Resources to reserve.",
        json_schema_extra={"maxProperties": 32},
    )
    limits: dict[str, Quantity] = Field(
        default={},
        description="Upper bounds; GPUs belong here, by the resource name of your device plugin.",
        json_schema_extra={"maxProperties": 32},
    )


DEFAULT_RESOURCES: dict[str, Any] = {"requests": {}, "limits": {}}


class Engine(Node):
    """The engine process."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                # A memory-backed volume is charged to the pod's memory limit.
                "rule": "!has(self.sharedMemory) || !('memory' in self.resources.limits) || "
                "quantity(string(self.sharedMemory)).isLessThan("
                "quantity(string(self.resources.limits['memory'])))",
                "message": "sharedMemory must be below resources.limits.memory, which it counts "
                "against",
                "fieldPath": ".sharedMemory",
            },
            {
                # The default of spec.engine is judged before it gets the defaults of its fields.
                "rule": "!has(self.maxRunningRequests) || !has(self.dataParallel) || "
                "self.maxRunningRequests >= self.dataParallel",
                "message": "maxRunningRequests must leave one request for each data-parallel copy",
                "messageExpression": "'maxRunningRequests (%d) must leave one request for each of "
                "the %d data-parallel copies'.format([self.maxRunningRequests, "
                "self.dataParallel])",
                "fieldPath": ".maxRunningRequests",
            },
        )
    )

    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None,
        description="Container image with SGLang and the specserve-engine package. May be left "
        "out where the operator was installed with a default one.",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="As in a container; unset follows the image tag."
    )
    command: Annotated[list[Text], Field(max_length=16)] = Field(
        default=[], description="Replaces the image's entry point; empty keeps it."
    )
    args: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=128)
    ] = Field(
        default=[],
        description="Further engine arguments. One that the operator renders too replaces the "
        "operator's value, except where that would break control of the engine.",
    )
    env: Annotated[
        list[EnvVar],
        Field(
            max_length=64,
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                **rules(
                    {
                        "rule": "self.all(e, !e.name.startsWith('SPECSERVE_'))",
                        "message": "names beginning with SPECSERVE_ belong to the operator",
                    }
                ),
            },
        ),
    ] = Field(default=[], description="Environment of the engine container.")
    resources: Resources = Field(
        default=DEFAULT_RESOURCES,
        validate_default=True,
        description="Requests and limits of the engine container.",
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="GPUs that share one copy of the model (--tp-size)."
    )
    data_parallel: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Copies of the model in one pod (--dp-size)."
    )
    max_running_requests: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=256,
        description="Requests that run at once in one pod, shared evenly by its data-parallel "
        "copies (--max-running-requests holds for each). Always rendered, because SGLang silently "
        "caps it at 48 as soon as a draft is loaded; CUDA graphs are captured up to it. An engine "
        "whose KV cache holds fewer lowers it and says so in the condition RequestCapacity.",
    )
    mem_fraction_static: Fraction | None = Field(
        default=None,
        description="Share of a GPU's memory for weights and KV cache (--mem-fraction-static), as "
        "a text from '0.1' to '0.95'; unset leaves it to SGLang. Lower it if the engine runs out "
        "of memory while it captures CUDA graphs: SGLang's own choice does not count those of "
        "further step counts.",
    )
    shared_memory: Quantity | None = Field(
        default=None,
        description="Size of a memory-backed /dev/shm, counted against the memory limit. With "
        "more than one GPU in a pod 8Gi if unset, otherwise none.",
    )
    startup_budget_seconds: Annotated[int, Field(ge=30, le=86_400)] = Field(
        default=900,
        description="Time in seconds from container start to readiness before the kubelet "
        "restarts it: weights, graph capture for every step count, warm-up. It is part of the pod "
        "template (its startup probe), so that a change replaces the pods.",
    )
    api_key_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Key that clients send to the serving port; the operator sends it to read "
        "the load. Another reference replaces the pods. Another content of the Secret does not: "
        "engines take it when they start, so restart them when it suits; they are steered all "
        "the same, and condition EnginesHealthy tells until then.",
    )


class Rollout(Node):
    """How pods are replaced. The default frees a GPU before it asks for one."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": "self.type == 'Recreate' || self.maxSurge > 0 || self.maxUnavailable > 0",
                "message": "maxSurge and maxUnavailable cannot both be 0",
                "fieldPath": ".maxUnavailable",
            }
        )
    )

    type: Literal["RollingUpdate", "Recreate"] = Field(
        default="RollingUpdate", description="As in a Deployment."
    )
    max_surge: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0, description="Pods above spec.replicas during a rollout; each needs a free GPU."
    )
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=1, description="Pods that may be missing during a rollout."
    )


DEFAULT_ROLLOUT: dict[str, Any] = {"type": "RollingUpdate", "maxSurge": 0, "maxUnavailable": 1}


class Pod(Node):
    """Parts of the pod template handed on as they are."""

    labels: dict[str, Annotated[str, Field(max_length=63)]] = Field(
        default={},
        description="Further labels.",
        json_schema_extra={"maxProperties": 64},
    )
    annotations: dict[str, Annotated[str, Field(max_length=65_536)]] = Field(
        default={},
        description="Further annotations.",
        json_schema_extra={"maxProperties": 64},
    )
    node_selector: dict[str, Annotated[str, Field(max_length=63)]] = Field(
        default={},
        description="Node labels the pod needs.",
        json_schema_extra={"maxProperties": 64},
    )
    tolerations: Annotated[list[PassThrough], Field(max_length=64)] = Field(
        default=[], description="Taints the pod tolerates. The operator adds none of its own."
    )
    affinity: PassThrough | None = Field(default=None, description="As in a pod.")
    topology_spread_constraints: Annotated[list[PassThrough], Field(max_length=16)] = Field(
        default=[], description="As in a pod."
    )
    runtime_class_name: ObjectName | None = Field(default=None, description="As in a pod.")
    priority_class_name: ObjectName | None = Field(default=None, description="As in a pod.")
    scheduler_name: ObjectName | None = Field(default=None, description="As in a pod.")
    host_ipc: bool = Field(
        default=False, alias="hostIPC", description="Use the IPC namespace of the node."
    )
    service_account_name: ObjectName | None = Field(
        default=None,
        description="ServiceAccount of the pods; if unset the operator makes one without rights.",
    )
    enable_service_links: bool = Field(
        default=False,
        description="Put a variable for each Service of the namespace into the environment. Off, "
        "because a Service named like the engine breaks it (SGLANG_PORT=tcp://...).",
    )
    image_pull_secrets: Annotated[list[PassThrough], Field(max_length=16)] = Field(
        default=[],
        description="As in a pod; if empty, those that the operator was installed with.",
    )
    security_context: PassThrough | None = Field(
        default=None, description="Security context of the pod."
    )
    init_containers: Annotated[list[PassThrough], Field(max_length=16)] = Field(
        default=[],
        description="Containers to run first; the hub token is added to their environment.",
    )
    volumes: Annotated[list[PassThrough], Field(max_length=64)] = Field(
        default=[], description="Further volumes."
    )
    volume_mounts: Annotated[list[PassThrough], Field(max_length=64)] = Field(
        default=[], description="Further mounts of the engine container."
    )
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=86_400)] = Field(
        default=330,
        description="Time in seconds that a stopping pod may take to finish its requests.",
    )


DEFAULT_POD: dict[str, Any] = {
    "enableServiceLinks": False,
    "hostIPC": False,
    "terminationGracePeriodSeconds": 330,
}
DEFAULT_DRAFT: dict[str, Any] = {"method": "None", "steps": [0, 3]}


class SpecServeSpec(Node):
    """Desired state: a model, its draft, and the policy that switches speculation."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": "!has(self.policy.steps) || self.policy.steps in self.draft.steps",
                "message": "policy.steps must be one of draft.steps",
                "fieldPath": ".policy.steps",
            },
            {
                "rule": "self.policy.tiers.all(t, t.steps in self.draft.steps)",
                "message": "every policy.tiers[].steps must be one of draft.steps",
                "fieldPath": ".policy.tiers",
            },
            {
                "rule": "self.draft.method != 'None' || self.policy.mode != 'On'",
                "message": "policy.mode On needs a draft; set draft.method",
                "fieldPath": ".policy.mode",
            },
        )
    )

    model: Model = Field(description="The model to serve.")
    draft: Draft = Field(
        default=DEFAULT_DRAFT,
        validate_default=True,
        description="The draft that speculates.",
    )
    policy: Policy = Field(
        default=DEFAULT_POLICY,
        validate_default=True,
        description="When to speculate.",
    )
    engine: Engine = Field(
        default={},
        validate_default=True,
        description="The engine process.",
    )
    replicas: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=1,
        description="Number of engine pods; 0 is honoured. The scale subresource writes here.",
    )
    rollout: Rollout = Field(
        default=DEFAULT_ROLLOUT,
        validate_default=True,
        description="How pods are replaced.",
    )
    pod: Pod = Field(
        default=DEFAULT_POD,
        validate_default=True,
        description="Parts of the pod template handed on as they are.",
    )


class Condition(Node):
    """One observation about the SpecServe, as in metav1.Condition."""

    type: Annotated[str, Field(max_length=316)] = Field(description="What is observed.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Why, as one word for machines."
    )
    message: Annotated[str, Field(max_length=32_768)] = Field(
        default="", description="Why, for people, with the thing to change."
    )
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] = Field(
        description="When status last changed."
    )
    observed_generation: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Generation of the spec this was observed for."
    )


class Switch(Node):
    """One switch of a pod."""

    time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] = Field(
        description="When the engine confirmed it."
    )
    pod: Annotated[str, Field(max_length=253)] = Field(description="Name of the pod.")
    mode: Literal["On", "Off"] = Field(description="What the engine does since.")
    reason: Annotated[str, Field(max_length=512)] = Field(
        default="", description="Why, in one line with its numbers."
    )


class Speculation(Node):
    """What is wanted of the pods, and what the engines themselves report."""

    mode: Literal["On", "Off", "Mixed", "Unknown"] = Field(
        default="Unknown",
        description="What ready pods run: all on, all off, both, or not read yet.",
    )
    wanted: Literal["On", "Off", "Mixed", "Unknown"] = Field(
        default="Unknown", description="What the policy wants of the ready pods."
    )
    summary: Annotated[str, Field(max_length=64)] = Field(
        default="", description="One word and counts for `kubectl get`: On 3/3."
    )
    on: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Ready pods whose engine speculates."
    )
    off: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Ready pods whose engine does not speculate."
    )
    drifted: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Ready pods whose engine reports another mode than wanted."
    )
    unknown: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Ready pods whose engine could not be read."
    )
    epoch: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Largest epoch of any engine of this SpecServe."
    )
    control_mode: Literal["Live", "None", "Unknown"] = Field(
        default="Unknown",
        description="Live: the engines take switches. None: they do not; see controlReason.",
    )
    control_reason: Annotated[str, Field(max_length=1024)] = Field(
        default="", description="Why the control mode is what it is."
    )
    last_switch_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = (
        Field(default=None, description="When a pod was last switched on or off.")
    )
    last_switch_reason: Annotated[str, Field(max_length=512)] = Field(
        default="", description="Why, in one line."
    )
    decisions: Annotated[
        list[Switch],
        Field(max_length=5),
    ] = Field(
        default=[],
        description="The last switches, the oldest first. The operator's endpoint "
        "/decisions/NAMESPACE/NAME tells more.",
    )
    accept_length_centi: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Tokens won per verify step, times 100, mean over pods, seen while on.",
    )
    sample_period_milliseconds: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Sample period in force, if longer than asked for."
    )


class SpecServeStatus(Node):
    """Observed state."""

    observed_generation: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Generation of the spec that this status describes."
    )
    replicas: Annotated[int, Field(ge=0)] = Field(default=0, description="Pods that exist.")
    ready_replicas: Annotated[int, Field(ge=0)] = Field(default=0, description="Pods ready.")
    ready: Annotated[str, Field(max_length=32)] = Field(
        default="", description="Ready and desired pods for `kubectl get`."
    )
    why: Annotated[str, Field(max_length=256)] = Field(
        default="",
        description="For `kubectl get -o wide`: reason and message of the condition Ready while "
        "it is not True, cut to one line; then the last switch, if its pod is there still.",
    )
    curve: Annotated[str, Field(max_length=64)] = Field(
        default="",
        description="For `kubectl get -o wide`: reason of the condition Calibrated; empty where "
        "no curve was measured and the strategy would use none.",
    )
    selector: Annotated[str, Field(max_length=1024)] = Field(
        default="", description="Label selector of the pods, for autoscalers."
    )
    speculation: Speculation = Field(
        default={},
        validate_default=True,
        description="What is wanted of the pods, and what they report.",
    )
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        ),
    ] = Field(default=[], description="Ready, Available, MetricsFresh and others.")
