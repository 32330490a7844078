"""The chain of checks from a reading to a verdict; the first hit decides."""

import math
from dataclasses import replace
from typing import Final

from specserve import api
from specserve.policy import breakeven, evidence, guard, probe, threshold, trial
from specserve.policy.guard import seconds
from specserve.policy.rounds import bucket_of
from specserve.policy.state import (
    Context,
    DraftKv,
    Memory,
    Mode,
    Probe,
    Sample,
    Setting,
    Verdict,
    steps_at,
)

_PINS: Final[dict[str, Mode]] = {"On": "On", "Off": "Off"}
_ANYWHERE: Final = Context()
#: Seconds between two tables that differ only where the load is not.
TABLE_PERIOD: Final = 10.0
#: Mean length of offs in seconds below which the draft's KV cache is kept filled: about a request.
SHORT_OFF: Final = 10.0


def decide(
    policy: api.Policy,
    memory: Memory,
    sample: Sample | None,
    now: float,
    context: Context = _ANYWHERE,
) -> tuple[Verdict, Memory]:
    """Decide what one pod's engine is to do.

    Pins come first and ask nobody: a person's word holds for a stalled or silent engine too.
    Then an engine that keeps ending while it speculates stays off, a stalled engine holds, and
    one whose load is not known does as `onSignalLoss` says. A flip that made things worse is
    taken back, and a draft that is never accepted is left out. Only then does the strategy
    speak. A flip needs a reading that has not been judged before, the end of the dwell, and
    budget.

    Mode Observe decides like Auto, without probes; that nothing is sent is the caller's part.

    Args:
        policy: The policy in force; it may differ from call to call.
        memory: What the call before returned for this engine process.
        sample: The latest reading, the same again if there is none newer, None if there is none.
        now: The time, on the clock of `sample.at`.
        context: What else is known.

    Returns:
        The verdict, and the memory for the next call.
    """
    new = sample is not None and evidence.is_new(memory, sample)
    memory = _update(policy, memory, sample, new, now, context.ranks)
    if memory.paces.known:
        context = replace(context, paces=memory.paces.known)
    verdict, memory = _judge(policy, memory, sample, new, now, context)
    if verdict.mode is None:
        return verdict, memory
    setting = verdict.setting or _plain(policy, memory, context, verdict.mode)
    numbers = verdict.numbers
    if not numbers and sample is not None:
        numbers = threshold.numbers(policy, context, sample)
    verdict = replace(verdict, setting=setting, numbers=numbers)
    if memory.ordered == setting:
        return verdict, memory
    batch = breakeven.batch_of(memory)
    if memory.ordered is None or memory.ordered.steps_for(batch) != setting.steps_for(batch):
        memory = replace(memory, turned=now)
    return verdict, replace(memory, ordered=setting)


def _update(
    policy: api.Policy,
    memory: Memory,
    sample: Sample | None,
    new: bool,
    now: float,
    ranks: int,
) -> Memory:
    """Take in what is new before anything is judged."""
    if memory.since > now:
        # A recorded switch from a clock ahead of ours must not stretch the dwell.
        memory = replace(memory, since=now)
    if sample is not None and new:
        memory = evidence.learn(memory, sample)
    elif memory.heard is None and memory.waiting is None:
        memory = replace(memory, waiting=now)
    if sample is not None:
        memory = evidence.read(policy, memory, sample, now, ranks)
    watch = trial.thawed(memory.watch, sample, now)
    return memory if watch is memory.watch else replace(memory, watch=watch)


def _judge(
    policy: api.Policy,
    memory: Memory,
    sample: Sample | None,
    new: bool,
    now: float,
    context: Context,
) -> tuple[Verdict, Memory]:
    lost = sample is None or now - _heard(memory, now) > policy.stale_after_seconds
    pin = _PINS.get(policy.mode)
    if pin is not None:
        load = "load unknown"
        if sample is not None and not lost:
            load = threshold.load(policy, context, sample)
        memory = _unwatched(memory)
        return _enter(memory, pin, f"Pinned{pin}", f"pinned by policy.mode, {load}", now)
    if memory.crashed:
        memory = _unwatched(memory)
        why = "the engine ended repeatedly while it speculated; change draft to try again"
        return _enter(memory, "Off", "CrashedWhileOn", why, now)
    looked = memory.probing.active
    if looked is not None and (memory.stalled or lost or policy.mode != "Auto"):
        memory = _withdraw(policy, memory, looked, now)
    if memory.stalled:
        return _hold(policy, memory, "EngineStalled", _silence(memory, now))
    if sample is None or lost:
        return _blind(policy, memory, now)
    if memory.stalled_since is not None:
        # Speculation wins or loses nothing while nothing runs, and this may become a stall.
        return _hold(policy, memory, "NothingRunning", f"0 running with {sample.queued} queued")
    return _see(policy, memory, sample, new, now, context)


def _see(
    policy: api.Policy,
    memory: Memory,
    sample: Sample,
    new: bool,
    now: float,
    context: Context,
) -> tuple[Verdict, Memory]:
    """Judge on a load that is known: the last flip, the draft, then the strategy's word."""
    tried = memory.watch.trial
    if tried is not None:
        watch, regret = trial.judge(policy, memory.watch, tried, now)
        memory = replace(memory, watch=watch)
        if regret is not None:
            return _take_back(policy, memory, sample, context, tried.back, regret, now)
    looked = memory.probing.active
    if looked is not None and not probe.over(memory, looked, sample, context, now):
        return _look(memory, looked)
    if memory.ineffective >= policy.draft_guard.windows and policy.draft_guard.action == "Off":
        return _without_draft(policy, memory, sample, now, context)
    if policy.strategy == "BreakEven":
        return _weigh(policy, memory, sample, new, now, context)
    if looked is not None:
        memory = _withdraw(policy, memory, looked, now, changed=True)
    return _compare(policy, memory, sample, new, now, context)


def _compare(
    policy: api.Policy,
    memory: Memory,
    sample: Sample,
    new: bool,
    now: float,
    context: Context,
) -> tuple[Verdict, Memory]:
    """Let the bounds of the Threshold strategy speak on a load that is known."""
    proposal = threshold.propose(policy, context, sample)
    if memory.mode is None:
        mode: Mode = "Off" if proposal.mode == "Off" else "On"
        return _enter(memory, mode, "FirstReading", f"first reading, {proposal.numbers}", now)
    if proposal.mode is None:
        return _hold(policy, memory, proposal.code, proposal.numbers)
    if proposal.mode != memory.mode and not new:
        silent = seconds(now - _heard(memory, now))
        return _hold(
            policy, memory, "AwaitingReading", f"{proposal.numbers}, no new reading for {silent}"
        )
    return _guarded(policy, memory, proposal.mode, proposal.code, proposal.numbers, now)


def _weigh(
    policy: api.Policy,
    memory: Memory,
    sample: Sample,
    new: bool,
    now: float,
    context: Context,
) -> tuple[Verdict, Memory]:
    """Let the BreakEven strategy speak on a load that is known."""
    looked = memory.probing.active
    acceptance = breakeven.acceptance_of(memory, context, now)
    memory = breakeven.settle(memory, context, sample, now)
    bucket, batch = memory.bucket, breakeven.batch_of(memory)
    low, high = (bucket_of(math.ceil(end)) for end in memory.range)
    weighed = (memory.read, bucket, low, high)
    if looked is not None or memory.weighed != weighed or not memory.tiers:
        largest = breakeven.largest_batch(context, sample, bucket)
        table = memory.table or breakeven.default(policy, context)
        memory = breakeven.compare(memory, context, acceptance, table, now)
        patient = breakeven.margin(policy, memory, now)
        table = breakeven.table(
            policy, context, acceptance, table, largest, (bucket, batch), patient
        )
        tiers = breakeven.sent(context, acceptance, table, (low, high), bucket, largest)
        memory = replace(memory, table=table, tiers=tiers, weighed=weighed)
    steps = steps_at(memory.tiers, bucket)
    known = breakeven.arms(context, acceptance, batch)
    if acceptance is not None and known:
        code, why = breakeven.words(context, sample, acceptance, known, steps, batch)
    else:
        code = "Learning"
        why = breakeven.unknown(policy, context, sample, acceptance, steps, batch)
    setting = Setting(memory.tiers, _draft_kv(policy, memory))
    verdict = Verdict(
        "On" if steps else "Off",
        code,
        f"{'on' if steps else 'off'}: {why}",
        flip=False,
        setting=setting,
        numbers=breakeven.numbers(context, known, batch, sample),
    )
    if looked is not None:
        return _looked(policy, memory, looked, verdict, steps, known, now)
    ordered = memory.ordered
    if ordered is None or memory.mode is None:
        return verdict, _flipped(replace(memory, tabled=now), "On" if steps else "Off", now)
    present = ordered.steps_for(batch)
    if (present > 0) != (memory.mode == "On"):
        # The engine followed its table to where the load went: no decision, no flip.
        memory = replace(memory, mode="On" if present else "Off")
    begun = None
    if steps == present or not known:
        # Where nothing is known a look tells more than what the bounds would do.
        begun = probe.due(policy, memory, sample, context, now, present=present)
    if begun is not None:
        return _begin(memory, begun, now)
    if steps != present:
        return _turn(policy, memory, verdict, steps, known, new, now, ordered=ordered)
    if setting != ordered and now - memory.tabled < TABLE_PERIOD:
        return replace(verdict, setting=ordered), memory
    return verdict, (memory if setting == ordered else replace(memory, tabled=now))


def _turn(
    policy: api.Policy,
    memory: Memory,
    verdict: Verdict,
    steps: int,
    known: tuple[breakeven.Arm, ...],
    new: bool,
    now: float,
    *,
    ordered: Setting,
) -> tuple[Verdict, Memory]:
    """Flip to the steps of a verdict, unless something forbids it."""
    present = ordered.steps_for(breakeven.batch_of(memory))
    predicted = breakeven.gain(known, present, steps)
    close = predicted is not None and predicted < breakeven.CLOSE
    refused = _refusal(policy, memory, new, now)
    if refused is None and close:
        refused = guard.unrest(policy, memory, now)
    if refused is not None:
        held = replace(verdict, setting=ordered)
        why = verdict.reason.partition(": ")[2]
        return _held(memory, held, refused[0], f"{why}, {refused[1]}")
    memory = replace(
        guard.stirred(memory, now) if close else memory,
        watch=trial.begin(memory.watch, ordered, now, predicted),
        probing=memory.probing if close else probe.restarted(memory.probing, now),
        tabled=now,
    )
    mode: Mode = "On" if steps else "Off"
    return replace(verdict, flip=True), _flipped(memory, mode, now, counted=True)


def _flipped(memory: Memory, mode: Mode, now: float, *, counted: bool = False) -> Memory:
    """Memory of being in `mode` from now on."""
    lasted = memory.off_lasted
    if memory.mode == "Off" and mode == "On" and memory.since > float("-inf"):
        off = now - memory.since
        lasted = off if lasted is None else (lasted + off) / 2
    if counted:
        memory = guard.spent(memory, now)
    return replace(memory, mode=mode, since=now, off_lasted=lasted)


# -- probes -----------------------------------------------------------------------------------


def _begin(memory: Memory, begun: Probe, now: float) -> tuple[Verdict, Memory]:
    memory = guard.spent(memory, now)
    return _look(replace(memory, probing=replace(memory.probing, active=begun)), begun)


def _look(memory: Memory, looked: Probe) -> tuple[Verdict, Memory]:
    mode: Mode = "On" if looked.steps else "Off"
    how = f"at {guard.steps(looked.steps)}" if looked.steps else "without drafts"
    return (
        Verdict(
            mode,
            "Probing",
            f"{mode.lower()}: short look {how}: {looked.why}",
            flip=False,
            setting=Setting(((1, looked.steps),)),
            fallback=looked.back,
            probe=True,
            recheck=probe.LOOK,
        ),
        memory,
    )


def _looked(
    policy: api.Policy,
    memory: Memory,
    looked: Probe,
    verdict: Verdict,
    steps: int,
    known: tuple[breakeven.Arm, ...],
    now: float,
) -> tuple[Verdict, Memory]:
    """End a probe by what it has told."""
    before = looked.back.steps_for(breakeven.batch_of(memory))
    kept = breakeven.gain(known, before, looked.steps)
    loss = probe.UNKNOWN_LOSS if kept is None else 1 - kept
    changed = steps != before
    predicted = breakeven.gain(known, before, steps)
    close = predicted is not None and predicted < breakeven.CLOSE
    probing = probe.ended(
        policy, memory.probing, looked, now, loss=loss, changed=changed and not close
    )
    memory = replace(memory, probing=probing, tabled=now)
    if not changed:
        return replace(verdict, probe=True), guard.spent(memory, now)
    watch = trial.begin(memory.watch, looked.back, now, predicted)
    if close:
        memory = guard.stirred(memory, now)
    # The step count looked at runs already: its flip was counted when the probe began.
    mode: Mode = "On" if steps else "Off"
    memory = _flipped(replace(memory, watch=watch), mode, now, counted=steps != looked.steps)
    return replace(verdict, flip=True), memory


def _withdraw(
    policy: api.Policy, memory: Memory, looked: Probe, now: float, *, changed: bool = False
) -> Memory:
    """End a probe that cannot be judged here, or whose outcome decides nothing by itself."""
    loss = probe.UNKNOWN_LOSS
    probing = probe.ended(policy, memory.probing, looked, now, loss=loss, changed=changed)
    memory = guard.spent(memory, now)
    return replace(memory, probing=probing, ordered=looked.back, turned=now)


# -- guards -----------------------------------------------------------------------------------


def _without_draft(
    policy: api.Policy, memory: Memory, sample: Sample, now: float, context: Context
) -> tuple[Verdict, Memory]:
    """Stay off while the draft wins nothing, and look again now and then."""
    memory = breakeven.settle(memory, context, sample, now)
    looked = memory.probing.active
    if looked is not None:
        memory = _withdraw(policy, memory, looked, now)
    limit = policy.draft_guard.accept_length_centi / 100
    why = (
        f"the draft wins nothing, acceptance at most {limit:.2f} in {memory.ineffective} "
        "readings with traffic"
    )
    if memory.mode == "Off" and memory.ordered is not None:
        off = replace(memory, ordered=Setting(((1, 0),), _draft_kv(policy, memory)))
        begun = probe.due(policy, off, sample, context, now, present=0)
        if begun is not None:
            return _begin(off, begun, now)
    verdict, memory = _guarded(policy, memory, "Off", "DraftIneffective", why, now)
    if verdict.mode == "Off":
        verdict = replace(verdict, setting=Setting(((1, 0),), _draft_kv(policy, memory)))
    return verdict, memory


def _take_back(
    policy: api.Policy,
    memory: Memory,
    sample: Sample,
    context: Context,
    back: Setting,
    why: str,
    now: float,
) -> tuple[Verdict, Memory]:
    """Undo a flip that made things worse."""
    demand = math.ceil(breakeven.demand_of(context, sample))
    mode: Mode = "On" if back.steps_for(demand) else "Off"
    if policy.strategy == "BreakEven":
        memory = replace(memory, table=back.tiers, tabled=now)
    memory = _flipped(memory, mode, now, counted=True)
    memory = replace(memory, probing=probe.restarted(memory.probing, now))
    reason = f"{mode.lower()}: taken back, {why}"
    return Verdict(mode, "FlipReverted", reason, flip=True, setting=back), memory


def _refusal(policy: api.Policy, memory: Memory, new: bool, now: float) -> tuple[str, str] | None:
    """Why the mode must not flip now, as (code, words), or None if it may."""
    if memory.watch.frozen is not None:
        return "FlipFrozen", trial.words(memory.watch.frozen, now)
    if not new:
        return "AwaitingReading", f"no new reading for {seconds(now - _heard(memory, now))}"
    return guard.refusal(policy, memory, now)


def _heard(memory: Memory, now: float) -> float:
    """When the pod was last heard of: its latest reading, else when waiting for one began."""
    if memory.heard is not None:
        return memory.heard
    return now if memory.waiting is None else memory.waiting


def _silence(memory: Memory, now: float) -> str:
    since = now if memory.stalled_since is None else memory.stalled_since
    return f"engine stalled, requests waited, 0 running and no token for {seconds(now - since)}"


def _blind(policy: api.Policy, memory: Memory, now: float) -> tuple[Verdict, Memory]:
    """No fresh reading. One that is merely late is not a loss yet, so the mode holds till then."""
    age = now - _heard(memory, now)
    limit = policy.stale_after_seconds
    if memory.heard is None:
        code, numbers = "NoSamples", f"no reading for {seconds(age)}, limit {limit} s"
    else:
        code = "SamplesStale" if age > limit else "NoSamples"
        numbers = f"last reading {seconds(age)} old, limit {limit} s"
    if policy.on_signal_loss == "Hold" or age <= limit:
        return _hold(policy, memory, code, numbers)
    # What happens while nothing can be read can not be watched either.
    mode = policy.on_signal_loss
    numbers += f", onSignalLoss is {mode}"
    return _guarded(policy, memory, mode, code, numbers, now, watched=False)


def _guarded(
    policy: api.Policy,
    memory: Memory,
    mode: Mode,
    code: str,
    numbers: str,
    now: float,
    *,
    watched: bool = True,
) -> tuple[Verdict, Memory]:
    """Enter `mode` unless a freeze, dwell or budget forbid it, and watch what comes of it."""
    if memory.mode is not None and memory.mode != mode:
        refused = _refusal(policy, memory, new=True, now=now)
        if refused is not None:
            return _hold(policy, memory, refused[0], f"{numbers}, {refused[1]}")
        if memory.ordered is not None and watched:
            watch = trial.begin(memory.watch, memory.ordered, now, None)
            memory = replace(memory, watch=watch, probing=probe.restarted(memory.probing, now))
    return _enter(memory, mode, code, numbers, now)


def _unwatched(memory: Memory) -> Memory:
    """Memory without probe, trial and freeze: nobody asks whether a person's word pays."""
    watch = replace(memory.watch, trial=None, frozen=None)
    return replace(memory, watch=watch, probing=replace(memory.probing, active=None))


def _enter(
    memory: Memory, mode: Mode, code: str, numbers: str, now: float
) -> tuple[Verdict, Memory]:
    """Be in `mode` from now on, counting a flip if another mode was known."""
    flip = memory.mode is not None and memory.mode != mode
    if memory.mode != mode:
        memory = _flipped(memory, mode, now, counted=flip)
    return Verdict(mode, code, f"{mode.lower()}: {numbers}", flip), memory


def _hold(policy: api.Policy, memory: Memory, code: str, numbers: str) -> tuple[Verdict, Memory]:
    verdict = Verdict(memory.mode, code, "", flip=False, setting=_present(policy, memory))
    return _held(memory, verdict, code, numbers)


def _held(memory: Memory, verdict: Verdict, code: str, numbers: str) -> tuple[Verdict, Memory]:
    held = "hold" if memory.mode is None else f"hold {memory.mode.lower()}"
    return replace(verdict, mode=memory.mode, code=code, reason=f"{held}: {numbers}"), memory


# -- settings ---------------------------------------------------------------------------------


def _present(policy: api.Policy, memory: Memory) -> Setting | None:
    """What holding means: under BreakEven the order in force, else what the mode now means."""
    return memory.ordered if policy.strategy == "BreakEven" else None


def _plain(policy: api.Policy, memory: Memory, context: Context, mode: Mode) -> Setting:
    """What a mode means without a table of the BreakEven strategy."""
    kv = _draft_kv(policy, memory)
    return Setting(((1, 0),) if mode == "Off" else threshold.tiers(policy, context.deepest), kv)


def _draft_kv(policy: api.Policy, memory: Memory) -> DraftKv:
    """What off does to the draft's KV cache: kept filled where offs have been short."""
    if policy.draft_kv != "Auto":
        return policy.draft_kv
    short = memory.off_lasted is not None and memory.off_lasted < SHORT_OFF
    return "Warm" if short else "Cold"
