"""The Threshold strategy: two bounds on the load, and the gap between them."""

from dataclasses import dataclass
from typing import Final

from specserve import api
from specserve.policy.state import Context, Mode, Sample

_WORDS: Final = {"InFlight": "in flight", "Running": "running", "Queued": "queued"}


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the load asks for; mode None between the bounds."""

    mode: Mode | None
    code: str
    numbers: str


def signal(policy: api.Policy, context: Context, sample: Sample) -> int:
    """The number of requests that the bounds are compared with."""
    running, queued = context.load(sample)
    if policy.signal == "Running":
        return running
    if policy.signal == "Queued":
        return queued
    return running + queued


def load(policy: api.Policy, context: Context, sample: Sample) -> str:
    """The signal in words."""
    where = "" if context.demand is None else " in the mean pod"
    return f"{signal(policy, context, sample)} {_WORDS[policy.signal]}{where}"


def numbers(policy: api.Policy, context: Context, sample: Sample) -> tuple[tuple[str, float], ...]:
    """What the strategy goes by, by name."""
    running, queued = context.load(sample)
    return (
        ("running", float(running)),
        ("queued", float(queued)),
        ("offAbove", float(policy.threshold.off_above)),
        ("onBelow", float(policy.threshold.on_below)),
    )


def propose(policy: api.Policy, context: Context, sample: Sample) -> Proposal:
    """Compare the signal with the bounds. A value on a bound lies between them."""
    value = signal(policy, context, sample)
    bounds = policy.threshold
    what = load(policy, context, sample)
    if value > bounds.off_above:
        return Proposal("Off", "AboveThreshold", f"{what} above {bounds.off_above}")
    if value < bounds.on_below:
        return Proposal("On", "BelowThreshold", f"{what} below {bounds.on_below}")
    between = f"{what} between {bounds.on_below} and {bounds.off_above}"
    return Proposal(None, "WithinBand", between)


def tiers(policy: api.Policy, deepest: int) -> tuple[tuple[int, int], ...]:
    """What on means without a curve: the policy's table, or one step count for all batches.

    Args:
        policy: The policy.
        deepest: The step count if the policy names none.
    """
    if policy.tiers:
        return tuple(sorted((tier.min_batch, tier.steps) for tier in policy.tiers))
    return ((1, deepest if policy.steps is None else policy.steps),)


def bounded(policy: api.Policy, deepest: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """The strategy as a table over the batch of one data-parallel rank: off above its share.

    Args:
        policy: The policy.
        deepest: The step count if the policy names none.
        ranks: Data-parallel ranks that share the pod's requests.
    """
    off = policy.threshold.off_above // max(ranks, 1) + 1
    below = tuple(tier for tier in tiers(policy, deepest) if tier[0] < off)
    # With more ranks than requests, a rank with any has more than its share.
    return (*below, (off, 0)) if off > 1 else ((1, 0),)


def unreachable(policy: api.Policy, capacity: int | None) -> str | None:
    """Why one of the bounds can never be passed, with what to change; None if both can.

    The running batch never exceeds the engine's cap. The queue has none, so InFlight and Queued
    can pass any `offAbove`. No count is below 0, whatever the signal.

    Args:
        policy: The policy; pins use no bounds, so nothing is unreachable then.
        capacity: Most requests the pod runs at once, all ranks together; None if not known.
    """
    if policy.mode in {"On", "Off"}:
        return None
    bounds = policy.threshold
    if policy.signal == "Running" and capacity is not None and capacity <= bounds.off_above:
        return (
            f"the engine runs at most {capacity} requests at once, so Running never exceeds "
            f"offAbove {bounds.off_above} and speculation never goes off: set "
            f"policy.threshold.offAbove below {capacity}, engine.maxRunningRequests above "
            f"{bounds.off_above}, or policy.signal to InFlight"
        )
    return None
