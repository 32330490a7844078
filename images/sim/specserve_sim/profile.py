"""Round times of an engine: measured tables, and the stated formulas between them.

`B` is the number of requests decoding together, `s` the number of draft steps. A plain round
takes `t_off(B)` seconds; a draft-and-verify round takes `r_s(B) * t_off(B)`, where `r_s(B)` is
the break-even acceptance length: speculation pays only above it. `profiles/README.md` says
which of these are measured.
"""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.resources.abc import Traversable

DraftKv = Literal["warm", "cold"]

REFERENCE_STEPS = 3
"""Every measured column ran with this many draft steps."""

PREFILL_SECONDS_PER_TOKEN = 33e-6
"""Engine time of a prompt token beyond the measured prompts, modelled.

On one H200 the rounds timed inside the engine leave 4.3 to 4.7 ms a request of the closed-loop
figures at 32 to 250 requests unexplained: the prefill of 128 tokens.
"""


class ProfileError(ValueError):
    """A profile file does not hold what a profile must hold."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where and how the figures of a profile were measured."""

    source: str
    engine: str
    accelerator: str
    model: str
    settings: str
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Curve:
    """A positive quantity over batch sizes, known at `sizes`."""

    sizes: tuple[int, ...]
    values: tuple[float, ...]

    def linear(self, batch: int) -> float:
        """Interpolate linearly in the batch size; go on with the last slope beyond the end."""
        return self._at(batch, float, extend=True)

    def logarithmic(self, batch: int) -> float:
        """Interpolate linearly in the logarithm of the batch size; constant beyond the ends."""
        return self._at(batch, math.log, extend=False)

    def _at(self, batch: int, scale: Callable[[float], float], *, extend: bool) -> float:
        sizes, values = self.sizes, self.values
        if len(sizes) == 1 or batch <= sizes[0]:
            return values[0]
        if batch >= sizes[-1] and not extend:
            return values[-1]
        right = min(bisect_right(sizes, batch), len(sizes) - 1)
        low, high = scale(sizes[right - 1]), scale(sizes[right])
        share = (scale(batch) - low) / (high - low)
        return values[right - 1] + share * (values[right] - values[right - 1])


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The break-even acceptance length at the reference steps, with its spread over columns."""

    middle: Curve
    lowest: Curve
    highest: Curve
    columns: int


@dataclass(frozen=True, slots=True)
class Profile:
    """What one engine's rounds take.

    Attributes:
        name: the file's name without its ending.
        title: one line for people.
        tensor_parallel: ranks the figures were measured with.
        provenance: where the figures are from.
        plain: seconds of a decode round of a server without a draft.
        break_even: `r_3(B)`.
        idle: `r_0(B)` of a server with a draft, for warm and for cold drafts.
        modelled: names of the quantities in this profile that were not measured on it.
    """

    name: str
    title: str
    tensor_parallel: int
    provenance: Provenance
    plain: Curve
    break_even: BreakEven
    idle: Mapping[DraftKv, Curve]
    modelled: tuple[str, ...]

    def t_off(self, batch: int) -> float:
        """Seconds of one decode round of `batch` requests in a server without a draft."""
        return self.plain.linear(batch)

    def r(self, batch: int, steps: int, draft_kv: DraftKv = "cold") -> float:
        """Break-even acceptance length of `steps` draft steps; of 0: what "off" itself costs."""
        if steps == 0:
            return self.idle[draft_kv].logarithmic(batch)
        return 1 + (self.break_even.middle.logarithmic(batch) - 1) * steps / REFERENCE_STEPS

    def t_on(self, batch: int, steps: int, draft_kv: DraftKv = "cold") -> float:
        """Seconds of one round of `batch` requests in a server with a draft."""
        return self.r(batch, steps, draft_kv) * self.t_off(batch)

    def throughput(
        self,
        batch: int,
        steps: int | None,
        accept_length: float,
        draft_kv: DraftKv = "cold",
    ) -> float:
        """Output tokens per second held with `batch` requests.

        Args:
            batch: requests decoding together.
            steps: draft steps; None is a server without a draft.
            accept_length: tokens won per verify at the reference steps.
            draft_kv: what steps 0 does to the draft.
        """
        if steps is None:
            return batch / self.t_off(batch)
        won = expected_tokens(position_probability(accept_length), steps)
        return batch * won / self.t_on(batch, steps, draft_kv)

    def crossover(self, accept_length: float, steps: int = REFERENCE_STEPS) -> int | None:
        """Smallest batch up to 512 from which `steps` lose to a cold 0; None if they never do."""
        won = expected_tokens(position_probability(accept_length), steps)
        loses = [won * self.r(b, 0) < self.r(b, steps) for b in range(1, 513)]
        if not loses[-1]:
            return None
        return 512 - next((i for i, bad in enumerate(reversed(loses)) if not bad), 512) + 1


def expected_tokens(probability: float, steps: int) -> float:
    """Mean tokens won per verify: `1 + p + ... + p^s`."""
    return sum(probability**position for position in range(steps + 1))


@lru_cache(maxsize=4096)
def position_probability(accept_length: float, steps: int = REFERENCE_STEPS) -> float:
    """Chance that a draft token is accepted, its predecessors being accepted.

    Args:
        accept_length: mean tokens won per verify, bonus included, from 1 to `steps + 1`.
        steps: draft steps that `accept_length` was seen with.

    Returns:
        The `p` for which `1 + p + ... + p^steps` is `accept_length`.

    Raises:
        ValueError: the acceptance length is out of range.
    """
    if not 1 <= accept_length <= steps + 1:
        raise ValueError(f"acceptance length {accept_length} is not within 1 and {steps + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(middle, steps) < accept_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _folder() -> Traversable:
    return files("specserve_sim") / "profiles"


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    names = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name[:-5] for name in names if name.endswith(".toml")))


@cache
def load_profile(name: str) -> Profile:
    """Read one of the profiles that come with the package.

    Raises:
        ProfileError: there is no such profile, or its file is not a valid one.
    """
    if name not in profile_names():
        raise ProfileError(f"no profile {name!r}; there are {', '.join(profile_names())}")
    text = (_folder() / f"{name}.toml").read_text(encoding="utf-8")
    profile = parse_profile(tomllib.loads(text))
    if profile.name != name:
        raise ProfileError(f"{name}.toml calls itself {profile.name!r}")
    return profile


def parse_profile(document: Mapping[str, Any]) -> Profile:
    """Check a profile document and derive its curves.

    Raises:
        ProfileError: with the place that is wrong.
    """
    try:
        provenance = Provenance(**document["provenance"])
        plain_rates = _curve("plain", document["plain"], "tokens_per_second")
        columns = [
            _break_even_column(index, column, plain_rates)
            for index, column in enumerate(document["speculating"])
        ]
        off = {kind: document["off"][kind] for kind in ("warm", "cold")}
        name, title = str(document["name"]), str(document["title"])
        tensor_parallel = int(document["tensor_parallel"])
    except (KeyError, TypeError) as error:
        raise ProfileError(f"missing or misplaced: {error}") from error
    if not columns:
        raise ProfileError("speculating: no column")
    rounds = tuple(
        size / rate for size, rate in zip(plain_rates.sizes, plain_rates.values, strict=True)
    )
    if any(later < earlier for earlier, later in pairwise(rounds)):
        raise ProfileError("plain: a larger batch has a shorter round")
    sizes = plain_rates.sizes
    by_size = list(zip(*(column.values for column in columns), strict=True))
    modelled = ["r_s for s other than 3", "batch sizes between and beyond the measured ones"]
    idle: dict[DraftKv, Curve] = {}
    for kind in ("warm", "cold"):
        share = _curve(f"off.{kind}", off[kind], "share")
        idle[kind] = Curve(share.sizes, tuple(1 / value for value in share.values))
        if off[kind].get("modelled") is not False:
            modelled.append(f"off.{kind}")
    return Profile(
        name=name,
        title=title,
        tensor_parallel=tensor_parallel,
        provenance=provenance,
        plain=Curve(sizes, rounds),
        break_even=BreakEven(
            middle=Curve(sizes, tuple(median(values) for values in by_size)),
            lowest=Curve(sizes, tuple(min(values) for values in by_size)),
            highest=Curve(sizes, tuple(max(values) for values in by_size)),
            columns=len(columns),
        ),
        idle=idle,
        modelled=tuple(modelled),
    )


def _break_even_column(index: int, column: Mapping[str, Any], plain: Curve) -> Curve:
    place = f"speculating[{index}]"
    if column["steps"] != REFERENCE_STEPS:
        raise ProfileError(f"{place}.steps: {column['steps']}, only {REFERENCE_STEPS} is measured")
    accept_length = float(column["accept_length"])
    position_probability(accept_length)
    if "ratio" in column:
        ratios = _curve(place, column, "ratio")
        ratio_values: Sequence[float] = ratios.values
    else:
        ratios = _curve(place, column, "tokens_per_second")
        ratio_values = [on / off for on, off in zip(ratios.values, plain.values, strict=False)]
    if ratios.sizes != plain.sizes:
        raise ProfileError(f"{place}.concurrency: not that of the plain server")
    return Curve(plain.sizes, tuple(accept_length / ratio for ratio in ratio_values))


def _curve(place: str, table: Mapping[str, Any], values_key: str) -> Curve:
    sizes = tuple(table["concurrency"])
    values = tuple(float(value) for value in table[values_key])
    if not sizes or len(sizes) != len(values):
        raise ProfileError(f"{place}: {len(sizes)} concurrencies for {len(values)} values")
    if any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ProfileError(f"{place}.concurrency: whole numbers from 1 on, not {sizes}")
    if any(later <= earlier for earlier, later in pairwise(sizes)):
        raise ProfileError(f"{place}.concurrency: not ascending")
    if any(not math.isfinite(value) or value <= 0 for value in values):
        raise ProfileError(f"{place}.{values_key}: not all positive")
    return Curve(sizes, values)
