"""The strategies that are compared: what chooses the draft steps of an engine that is played.

Two of them hear of nothing but readings, as in a cluster (`steering`). The others are told what
to do, or look at the batch alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specserve import api
from specserve_sim.model import upstream_default
from tests.bench.regret.steering import Judge, Plugin, Said, Steering
from tests.bench.regret.virtual import VirtualEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specserve.policy import Curve
    from specserve_sim.profile import Profile
    from tests.bench.regret.traces import Point

ALWAYS_ON, ALWAYS_OFF = "AlwaysOn", "AlwaysOff"
ENGINE_DEFAULT = "EngineDefault"
FIXED_THRESHOLD = "FixedThreshold"
THRESHOLD = "Threshold"
BREAK_EVEN = "BreakEven"
BREAK_EVEN_CURVE = "BreakEvenCurve"
STRATEGIES = (
    *(ALWAYS_ON, ALWAYS_OFF, ENGINE_DEFAULT, FIXED_THRESHOLD),
    *(THRESHOLD, BREAK_EVEN, BREAK_EVEN_CURVE),
)

THRESHOLDS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 257)
"""Batch sizes from which a fixed threshold does not draft; the best is found in hindsight."""

DRAFT: dict[str, Any] = {"method": "EAGLE3", "source": "hf://bench/draft"}


@dataclass(slots=True)
class Played:
    """What an engine did.

    Attributes:
        tokens: by the second asked for: tokens of answers so far.
        switches: changes of the step count, likewise.
        drafting_seconds: engine seconds spent with a step count above 0.
        said: the policy's verdicts, where they changed.
    """

    tokens: list[int] = field(default_factory=list)
    switches: list[int] = field(default_factory=list)
    drafting_seconds: float = 0.0
    said: list[Said] = field(default_factory=list)

    def note(self, engine: VirtualEngine) -> None:
        """Note where the engine stands."""
        self.tokens.append(engine.tokens)
        self.switches.append(engine.switches)
        self.drafting_seconds = engine.drafting_seconds


@dataclass(frozen=True, slots=True)
class Arm:
    """How an engine is driven.

    Attributes:
        choose: draft steps by batch; None if a policy steers.
        policy: the one that does.
        curve: what it is given beforehand.
        draft: whether the engine has one.
        clairvoyant: step counts among which the best is taken wherever the load stands; it
            knows the profile and the acceptance.
    """

    choose: Callable[[int], int] | None = None
    policy: api.Policy | None = None
    curve: Curve | None = None
    draft: bool = True
    clairvoyant: tuple[int, ...] = ()


def held(steps: int) -> Arm:
    """An engine held at one step count."""
    return Arm(choose=lambda _batch: steps)


def plain() -> Arm:
    """An engine without a draft."""
    return Arm(choose=lambda _batch: 0, draft=False)


def engine_default(steps: tuple[int, ...]) -> Arm:
    """SGLang's own default table."""
    return Arm(choose=upstream_default(steps))


def below(threshold: int, steps: int) -> Arm:
    """So many steps in batches below a threshold, none above."""
    return Arm(choose=lambda batch: steps if batch < threshold else 0)


def steered(strategy: str, curve: Curve | None = None) -> Arm:
    """The operator with its defaults and this strategy."""
    return Arm(policy=api.Policy.model_validate({"strategy": strategy}), curve=curve)


def play(
    arm: Arm,
    profile: Profile,
    points: Sequence[Point],
    looks: Sequence[float],
    steps: tuple[int, ...],
    seed: int,
) -> Played:
    """Play a load on one engine.

    Args:
        arm: how it is driven.
        profile: what its rounds take.
        points: the load and its acceptance over time.
        looks: seconds at which to note what was done, ascending; the last one ends it.
        steps: what the engine has prepared.
        seed: of all randomness.
    """
    engine = VirtualEngine(
        profile,
        seed,
        points[0].accept,
        arm.choose or upstream_default(steps),
        has_draft=arm.draft,
    )
    steering = None
    if arm.policy is not None:
        draft = api.Draft.model_validate({**DRAFT, "steps": list(steps)})
        steering = Steering(Judge(arm.policy, draft, steps, arm.curve), Plugin(engine, steps))
    advance = engine.run if steering is None else steering.run
    played = Played()
    changes = sorted({*looks, *(point.at for point in points if point.at < looks[-1])})
    by_time = {point.at: point for point in points}
    noted = set(looks)
    for at in changes:
        advance(at)
        if at in by_time:
            point = by_time[at]
            engine.accept_length = point.accept
            engine.load(point.clients)
            if arm.clairvoyant:
                engine.choose_steps = _best(profile, arm.clairvoyant, point.accept)
        if at in noted:
            played.note(engine)
    if steering is not None:
        played.said = steering.judge.said
    return played


def _best(profile: Profile, steps: tuple[int, ...], accept: float) -> Callable[[int], int]:
    best: dict[int, int] = {}

    def choose(batch: int) -> int:
        if batch not in best:
            best[batch] = max(steps, key=lambda s: profile.throughput(batch, s, accept))
        return best[batch]

    return choose
