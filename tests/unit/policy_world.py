"""An engine in mean values for tests of the policy: what its rounds take and win, and no queue.

Time goes in the loop's half seconds, or shorter where a verdict asks for it. Nothing is random:
what the policy makes of noise is for the benchmark against the simulated engine.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from specserve import api
from specserve.policy import (
    Accepted,
    Cell,
    Context,
    Curve,
    Knowledge,
    Memory,
    Rounds,
    Sample,
    Verdict,
    decide,
)
from specserve.policy.rounds import bucket_of

READ_BACK = 2.0
#: Age in seconds of rounds that an engine's window still holds.
WINDOW = 60.0
#: Most rounds that it holds.
MOST_ROUNDS = 512


def expected(length: float, steps: int) -> tuple[float, ...]:
    """Chances of the first 1 ... `steps` drafts for an acceptance length at 3 steps."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if 1 + middle + middle**2 + middle**3 < length else (low, middle)
        )
    return tuple(low**position for position in range(1, steps + 1))


@dataclass
class Window:
    """The newest rounds of one batch bucket at one step count, as an engine keeps them."""

    rounds: deque[tuple[float, float, float]] = field(default_factory=deque)
    count: float = 0.0

    def add(self, now: float, rounds: float, took: float) -> None:
        """Take in so many rounds that took so long each."""
        self.rounds.append((now, rounds, took))
        self.count += rounds
        while self.rounds[0][0] < now - WINDOW or self.count - self.rounds[0][1] >= MOST_ROUNDS:
            self.count -= self.rounds.popleft()[1]

    def cell(self, bucket: int, steps: int) -> Cell:
        """What the engine says of them: how many, and the median of their times."""
        half = self.count / 2
        by_time = sorted((took, rounds) for _, rounds, took in self.rounds)
        upto = accumulate(rounds for _, rounds in by_time)
        median = next(
            (took for (took, _), sofar in zip(by_time, upto, strict=True) if sofar >= half),
            by_time[-1][0],
        )
        count = max(1, min(MOST_ROUNDS, int(self.count)))
        return Cell(bucket, steps, count, median, self.rounds[-1][0])


@dataclass
class World:
    """One pod, its engine and the operator's memory of it.

    Attributes:
        policy: The policy in force.
        ratio: `r(batch, steps)` of the engine.
        batch: Requests running.
        accept: Acceptance length of the traffic at 3 steps.
        plain: Seconds of a plain round by batch.
        hidden: Share of the tokens of a speculating engine that its round times do not lie about.
        counted: Whether the engine counts accepted drafts.
        slowed: Factor by which other work on the machine lengthens rounds, by the time.
    """

    policy: api.Policy
    ratio: Callable[[int, int], float]
    batch: int = 32
    accept: float = 2.5
    queued: int = 0
    capacity: int = 256
    steps: tuple[int, ...] = (0, 3)
    curve: Curve | None = None
    plain: Callable[[int], float] = lambda batch: 0.005 + 0.00002 * batch
    now: float = 0.0
    memory: Memory = field(default_factory=Memory.start)
    knowledge: Knowledge = field(default_factory=Knowledge)
    timed: dict[tuple[int, int], Window] = field(default_factory=dict)
    counts: dict[int, tuple[float, list[float]]] = field(default_factory=dict)
    tokens: float = 0.0
    switches: list[tuple[float, int]] = field(default_factory=list)
    verdicts: list[tuple[float, Verdict]] = field(default_factory=list)
    doing: Verdict | None = None
    read_at: float = -10.0
    ran: int | None = None
    rounds: Rounds | None = None
    hidden: float = 1.0
    may_probe: bool = True
    counted: bool = True
    slowed: Callable[[float], float] = lambda now: 1.0  # noqa: ARG005

    def active(self) -> int:
        """Steps that the engine runs now."""
        setting = None if self.doing is None else self.doing.setting
        return self.steps[-1] if setting is None else setting.steps_for(self.batch)

    def rate(self, steps: int) -> float:
        """Tokens a second at the present batch and acceptance."""
        won = 1 + sum(expected(self.accept, steps))
        cost = self.ratio(self.batch, steps) if steps else 1.0
        worse = self.hidden if steps else 1.0
        return self.batch * won * worse / (cost * self.plain(self.batch))

    def best(self) -> float:
        """Tokens a second of the best step count."""
        return max(self.rate(steps) for steps in self.steps)

    def advance(self, seconds: float) -> None:
        """Let the engine run; nothing runs at batch 0."""
        self.now += seconds
        if not self.batch:
            return
        steps = self.active()
        if self.ran not in {None, steps}:  # the engine follows its table
            self.switches.append((self.now, steps))
            self.ran = steps
        slower = self.slowed(self.now)
        took = slower * self.plain(self.batch) * (self.ratio(self.batch, steps) if steps else 1.0)
        rounds = seconds / took
        self.tokens += seconds * self.rate(steps) / slower
        bucket = bucket_of(self.batch)
        self.timed.setdefault((bucket, steps), Window()).add(self.now, rounds, took)
        if steps and self.counted:
            verifies, accepted = self.counts.get(steps, (0.0, [0.0] * steps))
            chances = expected(self.accept, steps)
            self.counts[steps] = (
                verifies + rounds * self.batch,
                [a + rounds * self.batch * c for a, c in zip(accepted, chances, strict=True)],
            )

    def read(self) -> None:
        """Read the engine back."""
        self.read_at = self.now
        self.rounds = Rounds(
            self.now,
            tuple(window.cell(*arm) for arm, window in self.timed.items()),
            tuple(
                Accepted(steps, int(verifies), tuple(int(a) for a in accepted))
                for steps, (verifies, accepted) in sorted(self.counts.items())
            ),
            int(self.tokens),
        )
        self.knowledge = self.knowledge.learn(self.rounds)

    def tick(self) -> Verdict:
        """Half a second, or less where asked for, and a decision."""
        recheck = None if self.doing is None else self.doing.recheck
        self.advance(0.5 if recheck is None else recheck)
        if recheck is not None or self.now - self.read_at >= READ_BACK:
            self.read()
        sample = Sample(
            self.now,
            self.now,
            self.batch,
            self.queued,
            self.capacity,
            int(self.tokens),
            self.rounds,
        )
        context = Context(self.steps, 1, self.curve, self.knowledge, self.may_probe)
        verdict, self.memory = decide(self.policy, self.memory, sample, self.now, context)
        self.knowledge = self.knowledge.hear(self.memory.counts.acceptance)
        self.doing = verdict
        if self.batch and self.ran not in {None, self.active()}:
            self.switches.append((self.now, self.active()))
        self.ran = self.active()
        self.verdicts.append((self.now, verdict))
        return verdict

    def run(self, seconds: float) -> float:
        """Run for a time; tokens won over those of the best step count."""
        ends, tokens, best = self.now + seconds, self.tokens, 0.0
        while self.now < ends:
            before = self.now
            rate = self.best() if self.batch else 0.0
            self.tick()
            best += rate * (self.now - before)
        return (self.tokens - tokens) / best if best else 1.0
