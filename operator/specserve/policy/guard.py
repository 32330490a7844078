"""Whether a flip is allowed now: the dwell of the present mode, and the flip budget."""

import math
from dataclasses import replace
from typing import Final

from specserve import api
from specserve.policy.state import Memory

#: The sliding window of the flip budget, seconds.
HOUR: Final = 3600.0


#: Seconds without a close call after which one less is remembered.
QUIET: Final = 600.0
#: Seconds over which probes and close calls keep to their share of the budget.
BURST: Final = 600.0
#: Most doublings of the dwell.
MOST_UNREST: Final = 4


def seconds(value: float) -> str:
    """A duration for people, rounded up to a tenth so that what is left never reads 0."""
    return f"{math.ceil(round(value * 10, 6)) / 10:.1f}".removesuffix(".0") + " s"


def steps(count: int) -> str:
    """A step count for people."""
    return f"{count} step" if count == 1 else f"{count} steps"


def spent(memory: Memory, now: float) -> Memory:
    """Memory with one flip more."""
    return replace(memory, flips=(*recent(memory.flips, now), now))


def recent(flips: tuple[float, ...], now: float) -> tuple[float, ...]:
    """The flips that count against the budget at `now`."""
    return tuple(at for at in flips if at > now - HOUR)


def refusal(policy: api.Policy, memory: Memory, now: float) -> tuple[str, str] | None:
    """Why the mode must not flip at `now`, as (code, words), or None if it may."""
    dwell = _dwell(policy, memory)
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


def unrest(policy: api.Policy, memory: Memory, now: float) -> tuple[str, str] | None:
    """Why a close call must wait longer than the dwell, as `refusal` says it.

    Where two step counts are about as good, noise turns the verdict round at the end of each
    dwell. Every such flip doubles the dwell before the next, and quiet halves it again.
    """
    dwell = _dwell(policy, memory)
    longer = dwell * 2 ** _unrest(memory, now)
    left = memory.since + longer - now
    if left > 0:
        return "Dwelling", f"a close call, dwell {seconds(left)} of {longer} s left"
    if not seldom(policy, memory, now, 1):
        return "BudgetSpent", "a close call, and such have had their flips of these ten minutes"
    return None


def seldom(policy: api.Policy, memory: Memory, now: float, more: int, share: float = 0.4) -> bool:
    """Whether `more` flips keep to a share of the budget of ten minutes.

    Decisions that gain much may spend the hour's budget as they need it; probes and close calls
    may not spend it in a burst. The rest is for the engine's own steps along its table.
    """
    lately = sum(at > now - BURST for at in memory.flips)
    return lately + more <= policy.max_flips_per_hour * BURST / HOUR * share


def stirred(memory: Memory, now: float) -> Memory:
    """Memory after a flip that was a close call."""
    return replace(memory, unrest=min(_unrest(memory, now) + 1, MOST_UNREST), unrested=now)


def _dwell(policy: api.Policy, memory: Memory) -> int:
    return policy.dwell_on_seconds if memory.mode == "On" else policy.dwell_off_seconds


def _unrest(memory: Memory, now: float) -> int:
    if not memory.unrest:
        return 0
    return max(0, memory.unrest - int((now - memory.unrested) / QUIET))
