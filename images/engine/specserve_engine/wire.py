"""The admin endpoint's vocabulary: what a directive may say, and how its fields are refused.

Pure: JSON values in, frozen values out. The schema is written down once, here; every engine that
speaks it (real or simulated) parses with this module, so all of them refuse alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ADMIN_PORT: Final = 9470
SPECULATION_PATH: Final = "/v1/speculation"
HEALTH_PATH: Final = "/health"

MAX_EPOCH: Final = 2**53 - 1  # the largest integer that every JSON reader keeps exact
MAX_STEPS: Final = 64
MAX_BATCH: Final = 65_536
MAX_TIERS: Final = 32
MAX_REASON: Final = 256
MAX_NAME: Final = 320  # a namespace (63), a slash and an object's name (253), rounded up
MIN_LEASE_SECONDS: Final = 5
MAX_LEASE_SECONDS: Final = 600
MIN_DEADLINE_MS: Final = 100
MAX_DEADLINE_MS: Final = 10_000
DEFAULT_DEADLINE_MS: Final = 2_000


class Code(StrEnum):
    """What an error answer's `code` can be; the HTTP status is in `STATUS`."""

    INVALID = "Invalid"
    UNAUTHORIZED = "Unauthorized"
    STALE_EPOCH = "StaleEpoch"
    EPOCH_REUSED = "EpochReused"
    LEASE_HELD = "LeaseHeld"
    UNKNOWN_STEPS = "UnknownSteps"
    NOT_CONTROLLABLE = "NotControllable"
    WRONG_POD = "WrongPod"
    REBOOTED = "Rebooted"
    LOADING = "Loading"
    DRAINING = "Draining"
    TIMEOUT = "Timeout"


STATUS: Final[Mapping[Code, int]] = {
    Code.INVALID: 400,
    Code.UNAUTHORIZED: 401,
    Code.STALE_EPOCH: 409,
    Code.EPOCH_REUSED: 409,
    Code.LEASE_HELD: 409,
    Code.UNKNOWN_STEPS: 409,
    Code.NOT_CONTROLLABLE: 409,
    Code.WRONG_POD: 412,
    Code.REBOOTED: 412,
    Code.LOADING: 503,
    Code.DRAINING: 503,
    Code.TIMEOUT: 504,
}


class Mode(StrEnum):
    """Who chooses the draft steps of the next decode batch."""

    AUTO = "auto"  # the engine's own policy
    ON = "on"  # always `steps`
    OFF = "off"  # always 0
    TIERS = "tiers"  # by batch size


class DraftKv(StrEnum):
    """Whether the draft keeps its KV cache current while speculation is off."""

    WARM = "warm"
    COLD = "cold"


class Invalid(ValueError):  # noqa: N818 - named for the fact, as all our exceptions
    """A directive that cannot be read.

    Attributes:
        field: The JSON path of the offending field, such as `fallback.tiers[1].minBatch`;
            empty if the body as a whole is at fault.
        message: What is wrong with it, in one line.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class Tier:
    """From a batch of `min_batch` requests upwards (to the next tier), draft `steps` tokens."""

    min_batch: int
    steps: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides the draft steps: a directive's own choice, or its fallback.

    Attributes:
        mode: Who chooses.
        steps: With `Mode.ON` the forced steps (at least 1), otherwise None.
        tiers: With `Mode.TIERS` at least one, ascending, the first from batch 1; otherwise empty.
        draft_kv: What "0 steps" does to the draft's cache.
    """

    mode: Mode
    steps: int | None = None
    tiers: tuple[Tier, ...] = ()
    draft_kv: DraftKv = DraftKv.COLD

    def needed_steps(self) -> frozenset[int]:
        """Return the step counts that the engine must have prepared for this setting."""
        match self.mode:
            case Mode.AUTO:
                return frozenset()
            case Mode.ON:
                return frozenset() if self.steps is None else frozenset({self.steps})
            case Mode.OFF:
                return frozenset({0})
            case Mode.TIERS:
                return frozenset(tier.steps for tier in self.tiers)

    def steps_for(self, batch: int) -> int | None:
        """Return the steps this setting forces for a batch, None where the engine chooses."""
        match self.mode:
            case Mode.AUTO:
                return None
            case Mode.ON:
                return self.steps
            case Mode.OFF:
                return 0
            case Mode.TIERS:
                chosen = self.tiers[0].steps
                for tier in self.tiers:
                    if tier.min_batch > batch:
                        break
                    chosen = tier.steps
                return chosen


AUTO: Final = Setting(Mode.AUTO)


@dataclass(frozen=True, slots=True)
class Directive:
    """One absolute order of the operator to one engine process.

    Attributes:
        pod_uid: The pod it is meant for.
        boot_id: The engine process it is meant for.
        epoch: The fence: an engine refuses any that is older than the one it obeys.
        holder: The installation that steers; its replicas share the name and fence by epoch.
        lease_seconds: How long the setting holds without a renewal.
        setting: What holds now.
        fallback: What holds once the lease has run out.
        deadline_ms: The answer is due this many milliseconds after the request's arrival.
        reason: One line for the engine's log.
    """

    pod_uid: str
    boot_id: str
    epoch: int
    holder: str
    lease_seconds: int
    setting: Setting
    fallback: Setting
    deadline_ms: int = DEFAULT_DEADLINE_MS
    reason: str = ""
