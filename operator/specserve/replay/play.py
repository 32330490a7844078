"""The policy played over a trace: the very decisions of the operator, with the trace's clock."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from specserve import api
from specserve.policy import Context, Curve, Memory, Sample, Setting, Verdict, decide
from specserve.replay.engine import MeanEngine
from specserve.replay.trace import MadeUp, Recorded

#: Seconds between two read-backs of a made-up engine, as the operator reads one.
READ_BACK: Final = 2.0


@dataclass(frozen=True, slots=True)
class Moment:
    """One decision.

    Attributes:
        at: Seconds on the trace's clock.
        load: Requests in flight.
        accept: Acceptance length known then, None if none.
        verdict: What was decided.
    """

    at: float
    load: int
    accept: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens of a made-up load.

    Attributes:
        policy: Under the policy.
        always: Under each step count held all the time.
        clairvoyant: Under the best step count of each moment.
    """

    policy: float
    always: dict[int, float]
    clairvoyant: float


def over_recorded(
    policy: api.Policy, trace: Recorded, steps: tuple[int, ...], curve: Curve | None
) -> list[Moment]:
    """What the policy would have decided at each reading.

    The engine of the trace did what it did: a probe finds there only what was recorded.
    """
    context = Context(trace.steps or steps, curve=curve)
    memory = Memory.start()
    moments = []
    for sample in trace.samples:
        if sample.rounds is not None:
            context = replace(context, knowledge=context.knowledge.learn(sample.rounds))
        verdict, memory = decide(policy, memory, sample, sample.at, context)
        moments.append(_moment(sample, memory, verdict))
    return moments


def over_made_up(
    policy: api.Policy, load: MadeUp, engine: MeanEngine, curve: Curve | None
) -> tuple[list[Moment], Outcome]:
    """What the policy does under a made-up load, its engine obeying."""
    period = policy.sample_period_milliseconds / 1000
    context = Context(tuple(sorted(load.steps)), curve=curve)
    memory = Memory.start()
    moments: list[Moment] = []
    setting = Setting(((1, 0),))
    read_at = -READ_BACK
    recheck: float | None = None
    always = dict.fromkeys(context.steps, 0.0)
    clairvoyant = 0.0
    for start, in_flight, accept in load.load(period):
        batch = min(in_flight, load.capacity)
        rates = {steps: engine.rate(batch, accept, steps) for steps in always}
        clairvoyant += period * max(rates.values())
        for steps, rate in rates.items():
            always[steps] += period * rate
        for now, seconds in _turns(start, period, recheck):
            engine.run(now, seconds, batch, accept, setting)
            at = now + seconds
            rounds = None
            if recheck is not None or at - read_at >= READ_BACK:
                rounds, read_at = engine.rounds(at), at
                context = replace(context, knowledge=context.knowledge.learn(rounds))
            queued = in_flight - batch
            sample = Sample(at, at, batch, queued, load.capacity, int(engine.tokens), rounds)
            verdict, memory = decide(policy, memory, sample, at, context)
            setting, recheck = verdict.setting or setting, verdict.recheck
            moments.append(_moment(sample, memory, verdict))
    return moments, Outcome(engine.tokens, always, clairvoyant)


def _turns(start: float, period: float, recheck: float | None) -> Iterator[tuple[float, float]]:
    """The turns of one period: (begin, seconds)."""
    turns = 1 if recheck is None else max(1, round(period / recheck))
    for turn in range(turns):
        yield start + turn * period / turns, period / turns


def _moment(sample: Sample, memory: Memory, verdict: Verdict) -> Moment:
    acceptance = memory.counts.acceptance
    accept = None if acceptance is None else acceptance.counted
    return Moment(sample.at, sample.running + sample.queued, accept, verdict)


def transitions(moments: Iterable[Moment]) -> list[Moment]:
    """The moments at which mode, code or setting changed."""
    found: list[Moment] = []
    for moment in moments:
        before = found[-1].verdict if found else None
        now = moment.verdict
        if before is None or (before.mode, before.code, before.setting) != (
            now.mode,
            now.code,
            now.setting,
        ):
            found.append(moment)
    return found
