"""The plugin's figures on SGLang's own `/metrics`.

SGLang serves what its processes leave in files (prometheus_client's multiprocess mode), so values
are pushed here instead of collected at a scrape.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from specserve_engine.wire import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specserve_engine.control import Control
    from specserve_engine.ranks import GroupState


class Metrics:
    """All `specserve_engine_*` series of one engine."""

    def __init__(self, model_name: str) -> None:
        """Register the series. Call it only once SGLang has chosen the folder for their files."""
        # At its import it decides between one process and many, by SGLang's environment.
        from prometheus_client import Counter, Gauge  # noqa: PLC0415

        self._model_name = model_name
        self._clock = time.monotonic
        self._switches_seen: dict[tuple[int, int], int] = {}
        self._epoch = -1
        self._epoch_since = 0.0

        def gauge(name: str, text: str, *labels: str) -> Any:
            return Gauge(
                f"specserve_engine_{name}",
                text,
                ["model_name", *labels],
                multiprocess_mode="mostrecent",
            )

        self._mode = gauge("mode", "1 for the mode that holds, 0 for the others.", "mode")
        self._epoch_shown = gauge("epoch", "Epoch of the order in force.")
        self._age = gauge("directive_age_seconds", "Time since the epoch in force changed.")
        self._lease = gauge("lease_remaining_seconds", "Until the lease runs out; 0 without one.")
        self._expirations = gauge("lease_expirations", "Leases that ran out since the start.")
        self._controllable = gauge("controllable", "1 if steps can be changed live.")
        self._steps = gauge("active_steps", "Steps of the last batch.", "dp_rank", "tp_rank")
        self._switches = Counter(
            "specserve_engine_switches",
            "Changes of steps since the process began.",
            ["model_name", "dp_rank", "tp_rank"],
        )
        arm = ("dp_rank", "batch_bucket", "steps")
        self._rounds = gauge("window_rounds", "Rounds in the window.", *arm)
        self._accept = gauge("accept_length", "Tokens per request and round.", *arm)
        self._round = gauge(
            "round_seconds", "Time of a decode round in the window.", *arm, "quantile"
        )

    def show(self, control: Control, groups: Sequence[GroupState]) -> None:
        """Show the control core's state and the ranks' last reports."""
        now = self._clock()
        name = self._model_name
        state = control.read_back(now)
        if state["epoch"] != self._epoch:
            self._epoch, self._epoch_since = state["epoch"], now
        for mode in Mode:
            self._mode.labels(name, str(mode)).set(mode == state["mode"])
        self._epoch_shown.labels(name).set(state["epoch"])
        self._age.labels(name).set(now - self._epoch_since if state["epoch"] else 0)
        self._lease.labels(name).set(state["lease"]["remainingSeconds"] or 0)
        self._expirations.labels(name).set(state["lease"]["expirations"])
        self._controllable.labels(name).set(state["controllable"])
        for index, group in enumerate(groups):
            self._show_group(index, group)

    def _show_group(self, index: int, group: GroupState) -> None:
        for rank in group.ranks:
            where = (self._model_name, str(index), str(rank.rank))
            if rank.active_steps is not None:
                self._steps.labels(*where).set(rank.active_steps)
            if rank.switches is not None:
                seen = self._switches_seen.get((index, rank.rank), 0)
                self._switches.labels(*where).inc(max(0, rank.switches - seen))
                self._switches_seen[index, rank.rank] = rank.switches
        for cell in group.stats:
            arm = (self._model_name, str(index), str(cell.batch_bucket), str(cell.steps))
            self._rounds.labels(*arm).set(cell.rounds)
            self._accept.labels(*arm).set(cell.accept_length)
            for quantile, seconds in (
                ("0.05", cell.p5),
                ("0.5", cell.median_round_seconds),
                ("0.95", cell.p95),
            ):
                if seconds is not None:
                    self._round.labels(*arm, quantile).set(seconds)
