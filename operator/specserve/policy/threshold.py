"""The Threshold strategy: two bounds on the load, and the gap between them."""

from dataclasses import dataclass
from typing import Final

from specserve import api
from specserve.policy.state import Mode, Sample

_WORDS: Final = {"InFlight": "in flight", "Running": "running", "Queued": "queued"}


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the load asks for; mode None between the bounds."""

    mode: Mode | None
    code: str
    numbers: str


def signal(policy: api.Policy, sample: Sample) -> int:
    """The number of requests that the bounds are compared with."""
    if policy.signal == "Running":
        return sample.running
    if policy.signal == "Queued":
        return sample.queued
    return sample.running + sample.queued


def load(policy: api.Policy, sample: Sample) -> str:
    """The signal in words."""
    return f"{signal(policy, sample)} {_WORDS[policy.signal]}"


def propose(policy: api.Policy, sample: Sample) -> Proposal:
    """Compare the signal with the bounds. A value on a bound lies between them."""
    value = signal(policy, sample)
    bounds = policy.threshold
    what = load(policy, sample)
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
