"""What an engine's answers say: loads, metrics and read-backs to a `Reading`, or to `Rounds`.

Shapes as real servers give them (SGLang 0.5.16 and 0.5.23). Pure: text and JSON in, values or
`Unreadable` out. Absent, NaN or negative is never zero.

Series of one pod: data-parallel ranks hold shares, which add up, and so do the parts that a
label such as `is_streaming` splits a count into; tensor-, pipeline- and expert-parallel ranks hold
copies of their data-parallel rank's value, of which the largest counts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from specserve.policy.rounds import Accepted, Cell, Rounds

#: Seconds by which rounds of one cell of a read-back are older than its newest at most.
WINDOW = 60.0
#: The largest count that every JSON reader keeps exact; what is above it counts nothing.
_LARGEST = 2**53 - 1


class Unreadable(Exception):
    """An answer holds nothing that can be trusted; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The load of one pod.

    Attributes:
        stamp: Time of the numbers by the clock of who took them, in seconds; None if not given.
        running: Requests in the batch, all data-parallel ranks added up.
        queued: Requests waiting, likewise.
        capacity: Most requests that can run at once, likewise; None if not reported.
        tokens_total: Tokens generated since the engine started; None if not reported.
        ranks: Data-parallel ranks that the numbers cover.
        cache_tokens: Tokens that the KV caches hold, all ranks added up; None if not reported.
        age: Seconds since the numbers were taken; 0 where the engine was asked itself.
        gpu: What it runs on, empty if it does not say.
        key_refused: Whether SGLang refused the API key, so that the plugin was asked instead.
    """

    stamp: float | None
    running: int
    queued: int
    capacity: int | None
    tokens_total: int | None
    ranks: int
    cache_tokens: int | None = None
    age: float = 0.0
    gpu: str = ""
    key_refused: bool = False


@dataclass(frozen=True, slots=True)
class MetricNames:
    """Names of the three series in `/metrics`, in the spelling with a colon or an underscore."""

    running: str
    queued: str
    tokens: str


def from_loads(body: Any) -> Reading:
    """Read the decoded answer of `GET /v1/loads`.

    Raises:
        Unreadable: It has no load entry, or a count is missing or no count.
    """
    entries = body.get("loads") if isinstance(body, dict) else None
    if not isinstance(entries, list) or not entries:
        raise Unreadable("/v1/loads has no entry under loads")
    by_rank: dict[object, Mapping[str, Any]] = {}
    for position, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise Unreadable("/v1/loads has an entry that is no object")
        rank = entry.get("dp_rank")
        by_rank[rank if isinstance(rank, int) else ("entry", position)] = entry
    shares = list(by_rank.values())
    stamps = [share.get("timestamp") for share in shares]
    return Reading(
        # The oldest share decides: the sum is no fresher than it.
        stamp=min((s for s in stamps if _countable(s)), default=None),
        running=sum(_count(share, "num_running_reqs") for share in shares),
        queued=sum(_count(share, "num_waiting_reqs") for share in shares),
        capacity=_sum(shares, "max_running_requests"),
        tokens_total=None,
        ranks=len(shares),
        cache_tokens=_sum(shares, "max_total_num_tokens"),
        gpu=_text(body.get("accelerator")),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def from_metrics(text: str, names: MetricNames, model: str | None = None) -> Reading:
    """Read the Prometheus text of an engine.

    Args:
        text: Body of `GET /metrics`.
        names: Which series to look for; both separators are understood.
        model: Served model name; series of another model are not this pod's.

    Raises:
        Unreadable: A series is missing or holds no count, or the text cannot be parsed.
    """
    # Only engines without /v1/loads are read so; `specserve local` does without the library else.
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    wanted = {_plain(name): name for name in (names.running, names.queued, names.tokens)}
    found: dict[str, list[tuple[dict[str, str], float]]] = {name: [] for name in wanted}
    foreign = False
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    # Of some hundred kilobytes only a few lines matter, and only they need to be well-formed.
    beginnings = tuple(wanted)
    lines = [line for line in text.splitlines() if _plain(line).startswith(beginnings)]
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for name, labels, value, *_ in family.samples:
                plain = _plain(name)
                if plain not in found:
                    continue
                if model is not None and labels.get("model_name", model) != model:
                    foreign = True
                    continue
                # Both spellings of one series in one body are the same series.
                series = (plain, tuple(sorted(labels.items())))
                if series not in seen:
                    seen.add(series)
                    found[plain].append((labels, value))
    except ValueError as error:
        raise Unreadable(f"/metrics cannot be parsed: {error}") from None
    if foreign and not any(found.values()):
        raise Unreadable(f"/metrics is of another model than {model}")
    missing = [n for n in (names.running, names.queued) if not found[_plain(n)]]
    if missing:
        looked_for = " and ".join(f"{name} or {_plain(name)}" for name in missing)
        raise Unreadable(f"/metrics has no series {looked_for}")
    running = total(found[_plain(names.running)], names.running)
    queued = total(found[_plain(names.queued)], names.queued)
    tokens = found[_plain(names.tokens)]
    shares = {labels.get("dp_rank", "") for labels, _ in found[_plain(names.running)]}
    return Reading(
        stamp=None,
        running=running,
        queued=queued,
        capacity=None,
        tokens_total=total(tokens, names.tokens) if tokens else None,
        ranks=len(shares),
    )


def from_read_back(body: Mapping[str, Any]) -> Reading:
    """Read the load out of the plugin's read-back: SGLang's own counts, asked of its schedulers.

    Args:
        body: As `checked_read_back` returned it.

    Raises:
        Unreadable: There is no group, or the ranks of one do not all tell the same. They do where
            they hold copies; under attention data parallelism they hold shares.
    """
    groups = body.get("groups") or ()
    if not groups:
        raise Unreadable("the read-back has no entry under groups")
    stamps = [group.get("at") for group in groups]
    return Reading(
        stamp=min((stamp for stamp in stamps if _countable(stamp)), default=None),
        running=sum(_copied(group, "running") for group in groups),
        queued=sum(_copied(group, "queued") for group in groups),
        capacity=None,
        tokens_total=tokens_total(body),
        ranks=len(groups),
    )


def _copied(group: Mapping[str, Any], field: str) -> int:
    told = [rank.get(field) for rank in group.get("ranks") or ()]
    if not told or not _countable(told[0]) or any(one != told[0] for one in told):
        raise Unreadable(f"the read-back's {field} is no count that all ranks of a group share")
    return round(told[0])


def checked_read_back(body: Any) -> dict[str, Any]:
    """Hold an engine's read-back to the types that the operator relies on.

    Raises:
        Unreadable: A member has another type; the message names it.
    """
    if not isinstance(body, dict):
        raise Unreadable("the read-back is no JSON object")
    for field, kind in (("podUID", str), ("bootID", str), ("mode", str), ("controllable", bool)):
        if not isinstance(body.get(field), kind):
            raise Unreadable(f"the read-back's {field} is no {kind.__name__}")
    if not _countable(body.get("epoch")):
        raise Unreadable("the read-back's epoch is no count")
    lease = body.get("lease") or {}
    if not isinstance(lease, dict) or not _countable(lease.get("remainingSeconds") or 0):
        raise Unreadable("the read-back's lease is no lease")
    _check_counts(body)
    return body


def _check_counts(body: Mapping[str, Any]) -> None:
    tiers = _objects(body, "tiers")
    groups = _objects(body, "groups")
    ranks = [rank for group in groups for rank in _objects(group, "ranks")]
    stats = [stat for group in groups for stat in _objects(group, "stats")]
    acceptance = [row for group in groups for row in _objects(group, "acceptance")]
    for items, fields in (
        (tiers, ("minBatch", "steps")),
        (ranks, ("activeSteps", "decodeRounds")),
        (groups, ("at",)),
        (
            stats,
            (
                *("batchBucket", "steps", "rounds", "tokens"),
                *("acceptLength", "medianRoundSeconds", "lastSeen"),
            ),
        ),
        (acceptance, ("steps", "verifies")),
    ):
        for item in items:
            for field in fields:
                if not _countable(item.get(field) or 0):
                    raise Unreadable(f"the read-back's {field} is no count")
    for row in acceptance:
        accepted = row.get("accepted") or []
        if not isinstance(accepted, list) or not all(_countable(count) for count in accepted):
            raise Unreadable("the read-back's accepted is no list of counts")


def since(body: dict[str, Any], at: float, moment: float | None) -> dict[str, Any]:
    """A read-back without the cells that may hold rounds of before a moment.

    Counters stay: of two readings of a counter the difference is what came between.

    Args:
        body: As `checked_read_back` returned it.
        at: When it was read, seconds on the operator's clock.
        moment: On the same clock; None leaves out nothing.
    """
    if moment is None:
        return body
    groups = [
        {
            **group,
            "stats": [
                stat
                for stat in group.get("stats") or ()
                if (seen := _seen(group, stat, at)) is not None and seen - WINDOW >= moment
            ],
        }
        for group in body.get("groups") or ()
    ]
    return {**body, "groups": groups}


def rounds(body: Mapping[str, Any], at: float) -> Rounds:
    """What a read-back says of decode rounds, its data-parallel groups put together.

    Of a round time the group with the most rounds behind it speaks; accepted drafts add up. The
    engine's times become the operator's by the group's own `at`: no clocks are compared.

    Args:
        body: As `checked_read_back` returned it.
        at: When it was read, seconds on the operator's clock.
    """
    cells: dict[tuple[int, int], Cell] = {}
    acceptance: dict[int, Accepted] = {}
    for group in body.get("groups") or ():
        for cell in _cells(group, at):
            known = cells.get((cell.bucket, cell.steps))
            if known is None or cell.rounds > known.rounds:
                cells[cell.bucket, cell.steps] = cell
        for row in _accepted(group):
            known_row = acceptance.get(row.steps)
            acceptance[row.steps] = row if known_row is None else _together(known_row, row)
    return Rounds(
        at=at,
        cells=tuple(cells[key] for key in sorted(cells)),
        acceptance=tuple(acceptance[steps] for steps in sorted(acceptance)),
        tokens_total=tokens_total(body),
        rounds_total=_total(body, "roundsTotal"),
    )


def tokens_total(body: Mapping[str, Any]) -> int | None:
    """Tokens made so far by a read-back, None unless every group says."""
    return _total(body, "tokensTotal")


def _total(body: Mapping[str, Any], field: str) -> int | None:
    totals = [group.get(field) for group in body.get("groups") or ()]
    known = [total for total in totals if isinstance(total, int)]
    return sum(known) if known and len(known) == len(totals) else None


def _cells(group: Mapping[str, Any], at: float) -> Iterable[Cell]:
    for stat in group.get("stats") or ():
        bucket, steps, seconds = (
            stat.get(name) for name in ("batchBucket", "steps", "medianRoundSeconds")
        )
        seen = _seen(group, stat, at)
        if (
            seen is not None
            and None not in (bucket, steps, seconds)
            and bucket >= 1
            and seconds > 0
        ):
            count = int(stat.get("rounds") or 0)
            won = count * float(stat.get("acceptLength") or 0.0)
            batch = float(stat.get("tokens") or 0) / won if won > 0 else None
            yield Cell(int(bucket), int(steps), count, float(seconds), seen, batch or None)


def _seen(group: Mapping[str, Any], stat: Mapping[str, Any], at: float) -> float | None:
    """When the newest round of a cell ended, on the operator's clock; None if it does not say."""
    now, seen = group.get("at"), stat.get("lastSeen")
    return None if now is None or seen is None else at - max(0.0, float(now - seen))


def _accepted(group: Mapping[str, Any]) -> Iterable[Accepted]:
    """Rows of the counts, those left out that contradict themselves."""
    for row in group.get("acceptance") or ():
        steps, verifies = int(row.get("steps") or 0), int(row.get("verifies") or 0)
        accepted = tuple(int(count) for count in row.get("accepted") or ())
        falling = all(a >= b for a, b in pairwise((verifies, *accepted)))
        if steps > 0 and len(accepted) == steps and falling:
            yield Accepted(steps, verifies, accepted)


def _together(one: Accepted, other: Accepted) -> Accepted:
    added = tuple(a + b for a, b in zip(one.accepted, other.accepted, strict=True))
    return Accepted(one.steps, one.verifies + other.verifies, added)


def _objects(body: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    items = body.get(field) or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Unreadable(f"the read-back's {field} is no list of objects")
    return items


def total(series: Iterable[tuple[Mapping[str, str], float]], name: str) -> int:
    """Add up the shares of one pod's count, each the largest of its copies.

    Args:
        series: Labels and value of each; labels that all share do not matter.
        name: What is counted, for messages.

    Raises:
        Unreadable: A value is no count, or several processes made them.
    """
    items = list(series)
    if len({labels.get("pid") for labels, _ in items}) > 1:
        # One of them may be of a process that is no more, and nothing says which.
        raise Unreadable(f"{name} has series of several processes (label pid)")
    # With request priorities on, the series without one holds the total of the others.
    whole = [item for item in items if not item[0].get("priority")]
    shares: dict[frozenset[tuple[str, str]], float] = {}
    for labels, value in whole or items:
        if not _countable(value):
            raise Unreadable(f"{name} is {value}")
        share = frozenset(item for item in labels.items() if not tells_copies_apart(item[0]))
        shares[share] = max(value, shares.get(share, 0.0))
    return round(sum(shares.values()))


def tells_copies_apart(label: str) -> bool:
    """Whether series that differ by the label are copies: tp_rank, pp_rank, moe_ep_rank."""
    return label.endswith("_rank") and label != "dp_rank"


def _plain(name: str) -> str:
    return name.replace(":", "_")


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _countable(value: object) -> TypeGuard[float]:
    return _number(value) and 0 <= value <= _LARGEST  # NaN compares false with everything


def _count(entry: Mapping[str, Any], field: str) -> int:
    value = entry.get(field)
    if not _countable(value):
        raise Unreadable(f"/v1/loads: {field} is {str(value)[:40]!r}")
    return round(value)


def _sum(shares: Iterable[Mapping[str, Any]], field: str) -> int | None:
    """All shares added up; None if one of them does not tell."""
    counts = [_optional(share, field) for share in shares]
    return None if None in counts else sum(count for count in counts if count is not None)


def _optional(entry: Mapping[str, Any], field: str) -> int | None:
    return None if entry.get(field) is None else _count(entry, field)
