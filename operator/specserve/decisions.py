"""The decision log: what was decided for the pods of a SpecServe, and why. Pure.

In memory, bounded, for "why is it off?" an hour later. Changes of mode are kept apart from all
else, so that a load that wanders between two reasons does not push them out.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specserve.policy import Setting, Verdict

#: Entries of each kind that are kept of one SpecServe: changes of mode, and all others.
KEPT: Final = 100
#: Fewest of each kind, however many SpecServes there are.
KEPT_LEAST: Final = 10
#: Entries of all SpecServes together; some 500 bytes each.
KEPT_TOTAL: Final = 40_000
#: Switches that the status keeps on record, and the longest reason that its schema takes.
ON_RECORD: Final = 5
LONGEST_REASON: Final = 512
_ORDER: Final = ("time", "pod", "mode", "reason")


@dataclass(frozen=True, slots=True)
class Decision:
    """One verdict that differs from the one before it.

    Attributes:
        at: Wall-clock seconds.
        pod: Whose.
        verdict: What was decided, with its numbers.
        what: What differs: `mode`, `probe`, `setting` or `reason`; `first` without any before.
    """

    at: float
    pod: str
    verdict: Verdict
    what: str


@dataclass(frozen=True, slots=True)
class Switch:
    """A change that an engine has confirmed.

    Attributes:
        at: Wall-clock seconds.
        pod: Whose engine.
        mode: What it does since, `On` or `Off`.
        reason: Why, in one line.
    """

    at: float
    pod: str
    mode: str
    reason: str


def difference(before: Verdict | None, after: Verdict) -> str:
    """What is new about a verdict, as in `Decision`; empty if nothing is."""
    if before is None:
        return "first"
    if after.probe or (before.probe and not after.flip):
        known = (before.mode, before.code, before.setting)
        return "probe" if known != (after.mode, after.code, after.setting) else ""
    if before.mode != after.mode or after.flip:
        return "mode"
    if before.setting != after.setting:
        return "setting"
    return "reason" if before.code != after.code else ""


def room(logs: int) -> int:
    """How many entries of each kind may be kept where there are so many logs."""
    return min(KEPT, max(KEPT_LEAST, KEPT_TOTAL // (2 * max(logs, 1))))


class Log:
    """The decisions of one SpecServe, the oldest forgotten first."""

    __slots__ = ("_modes", "_others", "_switches")

    def __init__(self) -> None:
        self._modes: deque[Decision] = deque(maxlen=KEPT)
        self._others: deque[Decision] = deque(maxlen=KEPT)
        self._switches: deque[Switch] = deque(maxlen=ON_RECORD)

    def add(self, decision: Decision, most: int = KEPT) -> None:
        """Take in a decision, and keep so many of its kind at most."""
        kept = self._modes if decision.what in {"mode", "first"} else self._others
        kept.append(decision)
        while len(kept) > most:
            kept.popleft()

    def switched(self, switch: Switch) -> None:
        """Take in a confirmed change."""
        self._switches.append(switch)

    @property
    def entries(self) -> list[Decision]:
        """All that is kept, the oldest first. May be asked for from another thread."""
        return sorted((*self._modes.copy(), *self._others.copy()), key=lambda one: one.at)

    @property
    def switches(self) -> tuple[Switch, ...]:
        """The last confirmed changes, the oldest first."""
        return tuple(self._switches)

    def __len__(self) -> int:
        return len(self._modes) + len(self._others)


def to_json(decisions: Iterable[Decision], at_iso: Any) -> list[dict[str, Any]]:
    """The form in which the operator's endpoint tells them.

    Args:
        decisions: The decisions.
        at_iso: Turns wall-clock seconds into RFC 3339.
    """
    return [
        {
            "time": at_iso(one.at),
            "pod": one.pod,
            "what": one.what,
            "mode": one.verdict.mode,
            "code": one.verdict.code,
            "reason": one.verdict.reason,
            "setting": _setting(one.verdict.setting),
            "probe": one.verdict.probe,
            "numbers": dict(one.verdict.numbers),
        }
        for one in decisions
    ]


def _setting(setting: Setting | None) -> dict[str, Any] | None:
    if setting is None:
        return None
    return {
        "tiers": [{"minBatch": least, "steps": steps} for least, steps in setting.tiers],
        "draftKv": setting.draft_kv,
    }


def recent(
    before: Sequence[Mapping[str, Any]], switches: Iterable[Switch], at_iso: Any
) -> list[dict[str, Any]]:
    """The last switches for the status: those on record, and those seen by this process."""
    known = [dict(entry) for entry in before]
    for switch in switches:
        entry = {
            "time": at_iso(switch.at),
            "pod": switch.pod,
            "mode": switch.mode,
            "reason": switch.reason[:LONGEST_REASON],
        }
        if entry not in known:
            known.append(entry)
    # In a total order: among switches of one second the same ones are kept at every look.
    return sorted(known, key=lambda entry: [str(entry.get(name)) for name in _ORDER])[-ON_RECORD:]
