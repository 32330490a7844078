"""What goes into a decision and what comes out of it."""

import math
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self

from specserve.policy.acceptance import Counts
from specserve.policy.curve import Curve
from specserve.policy.knowledge import Knowledge
from specserve.policy.pace import Pace, Paces
from specserve.policy.rounds import Rounds

Mode = Literal["On", "Off"]
#: (smallest batch of one data-parallel rank, steps), ascending, the first from batch 1.
Tiers = tuple[tuple[int, int], ...]
#: What a probe is for: see `Probe`.
Kind = Literal["Renew", "Learn", "Check", "Moved"]
DraftKv = Literal["Cold", "Warm"]

#: Time in seconds between two probes at first, doubled by each that changes nothing.
FIRST_WAIT: Final = 60.0
#: The same for probes because the load moved.
FIRST_MOVED_WAIT: Final = 15.0
#: Time in seconds from a probe, or from taking over an engine, to one that learns what is unknown.
LEARN_WAIT: Final = 10.0
#: Seconds of lost throughput that an engine not yet known may cost.
FIRST_CREDIT: Final = 3.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one pod's load, its data-parallel ranks added up.

    Attributes:
        at: When the operator got it, seconds on the caller's clock.
        stamp: The engine's own timestamp. Only tells readings apart: clocks are never compared.
        running: Requests in the running batch.
        queued: Requests waiting.
        capacity: Most requests that the engine runs at once, None if it does not say.
        tokens_total: Monotonic count of generated tokens, None if it does not say.
        rounds: What the newest read-back says of decode rounds; may be older than the sample.
    """

    at: float
    stamp: float
    running: int
    queued: int
    capacity: int | None = None
    tokens_total: int | None = None
    rounds: Rounds | None = None


def steps_at(tiers: Tiers, batch: int) -> int:
    """The steps that a table has for a batch: those of the last tier that begins by then."""
    return next((steps for least, steps in reversed(tiers) if least <= batch), tiers[0][1])


@dataclass(frozen=True, slots=True)
class Setting:
    """What an engine is to do.

    Attributes:
        tiers: Steps by batch; one tier is on or off.
        draft_kv: What steps 0 do to the draft's KV cache.
    """

    tiers: Tiers
    draft_kv: DraftKv = "Cold"

    def steps_for(self, batch: int) -> int:
        """The steps of a batch."""
        return steps_at(self.tiers, batch)


@dataclass(frozen=True, slots=True)
class Context:
    """What a decision rests on beside the pod's own readings.

    Attributes:
        steps: Step counts that the engine has prepared, 0 among them.
        ranks: Data-parallel ranks of the pod; tiers and curves are about the batch of one.
        curve: A curve known beforehand, None if there is none.
        knowledge: What the pods of the SpecServe have learnt together.
        may_probe: Whether a probe may begin; no when another pod is at it.
        paces: The pod's own; `decide` takes them from its memory.
        demand: Requests running and queued in a mean pod of the SpecServe, where the fleet's
            load decides; None where the pod's own does.
    """

    steps: tuple[int, ...] = (0, 3)
    ranks: int = 1
    curve: Curve | None = None
    knowledge: Knowledge = field(default_factory=Knowledge)
    may_probe: bool = True
    paces: tuple[Pace, ...] = ()
    demand: tuple[float, float] | None = None

    def load(self, sample: Sample) -> tuple[int, int]:
        """The requests running and queued that decide."""
        if self.demand is None:
            return sample.running, sample.queued
        return round(self.demand[0]), round(self.demand[1])

    @property
    def deepest(self) -> int:
        """The largest step count."""
        return max(self.steps)


@dataclass(frozen=True, slots=True)
class Probe:
    """A short look at a step count that is not in use.

    Attributes:
        steps: The one looked at.
        began: When.
        verifies: Verifies at these steps before it began.
        back: What the engine did before, and does again if the probe changes nothing.
        kind: Renew what was known, Learn what a round takes, Check it where it is known from
            elsewhere or was seen in one look only, or Moved: see whether another load is another
            traffic.
        why: What it is for.
    """

    steps: int
    began: float
    verifies: int
    back: Setting
    kind: Kind
    why: str


@dataclass(frozen=True, slots=True)
class Probing:
    """When to look at step counts that are not in use, and what that may cost.

    Attributes:
        active: The probe under way, None if there is none.
        after: When the next may begin that renews what is known.
        wait: Time in seconds to the one after.
        learn_after: When the next may begin that learns what a round takes at another batch.
        moved_after: When the next may begin because the load is another than acceptance was seen
            at.
        moved_wait: Time in seconds to the one after.
        credit: Seconds of lost throughput that may be spent.
        credited: When `credit` was last reckoned, None before the first probe.
    """

    active: Probe | None = None
    after: float = -math.inf
    wait: float = FIRST_WAIT
    learn_after: float = -math.inf
    moved_after: float = -math.inf
    moved_wait: float = FIRST_MOVED_WAIT
    credit: float = FIRST_CREDIT
    credited: float | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens won under one step count at a like load.

    Attributes:
        per_request: Tokens per second and running request, the newest weighing most.
        batch: Running requests, likewise.
        seconds: Time behind it.
        length: Acceptance length when it began, None if not seen.
    """

    per_request: float
    batch: float
    seconds: float
    length: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A flip whose effect is being watched.

    Attributes:
        before: The rate before it.
        back: What the engine did before.
        at: When it was.
        predicted: Tokens per second after over before, as predicted; None under Threshold.
    """

    before: Rate
    back: Setting
    at: float
    predicted: float | None


@dataclass(frozen=True, slots=True)
class Frozen:
    """A mode that holds because leaving it made things worse.

    Attributes:
        until: When it ends.
        batch: Requests running when it began.
        why: What was seen.
    """

    until: float
    batch: float
    why: str


@dataclass(frozen=True, slots=True)
class Watch:
    """The throughput watched for the effect of flips.

    Attributes:
        base: Time and token count that the next reading is compared with, None without any.
        rate: Under the present setting, None before there is one.
        trial: The last flip until it has been judged.
        frozen: The mode held after a flip that was taken back.
        seen: Tokens per second after over before the last judged flip, None before.
        predicted: The same as predicted, None if it was not.
    """

    base: tuple[float, int] | None = None
    rate: Rate | None = None
    trial: Trial | None = None
    frozen: Frozen | None = None
    seen: float | None = None
    predicted: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What the policy remembers of one engine; `reboot` when its process is a new one.

    Attributes:
        mode: Mode in force by the policy, None before its first decision.
        since: When `mode` came into force; the dwell counts from here.
        flips: Times of the flips of the last hour, oldest first, pins included.
        stamp: Engine timestamp of the latest reading.
        heard: When `stamp` was first seen, None before the first reading.
        waiting: When a decision was first asked for without any reading.
        stalled_since: First reading with requests queued, none running and no token made.
        stalled: Whether that lasted long enough to call the engine stalled.
        tokens: Latest known token count; the base for the next comparison.
        read: When the latest read-back taken into account was read, None before the first.
        counts: Drafts accepted of late.
        ineffective: Read-backs in a row with traffic and hardly any draft accepted.
        crashes: Times at which the engine ended while it speculated, within the last hour.
        crashed: Whether that happened too often to speculate again.
        paces: What rounds take by the clock.
        turned: When the steps of the present batch last changed.
        ordered: What the last verdict had the engine do, None before the first.
        batch: The demand on one data-parallel rank, evened out; None before the first.
        settled: When it was last evened out.
        bucket: Its batch bucket, left only for a clear reason; 0 before the first.
        range: Smallest and largest demand of late, drifting towards the present one.
        better: The step count that has been better than the present one at this batch, and since
            when; None if none is.
        unrest: Flips of late that were close calls; each doubles the dwell of the next such.
        unrested: When `unrest` last changed.
        table: What the BreakEven strategy holds best by batch, as tiers; empty before the first.
        tabled: When what the engine is to do last changed.
        weighed: Read-back and buckets that the table was made for.
        tiers: What of the table is sent at the present load.
        off_lasted: Mean length of the last offs in seconds, None before the first.
        probing: Probes.
        watch: Throughput before and after flips.
    """

    mode: Mode | None = None
    since: float = -math.inf
    flips: tuple[float, ...] = ()
    stamp: float | None = None
    heard: float | None = None
    waiting: float | None = None
    stalled_since: float | None = None
    stalled: bool = False
    tokens: int | None = None
    read: float | None = None
    counts: Counts = field(default_factory=Counts)
    ineffective: int = 0
    crashes: tuple[float, ...] = ()
    crashed: bool = False
    paces: Paces = field(default_factory=Paces)
    turned: float = -math.inf
    ordered: Setting | None = None
    batch: float | None = None
    settled: float = -math.inf
    bucket: int = 0
    range: tuple[float, float] = (1.0, 1.0)
    better: tuple[int, float] | None = None
    unrest: int = 0
    unrested: float = -math.inf
    table: Tiers = ()
    tabled: float = -math.inf
    weighed: tuple[float | None, int, int, int] | None = None
    tiers: tuple[tuple[int, int], ...] = ()
    off_lasted: float | None = None
    probing: Probing = field(default_factory=Probing)
    watch: Watch = field(default_factory=Watch)

    @classmethod
    def start(cls) -> Self:
        """Memory of an engine that nobody has steered yet."""
        return cls()

    @classmethod
    def resume(
        cls,
        mode: Mode | None,
        since: float | None,
        tiers: Tiers,
        now: float,
    ) -> Self:
        """Memory after an operator restart.

        Args:
            mode: What the engine's read-back says, None if it does not say.
            since: Last recorded switch on the caller's clock, None if none is on record.
            tiers: The table that the engine follows, as in `Setting`; empty if it has none.
            now: The time. Probes wait from here on, as the old process's are not known, but no
                longer than after one that learns: what it knew is lost, and in a SpecServe one
                look tells for all of its pods.
        """
        begun = cls(
            mode=mode,
            ordered=Setting(tiers) if tiers else None,
            table=tiers,
            probing=Probing(after=now + LEARN_WAIT, learn_after=now + LEARN_WAIT),
        )
        if mode is None or since is None:
            return begun
        # Earlier flips are lost with the old process; the one on record still counts.
        return replace(begun, since=since, flips=(since,))

    def reboot(self) -> Self:
        """Memory for the next process of the same engine: decisions stay, readings do not."""
        return replace(
            self,
            stamp=None,
            heard=None,
            waiting=None,
            stalled_since=None,
            stalled=False,
            tokens=None,
            read=None,
            counts=replace(self.counts, base=None),
            weighed=None,
            paces=replace(self.paces, base=None),
            probing=replace(self.probing, active=None),
            watch=Watch(frozen=self.watch.frozen),
        )

    def age(self, now: float) -> float | None:
        """Seconds since the latest new reading, None before the first one."""
        return None if self.heard is None else max(0.0, now - self.heard)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One decision.

    Attributes:
        mode: Mode to be in, None to leave the engine as it is because nothing is known yet.
        code: Machine reason; flows unchanged into condition, event, log and metric label.
        reason: The same for people: one line with the numbers.
        flip: Whether this decision changed a mode that was known before.
        setting: What the engine is to do, None to leave it as it is.
        fallback: What it is to do once nobody renews the order, None for the same.
        probe: Whether the setting is a short look that ends by itself.
        recheck: Seconds after which to read the engine and to decide again; None: as usual.
        numbers: What the reason rests on, by name.
    """

    mode: Mode | None
    code: str
    reason: str
    flip: bool
    setting: Setting | None = None
    fallback: Setting | None = None
    probe: bool = False
    recheck: float | None = None
    numbers: tuple[tuple[str, float], ...] = ()
