"""What the screen shows of each engine, as the engine itself reports it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from specserve import api
from specserve.fleet import Steered
from specserve.local.places import Facts, Place

#: What is not known is not shown as zero.
UNKNOWN: Final = "-"
_MODES: Final[Mapping[str, str]] = {"tiers": "table", "auto": "own policy"}


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, in words.

    Attributes:
        name: What it is called.
        mode: The mode it reports: on, off, table, or its own policy.
        steps: Draft steps of its last rounds; 0 before any while it is off.
        running: Requests running.
        queued: Requests waiting.
        accept: Tokens won per request and verify, the last seen while on.
        rate: Tokens per second between its last two reports.
        lease: Seconds left of its order.
        reason: Why it does what it does, with the numbers.
        trouble: Whether the reason is that something is wrong.
        on: Whether it speculates, None if that is not known.
    """

    name: str
    mode: str = UNKNOWN
    steps: str = UNKNOWN
    running: str = UNKNOWN
    queued: str = UNKNOWN
    accept: str = UNKNOWN
    rate: str = UNKNOWN
    lease: str = UNKNOWN
    reason: str = ""
    trouble: bool = False
    on: bool | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of the table, in the order of `HEADER`."""
        return (
            *(self.name, self.mode, self.steps, self.running, self.queued),
            *(self.accept, self.rate, self.lease),
        )


HEADER: Final = (
    *("engine", "mode", "steps", "running", "queued"),
    *("accepted", "tok/s", "lease s"),
)


def row(
    place: Place, steered: Steered | None, facts: Facts | None, policy: api.Policy, now: float
) -> Row:
    """What is to be shown of an engine.

    Args:
        place: Where it is.
        steered: What the loop knows of it, None before it does.
        facts: What its last read-back says, None before the first.
        policy: The policy in force.
        now: The time, on the clock of the loop.
    """
    if steered is None or not steered.pod.usable:
        trouble = None if steered is None else steered.pod.trouble
        said = "not started yet" if trouble is None else trouble.message
        return Row(place.name, reason=said, trouble=trouble is not None)
    problem = steered.control_error or steered.sample_error
    if facts is None or steered.readback is None:
        said = (
            f"waits for its first answer at {place.admin}" if problem is None else _said(problem)
        )
        return Row(place.name, reason=said, trouble=problem is not None)
    sample = None if steered.stale(policy, now) else steered.sample
    accepted = steered.memory.counts.acceptance
    accept = steered.accept if accepted is None else accepted.counted
    verdict = steered.verdict
    lasts = steered.lease_until - now
    reason = "" if verdict is None else verdict.reason
    if steered.readback.get("controllable") is False:
        problem = ("NotControllable", str(steered.readback.get("reason") or ""))
    return Row(
        name=place.name,
        mode=_MODES.get(facts.mode, facts.mode),
        steps="/".join(map(str, facts.active)) or ("0" if facts.mode == "off" else UNKNOWN),
        running=UNKNOWN if sample is None else str(sample.running),
        queued=UNKNOWN if sample is None else str(sample.queued),
        accept=UNKNOWN if accept is None else f"{accept:.2f}",
        rate=UNKNOWN if facts.rate is None else f"{facts.rate:,.0f}",
        lease=f"{lasts:.0f}" if lasts > 0 else UNKNOWN,
        reason=reason if problem is None else _said(problem),
        trouble=problem is not None,
        on=steered.on(now),
    )


def _said(problem: tuple[str, str]) -> str:
    code, message = problem
    return f"{code}: {message}" if message else code
