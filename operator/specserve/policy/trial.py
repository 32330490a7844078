"""Whether a flip made things better: tokens per second and request before and after, at one load.

It is the check on all that was assumed: on a curve of another GPU, on bounds set by hand, on what
round times leave out. A flip that lowered it beyond tolerance is taken back, and the mode is held
for a while. A load that changed meanwhile settles nothing, and neither does an engine that ran
dry in between.
"""

from dataclasses import replace
from typing import Final

from specserve import api
from specserve.policy.guard import seconds
from specserve.policy.rounds import Rounds
from specserve.policy.state import Frozen, Rate, Sample, Setting, Trial, Watch

#: Time constant of the rate in seconds.
FADING: Final = 10.0
#: Seconds of one setting that make a rate.
ENOUGH: Final = 5.0
#: Largest relative difference between the loads before and after.
LIKE: Final = 0.25
#: Largest relative difference between acceptance lengths of one traffic.
TRAFFIC: Final = 0.05
#: Seconds after which a flip that could not be judged is forgotten.
FORGOTTEN: Final = 30.0


def observe(
    watch: Watch, rounds: Rounds, running: int, length: float | None, *, probing: bool
) -> Watch:
    """Take in the token count of a read-back.

    Args:
        watch: Before.
        rounds: The read-back.
        running: Requests running.
        length: Acceptance length of the traffic, None if not seen. Other traffic is no like load.
        probing: Whether a probe is under way.
    """
    if rounds.tokens_total is None or running == 0 or probing:
        return replace(watch, base=None)
    base = (rounds.at, rounds.tokens_total)
    if watch.base is None:
        return replace(watch, base=base)
    lasted = rounds.at - watch.base[0]
    won = rounds.tokens_total - watch.base[1]
    if lasted <= 0 or won < 0:
        return replace(watch, base=base)
    new = Rate(won / lasted / running, float(running), lasted, length)
    return replace(watch, base=base, rate=_blend(watch.rate, new))


def idle(watch: Watch) -> Watch:
    """Take in that nothing runs: what was counted across it is no rate."""
    return watch if watch.base is None else replace(watch, base=None)


def _blend(rate: Rate | None, new: Rate) -> Rate:
    if rate is None or abs(new.batch / rate.batch - 1) > LIKE or not _same_traffic(rate, new):
        return new
    behind = rate.seconds + new.seconds
    share = min(1.0, new.seconds / min(FADING, behind))
    return Rate(
        rate.per_request + share * (new.per_request - rate.per_request),
        rate.batch + share * (new.batch - rate.batch),
        behind,
        new.length if rate.length is None else rate.length,
    )


def _same_traffic(rate: Rate, new: Rate) -> bool:
    if rate.length is None or new.length is None:
        return True
    return abs(new.length / rate.length - 1) <= TRAFFIC


def begin(watch: Watch, back: Setting, now: float, predicted: float | None) -> Watch:
    """Watch a flip that is being made."""
    known = watch.rate is not None and watch.rate.seconds >= ENOUGH
    trial = Trial(watch.rate, back, now, predicted) if watch.rate and known else None
    return replace(watch, base=None, rate=None, trial=trial)


def judge(policy: api.Policy, watch: Watch, trial: Trial, now: float) -> tuple[Watch, str | None]:
    """Judge the last flip, if the time has come.

    Returns:
        The watch, and why the flip is to be taken back, None if it is not.
    """
    after = watch.rate
    if after is None or after.seconds < ENOUGH:
        return (replace(watch, trial=None) if now - trial.at > FORGOTTEN else watch), None
    if abs(after.batch / trial.before.batch - 1) > LIKE:
        return replace(watch, trial=None), None
    seen = after.per_request / trial.before.per_request if trial.before.per_request > 0 else None
    watch = replace(watch, trial=None, seen=seen, predicted=trial.predicted)
    if seen is None or seen >= 1 - policy.flip_guard.tolerance_percent / 100:
        return watch, None
    why = f"the last flip lowered tokens per second and request to {seen:.2f} of before"
    if trial.predicted is not None:
        why += f", predicted {trial.predicted:.2f}"
    frozen = Frozen(now + policy.flip_guard.freeze_seconds, after.batch, why)
    return replace(watch, frozen=frozen), why


def thawed(watch: Watch, sample: Sample | None, now: float) -> Watch:
    """End a freeze whose time is over, or whose running requests have halved or doubled.

    The queue is left out: where an engine is full, its length says nothing about the batch.
    """
    frozen = watch.frozen
    if frozen is None:
        return watch
    moved = sample is not None and not frozen.batch / 2 <= sample.running <= frozen.batch * 2
    return replace(watch, frozen=None) if moved or now >= frozen.until else watch


def words(frozen: Frozen, now: float) -> str:
    """Why the mode is held."""
    return f"{frozen.why}, held for {seconds(frozen.until - now)} more"
