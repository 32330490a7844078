"""The chain of checks from a reading to a verdict; the first hit decides."""

from dataclasses import replace
from typing import Final

from specserve import api
from specserve.policy import evidence, guard, threshold
from specserve.policy.guard import seconds
from specserve.policy.state import Memory, Mode, Sample, Verdict

_PINS: Final[dict[str, Mode]] = {"On": "On", "Off": "Off"}


def decide(
    policy: api.Policy, memory: Memory, sample: Sample | None, now: float
) -> tuple[Verdict, Memory]:
    """Decide the mode of one pod.

    Pins come first and ask nobody: a person's word holds for a stalled or silent engine too.
    Then a stalled engine holds, then one whose load is not known does as `onSignalLoss` says;
    only then do the bounds speak. A flip needs a reading that has not been judged before, the
    end of the dwell, and budget.

    Mode Observe decides like Auto; that nothing is sent is the caller's part.

    Args:
        policy: The policy in force; it may differ from call to call.
        memory: What the call before returned for this engine process.
        sample: The latest reading, the same again if there is none newer, None if there is none.
        now: The time, on the clock of `sample.at`.

    Returns:
        The verdict, and the memory for the next call.
    """
    new = sample is not None and evidence.is_new(memory, sample)
    return _judge(policy, _update(memory, sample if new else None, now), sample, new, now)


def _update(memory: Memory, news: Sample | None, now: float) -> Memory:
    """Take in what is new before anything is judged."""
    if memory.since > now:
        # A recorded switch from a clock ahead of ours must not stretch the dwell.
        memory = replace(memory, since=now)
    if news is not None:
        return evidence.learn(memory, news)
    if memory.heard is None and memory.waiting is None:
        return replace(memory, waiting=now)
    return memory


def _judge(
    policy: api.Policy, memory: Memory, sample: Sample | None, new: bool, now: float
) -> tuple[Verdict, Memory]:
    lost = sample is None or now - _heard(memory, now) > policy.stale_after_seconds
    pin = _PINS.get(policy.mode)
    if pin is not None:
        load = "load unknown" if sample is None or lost else threshold.load(policy, sample)
        return _enter(memory, pin, f"Pinned{pin}", f"pinned by policy.mode, {load}", now)
    if memory.stalled:
        return _hold(memory, "EngineStalled", _silence(memory, now))
    if sample is None or lost:
        return _blind(policy, memory, now)
    if memory.stalled_since is not None:
        # Speculation wins or loses nothing while nothing runs, and this may become a stall.
        return _hold(memory, "NothingRunning", f"0 running with {sample.queued} queued")
    return _weigh(policy, memory, sample, new, now)


def _weigh(
    policy: api.Policy, memory: Memory, sample: Sample, new: bool, now: float
) -> tuple[Verdict, Memory]:
    """Let the bounds speak on a load that is known."""
    proposal = threshold.propose(policy, sample)
    if memory.mode is None:
        mode: Mode = "Off" if proposal.mode == "Off" else "On"
        return _enter(memory, mode, "FirstReading", f"first reading, {proposal.numbers}", now)
    if proposal.mode is None:
        return _hold(memory, proposal.code, proposal.numbers)
    if proposal.mode != memory.mode and not new:
        silent = seconds(now - _heard(memory, now))
        return _hold(memory, "AwaitingReading", f"{proposal.numbers}, no new reading for {silent}")
    return _guarded(policy, memory, proposal.mode, proposal.code, proposal.numbers, now)


def _heard(memory: Memory, now: float) -> float:
    """When the pod was last heard of: its latest reading, else when waiting for one began."""
    if memory.heard is not None:
        return memory.heard
    return now if memory.waiting is None else memory.waiting


def _silence(memory: Memory, now: float) -> str:
    since = now if memory.stalled_since is None else memory.stalled_since
    return f"engine stalled, requests queued, 0 running and no token for {seconds(now - since)}"


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
        return _hold(memory, code, numbers)
    return _guarded(policy, memory, policy.on_signal_loss, code, numbers, now)


def _guarded(
    policy: api.Policy, memory: Memory, mode: Mode, code: str, numbers: str, now: float
) -> tuple[Verdict, Memory]:
    """Enter `mode` unless dwell or budget forbid it."""
    if memory.mode is not None and memory.mode != mode:
        refused = guard.refusal(policy, memory, now)
        if refused is not None:
            return _hold(memory, refused[0], f"{numbers}, {refused[1]}")
    return _enter(memory, mode, code, numbers, now)


def _enter(
    memory: Memory, mode: Mode, code: str, numbers: str, now: float
) -> tuple[Verdict, Memory]:
    """Be in `mode` from now on, counting a flip if another mode was known."""
    flip = memory.mode is not None and memory.mode != mode
    if memory.mode != mode:
        flips = (*guard.recent(memory.flips, now), now) if flip else memory.flips
        memory = replace(memory, mode=mode, since=now, flips=flips)
    return Verdict(mode, code, f"{mode.lower()}: {numbers}", flip), memory


def _hold(memory: Memory, code: str, numbers: str) -> tuple[Verdict, Memory]:
    held = "hold" if memory.mode is None else f"hold {memory.mode.lower()}"
    return Verdict(memory.mode, code, f"{held}: {numbers}", flip=False), memory
