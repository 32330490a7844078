"""Conditions of a SpecServe: their types, their reasons, and how they keep their history.

All types but two say that something is well when True, like those of a Deployment. Reconciling
and Stalled are the exceptions because tools that wait for any kind of object (kstatus: Flux,
Argo CD, `kubectl wait` wrappers) give these two names a meaning: True is "not there yet" and
"will not get there without a change".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Type = Literal[
    "Ready",
    "Reconciling",
    "Stalled",
    "Available",
    "MetricsFresh",
    "EnginesHealthy",
    "SpeculationControl",
    "SpeculationSettled",
    "ThresholdReachable",
    "RequestCapacity",
    "StrategyDecides",
    "DraftEffective",
    "CurveKnown",
    "Calibrated",
]
Status = Literal["True", "False", "Unknown"]

#: Summary: the spec was accepted and enough pods are ready to serve.
READY: Final = "Ready"
#: Abnormal if True: pods are still being brought to the spec.
RECONCILING: Final = "Reconciling"
#: Abnormal if True: the spec cannot be met until somebody changes something.
STALLED: Final = "Stalled"
#: Enough pods are ready to serve.
AVAILABLE: Final = "Available"
#: The load of every ready pod is known.
METRICS_FRESH: Final = "MetricsFresh"
#: No engine sits on a queue without making tokens, or refuses the API key in force.
ENGINES_HEALTHY: Final = "EnginesHealthy"
#: The engines take live switches.
SPECULATION_CONTROL: Final = "SpeculationControl"
#: Every ready pod reports the wanted mode.
SPECULATION_SETTLED: Final = "SpeculationSettled"
#: Both bounds of the threshold can be passed by the signal.
THRESHOLD_REACHABLE: Final = "ThresholdReachable"
#: Engines run as many requests at once as they were asked to.
REQUEST_CAPACITY: Final = "RequestCapacity"

#: The strategy decides, not a person: no override, pin or mode Observe.
STRATEGY_DECIDES: Final = "StrategyDecides"
#: Draft tokens are accepted, and the engine survives them.
DRAFT_EFFECTIVE: Final = "DraftEffective"
#: What a round with drafts takes over a plain one is known.
CURVE_KNOWN: Final = "CurveKnown"
#: A curve was measured in the cluster, on what runs now.
CALIBRATED: Final = "Calibrated"

#: Every type that is published, in the order of the status.
TYPES: Final[tuple[Type, ...]] = get_args(Type)

# Reasons. Those of a decision come from specserve.policy and are passed on as they are.
NOT_OBSERVED: Final = "NotObserved"
NO_PODS: Final = "NoPods"

REPLICAS_READY: Final = "ReplicasReady"
REPLICAS_NOT_READY: Final = "ReplicasNotReady"
SCALED_TO_ZERO: Final = "ScaledToZero"
ROLLING_OUT: Final = "RollingOut"
UP_TO_DATE: Final = "UpToDate"
SPEC_ACCEPTED: Final = "SpecAccepted"
SPEC_REJECTED: Final = "SpecRejected"
CHANGED_BY_HAND: Final = "ChangedByHand"
SECRET_MISSING: Final = "SecretMissing"  # noqa: S105 - a reason, not a secret
OTHER_OPERATOR: Final = "OtherOperator"
UNSCHEDULABLE: Final = "Unschedulable"
IMAGE_UNAVAILABLE: Final = "ImageUnavailable"
CRASH_LOOP: Final = "CrashLoop"

SAMPLES_FRESH: Final = "SamplesFresh"
SAMPLES_STALE: Final = "SamplesStale"
NO_SAMPLES: Final = "NoSamples"
RANKS_MISSING: Final = "RanksMissing"
ENGINE_UNREACHABLE: Final = "EngineUnreachable"

ENGINES_SERVING: Final = "EnginesServing"
ENGINE_STALLED: Final = "EngineStalled"
API_KEY_REFUSED: Final = "ApiKeyRefused"

LIVE: Final = "Live"
NO_DRAFT: Final = "NoDraft"
NOT_CONTROLLABLE: Final = "NotControllable"

SETTLED: Final = "Settled"
SWITCH_PENDING: Final = "SwitchPending"
OBSERVING: Final = "Observing"

WITHIN_REACH: Final = "WithinReach"
THRESHOLD_UNREACHABLE: Final = "ThresholdUnreachable"
PINNED: Final = "Pinned"

AUTO: Final = "Auto"
OVERRIDDEN: Final = "Overridden"
PIN_ENDED: Final = "PinEnded"

DRAFTS_ACCEPTED: Final = "DraftsAccepted"
DRAFT_INEFFECTIVE: Final = "DraftIneffective"
CRASHED_WHILE_ON: Final = "CrashedWhileOn"
NOT_SEEN: Final = "NotSeen"

NOT_USED: Final = "NotUsed"
NO_CURVE: Final = "NoCurve"

MEASURED: Final = "Measured"
NOT_ASKED_FOR: Final = "NotAskedFor"
NOT_ENOUGH_PODS: Final = "NotEnoughPods"
DRAINING: Final = "Draining"
RUNNING: Final = "Running"
ENDING: Final = "Ending"
FAILED: Final = "Failed"
NOT_KEPT: Final = "NotKept"
FORBIDDEN: Final = "Forbidden"
STALE: Final = "Stale"
NAME_TAKEN: Final = "NameTaken"
NO_IMAGE: Final = "NoImage"

AS_ASKED: Final = "AsAsked"
CAPACITY_REDUCED: Final = "CapacityReduced"
NOT_REPORTED: Final = "NotReported"

#: Longest message and reason the schema takes; a longer one would cost the whole status.
MESSAGE_LENGTH: Final = 32_768
REASON_LENGTH: Final = 1024


@dataclass(frozen=True, slots=True)
class Condition:
    """One observation, before it is merged into the history.

    Attributes:
        type: What is observed.
        status: Whether it holds.
        reason: Why, as one CamelCase word.
        message: Why, for people, naming the thing to change.
    """

    type: Type
    status: Status
    reason: str
    message: str = ""


def counted(count: int, noun: str) -> str:
    """A count and what is counted, in the number that goes with it: 1 pod, 2 pods."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def merge(
    old: Iterable[Mapping[str, Any]], new: Iterable[Condition], generation: int, now_iso: str
) -> list[dict[str, Any]]:
    """The conditions to publish, in the order of `TYPES`, one for each.

    What is not in `new` was not observed and stays as it was, or starts as Unknown. Types that
    are not ours are left out: under server-side apply each manager states its own alone.

    Args:
        old: Conditions of the status as read, in wire form.
        new: Observations; the last one of a type counts.
        generation: Generation of the spec that `new` was observed for.
        now_iso: The time, RFC 3339, for those whose status changed.
    """
    before = {item.get("type"): item for item in old}
    observed = {item.type: item for item in new}
    return [
        _next(before.get(kind), observed.get(kind), kind, generation, now_iso) for kind in TYPES
    ]


def _next(
    before: Mapping[str, Any] | None,
    observed: Condition | None,
    kind: Type,
    generation: int,
    now_iso: str,
) -> dict[str, Any]:
    if observed is None:
        if before is not None:
            return dict(before)
        observed = Condition(kind, "Unknown", NOT_OBSERVED, "not looked at yet")
    same = before is not None and before.get("status") == observed.status
    since = before.get("lastTransitionTime") if same and before is not None else None
    return {
        "type": kind,
        "status": observed.status,
        # The schema takes no condition without a reason, and one would cost the whole status.
        "reason": observed.reason[:REASON_LENGTH] or NOT_OBSERVED,
        "message": observed.message[:MESSAGE_LENGTH],
        "lastTransitionTime": since or now_iso,
        "observedGeneration": generation,
    }
