"""What a live server shows of itself. Pure values; every part may be missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was gathered from one server.

    Attributes:
        info: SGLang's `/server_info`; empty if there is none. Holds keys: never shown as a whole.
        open_to_all: Whether `/server_info` answers without any key; None if that was not asked.
        loads: Entries of `/v1/loads`, one for each data-parallel rank; empty if there is none.
        metrics: Status of `/metrics`, None if it gave no answer.
        series: Sums of the series of `/metrics` that are looked at, by name and by the value of
            the label `mode` where that is told apart (`name{mode}`); only those that are there.
        plugin: Read-back of the SpecServe plugin; empty if there is none.
        no_plugin: Why there is no read-back, in one line.
    """

    info: Mapping[str, Any] = field(default_factory=dict, repr=False)
    open_to_all: bool | None = None
    loads: Sequence[Mapping[str, Any]] = ()
    metrics: int | None = None
    series: Mapping[str, float] = field(default_factory=dict)
    plugin: Mapping[str, Any] = field(default_factory=dict)
    no_plugin: str = ""

    @property
    def states(self) -> Sequence[Mapping[str, Any]]:
        """What the schedulers say of themselves inside of `/server_info`."""
        states = self.info.get("internal_states")
        return [s for s in states if isinstance(s, dict)] if isinstance(states, list) else []

    @property
    def has_draft(self) -> bool | None:
        """Whether a draft is loaded; None if that is not to be seen."""
        if "speculative_algorithm" in self.info:
            return bool(self.info["speculative_algorithm"])
        if self.plugin:
            return True if self.plugin.get("controllable") else None
        return None

    @property
    def on_cpu(self) -> bool:
        """Whether the server says that it runs on a CPU."""
        return self.info.get("device") == "cpu"

    def whole(self, name: str) -> int | None:
        """A whole number of the server's settings, None if it is not shown."""
        value = self.info.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def groups(self) -> int:
        """Data-parallel groups; 1 if not shown."""
        return max(1, self.whole("dp_size") or len(self.loads))

    @property
    def cap(self) -> int | None:
        """Most requests that run at once in one data-parallel group, None if not shown."""
        for entry, name in (
            *((state, "effective_max_running_requests_per_dp") for state in self.states),
            *((load, "max_running_requests") for load in self.loads),
        ):
            value = entry.get(name)
            if isinstance(value, int) and value > 0:
                return value
        return None
