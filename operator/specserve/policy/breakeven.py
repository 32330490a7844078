"""The BreakEven strategy: which step count wins most tokens a second, by batch size.

With `s` draft steps a request wins `a_s` tokens in a round that takes `r_s(B)` plain ones, so its
value is `a_s / r_s(B)`, 1 for off. The best is chosen for each batch bucket; a bucket about which
nothing is known keeps what the Threshold strategy does there, and no bucket is judged by its
neighbours: `r` is not monotonic.
"""

import math
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal

from specserve import api
from specserve.policy import guard, pace, threshold
from specserve.policy.acceptance import TELLING, Acceptance
from specserve.policy.curve import across
from specserve.policy.knowledge import Time
from specserve.policy.rounds import BUCKETS, LARGEST_BATCH, bucket_of, smallest
from specserve.policy.state import Context, Memory, Sample, Tiers, steps_at

#: Age in seconds up to which a pod's own acceptance is taken before a newer one of another pod.
OWN: Final = 10.0
#: Factor by which the demand must change to be followed at once.
JUMP: Final = 2.0
#: Seconds in which the margin shrinks for a step count that stays better, and to what share.
PATIENCE: Final = 60.0
LEAST_MARGIN: Final = 0.2
#: Time constant in seconds after which a load is no longer one of late.
LATELY: Final = 600.0
#: Factor by which step counts must differ in worth to be switched between by a wavering load.
BORDER: Final = 1.3
#: Factor below which a flip is a close call, which noise can turn round.
CLOSE: Final = 1.15
#: Time constant in seconds in which a wavering demand is evened out.
EVENING: Final = 5.0
#: Share by which the demand must be outside a bucket to leave it.
SLACK: Final = 0.1
#: Factor between what two neighbouring batches, or a curve and rounds, show of `r`, from which one
#: of them is doubted: on H200s neighbours differ by up to 1.25.
FAR: Final = 1.4
#: Largest batch that is weighed if the engine does not say how many requests it runs at most.
LARGEST: Final = 1024

Source = Literal["Live", "Estimate", "Calibrated", "Profile"]


@dataclass(frozen=True, slots=True)
class Arm:
    """What one step count is worth at one batch.

    Attributes:
        steps: Draft steps, above 0.
        length: Acceptance length, expected at these steps.
        ratio: Break-even acceptance length `r_s(B)`.
        source: Where `ratio` is from; Estimate is from live rounds of another step count.
    """

    steps: int
    length: float
    ratio: float
    source: Source

    @property
    def value(self) -> float:
        """Tokens per second over those of a live pod that is off."""
        return self.length / self.ratio


def demand_of(context: Context, sample: Sample) -> float:
    """The batch that the demand amounts to in one data-parallel rank: queued requests count."""
    demand = sum(context.load(sample))
    if sample.capacity is not None:
        demand = min(demand, sample.capacity)
    return min(max(1.0, demand / max(context.ranks, 1)), float(LARGEST_BATCH))


def settle(memory: Memory, context: Context, sample: Sample, now: float) -> Memory:
    """Follow the demand: at once where it more than halves or doubles, else evened out.

    The bucket is left only once the demand is clearly outside, so that a load on the border of
    two buckets belongs to one of them.
    """
    demand = demand_of(context, sample)
    batch = memory.batch
    if batch is not None and not sum(context.load(sample)):
        return replace(memory, settled=now)  # an idle engine keeps its table
    if batch is None:
        memory = replace(memory, range=(demand, demand), settled=now)
    lasted = max(0.0, now - memory.settled)
    drift = 1 - math.exp(-lasted / LATELY)
    low, high = memory.range
    low, high = (
        min(demand, low + (demand - low) * drift),
        max(demand, high + (demand - high) * drift),
    )
    memory = replace(memory, range=(low, high))
    if batch is None or not batch / JUMP <= demand <= batch * JUMP:
        return replace(memory, batch=demand, settled=now, bucket=bucket_of(math.ceil(demand)))
    batch += (demand - batch) * (1 - math.exp(-lasted / EVENING))
    bucket = memory.bucket
    if not smallest(bucket) * (1 - SLACK) <= batch <= bucket * (1 + SLACK):
        bucket = bucket_of(math.ceil(batch))
    return replace(memory, batch=batch, settled=now, bucket=bucket)


def batch_of(memory: Memory) -> int:
    """The batch that decisions are about, within its bucket."""
    evened = max(1, round(memory.batch or 1))
    return min(max(evened, smallest(memory.bucket)), memory.bucket) if memory.bucket else evened


def acceptance_of(memory: Memory, context: Context, now: float) -> Acceptance | None:
    """The traffic's acceptance: the pod's own while it is fresh, else the newest of any pod."""
    own, other = memory.counts.acceptance, context.knowledge.acceptance
    if own is None or (other is not None and other.at > own.at and now - own.at > OWN):
        return other
    return own


def live(context: Context, batch: int, steps: int) -> float | None:
    """`r_s(B)` as live engines show it: by the clock once that is trusted, else by round times.

    The clock goes before round times as long as both its paces are of about one time, and later
    as long as round times bear it out. Not below 1, whatever was measured: a round with drafts
    does all that a plain one does.
    """
    shown = _shown(context, batch, steps)
    return None if shown is None else max(1.0, shown)


def _shown(context: Context, batch: int, steps: int) -> float | None:
    paced = pace.compared(context.paces, bucket_of(batch), steps)
    timed = context.knowledge.ratio(batch, steps)
    if paced is None or timed is None:
        return timed if paced is None else paced.ratio
    borne_out = paced.together or abs(timed / paced.ratio - 1) <= pace.BORNE_OUT
    return paced.ratio if paced.trusted and borne_out else timed


def odd(context: Context, batch: int, steps: int) -> bool:
    """Whether `r_s(B)` as measured can hardly be, or is far from what is known beside it."""
    shown = _shown(context, batch, steps)
    if shown is None:
        return False
    if not 1 <= shown <= steps + 1:
        return True
    place = BUCKETS.index(bucket_of(batch))
    beside = BUCKETS[max(place - 1, 0) : place] + BUCKETS[place + 1 : place + 2]
    expected = [
        known
        for each in beside
        if context.knowledge.exact(each, steps)
        and (known := context.knowledge.ratio(each, steps)) is not None
    ]
    if context.curve is not None:
        expected.append(context.curve.ratio(batch, steps))
    return any(not 1 / FAR <= shown / each <= FAR for each in expected)


def sure(context: Context, batch: int, steps: int) -> bool:
    """Whether what rounds of a step count take here was seen more than once, or for long."""
    timed = _timed(context, batch, steps)
    if timed is not None:
        return timed.sure
    paced = pace.find(context.paces, bucket_of(batch), steps)
    return paced is not None and paced.behind >= pace.TRUSTED


def _timed(context: Context, batch: int, steps: int) -> Time | None:
    known = context.knowledge
    return known.of_bucket(bucket_of(batch), steps) or known.time(batch, steps)


def exact(context: Context, batch: int, steps: int) -> bool:
    """Whether `live` is of this very bucket, not of one beside it."""
    paced = pace.compared(context.paces, bucket_of(batch), steps)
    return paced is not None or context.knowledge.exact(batch, steps)


def seen(context: Context, batch: int, steps: int) -> float | None:
    """When rounds of a step count were last measured at a batch, None if they are not known."""
    timed = _timed(context, batch, steps)
    paced = pace.find(context.paces, bucket_of(batch), steps)
    return max((each.seen for each in (timed, paced) if each is not None), default=None)


def ratio(context: Context, batch: int, steps: int) -> tuple[float, Source] | None:
    """`r_s(B)` from the best source there is, None if nothing is known about this batch."""
    known = live(context, batch, steps)
    if known is not None:
        return known, "Live"
    others = {
        other: known
        for other in context.steps
        if other and (known := live(context, batch, other)) is not None
    }
    if others:
        return across(others, steps), "Estimate"
    if context.curve is not None:
        return context.curve.ratio(batch, steps), context.curve.kind
    return None


def weigh(context: Context, acceptance: Acceptance | None, batch: int, steps: int) -> Arm | None:
    """What a step count above 0 is worth at a batch, None if that is not known."""
    if acceptance is None or steps not in context.steps:
        return None
    known = ratio(context, batch, steps)
    return None if known is None else Arm(steps, acceptance.length(steps), *known)


def arms(context: Context, acceptance: Acceptance | None, batch: int) -> tuple[Arm, ...]:
    """All step counts above 0 whose worth at a batch is known."""
    found = (weigh(context, acceptance, batch, steps) for steps in context.steps if steps)
    return tuple(arm for arm in found if arm is not None)


def value_of(known: tuple[Arm, ...], steps: int) -> float | None:
    """Worth of a step count among `arms`, 1 for off, None if not known."""
    if steps == 0:
        return 1.0
    return next((arm.value for arm in known if arm.steps == steps), None)


def best(
    policy: api.Policy,
    context: Context,
    acceptance: Acceptance | None,
    batch: int,
    present: int,
    margin: float | None = None,
) -> int:
    """The step count to have at a batch: the present one unless another is clearly better.

    Clearly: by the margin and one standard error of the acceptance. Step counts never timed here
    are left to probes.

    Args:
        policy: Gives the margin if none is given.
        context: What is known of rounds.
        acceptance: The traffic's.
        batch: The batch.
        present: The step count now.
        margin: Share by which another must be better.
    """
    if margin is None:
        margin = policy.break_even.margin_percent / 100
    known = arms(context, acceptance, batch)
    if acceptance is None or acceptance.verifies < TELLING or not known:
        return present
    worth = value_of(known, present)
    if worth is None:
        return present
    challenger = _challenger(known)
    error = acceptance.error(max(challenger[1], present))
    needed = worth * (1 + margin) * (1 + error)
    return challenger[1] if challenger[0] > needed else present


def gain(known: tuple[Arm, ...], before: int, after: int) -> float | None:
    """Tokens per second of a step count over those of another, None if not known of both."""
    old, new = value_of(known, before), value_of(known, after)
    return new / old if old and new else None


def _challenger(known: tuple[Arm, ...]) -> tuple[float, int]:
    """Worth and steps of the best step count that has been timed, off among them."""
    timed = [(arm.value, arm.steps) for arm in known if arm.source != "Estimate"]
    return max([*timed, (1.0, 0)])


def compare(
    memory: Memory, context: Context, acceptance: Acceptance | None, base: Tiers, now: float
) -> Memory:
    """Remember since when another step count has been better at the present batch."""
    known = arms(context, acceptance, batch_of(memory))
    present = steps_at(base, memory.bucket)
    worth = value_of(known, present)
    value, steps = _challenger(known)
    if not known or worth is None or value <= worth:
        return memory if memory.better is None else replace(memory, better=None)
    if memory.better is not None and memory.better[0] == steps:
        return memory
    return replace(memory, better=(steps, now))


def margin(policy: api.Policy, memory: Memory, now: float) -> float:
    """The margin at the present batch: what has been better for long need not be much better."""
    full = policy.break_even.margin_percent / 100
    if memory.better is None:
        return full
    return full * max(LEAST_MARGIN, 1 - (now - memory.better[1]) / PATIENCE)


def default(policy: api.Policy, context: Context) -> Tiers:
    """What the Threshold strategy does by batch."""
    return threshold.bounded(policy, context.deepest, context.ranks)


def table(
    policy: api.Policy,
    context: Context,
    acceptance: Acceptance | None,
    base: Tiers,
    largest: int,
    present: tuple[int, int],
    patient: float,
) -> Tiers:
    """The best step count of each bucket, made from the table before.

    Args:
        policy: The policy in force.
        context: What is known of rounds.
        acceptance: The traffic's.
        base: The table before.
        largest: Largest batch of a rank.
        present: The present bucket, and the batch in it.
        patient: The margin there.
    """
    wanted = []
    for bucket in BUCKETS:
        if smallest(bucket) > largest:
            break
        now = steps_at(base, bucket)
        if bucket == present[0]:
            steps = best(policy, context, acceptance, present[1], now, patient)
        else:
            steps = best(policy, context, acceptance, bucket, now)
        wanted.append((smallest(bucket), steps))
    return merged(wanted)


def sent(
    context: Context,
    acceptance: Acceptance | None,
    base: Tiers,
    visited: tuple[int, int],
    bucket: int,
    largest: int,
) -> Tiers:
    """A table for the engine, with few borders where the load wavers.

    From the present bucket outwards, a bucket gets the steps of the one before unless its own are
    better by `BORDER`: where the load has been of late every border is crossed to and fro. Those
    right beside the present one always get its steps. Elsewhere the table holds as it is.

    Args:
        context: What is known of rounds.
        acceptance: The traffic's.
        base: The table.
        visited: Smallest and largest bucket of late.
        bucket: The present one.
        largest: Largest batch of a rank.
    """
    place = BUCKETS.index(bucket)
    low = max(BUCKETS.index(visited[0]) - 2, 0)
    high = min(BUCKETS.index(visited[1]) + 2, len(BUCKETS) - 1)
    chosen = {bucket: steps_at(base, bucket)}
    for way in (range(place + 1, len(BUCKETS)), range(place - 1, -1, -1)):
        before = chosen[bucket]
        for index in way:
            each = BUCKETS[index]
            if smallest(each) > largest:
                break
            own = steps_at(base, each)
            if own != before and low <= index <= high:
                known = arms(context, acceptance, each)
                here, there = value_of(known, own), value_of(known, before)
                better = here and there and here > there * BORDER
                if abs(index - place) == 1 or not better:
                    own = before
            before = chosen[each] = own
    return merged(sorted((smallest(each), steps) for each, steps in chosen.items()))


def largest_batch(context: Context, sample: Sample, bucket: int) -> int:
    """Largest batch of one data-parallel rank that is worth a tier; the present one always is."""
    if sample.capacity is None:
        return max(LARGEST, bucket)
    return max(sample.capacity // max(context.ranks, 1), bucket)


def merged(tiers: list[tuple[int, int]]) -> Tiers:
    """Tiers without those that repeat the one before."""
    return tuple(next(group) for _, group in groupby(tiers, key=lambda tier: tier[1]))


def numbers(
    context: Context, known: tuple[Arm, ...], batch: int, sample: Sample
) -> tuple[tuple[str, float], ...]:
    """What a decision rests on, by name."""
    running, queued = context.load(sample)
    load = (
        ("running", float(running)),
        ("queued", float(queued)),
        ("batch", float(batch)),
    )
    weighed = tuple(
        item
        for arm in known
        for item in (
            (f"accept@{arm.steps}", round(arm.length, 3)),
            (f"breakEven@{arm.steps}", round(arm.ratio, 3)),
            (f"value@{arm.steps}", round(arm.value, 3)),
        )
    )
    return load + weighed


def words(
    context: Context,
    sample: Sample,
    acceptance: Acceptance,
    known: tuple[Arm, ...],
    steps: int,
    batch: int,
) -> tuple[str, str]:
    """Why `steps` is right at a batch, as (code, words); `known` must not be empty."""
    if steps == 0:
        tried = [arm for arm in known if arm.source != "Estimate"]
        arm = max(tried or known, key=lambda arm: arm.value)
        code, relation = "BelowBreakEven", "below"
    else:
        arm = next((arm for arm in known if arm.steps == steps), known[-1])
        code, relation = "AboveBreakEven", "above"
    depth = f", {guard.steps(arm.steps)}" if len(known) > 1 else ""
    source = "" if arm.source == "Live" else f" ({_SOURCES[arm.source]})"
    even = f"break-even {arm.ratio:.2f}{source} {where(context, sample, batch)}{depth}"
    if (arm.value > 1) == (steps > 0):
        return code, f"acceptance {arm.length:.2f} {relation} {even}"
    what = f"acceptance {arm.length:.2f}, {even}"
    if acceptance.verifies < TELLING:
        count = round(acceptance.verifies)
        return "TooFewVerifies", f"{what}: {count} verifies are too few to switch"
    return "WithinMargin", f"{what}: too close to switch"


def unknown(
    policy: api.Policy,
    context: Context,
    sample: Sample,
    acceptance: Acceptance | None,
    steps: int,
    batch: int,
) -> str:
    """Why `steps` is in force at a batch where nothing can be weighed yet, in words."""
    at = where(context, sample, batch)
    even = ratio(context, batch, context.deepest)
    if acceptance is None and even is not None:
        source = "" if even[1] == "Live" else f" ({_SOURCES[even[1]]})"
        what = f"acceptance not seen yet, break-even {even[0]:.2f}{source} {at}"
    else:
        what = f"break-even {at} not known yet"
    proposal = threshold.propose(policy, context, sample)
    if (proposal.mode or "On") == ("On" if steps else "Off"):
        return f"{what}, by policy.threshold until then: {proposal.numbers}"
    return f"{what}, as before until then"


def where(context: Context, sample: Sample, batch: int) -> str:
    """The batch that a decision is about, in words."""
    load = sum(context.load(sample))
    rank = "" if context.ranks == 1 else " per rank"
    mean = "" if context.demand is None else " in the mean pod"
    more = ", idle now" if not load else ""
    if sample.capacity is not None and load > sample.capacity:
        more = f" and {load - sample.capacity} more waiting"
    return f"at {batch} in flight{rank}{mean}{more}"


_SOURCES: Final[dict[Source, str]] = {
    "Live": "live rounds",
    "Estimate": "from other step counts",
    "Calibrated": "calibrated",
    "Profile": "profile",
}
