"""From readings to knowledge: what is new, how old it is, whether the engine has stalled."""

from dataclasses import replace
from typing import Final

from specserve.policy.state import Memory, Sample

#: Seconds without a token, with requests queued and none running, that make an engine stalled.
#: Longer than any prefill or graph replay seen between two tokens, and short enough that an
#: alarm comes before clients give up.
STALLED_AFTER: Final = 10.0


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
