"""The operator of one engine in virtual time: sample, read back, decide, order.

Everything that the policy hears comes from the engine as the operator would get it: its load, and
the read-back that the plugin's own `RoundStats` makes of the rounds that were played. Everything
that it orders goes through the wire format.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specserve import signals
from specserve.policy import Context, Knowledge, Memory, Rounds, Sample, decide, directive
from specserve_engine.rounds import RoundStats
from specserve_engine.wire import parse_directive
from specserve_sim.model import upstream_default
from tests.bench.regret.virtual import CAPACITY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specserve import api
    from specserve.policy import Curve
    from specserve_engine.wire import Setting
    from tests.bench.regret.virtual import Rows, VirtualEngine

SAMPLE_SECONDS = 0.5
READ_BACK_SECONDS = 2.0
ORDER_SECONDS = 0.02
"""From a verdict to the engine's obeying it: measured medians are 2 to 40 ms over HTTP."""


@dataclass(frozen=True, slots=True)
class Said:
    """A verdict that differs from the one before it, for whoever asks why."""

    at: float
    code: str
    reason: str
    tiers: tuple[tuple[int, int], ...]
    probe: bool


class Plugin:
    """The admin side of a played engine: counts rounds, reports them, obeys orders."""

    def __init__(self, engine: VirtualEngine, steps: tuple[int, ...]) -> None:
        self.engine = engine
        self.steps = steps
        self.stats = RoundStats()
        self._pending: deque[Rows] = deque()
        self._auto = upstream_default(steps)
        engine.on_rows = self._pending.append
        engine.choose_steps = self._auto

    def read_back(self, now: float) -> dict[str, Any]:
        """The part of a read-back that tells of rounds; those under way are not counted."""
        self._count(now)
        group = {
            "at": now,
            "stats": [figures.to_json() for figures in self.stats.figures(now)],
            "acceptance": [counts.to_json() for counts in self.stats.acceptance()],
            "tokensTotal": self.stats.tokens_total,
            "roundsTotal": self.stats.rounds_total,
        }
        return {"groups": [group]}

    def obey(self, setting: Setting) -> None:
        """Follow an order from the next round on."""
        self.engine.draft_kv = setting.draft_kv.value

        def choose(batch: int) -> int:
            forced = setting.steps_for(batch)
            return self._auto(batch) if forced is None else forced

        self.engine.choose_steps = choose

    def _count(self, now: float) -> None:
        while self._pending:
            rows = self._pending[0]
            if len(rows.ended) and rows.ended[0] > now:
                return
            self._pending.popleft()
            self._observe(rows)

    def _observe(self, rows: Rows) -> None:
        observe, steps = self.stats.observe, rows.steps
        sizes = rows.decoding.sum(axis=1).tolist()
        whole = rows.decoding.shape[1]
        accepted = None if rows.accepted is None else rows.accepted.tolist()
        none = [0] * whole
        for row, (ended, seconds, joined, size) in enumerate(
            zip(
                rows.ended.tolist(),
                rows.seconds.tolist(),
                rows.joined.tolist(),
                sizes,
                strict=True,
            )
        ):
            if accepted is None:
                won = none[:size]
            elif size == whole:
                won = accepted[row]
            else:
                won = rows.accepted[row][rows.decoding[row]].tolist()  # type: ignore[index]
            observe(steps, seconds, won, ended, prefill_between=joined)


@dataclass(slots=True, eq=False)
class Judge:
    """What the operator keeps of one engine, and how it comes to an order.

    Attributes:
        policy: as in the SpecServe.
        draft: likewise.
        steps: what the engine has prepared.
        curve: calibrated or shipped; None leaves the policy to what it sees.
        said: the verdicts, where they changed.
    """

    policy: api.Policy
    draft: api.Draft
    steps: tuple[int, ...]
    curve: Curve | None = None
    said: list[Said] = field(default_factory=list)
    _memory: Memory = field(default_factory=Memory.start)
    _knowledge: Knowledge = field(default_factory=Knowledge)
    _rounds: Rounds | None = None
    _tokens: int | None = None
    _read_at: float = -math.inf
    _soon: bool = True
    _wanted: dict[str, Any] = field(default_factory=dict)

    def reads(self, now: float) -> bool:
        """Whether the engine is to be read back now."""
        return self._soon or now - self._read_at >= READ_BACK_SECONDS

    def take(self, answer: Mapping[str, Any], now: float) -> None:
        """Take in a read-back."""
        self._read_at = now
        self._rounds = signals.rounds(answer, now)
        self._tokens = self._rounds.tokens_total
        self._knowledge = self._knowledge.learn(self._rounds)

    def decide(
        self, now: float, stamp: float, running: int, queued: int
    ) -> tuple[float, dict[str, Any] | None]:
        """Decide on a reading of the load.

        Returns:
            Seconds to the next one, and the setting to send if it is another.
        """
        sample = Sample(
            at=now,
            stamp=stamp,
            running=running,
            queued=queued,
            capacity=CAPACITY,
            tokens_total=self._tokens,
            rounds=self._rounds,
        )
        self._rounds = None
        context = Context(steps=self.steps, curve=self.curve, knowledge=self._knowledge)
        verdict, self._memory = decide(self.policy, self._memory, sample, now, context)
        self._knowledge = self._knowledge.hear(self._memory.counts.acceptance)
        self._soon = verdict.recheck is not None
        wait = min(SAMPLE_SECONDS, verdict.recheck or SAMPLE_SECONDS)
        if verdict.setting is None:
            return wait, None
        wanted = directive.wanted(self.policy, self.draft, verdict)
        if wanted == self._wanted:
            return wait, None
        self._wanted = wanted
        tiers = verdict.setting.tiers
        self.said.append(Said(now, verdict.code, verdict.reason, tiers, verdict.probe))
        return wait, wanted

    def order(self, wanted: Mapping[str, Any], pod_uid: str, boot_id: str) -> dict[str, Any]:
        """The directive that carries a setting."""
        return directive.body(
            wanted,
            pod_uid=pod_uid,
            boot_id=boot_id,
            epoch=len(self.said),
            holder="bench/regret",
            lease_seconds=60,
            deadline_ms=2000,
            reason=self.said[-1].reason,
        )


@dataclass(slots=True, eq=False)
class Steering:
    """The operator of an engine in virtual time."""

    judge: Judge
    plugin: Plugin
    _due: float = 0.0

    def run(self, until: float) -> None:
        """Steer the engine up to a time; it has played its rounds until then."""
        engine = self.plugin.engine
        while self._due < until:
            now = self._due
            engine.run(now)
            if self.judge.reads(now):
                self.judge.take(self.plugin.read_back(now), now)
            wait, wanted = self.judge.decide(now, now, engine.running, engine.queue)
            self._due = now + wait
            if wanted is not None:
                engine.run(now + ORDER_SECONDS)
                self.plugin.obey(parse_directive(self.judge.order(wanted, "pod", "boot")).setting)
                # The acknowledgement is a read-back too.
                self.judge.take(self.plugin.read_back(now + ORDER_SECONDS), now + ORDER_SECONDS)
        engine.run(until)
