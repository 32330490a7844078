"""From readings to knowledge: what is new, how old it is, whether the engine has stalled."""

from dataclasses import replace
from typing import Final

from specserve import api
from specserve.policy import trial
from specserve.policy.state import Memory, Sample

#: Seconds without a token, with requests queued and none running, that make an engine stalled.
#: Longer than any prefill or graph replay seen between two tokens, and short enough that an
#: alarm comes before clients give up.
STALLED_AFTER: Final = 10.0
#: Verifies that make an interval one with traffic, as far as the draft is judged by it.
TRAFFIC: Final = 50
#: Seconds within which crashes add up, and how many there may be while speculating.
CRASH_WINDOW: Final = 3600.0
CRASHES: Final = 2


def is_new(memory: Memory, sample: Sample | None) -> bool:
    """Whether `sample` says more than the readings before it.

    A repeated stamp is the same reading fetched again; one fetched before the latest came late.
    """
    if sample is None or sample.stamp == memory.stamp:
        return False
    return memory.heard is None or sample.at >= memory.heard


def learn(memory: Memory, sample: Sample) -> Memory:
    """Take in a new reading.

    An engine is suspect while requests wait, none runs and no token is made. Any change of the
    token count clears it, also a fall, which means that the counter was reset and has a new base.
    Once stalled, an empty queue is no recovery: clients give up on a dead engine.
    """
    known = memory.tokens is not None and sample.tokens_total is not None
    moved = known and sample.tokens_total != memory.tokens
    suspect = sample.running == 0 and not moved and (sample.queued > 0 or memory.stalled)
    since: float | None = None
    stalled = False
    if suspect:
        first = memory.stalled_since is None
        base = memory.tokens is None and sample.tokens_total is not None
        since = sample.at if first or base else memory.stalled_since
        lasted = sample.at - (sample.at if since is None else since)
        # Without a count nothing proves that no token was made: absent is not zero.
        stalled = memory.stalled or (known and lasted >= STALLED_AFTER)
    return replace(
        memory,
        stamp=sample.stamp,
        heard=sample.at,
        waiting=None,
        stalled_since=since,
        stalled=stalled,
        tokens=memory.tokens if sample.tokens_total is None else sample.tokens_total,
    )


def read(policy: api.Policy, memory: Memory, sample: Sample, now: float, ranks: int = 1) -> Memory:
    """Take in what a newer read-back says of drafts accepted and tokens won.

    Acceptance is not judged in the grace after a cold off, and absent counts are unknown, not
    bad: a method without them is never called ineffective.
    """
    if sample.running == 0:
        memory = replace(memory, watch=trial.idle(memory.watch))
    rounds = sample.rounds
    if rounds is None or (memory.read is not None and rounds.at <= memory.read):
        return memory
    began = memory.since if memory.probing.active is None else memory.probing.active.began
    grace = policy.break_even.grace_milliseconds / 1000
    counts, verifies = memory.counts.learn(rounds, judged=now - began >= grace, batch=memory.batch)
    ineffective = memory.ineffective
    acceptance = counts.acceptance
    if verifies >= TRAFFIC and acceptance is not None:
        bad = acceptance.counted <= policy.draft_guard.accept_length_centi / 100
        ineffective = ineffective + 1 if bad else 0
    watch = trial.observe(
        memory.watch,
        rounds,
        sample.running,
        length=acceptance.counted if acceptance is not None and verifies else None,
        probing=memory.probing.active is not None,
    )
    paces = memory.paces
    if memory.ordered is not None:
        steps = memory.ordered.steps_for(-(-sample.running // max(ranks, 1)))
        paces = paces.learn(rounds, sample.running, steps, ranks, memory.turned)
    return replace(
        memory,
        read=rounds.at,
        counts=counts,
        ineffective=ineffective,
        watch=watch,
        paces=paces,
    )


def crashed(memory: Memory, now: float) -> Memory:
    """Remember that the engine ended while it speculated; too often, and it is left off."""
    recent = tuple(at for at in memory.crashes if at > now - CRASH_WINDOW)
    crashes = (*recent, now)
    return replace(memory, crashes=crashes, crashed=memory.crashed or len(crashes) >= CRASHES)


def pardoned(memory: Memory) -> Memory:
    """Forget the ends of an engine that had another draft, and what that draft won."""
    return replace(
        memory, crashes=(), crashed=False, ineffective=0, counts=replace(memory.counts, at=None)
    )
