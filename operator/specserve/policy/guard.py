"""Whether a flip is allowed now: the dwell of the present mode, and the flip budget."""

import math
from typing import Final

from specserve import api
from specserve.policy.state import Memory

#: The sliding window of the flip budget, seconds.
HOUR: Final = 3600.0


def seconds(value: float) -> str:
    """A duration for people, rounded up to a tenth so that what is left never reads 0."""
    return f"{math.ceil(round(value * 10, 6)) / 10:.1f}".removesuffix(".0") + " s"


def recent(flips: tuple[float, ...], now: float) -> tuple[float, ...]:
    """The flips that count against the budget at `now`."""
    return tuple(at for at in flips if at > now - HOUR)


def refusal(policy: api.Policy, memory: Memory, now: float) -> tuple[str, str] | None:
    """Why the mode must not flip at `now`, as (code, words), or None if it may."""
    dwell = policy.dwell_on_seconds if memory.mode == "On" else policy.dwell_off_seconds
    left = memory.since + dwell - now
    if left > 0:
        return "Dwelling", f"dwell {seconds(left)} of {dwell} s left"
    limit = policy.max_flips_per_hour
    if len(memory.flips) >= limit:
        flips = recent(memory.flips, now)
        if len(flips) >= limit:
            wait = flips[len(flips) - limit] + HOUR - now
            return (
                "BudgetSpent",
                f"{len(flips)} of {limit} flips an hour spent, next in {seconds(wait)}",
            )
    return None
