"""The admin endpoint's vocabulary: what a directive may say, and how its fields are refused.

Pure: JSON values in, frozen values out. The schema is written down once, here; every engine that
speaks it (real or simulated) parses with this module, so all of them refuse alike.
"""

from __future__ import annotations

import json
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


class Invalid(ValueError):
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

    def __str__(self) -> str:
        """Return it as a directive has it, for logs."""
        return json.dumps(_given(self))

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


def decode(body: bytes) -> object:
    """Decode a JSON text.

    Stricter than `json.loads`: a member given twice and the number-like words (NaN, Infinity) are
    errors, since two readers could disagree about them.

    Raises:
        Invalid: With the body as a whole at fault, or the member that was given twice.
    """
    try:
        return json.loads(body, object_pairs_hook=_once, parse_constant=_no_number)
    except Invalid:
        raise
    except (ValueError, RecursionError) as error:
        raise Invalid("", f"the body is not JSON: {_printable(str(error))}") from None


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Invalid(_printable(twice), "is given twice")
    return members


def _no_number(word: str) -> object:
    raise Invalid("", f"the body is not JSON: {word} is no number")


def parse_directive(body: object) -> Directive:
    """Read a directive from decoded JSON.

    Raises:
        Invalid: The first field that is missing, unknown, of a wrong type or out of bounds.
    """
    fields = _Fields(body, "")
    directive = Directive(
        pod_uid=fields.name("podUID"),
        boot_id=fields.name("bootID"),
        epoch=fields.integer("epoch", 1, MAX_EPOCH),
        holder=fields.name("holder"),
        lease_seconds=fields.integer("leaseSeconds", MIN_LEASE_SECONDS, MAX_LEASE_SECONDS),
        setting=_setting(fields),
        fallback=_fallback(fields.required("fallback")),
        deadline_ms=fields.integer(
            "deadlineMs", MIN_DEADLINE_MS, MAX_DEADLINE_MS, default=DEFAULT_DEADLINE_MS
        ),
        reason=fields.line("reason", MAX_REASON),
    )
    fields.refuse_the_rest()
    return directive


def directive_json(directive: Directive) -> dict[str, Any]:
    """Return the body of the request that `parse_directive` reads back as `directive`."""
    return {
        "podUID": directive.pod_uid,
        "bootID": directive.boot_id,
        "epoch": directive.epoch,
        "holder": directive.holder,
        "leaseSeconds": directive.lease_seconds,
        **_given(directive.setting),
        "fallback": _given(directive.fallback),
        "deadlineMs": directive.deadline_ms,
        "reason": directive.reason,
    }


def setting_json(setting: Setting) -> dict[str, Any]:
    """Return a setting as the read-back shows it: every member, null where it means nothing."""
    return {
        "mode": str(setting.mode),
        "steps": setting.steps,
        "tiers": [{"minBatch": tier.min_batch, "steps": tier.steps} for tier in setting.tiers]
        or None,
        "draftKv": str(setting.draft_kv),
    }


def _given(setting: Setting) -> dict[str, Any]:
    return {name: value for name, value in setting_json(setting).items() if value is not None}


def _fallback(body: object) -> Setting:
    fields = _Fields(body, "fallback")
    setting = _setting(fields)
    fields.refuse_the_rest()
    return setting


def _setting(fields: _Fields) -> Setting:
    mode = Mode(fields.choice("mode", Mode))
    steps: int | None = None
    tiers: tuple[Tier, ...] = ()
    # null counts as absent: the read-back shows it, and what was read back can be sent again.
    if mode is Mode.ON:
        steps = fields.integer("steps", 1, MAX_STEPS)
    elif fields.take("steps") is not None:
        raise Invalid(fields.path("steps"), f"goes with mode on, not with {mode}")
    if mode is Mode.TIERS:
        tiers = _tiers(fields.required("tiers"), fields.path("tiers"))
    elif fields.take("tiers") is not None:
        raise Invalid(fields.path("tiers"), f"goes with mode tiers, not with {mode}")
    draft_kv = DraftKv(fields.choice("draftKv", DraftKv, default=DraftKv.COLD))
    return Setting(mode, steps, tiers, draft_kv)


def _tiers(body: object, path: str) -> tuple[Tier, ...]:
    if not isinstance(body, list):
        raise Invalid(path, f"must be a list, is {_kind(body)}")
    if not 1 <= len(body) <= MAX_TIERS:
        raise Invalid(path, f"must have 1 to {MAX_TIERS} entries, has {len(body)}")
    tiers: list[Tier] = []
    for index, entry in enumerate(cast("Sequence[object]", body)):
        fields = _Fields(entry, f"{path}[{index}]")
        tier = Tier(
            fields.integer("minBatch", 1, MAX_BATCH), fields.integer("steps", 0, MAX_STEPS)
        )
        fields.refuse_the_rest()
        if not tiers and tier.min_batch != 1:
            raise Invalid(
                fields.path("minBatch"), f"must be 1 in the first tier, is {tier.min_batch}"
            )
        if tiers and tier.min_batch <= tiers[-1].min_batch:
            raise Invalid(
                fields.path("minBatch"),
                f"must rise from tier to tier, is {tier.min_batch} after {tiers[-1].min_batch}",
            )
        tiers.append(tier)
    return tuple(tiers)


class _Fields:
    """The members of a JSON object, taken one by one; what is left over in the end is unknown."""

    def __init__(self, body: object, path: str) -> None:
        if not isinstance(body, dict):
            raise Invalid(path, f"must be an object, is {_kind(body)}")
        self._left: dict[str, object] = dict(body)
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str) -> object:
        return self._left.pop(name, None)

    def required(self, name: str) -> object:
        if name not in self._left:
            raise Invalid(self.path(name), "is missing")
        return self.take(name)

    def integer(self, name: str, low: int, high: int, *, default: int | None = None) -> int:
        if default is not None and name not in self._left:
            return default
        value = self.required(name)
        if type(value) is not int:  # bool is an int to isinstance
            raise Invalid(self.path(name), f"must be an integer, is {_kind(value)}")
        if not low <= value <= high:
            raise Invalid(self.path(name), f"must be {low} to {high}, is {_shown(value)}")
        return value

    def name(self, name: str) -> str:
        value = self._string(name, self.required(name), MAX_NAME)
        if not value:
            raise Invalid(self.path(name), "must not be empty")
        return value

    def line(self, name: str, longest: int) -> str:
        return self._string(name, self._left.pop(name, ""), longest)

    def choice(self, name: str, of: type[StrEnum], *, default: str | None = None) -> str:
        if default is not None and name not in self._left:
            return default
        value = self.required(name)
        if not isinstance(value, str) or value not in set(of):
            choices = ", ".join(of)
            raise Invalid(self.path(name), f"must be one of {choices}, is {_shown(value)}")
        return value

    def refuse_the_rest(self) -> None:
        for name in self._left:
            raise Invalid(self.path(_printable(name)), "is not a field of this object")

    def _string(self, name: str, value: object, longest: int) -> str:
        if not isinstance(value, str):
            raise Invalid(self.path(name), f"must be a string, is {_kind(value)}")
        if len(value) > longest:
            raise Invalid(
                self.path(name), f"must have at most {longest} characters, has {len(value)}"
            )
        # It goes into a line of the log: no line breaks, no terminal control, no lone surrogates.
        if not value.isprintable():
            raise Invalid(self.path(name), "must be one line of printable characters")
        return value


_KINDS: Final[Mapping[type, str]] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number with a fraction",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    """Return a value for an error message: short, and safe to print."""
    return ascii(value)[:60] if isinstance(value, int | str) else _kind(value)


def _printable(name: str) -> str:
    return name[:60] if name.isprintable() else ascii(name)[:60]
