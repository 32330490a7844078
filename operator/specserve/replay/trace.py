"""Traces: recorded readings of one pod, or a load made up in phases. Pure: text in, values out."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from specserve import api, document, signals
from specserve.policy import Sample

#: Longest trace, seconds.
LONGEST: Final = 7 * 86_400.0


class BadTrace(Exception):
    """A file is no trace, or no SpecServe; the message names the place and what is wrong."""


class _Document(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
    )


class _Line(_Document):
    """One reading of a recorded trace."""

    at: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    running: Annotated[int, Field(ge=0)]
    queued: Annotated[int, Field(ge=0)] = 0
    capacity: Annotated[int, Field(ge=1)] | None = None
    speculation: dict[str, Any] | None = None


Ramp = Annotated[list[float], Field(min_length=2, max_length=2)]


class Phase(_Document):
    """A stretch of a made-up load.

    Attributes:
        seconds: How long it lasts.
        in_flight: Requests in flight; two numbers are a ramp from one to the other.
        accept_length: Acceptance length of the traffic at 3 steps, from 1 to 4; likewise.
    """

    seconds: Annotated[float, Field(gt=0, le=LONGEST)]
    in_flight: Annotated[float, Field(ge=0, le=65_536)] | Ramp
    accept_length: Annotated[float, Field(ge=1, le=4)] | Ramp

    def at(self, share: float) -> tuple[int, float]:
        """Requests in flight and acceptance length at a share of the phase."""
        return round(_between(self.in_flight, share)), _between(self.accept_length, share)


class MadeUp(_Document):
    """A made-up load, and the engine that is to carry it.

    Attributes:
        profile: Curve of the engine, one of those that come with the operator.
        steps: Step counts that the engine has prepared.
        capacity: Most requests that it runs at once.
        phases: The load.
    """

    profile: str = "h200-a"
    steps: Annotated[list[int], Field(min_length=2)] = [0, 3]
    capacity: Annotated[int, Field(ge=1)] = 256
    phases: Annotated[list[Phase], Field(min_length=1)]

    @model_validator(mode="after")
    def _loaded(self) -> Self:
        if not any(any(phase.at(share)[0] for share in (0.0, 1.0)) for phase in self.phases):
            raise ValueError("inFlight is 0 in all phases: there is nothing to decide")
        return self

    def load(self, period: float) -> Iterator[tuple[float, int, float]]:
        """(seconds from the start, in flight, acceptance length), each period."""
        start = 0.0
        for phase in self.phases:
            steps = max(1, round(phase.seconds / period))
            for step in range(steps):
                yield start + step * period, *phase.at(step / max(steps - 1, 1))
            start += steps * period


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded trace.

    Attributes:
        samples: The readings, ascending in time.
        steps: Step counts that the engine has prepared, as far as it says.
    """

    samples: tuple[Sample, ...]
    steps: tuple[int, ...] | None

    @property
    def start(self) -> float:
        """Seconds of the first reading, on the clock that recorded it."""
        return self.samples[0].at


def spec_of(text: str) -> api.SpecServeSpec:
    """The spec of the one SpecServe in a YAML text.

    Raises:
        BadTrace: There is none, or more than one, or it is not valid.
    """
    try:
        return document.read(text).spec
    except document.BadDocument as error:
        raise BadTrace(str(error)) from None


def recorded(text: str) -> Recorded:
    """A recorded trace: one JSON object a line.

    Raises:
        BadTrace: A line is none; the message gives its number.
    """
    samples: list[Sample] = []
    available: tuple[int, ...] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = _Line.model_validate_json(line)
        except ValidationError as error:
            raise BadTrace(f"line {number}: {_first(error)}") from None
        body = entry.speculation
        if body is not None:
            try:
                body = signals.checked_read_back(body)
            except signals.Unreadable as error:
                raise BadTrace(f"line {number}: speculation: {error}") from None
            if body.get("availableSteps"):
                available = tuple(sorted(int(steps) for steps in body["availableSteps"]))
        samples.append(
            Sample(
                entry.at,
                entry.at,
                entry.running,
                entry.queued,
                entry.capacity,
                None if body is None else signals.tokens_total(body),
                None if body is None else signals.rounds(body, entry.at),
            )
        )
    if not samples:
        raise BadTrace("it holds no line")
    for earlier, later in pairwise(samples):
        if later.at <= earlier.at:
            raise BadTrace(f"at {later.at:.16g} comes after {earlier.at:.16g}: times must ascend")
    return Recorded(tuple(samples), available)


def made_up(text: str) -> MadeUp:
    """A made-up load: YAML or JSON.

    Raises:
        BadTrace: It is none; the message names the field.
    """
    try:
        return MadeUp.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise BadTrace(f"no YAML: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        raise BadTrace(_first(error)) from None


def is_recorded(text: str) -> bool:
    """Whether a text looks like a recorded trace: its first line is a JSON object with a time."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    try:
        entry = json.loads(first)
    except ValueError:
        return False
    return isinstance(entry, dict) and "at" in entry


def _between(value: float | Sequence[float], share: float) -> float:
    if isinstance(value, int | float):
        return float(value)
    return value[0] + share * (value[1] - value[0])


def _first(error: ValidationError) -> str:
    """What is wrong first; a key that does not exist before the one that is missing for it."""
    details = error.errors()
    detail = next((one for one in details if one["type"] == "extra_forbidden"), details[0])
    place = ".".join(str(part) for part in detail["loc"] if isinstance(part, int | str))
    if detail["type"] != "extra_forbidden":
        return f"{place or 'document'}: {detail['msg']}"
    missing = [str(one["loc"][-1]) for one in details if one["type"] == "missing"]
    return f"unknown key {place}" + (f"; {', '.join(missing)} is missing" if missing else "")
