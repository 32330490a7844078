"""Short looks at step counts that are not in use, so that what is known does not go out of date.

Off, nobody sees the acceptance; on, nobody sees what a plain round takes. A probe runs the missing
arm until it has told enough, about a second, and the engine then goes back unless it was better.
None is made where no outcome could change the decision, each is paid from a credit that accrues
as a small share of throughput, and each that changes nothing doubles the time to the next.
"""

import math
from dataclasses import replace
from typing import Final

from specserve import api
from specserve.policy import breakeven, guard, pace
from specserve.policy.acceptance import Acceptance
from specserve.policy.rounds import bucket_of
from specserve.policy.state import (
    FIRST_CREDIT,
    FIRST_MOVED_WAIT,
    FIRST_WAIT,
    LEARN_WAIT,
    Context,
    Kind,
    Memory,
    Probe,
    Probing,
    Sample,
)

_LEARNING: Final = frozenset({"Learn", "Check"})
Look = tuple[int, Kind, str]

#: Longest time in seconds between two probes.
LONGEST_WAIT: Final = 480.0
#: Seconds from one look at a probe to the next.
LOOK: Final = 0.25
#: Verifies that tell the acceptance well enough for a decision.
ENOUGH_VERIFIES: Final = 120
#: Longest time of a probe in seconds, and of one that must learn what a round takes.
LONGEST: Final = (2.0, 6.0)
#: Seconds under one setting before a probe of another.
SETTLED: Final = 3.0
#: Time in seconds that a probe is reckoned to take before it begins.
TYPICAL: Final = 1.0
#: Factor by which the load must change to have left the batch that a probe is about.
LEFT: Final = 1.6
#: Rounds in an engine's window that tell what a round takes.
LEARNT_ROUNDS: Final = 20
#: Seconds of a probe after which its pace will do where no round was undisturbed.
PACED: Final = 1.5
#: Share of throughput that a step count loses of which nothing is known.
UNKNOWN_LOSS: Final = 0.6
#: Seconds that a look takes whose outcome is odd: most of what disturbs rounds is over by then.
DOUBTED: Final = 2.0
#: Seconds from a look to the one that bears it out: an engine's window then holds other rounds.
APART: Final = 60.0
#: Worth of the present steps from which a plain round that was disturbed decides nothing.
DISTURBED: Final = 2.0
#: Age in seconds at which a plain round time is looked at again, where it matters.
AGED: Final = 600.0
#: Worth of the present steps from which no drift of a plain round is expected to change the mode.
SAFE: Final = 1.25
#: Factor between loads from which acceptance seen at one may not hold at the other.
MOVED: Final = 2.0
#: Factor from which such a look need not be seldom.
JUMPED: Final = 4.0
#: Worth of a step count up to which, either way, a neighbouring batch does not settle it.
NEARLY: Final = 1.35
#: Shares of the flip budget of ten minutes up to which acceptance is renewed, and the rest done.
RENEWING: Final = 0.8
ELSE: Final = 0.4
#: Flips of the budget that probes leave to decisions.
RESERVED: Final = 4


def credit(policy: api.Policy, probing: Probing, now: float) -> float:
    """Seconds of lost throughput that may be spent at `now`."""
    if probing.credited is None:
        return probing.credit
    share = policy.break_even.probe_budget_permille / 1000
    return min(FIRST_CREDIT, probing.credit + share * max(0.0, now - probing.credited))


def due(
    policy: api.Policy,
    memory: Memory,
    sample: Sample,
    context: Context,
    now: float,
    *,
    present: int,
) -> Probe | None:
    """The probe to begin now, None if there is none.

    Args:
        policy: The policy in force.
        memory: The pod's.
        sample: A fresh reading.
        context: What else is known.
        now: The time.
        present: Steps in force at the current batch.
    """
    probing = memory.probing
    if (
        policy.mode != "Auto"
        or not policy.break_even.probe_budget_permille
        or not context.may_probe
        or probing.active is not None
        or memory.ordered is None
        or memory.watch.frozen is not None
        or memory.watch.trial is not None
        or sample.running == 0
        or now < memory.since + SETTLED
        or guard.refusal(policy, memory, now) is not None
        or policy.max_flips_per_hour - len(guard.recent(memory.flips, now)) < RESERVED + 2
    ):
        return None
    acceptance = breakeven.acceptance_of(memory, context, now)
    batch = breakeven.batch_of(memory)
    if present == 0:
        chosen = _look_on(policy, context, acceptance, batch, now, probing.wait)
    else:
        chosen = _look_else(policy, context, acceptance, batch, now, present)
    if chosen is None:
        return None
    steps, kind, why = chosen
    after = {
        "Renew": probing.after,
        "Learn": probing.learn_after,
        "Check": probing.learn_after,
        "Moved": probing.moved_after,
    }
    if now < after[kind]:
        return None
    # What is learnt for the first time, and a load far off, are worth any flip of the budget.
    free = kind == "Learn" or (kind == "Moved" and _jumped(acceptance, batch))
    share = RENEWING if kind == "Renew" else ELSE
    if not free and not guard.seldom(policy, memory, now, 2, share):
        return None
    if _loss(context, acceptance, batch, steps, present) * TYPICAL > credit(policy, probing, now):
        return None
    return Probe(steps, now, memory.counts.verifies(steps), memory.ordered, kind, why)


def _look_on(
    policy: api.Policy,
    context: Context,
    acceptance: Acceptance | None,
    batch: int,
    now: float,
    wait: float,
) -> Look | None:
    """What to look at while off."""
    if breakeven.seen(context, batch, 0) is None:
        return None  # it is being learnt
    deepest = context.deepest
    known = {
        steps: ratio[0]
        for steps in context.steps
        if steps and (ratio := breakeven.ratio(context, batch, steps)) is not None
    }
    needed = 1 + policy.break_even.margin_percent / 100
    if not known:
        return deepest, "Learn", "how long a round with drafts takes at this load is not known"
    if all((steps + 1) / ratio <= needed for steps, ratio in known.items()):
        # Not even with every draft accepted, if that is what a round takes.
        return _again(context, batch, deepest, now, APART)
    if acceptance is None:
        return deepest, "Renew", "acceptance is not known"
    if _borrowed(context, acceptance, batch, deepest):
        return deepest, "Check", "break-even is known beside this load only"
    promising = _untried(context, acceptance, batch, needed)
    if promising is not None:
        return promising
    if now - acceptance.at >= wait and not _jumped(acceptance, batch):
        ago = guard.seconds(now - acceptance.at)
        return deepest, "Renew", f"acceptance was last seen {ago} ago"
    if acceptance.batch is not None and not _within(acceptance.batch / batch, MOVED):
        return deepest, "Moved", f"acceptance was last seen at {round(acceptance.batch)} in flight"
    if breakeven.live(context, batch, deepest) is None:
        return deepest, "Check", "the curve has not been checked against rounds at this load"
    return None


def _within(ratio: float, factor: float) -> bool:
    return 1 / factor < ratio < factor


def _jumped(acceptance: Acceptance | None, batch: int) -> bool:
    """Whether acceptance was seen at a load so far off that noise did not lead from there."""
    if acceptance is None or acceptance.batch is None:
        return False
    return not _within(acceptance.batch / batch, JUMPED)


def _borrowed(context: Context, acceptance: Acceptance, batch: int, steps: int) -> bool:
    """Whether a decision that could fall either way rests on rounds of another bucket."""
    if breakeven.live(context, batch, steps) is None or breakeven.exact(context, batch, steps):
        return False
    arm = breakeven.weigh(context, acceptance, batch, steps)
    return arm is not None and _within(arm.value, NEARLY)


def _look_else(
    policy: api.Policy,
    context: Context,
    acceptance: Acceptance | None,
    batch: int,
    now: float,
    present: int,
) -> Look | None:
    """What to look at while on."""
    if breakeven.seen(context, batch, present) is None or acceptance is None:
        return None  # it is being learnt
    if breakeven.live(context, batch, present) is None:
        return 0, "Learn", "how long a plain round takes at this load is not known"
    if _borrowed(context, acceptance, batch, present):
        return 0, "Check", "break-even is known beside this load only"
    arm = breakeven.weigh(context, acceptance, batch, present)
    worth = 1.0 if arm is None else arm.value
    return _plain_again(context, batch, now, present, worth) or _untried(
        context, acceptance, batch, worth * (1 + policy.break_even.margin_percent / 100)
    )


def _plain_again(
    context: Context, batch: int, now: float, present: int, worth: float
) -> Look | None:
    """Another look at a plain round, which may have changed, or have been disturbed when seen."""
    seen = breakeven.seen(context, batch, 0)
    age = math.inf if seen is None else now - seen
    odd = breakeven.odd(context, batch, present)
    if (worth < SAFE or odd) and age > AGED:
        return 0, "Renew", "how long a plain round takes at this load was not seen for long"
    if worth >= DISTURBED and not odd:
        return None
    # Speculation that wins little only later, as acceptance falls, is about to be decided anyway.
    soon = odd or (worth < NEARLY and age < 2 * APART)
    return _again(context, batch, 0, now, APART if soon else AGED)


def _again(context: Context, batch: int, steps: int, now: float, wait: float) -> Look | None:
    """A second look at rounds that were seen once: what disturbed them, lengthened all of them.

    So one look may have shown a plain round so long that any speculation seems to pay, or one
    with drafts so long that none does.
    """
    seen = breakeven.seen(context, batch, steps)
    if seen is None or now - seen < wait or breakeven.sure(context, batch, steps):
        return None
    kind = "with" if steps else "without"
    return steps, "Check", f"how long rounds {kind} drafts take at this load was seen only once"


def _untried(context: Context, acceptance: Acceptance, batch: int, needed: float) -> Look | None:
    """A step count never timed here that is expected to be better than `needed`."""
    expected = [
        arm
        for arm in breakeven.arms(context, acceptance, batch)
        if arm.source == "Estimate" and arm.value > needed
    ]
    if not expected:
        return None
    arm = max(expected, key=lambda arm: arm.value)
    return arm.steps, "Learn", f"{guard.steps(arm.steps)} should win more, never tried here"


def _loss(
    context: Context, acceptance: Acceptance | None, batch: int, steps: int, present: int
) -> float:
    """Share of throughput that a probe of `steps` may lose: nothing accepted if it speculates."""
    if steps == 0:
        arm = breakeven.weigh(context, acceptance, batch, present)
        return UNKNOWN_LOSS if arm is None else max(0.0, 1 - 1 / arm.value)
    ratio = breakeven.ratio(context, batch, steps)
    return UNKNOWN_LOSS if ratio is None else max(0.0, 1 - 1 / ratio[0])


def over(memory: Memory, probe: Probe, sample: Sample, context: Context, now: float) -> bool:
    """Whether a probe has told enough, or has taken long enough."""
    lasted = now - probe.began
    if lasted >= LONGEST[1 if probe.kind in _LEARNING else 0] or sample.running == 0:
        return True
    batch = breakeven.batch_of(memory)
    demand = breakeven.demand_of(context, sample)
    # Of a few requests one is often between its end and the next one's start.
    if abs(demand - batch) > 1 and not batch / LEFT <= demand <= batch * LEFT:
        return True
    bucket = bucket_of(batch)
    timed = context.knowledge.of_bucket(bucket, probe.steps)
    paced = pace.find(context.paces, bucket, probe.steps)
    learnt = probe.kind not in _LEARNING or (timed is not None and timed.rounds >= LEARNT_ROUNDS)
    fresh = (timed is not None and timed.seen > probe.began and learnt) or (
        paced is not None and paced.seen - probe.began >= PACED and lasted >= PACED
    )
    # A round time known from before will do where only the acceptance was asked for.
    known = breakeven.live(context, batch, probe.steps) is not None
    if not fresh and (probe.kind in _LEARNING or not probe.steps or not known):
        return False
    if fresh and lasted < DOUBTED and not breakeven.sure(context, batch, probe.steps):
        steps = probe.steps or probe.back.steps_for(batch)
        if breakeven.odd(context, batch, steps):
            return False
    if probe.steps == 0:
        return True
    return memory.counts.verifies(probe.steps) - probe.verifies >= ENOUGH_VERIFIES


def ended(
    policy: api.Policy, probing: Probing, probe: Probe, now: float, *, loss: float, changed: bool
) -> Probing:
    """Probing after a probe.

    Args:
        policy: The policy in force.
        probing: Before.
        probe: The one that ends.
        now: The time.
        loss: Share of throughput that it lost.
        changed: Whether it changed the decision.
    """
    spent = credit(policy, probing, now) - (now - probe.began) * max(0.0, loss)
    probing = replace(
        probing, active=None, learn_after=now + LEARN_WAIT, credit=spent, credited=now
    )
    if changed:
        return replace(
            probing,
            after=now + FIRST_WAIT,
            wait=FIRST_WAIT,
            moved_after=now + FIRST_MOVED_WAIT,
            moved_wait=FIRST_MOVED_WAIT,
        )
    if probe.kind in _LEARNING:
        return replace(probing, after=max(probing.after, now + FIRST_WAIT))
    moved_after = now + probing.moved_wait
    if probe.kind == "Moved":
        longer = min(probing.moved_wait * 2, LONGEST_WAIT)
        return replace(probing, moved_after=moved_after, moved_wait=longer)
    longer = min(probing.wait * 2, LONGEST_WAIT)
    return replace(probing, after=now + probing.wait, wait=longer, moved_after=moved_after)


def restarted(probing: Probing, now: float) -> Probing:
    """Probing after a decision that was no probe's: short waits again."""
    return replace(probing, active=None, after=now + FIRST_WAIT, wait=FIRST_WAIT)
