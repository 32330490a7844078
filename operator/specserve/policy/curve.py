"""The break-even curve: what a round with draft steps takes over a plain one, by batch size.

`r_s(B) = t_on(B, s) / t_off(B)`, in units of the live pod's own cold off: speculation with `s`
steps pays at batch `B` exactly when it wins more than `r_s(B)` tokens a request and round. It
belongs to the model, draft, GPU, engine version and parallel size, and is not monotonic in `B`
where GPUs share no peer memory. Between known batches it is interpolated in the logarithm of the
batch; beyond them the nearest value holds.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

API_VERSION = "specserve.dev/curve-v1"


class CurveError(ValueError):
    """A document is no curve; the message names the field and what is wrong with it."""


class _Document(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, extra="forbid", frozen=True
    )


class Provenance(_Document):
    """Where a curve is from; what differs from the pods it is used for makes it stale.

    Attributes:
        source: How it was measured, for people.
        model: Model source, None if any.
        draft: Draft source, None if any.
        sglang: SGLang version.
        plugin: Plugin version.
        gpu: GPU as the driver names it.
        tensor_parallel: GPUs of one engine.
        interconnect: What links them.
        date: When, ISO 8601.
        host: Where.
        settings: What else matters, for people.
    """

    source: str = ""
    model: str | None = None
    draft: str | None = None
    sglang: str | None = None
    plugin: str | None = None
    gpu: str | None = None
    tensor_parallel: int | None = None
    interconnect: str | None = None
    date: str | None = None
    host: str | None = None
    settings: str = ""


class Point(_Document):
    """`r_s(B)` at one batch and step count.

    Attributes:
        batch: Requests in the batch of one data-parallel rank.
        steps: Draft steps, above 0.
        ratio: `r_s(B)`.
        spread: Half width of its 95 % confidence interval, None if not known.
        rounds: Rounds behind it, None if it is no live measurement.
    """

    batch: Annotated[int, Field(ge=1, le=65_536)]
    steps: Annotated[int, Field(ge=1, le=64)]
    ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    rounds: Annotated[int, Field(ge=0)] | None = None


class CurveDocument(_Document):
    """The file format of a curve: JSON with camelCase names."""

    api_version: Literal["specserve.dev/curve-v1"] = "specserve.dev/curve-v1"
    provenance: Provenance = Provenance()
    cells: Annotated[list[Point], Field(min_length=1, max_length=1024)]


@dataclass(frozen=True, slots=True)
class Curve:
    """A break-even curve.

    Attributes:
        document: What it was made from.
        kind: `Calibrated` or `Profile`.
    """

    document: CurveDocument
    kind: Literal["Calibrated", "Profile"] = "Calibrated"
    _by_steps: Mapping[int, tuple[tuple[float, float], ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Order the points by steps and batch.

        Raises:
            CurveError: Two points are of one batch and step count.
        """
        table: dict[int, dict[int, float]] = {}
        for point in self.document.cells:
            if table.setdefault(point.steps, {}).setdefault(point.batch, point.ratio) is not (
                point.ratio
            ):
                raise CurveError(
                    f"cells: batch {point.batch} with {point.steps} steps is there twice"
                )
        object.__setattr__(
            self,
            "_by_steps",
            {
                steps: tuple((math.log(batch), ratio) for batch, ratio in sorted(row.items()))
                for steps, row in sorted(table.items())
            },
        )

    @classmethod
    def from_json(
        cls, text: str | bytes, kind: Literal["Calibrated", "Profile"] = "Calibrated"
    ) -> Self:
        """Read a curve file.

        Raises:
            CurveError: It is no curve; the message names the first field that is wrong.
        """
        try:
            return cls(CurveDocument.model_validate_json(text), kind)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "document"
            raise CurveError(f"{place}: {first['msg']}") from None

    def to_json(self, *, compact: bool = False) -> str:
        """The curve file, for people or in the fewest bytes: a line without counts of rounds."""
        if compact:
            left_out = {"cells": {"__all__": {"rounds"}}}
            return self.document.model_dump_json(
                by_alias=True, exclude_none=True, exclude=left_out
            )
        return self.document.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"

    @property
    def provenance(self) -> Provenance:
        """Where it is from."""
        return self.document.provenance

    def ratio(self, batch: int, steps: int) -> float:
        """`r_s(B)`; of step counts it does not hold, by `across`."""
        return across(
            {known: _at(row, math.log(max(batch, 1))) for known, row in self._by_steps.items()},
            steps,
        )


def furthest(new: Curve, old: Curve) -> tuple[float, Point] | None:
    """How far two curves are apart at most in the cells that they share, and in which one.

    Returns:
        The larger ratio over the smaller one, less 1, and the cell of `new`; None if they share
        none.
    """
    before = {(point.batch, point.steps): point.ratio for point in old.document.cells}
    apart = [
        (max(known, point.ratio) / min(known, point.ratio) - 1, point)
        for point in new.document.cells
        if (known := before.get((point.batch, point.steps))) is not None
    ]
    return max(apart, key=lambda one: one[0], default=None)


def across(ratios: Mapping[int, float], steps: int) -> float:
    """`r` of a step count from those of others at the same batch, linearly in the steps.

    A draft step costs the same whichever it is, so rounds lengthen evenly with the steps; the
    verification is in all of them. With one step count known, the line through it and 1 at 0
    steps is taken, which leaves the verification out: too low below it and too high above.

    Args:
        ratios: At least one known `r` by steps above 0.
        steps: The step count asked for; 0 is the unit.
    """
    if steps == 0:
        return 1.0
    if steps in ratios:
        return ratios[steps]
    known = sorted({0: 1.0, **ratios}.items())
    right = min(max(bisect_left(known, (steps, 0.0)), 1), len(known) - 1)
    (low, below), (high, above) = known[right - 1], known[right]
    return max(below + (above - below) * (steps - low) / (high - low), 1e-6)


def _at(row: tuple[tuple[float, float], ...], place: float) -> float:
    right = bisect_left(row, (place, 0.0))
    if right == 0:
        return row[0][1]
    if right == len(row):
        return row[-1][1]
    (low, below), (high, above) = row[right - 1], row[right]
    return below + (above - below) * (place - low) / (high - low)
