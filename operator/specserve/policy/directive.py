"""A mode in the words of the engine's admin endpoint, and the engine's words read back.

The wire fields are those of `PUT /v1/speculation`. A setting is the part of a directive that the
engine reports back: mode, steps or tiers, draftKv and fallback.
"""

from collections.abc import Mapping
from typing import Any, Final

from specserve import api
from specserve.policy import threshold
from specserve.policy.state import Setting, Verdict

#: Longest reason the engine takes.
REASON_LENGTH: Final = 256


def wanted(
    policy: api.Policy, draft: api.Draft, verdict: Verdict, ranks: int = 1
) -> dict[str, Any]:
    """The setting that carries out a verdict and survives the operator.

    Args:
        policy: Gives the fallback of the Threshold strategy.
        draft: Gives the steps of that fallback if the policy names none.
        verdict: One with a setting.
        ranks: Data-parallel ranks of the pod. The thresholds are of the whole pod, while each
            rank follows a table by its own batch.
    """
    setting = verdict.setting
    if setting is None:
        raise ValueError(f"the verdict {verdict.code} has no setting")
    active = _mode(setting)
    if policy.mode in {"On", "Off"}:
        fallback = active  # a pin outlives the operator
    elif policy.strategy == "BreakEven":
        fallback = _mode(verdict.fallback or setting)
    else:
        fallback = _fallback(policy, draft, ranks)
    draft_kv = setting.draft_kv.lower()
    return {**active, "draftKv": draft_kv, "fallback": {**fallback, "draftKv": draft_kv}}


def _mode(setting: Setting) -> dict[str, Any]:
    """Mode, steps and tiers as the wire has them."""
    if len(setting.tiers) > 1:
        table = [{"minBatch": least, "steps": steps} for least, steps in setting.tiers]
        return {"mode": "tiers", "tiers": table}
    steps = setting.tiers[0][1]
    return {"mode": "on", "steps": steps} if steps else {"mode": "off"}


def _fallback(policy: api.Policy, draft: api.Draft, ranks: int) -> dict[str, Any]:
    """What the engine does by itself once the lease has run out, under the Threshold strategy.

    The upper bound becomes a table over the engine's own batch size, so that no pod stays in a
    mode the policy would not choose for its batch. The queue is not a function of the batch, so
    with the signal Queued the table is the one the policy names for the time it is on, and where
    it names none the engine's own policy rules: it is the only one left that sees the load.
    """
    deepest = max(draft.steps)
    if policy.signal == "Queued":
        known = policy.tiers
        return _mode(Setting(threshold.tiers(policy, deepest))) if known else {"mode": "auto"}
    return _mode(Setting(threshold.bounded(policy, deepest, ranks)))


def body(
    wanted: Mapping[str, Any],
    *,
    pod_uid: str,
    boot_id: str,
    epoch: int,
    holder: str,
    lease_seconds: int,
    deadline_ms: int,
    reason: str,
) -> dict[str, Any]:
    """The directive that carries the setting `wanted`, as the JSON object to PUT.

    A renewal repeats the epoch and the setting; any other setting needs a higher epoch.

    Args:
        wanted: From `wanted()`.
        pod_uid: UID of the pod that is meant.
        boot_id: Engine process that is meant, from its read-back.
        epoch: The fence, above every epoch this pod has seen.
        holder: Namespace and name of the installation's election Lease.
        lease_seconds: Life of the directive in seconds.
        deadline_ms: Time for the engine's answer in milliseconds.
        reason: For the engine's log; made one printable line and cut to what the engine takes.
    """
    line = "".join(char if char.isprintable() else "?" for char in " ".join(reason.split()))
    return {
        "podUID": pod_uid,
        "bootID": boot_id,
        "epoch": epoch,
        "holder": holder,
        "leaseSeconds": lease_seconds,
        **wanted,
        "deadlineMs": deadline_ms,
        "reason": line[:REASON_LENGTH],
    }


def matches(readback: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first difference between what an engine reports and what is wanted, None if none.

    Fields that the wanted mode does not use are ignored, whatever the engine reports there.
    """
    return _differ(readback, wanted, "")


def _differ(actual: object, wanted: Mapping[str, Any], prefix: str) -> str | None:
    if not isinstance(actual, Mapping):
        return f"{prefix.rstrip('.')} is {_words(actual)}, wanted {_words(wanted)}"
    for key, value in wanted.items():
        if isinstance(value, Mapping):
            difference = _differ(actual.get(key), value, f"{prefix}{key}.")
            if difference is not None:
                return difference
        elif actual.get(key) != value:
            return f"{prefix}{key} is {_words(actual.get(key))}, wanted {_words(value)}"
    return None


def _words(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "[" + ", ".join(_words(item) for item in value) + "]"
    return str(value)


#: Rounds under an order after which a rank that does otherwise is not just late: with overlap
#: scheduling the round that was under way still counts.
SETTLING_ROUNDS: Final = 3


def astray(readback: Mapping[str, Any]) -> str | None:
    """The first rank that does otherwise than the engine has accepted, None if none.

    An accepted order is not an active one: a rank takes it over with its next decode batch, and
    an idle one keeps the old steps. Under a table or the engine's own policy nothing is judged.
    """
    ordered = {"off": 0, "on": readback.get("steps")}.get(str(readback.get("mode")))
    if ordered is None:
        return None
    for group in readback.get("groups") or []:
        for rank in group.get("ranks") or []:
            active, rounds = rank.get("activeSteps"), rank.get("decodeRounds")
            if active is None or rounds is None or rounds < SETTLING_ROUNDS:
                continue
            if active != ordered:
                return f"rank {rank.get('rank', '?')} runs {active} steps, ordered {ordered}"
    return None


def is_on(readback: Mapping[str, Any]) -> bool | None:
    """Whether an engine speculates by its own report; None if the report does not say.

    A directive that forces a mode is taken at its word. Under its own policy the engine has a
    mode only as far as its ranks have run rounds: before that `activeSteps` is what it booted
    with.
    """
    mode = readback.get("mode")
    if mode == "off":
        return False
    if mode == "on":
        return True
    if mode == "tiers":
        return any(tier.get("steps", 0) > 0 for tier in readback.get("tiers") or [])
    if mode != "auto":
        return None
    steps = [
        rank["activeSteps"]
        for group in readback.get("groups") or []
        for rank in group.get("ranks") or []
        if rank.get("decodeRounds") and rank.get("activeSteps") is not None
    ]
    return any(count > 0 for count in steps) if steps else None
