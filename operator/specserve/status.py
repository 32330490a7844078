"""What is observed of a SpecServe, as its status. Pure.

Messages carry no numbers that move with the load: at rest, and under steady load, equal
observations give equal statuses, and equal statuses are not written.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specserve import api, conditions, names
from specserve.conditions import Condition, counted
from specserve.curves import Seen
from specserve.decisions import LONGEST_REASON, Switch, recent
from specserve.observed import Owned, Pod, Trouble
from specserve.policy import unreachable

#: The change in acceptance length that is worth a write of its own, as a ratio.
ACCEPT_TOLERANCE = 0.1
#: Most characters of columns of `kubectl get -o wide`; the schema takes 256 and 64.
WHY_LENGTH = 160
CURVE_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Engine:
    """What is known of the engine in one usable pod.

    Attributes:
        name: The pod's name.
        on: Whether the engine reports that it speculates; None if it was not read.
        wanted: What the policy wants of it, `On` or `Off`; None if nothing yet.
        code: Machine reason of the policy's last verdict.
        difference: First difference between the wanted setting and the read-back, None if none.
        controllable: Whether the engine takes switches; None if it was not read.
        control_reason: The engine's own words on that.
        control_error: Code and message of the last failed call, None if the last one worked.
        sample_error: Likewise for load readings.
        sampled: Whether there is a load reading.
        key_refused: Whether it refuses the API key; the load is then read from its plugin.
        ranks: Data-parallel ranks that the reading covers; None if there is none.
        stalled: Whether the engine sits on a queue without making tokens.
        unreachable: Why the threshold can never be passed, None if it can.
        capacity: Requests that the engine runs at once at most; None if it does not say.
        cache_tokens: Tokens that its KV caches hold; None if it does not say.
        epoch: The largest epoch it reported.
        accept: Tokens won per verify step, seen while on; None if never seen.
        switched_at: Wall-clock seconds of its last switch; None if none was seen.
        switched_why: Why, in one line.
        effective: Whether draft tokens are accepted; None if that was not seen yet.
        crashed: Whether the engine ended too often while it speculated.
        sglang: Version of SGLang that it reports, empty if it was not read.
        plugin: Version of the plugin, likewise.
        gpu: What it runs on, empty if it does not say.
    """

    name: str
    on: bool | None = None
    wanted: str | None = None
    code: str = ""
    difference: str | None = None
    controllable: bool | None = None
    control_reason: str = ""
    control_error: tuple[str, str] | None = None
    sample_error: tuple[str, str] | None = None
    sampled: bool = False
    key_refused: bool = False
    ranks: int | None = None
    stalled: bool = False
    unreachable: str | None = None
    capacity: int | None = None
    cache_tokens: int | None = None
    epoch: int = 0
    accept: float | None = None
    switched_at: float | None = None
    switched_why: str = ""
    effective: bool | None = None
    crashed: bool = False
    sglang: str = ""
    plugin: str = ""
    gpu: str = ""


def reported(engines: Sequence[Engine]) -> Seen:
    """What engines report of themselves, as far as they are read."""
    return Seen(
        sglang=frozenset(one.sglang for one in engines if one.sglang),
        plugin=frozenset(one.plugin for one in engines if one.plugin),
        gpus=frozenset(one.gpu for one in engines if one.gpu),
    )


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything a status is made from.

    Attributes:
        name: Name of the SpecServe.
        generation: Generation of the spec that was reconciled.
        spec: The spec, None if it could not be read.
        blocked: Why the objects are not as the spec says, None if they are.
        deployment: The Deployment as last seen.
        pods: All pods of the SpecServe.
        engines: What is known of the usable ones.
        ranks: Data-parallel ranks of a pod.
        requests: Requests that a pod is asked to run at once; None if the spec does not tell.
        period_milliseconds: Sample period in force if longer than asked for.
        previous: The status as last read or written.
        mode: The mode in force; None if that of the policy is.
        override: The override of all SpecServes in words, empty if there is none.
        override_problem: Why it could not be read, empty if it could.
        curve: Reason and message about the curve known beforehand; None if none was looked for.
        live: Whether live round times of the engines are known.
        switches: The last ones that this process has seen.
        calibrated: What calibrations in the cluster have come to; None if that was not looked at.
    """

    name: str
    generation: int
    spec: api.SpecServeSpec | None
    blocked: Trouble | None
    deployment: Owned | None
    pods: Sequence[Pod]
    engines: Sequence[Engine]
    period_milliseconds: int | None
    previous: Mapping[str, Any]
    ranks: int = 1
    requests: int | None = None
    mode: str | None = None
    override: str = ""
    override_problem: str = ""
    curve: tuple[str, str] | None = None
    live: bool = False
    switches: Sequence[Switch] = ()
    calibrated: Condition | None = None


def build(seen: Observation, now_iso: str, at_iso: Any) -> dict[str, Any]:
    """The status to publish.

    Args:
        seen: What was observed.
        now_iso: The time, RFC 3339, for conditions that change.
        at_iso: Turns wall-clock seconds into RFC 3339.
    """
    # In one order, whatever the order in which they were found, or the words would differ.
    seen = replace(seen, engines=sorted(seen.engines, key=lambda engine: engine.name))
    alive = [pod for pod in seen.pods if pod.alive]
    ready = sum(pod.ready for pod in alive)
    aside = sum(pod.ready and not pod.usable for pod in alive)
    desired = seen.spec.replicas if seen.spec else 0
    observed = [
        *_workload(seen, alive, ready, desired),
        _available(ready - aside, desired, aside),
        _metrics(seen),
        _health(seen),
        _control(seen),
        _settled(seen),
        _reach(seen),
        _capacity(seen),
        _decides(seen),
        _draft(seen),
        _curve(seen),
        *([seen.calibrated] if seen.calibrated else []),
    ]
    merged = conditions.merge(
        seen.previous.get("conditions") or (), observed, seen.generation, now_iso
    )
    told = {condition["type"]: condition for condition in merged}
    speculation = _speculation(seen, at_iso)
    return {
        "observedGeneration": seen.generation,
        "replicas": len(alive),
        "readyReplicas": ready,
        "ready": f"{ready}/{desired}",
        "why": _why(seen, told[conditions.READY], speculation["lastSwitchReason"]),
        "curve": _curve_in_short(seen, told[conditions.CALIBRATED]["reason"]),
        "selector": names.selector_string(seen.name),
        "speculation": speculation,
        "conditions": merged,
    }


def _why(seen: Observation, ready: Mapping[str, Any], switched: str) -> str:
    """What to know first, in one line: what keeps pods from serving, else the last switch."""
    if ready["status"] != "True":
        said = f"{ready['reason']}: {ready['message']}"
        return textwrap.shorten(said, WHY_LENGTH, placeholder=" …")[:WHY_LENGTH]
    # The line of a switch begins with its pod; that of a pod which is no more explains nothing.
    there = {pod.name for pod in seen.pods if pod.alive}
    if switched.partition(": ")[0] not in there or (seen.spec and not seen.spec.replicas):
        return ""
    return textwrap.shorten(switched, WHY_LENGTH, placeholder=" …")


def _curve_in_short(seen: Observation, reason: str) -> str:
    """The reason of Calibrated; empty where no curve was measured and none would be used."""
    used = seen.spec is not None and seen.spec.policy.strategy == "BreakEven"
    idle = {conditions.NOT_ASKED_FOR, conditions.NOT_OBSERVED}
    return "" if reason in idle and not used else reason[:CURVE_LENGTH]


# -- workload -------------------------------------------------------------------------------

#: Which trouble names the cause when several pods have some.
_SEVERITY = (
    "OutOfGpuMemory",
    "DraftRejected",
    "CrashLooping",
    "ImagePullFailed",
    "ContainerConfigInvalid",
    "Unschedulable",
    "Restarted",
    "PodFailed",
    "Loading",
)


#: Where the Deployment was brought to the spec, and clients may not reach its pods.
_BESIDE_THE_DEPLOYMENT = frozenset({conditions.CHANGED_BY_HAND, conditions.NAME_TAKEN})


def _workload(
    seen: Observation, alive: Sequence[Pod], ready: int, desired: int
) -> list[Condition]:
    rolled_out = seen.deployment is not None and seen.deployment.rolled_out
    cause = _cause(seen, alive)
    stuck = seen.blocked
    # A Secret that vanished under running pods is missed by the next pod only.
    running = stuck is not None and stuck.reason == conditions.SECRET_MISSING and ready >= desired
    if stuck is not None and not running:
        message = stuck.message
        if ready and stuck.reason not in _BESIDE_THE_DEPLOYMENT:
            message += "; the pods of the last accepted spec go on serving"
        return [
            Condition("Ready", "False", stuck.reason, message),
            Condition("Reconciling", "False", stuck.reason, stuck.message),
            Condition("Stalled", "True", stuck.reason, stuck.message),
        ]
    if desired == 0 and not alive:
        return [
            Condition("Ready", "True", conditions.SCALED_TO_ZERO, "no pods are asked for"),
            Condition("Reconciling", "False", conditions.UP_TO_DATE),
            Condition("Stalled", "False", conditions.SPEC_ACCEPTED),
        ]
    if ready >= desired and rolled_out:
        return [
            Condition("Ready", "True", conditions.REPLICAS_READY, f"{ready}/{desired} pods ready"),
            Condition("Reconciling", "False", conditions.UP_TO_DATE),
            Condition("Stalled", "False", conditions.SPEC_ACCEPTED),
        ]
    words = f"{ready}/{desired} pods ready"
    reason = conditions.REPLICAS_NOT_READY
    if cause is not None:
        reason, words = cause.reason, f"{words}; {cause.message}"
    rollout = Condition("Reconciling", "True", conditions.ROLLING_OUT, words)
    if ready >= desired and cause is not None and cause.reason == "Unschedulable":
        rollout = Condition(
            "Reconciling",
            "True",
            "RolloutBlocked",
            f"a new pod finds no room: {cause.message}; with rollout.maxSurge 0 an old pod "
            "makes room first",
        )
    return [
        Condition("Ready", "True", conditions.REPLICAS_READY, f"{ready}/{desired} pods ready")
        if ready >= desired
        else Condition("Ready", "False", reason, words),
        rollout,
        Condition("Stalled", "False", conditions.SPEC_ACCEPTED),
    ]


def _cause(seen: Observation, alive: Sequence[Pod]) -> Trouble | None:
    """The trouble that best explains missing pods, with the pod's name in front."""
    rolling = seen.deployment is not None and not seen.deployment.rolled_out
    leaving = rolling and any(pod.leaving for pod in seen.pods)
    found = sorted(
        (
            (_severity(pod.trouble), pod.name, pod.trouble)
            for pod in alive
            # A pod on its way out still holds its GPU: waiting for it is no failure.
            if pod.trouble and not (leaving and pod.trouble.reason == "Unschedulable")
        ),
        key=lambda item: item[:2],
    )
    if found:
        _, name, trouble = found[0]
        return Trouble(trouble.reason, f"pod {name}: {trouble.message}")
    if seen.deployment is not None and seen.deployment.problem:
        return seen.deployment.problem
    waits = min((pod.name for pod in alive if _not_started(pod)), default=None)
    if waits is not None:
        # Without the time that it takes, which would be news at every look.
        return Trouble(
            conditions.REPLICAS_NOT_READY,
            f"pod {waits}: container {names.ENGINE_CONTAINER} has not started: its image is "
            "pulled, volumes are mounted or init containers run",
        )
    return None


def _not_started(pod: Pod) -> bool:
    """Whether the engine container has had no start: there is no id of it in what tells them."""
    return not pod.ready and pod.trouble is None and pod.boot.startswith("#")


def _severity(trouble: Trouble) -> int:
    try:
        return _SEVERITY.index(trouble.reason)
    except ValueError:
        return len(_SEVERITY)


def _available(serving: int, desired: int, aside: int) -> Condition:
    if serving:
        return Condition(
            "Available",
            "True",
            conditions.REPLICAS_READY,
            f"{counted(serving, 'pod')} {'serves' if serving == 1 else 'serve'}",
        )
    if desired == 0:
        return Condition("Available", "False", conditions.SCALED_TO_ZERO, "no pods are asked for")
    if aside:
        words = "the only pod is out of its Service, to be calibrated"
        return Condition("Available", "False", conditions.RUNNING, words)
    return Condition("Available", "False", conditions.REPLICAS_NOT_READY, "no pod is ready")


# -- engines --------------------------------------------------------------------------------


def _listed(engines: Sequence[Engine], what: Any) -> str:
    """Name the first few pods and what is the matter with them."""
    shown = "; ".join(f"{engine.name}: {what(engine)}" for engine in engines[:3])
    return shown + (f"; and {len(engines) - 3} more" if len(engines) > 3 else "")


def _metrics(seen: Observation) -> Condition:
    engines = seen.engines
    if not engines:
        return Condition("MetricsFresh", "Unknown", conditions.NO_PODS, "no pod is ready")
    blind = [engine for engine in engines if engine.sample_error]
    if blind:
        code, _ = blind[0].sample_error or ("", "")
        loss = seen.spec.policy.on_signal_loss if seen.spec else "Hold"
        return Condition(
            "MetricsFresh",
            "False",
            code,
            f"load unknown, policy.onSignalLoss is {loss}: "
            + _listed(blind, lambda e: (e.sample_error[1] if e.sample_error else "") or code),
        )
    if not all(engine.sampled for engine in engines):
        return Condition(
            "MetricsFresh", "Unknown", conditions.NO_SAMPLES, "waiting for the first readings"
        )
    partial = [e for e in engines if e.ranks is not None and e.ranks < seen.ranks]
    if partial:
        return Condition(
            "MetricsFresh",
            "False",
            conditions.RANKS_MISSING,
            f"the load may be higher than what is read of it: {partial[0].name} shows "
            f"{partial[0].ranks} of {seen.ranks} data-parallel ranks (engine.dataParallel)",
        )
    return Condition("MetricsFresh", "True", conditions.SAMPLES_FRESH)


def _health(seen: Observation) -> Condition:
    engines = seen.engines
    if not engines:
        return Condition("EnginesHealthy", "Unknown", conditions.NO_PODS, "no pod is ready")
    stalled = [engine for engine in engines if engine.stalled]
    if stalled:
        return Condition(
            "EnginesHealthy",
            "False",
            conditions.ENGINE_STALLED,
            _listed(stalled, lambda _: "requests wait, none runs and no token is made"),
        )
    locked = [engine for engine in engines if engine.key_refused]
    if locked:
        return Condition(
            "EnginesHealthy",
            "False",
            conditions.API_KEY_REFUSED,
            _listed(locked, lambda _: "refuses the API key (engine.apiKeySecretRef)")
            + ". Engines take it at their start, so clients with another key than theirs are "
            "refused until a restart: kubectl rollout restart deployment "
            f"{seen.name}. They are steered all the same, by what their plugin tells of the load",
        )
    return Condition("EnginesHealthy", "True", conditions.ENGINES_SERVING)


def _control(seen: Observation) -> Condition:
    kind: conditions.Type = conditions.SPECULATION_CONTROL
    if seen.spec is not None and seen.spec.draft.method == "None":
        return Condition(kind, "False", conditions.NO_DRAFT, "draft.method is None")
    if not seen.engines:
        return Condition(kind, "Unknown", conditions.NO_PODS, "no pod is ready")
    failing = [engine for engine in seen.engines if engine.control_error]
    if failing:
        code, _ = failing[0].control_error or ("", "")
        return Condition(
            kind,
            "False",
            code,
            _listed(failing, lambda e: e.control_error[1] if e.control_error else ""),
        )
    if any(engine.controllable is None for engine in seen.engines):
        return Condition(kind, "Unknown", conditions.NOT_OBSERVED, "not all engines are read yet")
    fixed = [engine for engine in seen.engines if not engine.controllable]
    if fixed:
        return Condition(
            kind, "False", conditions.NOT_CONTROLLABLE, _listed(fixed, lambda e: e.control_reason)
        )
    return Condition(kind, "True", conditions.LIVE)


def _settled(seen: Observation) -> Condition:
    kind: conditions.Type = conditions.SPECULATION_SETTLED
    if seen.spec is not None and seen.spec.draft.method == "None":
        return Condition(kind, "True", conditions.NO_DRAFT, "there is nothing to switch")
    if not seen.engines:
        return Condition(kind, "Unknown", conditions.NO_PODS, "no pod is ready")
    if _mode(seen) == "Observe":
        return Condition(kind, "True", conditions.OBSERVING, "nothing is sent to the pods")
    drifted = [engine for engine in seen.engines if engine.difference]
    if drifted:
        return Condition(
            kind,
            "False",
            conditions.SWITCH_PENDING,
            _listed(drifted, lambda e: e.difference),
        )
    silent = [engine for engine in seen.engines if engine.control_error]
    if silent:
        code, _ = silent[0].control_error or ("", "")
        return Condition(kind, "Unknown", code, _listed(silent, lambda _: "not read of late"))
    if any(engine.controllable is False for engine in seen.engines):
        return Condition(
            kind, "Unknown", conditions.NOT_CONTROLLABLE, "the engines take no switches"
        )
    if any(engine.on is None or engine.wanted is None for engine in seen.engines):
        return Condition(kind, "Unknown", conditions.NOT_OBSERVED, "not all engines are read yet")
    return Condition(kind, "True", conditions.SETTLED)


def _reach(seen: Observation) -> Condition:
    kind: conditions.Type = conditions.THRESHOLD_REACHABLE
    if _mode(seen) in {"On", "Off"}:
        return Condition(kind, "True", conditions.PINNED, "the threshold is not in force")
    capped = next((engine for engine in seen.engines if engine.unreachable), None)
    if capped is not None:
        return Condition(
            kind, "False", conditions.THRESHOLD_UNREACHABLE, f"{capped.name}: {capped.unreachable}"
        )
    if not any(engine.sampled for engine in seen.engines):
        return _reach_by_spec(seen)
    return Condition(kind, "True", conditions.WITHIN_REACH)


def _reach_by_spec(seen: Observation) -> Condition:
    """Whether the bounds can be passed by what engines are asked to run; they may run fewer."""
    kind: conditions.Type = conditions.THRESHOLD_REACHABLE
    if seen.spec is None:
        return Condition(kind, "Unknown", conditions.NO_PODS, "no engine is read yet")
    # Of the mode in force: a pin that has ended stands in the spec still.
    rules = seen.spec.policy.model_copy(update={"mode": _mode(seen)})
    capped = unreachable(rules, seen.requests)
    if capped is not None:
        return Condition(kind, "False", conditions.THRESHOLD_UNREACHABLE, capped)
    if rules.signal == "Running" and seen.requests is None:
        return Condition(kind, "Unknown", conditions.NO_PODS, "no engine is read yet")
    return Condition(kind, "True", conditions.WITHIN_REACH, "by the spec: no engine is read yet")


def _capacity(seen: Observation) -> Condition:
    """Whether SGLang lowered the limit: it fits it to its memory at the start, with a log line."""
    kind: conditions.Type = conditions.REQUEST_CAPACITY
    asked = seen.requests
    known = [engine for engine in seen.engines if engine.capacity is not None]
    if not known or asked is None:
        reason = conditions.NOT_REPORTED if seen.engines else conditions.NO_PODS
        return Condition(kind, "Unknown", reason, "no engine has told its limit")
    reduced = [engine for engine in known if (engine.capacity or 0) < asked]
    if not reduced:
        return Condition(kind, "True", conditions.AS_ASKED)
    if seen.deployment is not None and not seen.deployment.rolled_out:
        return Condition(kind, "Unknown", conditions.ROLLING_OUT, "pods of an older spec run")
    return Condition(
        kind,
        "False",
        conditions.CAPACITY_REDUCED,
        f"{counted(asked, 'request')} at once {'is' if asked == 1 else 'are'} asked for; "
        + _listed(reduced, _limit)
        + ". Raise engine.memFractionStatic, use more GPUs, or lower engine.maxRunningRequests",
    )


def _limit(engine: Engine) -> str:
    holds = engine.cache_tokens
    cache = "" if holds is None else f", as its KV cache holds {counted(holds, 'token')}"
    return f"runs at most {engine.capacity}{cache}"


# -- decisions ------------------------------------------------------------------------------


def _mode(seen: Observation) -> str:
    """The mode in force."""
    if seen.mode is not None:
        return seen.mode
    return seen.spec.policy.mode if seen.spec is not None else "Auto"


def _decides(seen: Observation) -> Condition:
    reason, message = _decider(seen)
    if seen.override_problem:
        unread = "the override cannot be read, what was last known of it holds"
        message = "; ".join(filter(None, (message, f"{unread}: {seen.override_problem}")))
    decides = reason in {conditions.AUTO, conditions.PIN_ENDED}
    return Condition(conditions.STRATEGY_DECIDES, "True" if decides else "False", reason, message)


def _decider(seen: Observation) -> tuple[str, str]:
    """Who decides, as (reason, words)."""
    if seen.override:
        return (
            conditions.OVERRIDDEN,
            f"override of all SpecServes of this installation: {seen.override}",
        )
    if seen.spec is None:
        return conditions.AUTO, ""
    policy, mode = seen.spec.policy, _mode(seen)
    if mode == "Observe":
        return conditions.OBSERVING, "policy.mode is Observe: nothing is sent to the pods"
    if mode in {"On", "Off"}:
        end = f" until {policy.mode_until}, then Auto" if policy.mode_until else ""
        return conditions.PINNED, f"policy.mode is {mode}{end}"
    if policy.mode in {"On", "Off"}:
        return (
            conditions.PIN_ENDED,
            f"policy.mode {policy.mode} ended at {policy.mode_until}: strategy {policy.strategy}",
        )
    unused = "; policy.modeUntil ends the modes On and Off, and does nothing here"
    return (
        conditions.AUTO,
        f"strategy {policy.strategy}, scope {policy.scope}{unused if policy.mode_until else ''}",
    )


def _draft(seen: Observation) -> Condition:
    kind: conditions.Type = conditions.DRAFT_EFFECTIVE
    if seen.spec is not None and seen.spec.draft.method == "None":
        return Condition(kind, "Unknown", conditions.NO_DRAFT, "draft.method is None")
    if not seen.engines:
        return Condition(kind, "Unknown", conditions.NO_PODS, "no pod is ready")
    crashed = [engine for engine in seen.engines if engine.crashed]
    if crashed:
        return Condition(
            kind,
            "False",
            conditions.CRASHED_WHILE_ON,
            _listed(crashed, lambda _: "the engine ended repeatedly while it speculated")
            + ". It is left off until draft changes or the pod is replaced",
        )
    useless = [engine for engine in seen.engines if engine.effective is False]
    if useless:
        action = seen.spec.policy.draft_guard.action if seen.spec else "Report"
        return Condition(
            kind,
            "False",
            conditions.DRAFT_INEFFECTIVE,
            _listed(useless, lambda _: "under traffic hardly any draft token is accepted")
            + f". Does the draft fit the model? policy.draftGuard.action is {action}",
        )
    if any(engine.effective for engine in seen.engines):
        return Condition(kind, "True", conditions.DRAFTS_ACCEPTED)
    return Condition(kind, "Unknown", conditions.NOT_SEEN, "no drafts were verified of late")


def _curve(seen: Observation) -> Condition:
    kind: conditions.Type = conditions.CURVE_KNOWN
    if seen.spec is not None and seen.spec.draft.method == "None":
        return Condition(kind, "True", conditions.NO_DRAFT, "there is nothing to weigh")
    if seen.spec is not None and seen.spec.policy.strategy != "BreakEven":
        return Condition(kind, "True", conditions.NOT_USED, "strategy Threshold uses no curve")
    reason, message = seen.curve or (conditions.NOT_OBSERVED, "not looked for yet")
    broken = reason not in {"Calibrated", "Profile", conditions.NO_CURVE}
    if seen.live:
        aside = f"; the curve named in the policy: {message}" if broken else ""
        return Condition(kind, "True", conditions.LIVE, f"round times of the engines{aside}")
    if seen.curve is None:
        return Condition(kind, "Unknown", reason, message)
    if reason in {"Calibrated", "Profile"}:
        return Condition(kind, "True", reason, message)
    return Condition(
        kind,
        "False",
        reason,
        f"{message}. Until live rounds of the engines tell, where nothing else does, the bounds "
        "of policy.threshold hold",
    )


# -- speculation ----------------------------------------------------------------------------


def _speculation(seen: Observation, at_iso: Any) -> dict[str, Any]:
    before = seen.previous.get("speculation") or {}
    engines = seen.engines
    on = sum(engine.on is True for engine in engines)
    off = sum(engine.on is False for engine in engines)
    mode = _together(on, off, len(engines))
    wanted = _together(
        sum(engine.wanted == "On" for engine in engines),
        sum(engine.wanted == "Off" for engine in engines),
        len(engines),
    )
    live, why = _control_mode(seen)
    latest = max(
        (engine for engine in engines if engine.switched_at is not None),
        key=lambda engine: engine.switched_at or 0.0,
        default=None,
    )
    fields: dict[str, Any] = {
        "mode": mode,
        "wanted": wanted,
        "summary": _summary(seen, mode, on, off),
        "on": on,
        "off": off,
        "drifted": sum(engine.difference is not None for engine in engines),
        "unknown": len(engines) - on - off,
        "epoch": max([int(before.get("epoch", 0)), *(engine.epoch for engine in engines)]),
        "controlMode": live,
        "controlReason": why[:1024],
        "lastSwitchReason": str(before.get("lastSwitchReason", "")),
    }
    if "lastSwitchTime" in before:
        fields["lastSwitchTime"] = before["lastSwitchTime"]
    if latest is not None:
        moment = at_iso(latest.switched_at)
        if moment >= str(before.get("lastSwitchTime", "")):
            fields["lastSwitchTime"] = moment
            fields["lastSwitchReason"] = latest.switched_why[:LONGEST_REASON]
    accept = _accept(engines, before.get("acceptLengthCenti"))
    if accept is not None:
        fields["acceptLengthCenti"] = accept
    decisions = recent(before.get("decisions") or (), seen.switches, at_iso)
    if decisions:
        fields["decisions"] = decisions
    if seen.period_milliseconds is not None:
        fields["samplePeriodMilliseconds"] = seen.period_milliseconds
    return fields


def _together(on: int, off: int, total: int) -> str:
    if total == 0 or on + off < total:
        return "Unknown"
    if on and off:
        return "Mixed"
    return "On" if on else "Off"


def _summary(seen: Observation, mode: str, on: int, off: int) -> str:
    total = len(seen.engines)
    if seen.spec is not None and seen.spec.draft.method == "None":
        return "None"
    if total == 0:
        return "-"
    counts = {"On": f"On {on}/{total}", "Off": f"Off {off}/{total}"}
    told = counts.get(mode, f"{mode} ({on} on, {off} off)")
    return f"{told}, override" if seen.override else told


def _control_mode(seen: Observation) -> tuple[str, str]:
    if seen.spec is not None and seen.spec.draft.method == "None":
        return "None", "draft.method is None"
    known = [engine for engine in seen.engines if engine.controllable is not None]
    if not known:
        return "Unknown", "no engine is read yet"
    fixed = next((engine for engine in known if not engine.controllable), None)
    if fixed is not None:
        return "None", fixed.control_reason or "the engine takes no switches"
    return "Live", ""


def _accept(engines: Sequence[Engine], before: Any) -> int | None:
    seen = [engine.accept for engine in engines if engine.accept is not None]
    if not seen:
        return before if isinstance(before, int) else None
    mean = round(100 * sum(seen) / len(seen))
    if isinstance(before, int) and abs(mean - before) <= ACCEPT_TOLERANCE * before:
        return before
    return mean
