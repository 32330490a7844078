"""The load of pods as Prometheus knows it: one query, and its answer as a `Reading` a pod. Pure.

One instant query asks for both signals and for the time of their samples. Asked apart, a scrape in
between would give an old value a new time, and one reading would count as two.

A reading belongs to a pod, told by namespace and name. By the labels of its series, data-parallel
ranks are shares, other ranks are copies of a share, and labels that scraping adds (job, instance,
replica of the server) tell sources apart, of which the one with the newest sample counts. Series
that differ by anything else are not added up: nothing says what they are.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from specserve import api, conditions, signals
from specserve.observed import Key
from specserve.signals import MetricNames, Reading, Unreadable

#: Samples older than so many scrape intervals are lost.
PATIENT_SCRAPES: Final = 3
#: The server is asked so many times in a scrape interval: a sample is found in a quarter of it.
ASKED_PER_SCRAPE: Final = 4
#: Characters of the names of Deployments that their pods' names surely begin with.
_SURE_PREFIX: Final = 45

#: The label that tells the four parts of an answer apart.
_MARK: Final = "specserve_signal"
_TIME: Final = "_time"
#: Labels whose values are shares of a pod's load.
_SHARES: Final = frozenset({"dp_rank", "is_streaming", "priority"})
#: Labels that come with scraping, and with the servers that scrape.
_SCRAPING: Final = frozenset(
    {
        *("job", "instance", "endpoint", "service", "container", "node", "cluster"),
        *("prometheus", "prometheus_replica", "replica", "__replica__", "receive_replica"),
        *("monitor", "tenant_id", "receive", "scrape_job"),
    }
)
_MESSAGE: Final = 480


class PrometheusError(Exception):
    """A server brought no reading.

    Attributes:
        code: Machine-readable reason, used unchanged in conditions and events.
        answered: Whether the server said so itself; else it may be only the way to it.
    """

    def __init__(self, code: str, message: str, *, answered: bool = True) -> None:
        super().__init__(message)
        self.code = code
        self.answered = answered


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked.

    Attributes:
        text: The whole query.
        running: Its part for requests running, in the one spelling that messages name.
        queued: The same for requests waiting.
    """

    text: str
    running: str
    queued: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Why there is no reading.

    Attributes:
        code: One word for machines, the reason of a condition.
        message: The same for people; it names the query.
    """

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class _Series:
    labels: Mapping[str, str]
    value: float
    stamp: float
    age: float


def paced(policy: api.Policy) -> api.Policy:
    """The policy, its times no shorter than a Prometheus source can serve.

    Asking more often than the server scrapes finds nothing new, and a sample that nothing could
    have replaced yet is not stale. Leases are renewed as pods are visited, so they bound the
    period.
    """
    if policy.source != "Prometheus" or policy.prometheus is None:
        return policy
    scrape = policy.prometheus.scrape_interval_seconds
    useful = min(scrape / ASKED_PER_SCRAPE, policy.lease_seconds / 3)
    return policy.model_copy(
        update={
            "sample_period_milliseconds": max(
                policy.sample_period_milliseconds, math.floor(1000 * useful)
            ),
            "stale_after_seconds": max(policy.stale_after_seconds, PATIENT_SCRAPES * scrape),
        }
    )


def query(spec: api.Prometheus, key: Key, names: MetricNames) -> Query:
    """What to ask for the pods of a SpecServe.

    Args:
        spec: Where and how to ask.
        key: The SpecServe.
        names: Series to look for; both spellings of their separator are asked for.
    """
    running = _spellings(spec.running_query, names.running, spec, key)
    queued = _spellings(spec.queued_query, names.queued, spec, key)
    parts = {
        "running": " or ".join(running),
        "running" + _TIME: " or ".join(f"timestamp({one})" for one in running),
        "queued": " or ".join(queued),
        "queued" + _TIME: " or ".join(f"timestamp({one})" for one in queued),
    }
    marked = (
        # The source label is the new one itself: absent, it matches the empty expression.
        f'label_replace({part}, "{_MARK}", "{mark}", "{_MARK}", "")'
        for mark, part in parts.items()
    )
    return Query(" or ".join(marked), running[0].strip(), queued[0].strip())


def _spellings(own: str | None, name: str, spec: api.Prometheus, key: Key) -> list[str]:
    """What gives a signal; of several, those that come first count."""
    if own is not None:
        # On a line of its own, or a comment at its end would swallow what follows.
        return [f"\n{own}\n"]
    plain = name.replace(":", "_")
    return [
        _selector(spelling, spec, key)
        for spelling in dict.fromkeys((name, plain.replace("_", ":", 1), plain))
    ]


def _selector(name: str, spec: api.Prometheus, key: Key) -> str:
    namespace, deployment = key
    # Kubernetes shortens long names of Deployments in those of pods.
    pods = f"{deployment}-.*"
    if len(deployment) > _SURE_PREFIX:
        pods = f"{deployment[:_SURE_PREFIX]}.*"
    matchers = [
        ("__name__", "=", name),
        (spec.namespace_label, "=", namespace),
        (spec.pod_label, "=~", pods),
        *((one.name, one.operator, one.value) for one in spec.label_matchers),
    ]
    return "{" + ",".join(f"{label}{op}{_quoted(value)}" for label, op, value in matchers) + "}"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r") + '"'


def readings(
    result: Any, asked: Query, spec: api.Prometheus, key: Key, model: str, patience: float
) -> dict[str, Reading | Gap] | Gap:
    """Read the decoded `data.result` of an answer.

    Args:
        result: What the server answered.
        asked: What it was asked.
        spec: Where and how it was asked.
        key: The SpecServe.
        model: Served model name; series of another model are not this SpecServe's.
        patience: Age in seconds above which a sample is lost.

    Returns:
        For each pod its reading, or why there is none; or why there is none at all.
    """
    if not isinstance(result, list):
        return _gap("Unreadable", "the answer is no vector", asked.text)
    if not result:
        return _gap("NoSeries", "the answer is empty", _both(asked))
    try:
        parts, strays = _sorted_out(result, spec, key)
    except Unreadable as error:
        return _gap("Unreadable", str(error), asked.text)
    if not parts:
        labels = f"{spec.namespace_label} and {spec.pod_label}"
        return _gap(
            "NoSeries",
            f"none of {strays} series is of a pod of namespace {key[0]} by its labels {labels}",
            _both(asked),
        )
    return {
        pod: _reading(pod, signals_of, asked, spec, model, patience)
        for pod, signals_of in parts.items()
    }


_Parts = dict[str, dict[str, dict[frozenset[tuple[str, str]], tuple[float, float]]]]


def _sorted_out(result: list[Any], spec: api.Prometheus, key: Key) -> tuple[_Parts, int]:
    """Values and times of evaluation by pod, part and labels; how many are of no pod of ours."""
    parts: _Parts = {}
    strays = 0
    for item in result:
        labels, at, value = _element(item)
        pod = labels.pop(spec.pod_label, "")
        if labels.pop(spec.namespace_label, None) != key[0] or not pod:
            strays += 1
            continue
        part = labels.pop(_MARK, "")
        labels.pop("__name__", None)
        kept = frozenset(item for item in labels.items() if item[1])
        parts.setdefault(pod, {}).setdefault(part, {})[kept] = (value, at)
    return parts, strays


def _element(item: Any) -> tuple[dict[str, str], float, float]:
    """One element of an instant vector: its labels, time of evaluation and value."""
    try:
        labels, (at, text) = item["metric"], item["value"]
        value, moment = float(text), float(at)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Unreadable("the answer is no vector of samples") from None
    if (
        not isinstance(labels, dict)
        or set(map(type, labels.values())) - {str}
        or not isinstance(text, str)
        or isinstance(at, bool)
        or not isinstance(at, int | float)
        or not math.isfinite(moment)
    ):
        raise Unreadable("the answer is no vector of samples")
    return dict(labels), moment, value


def _reading(
    pod: str,
    parts: Mapping[str, Mapping[frozenset[tuple[str, str]], tuple[float, float]]],
    asked: Query,
    spec: api.Prometheus,
    model: str,
    patience: float,
) -> Reading | Gap:
    found: list[tuple[int, list[_Series]]] = []
    for name, own, text in (
        ("running", spec.running_query, asked.running),
        ("queued", spec.queued_query, asked.queued),
    ):
        try:
            quantum = spec.scrape_interval_seconds if own is not None else None
            series = _series(parts.get(name, {}), parts.get(name + _TIME, {}), quantum)
            if not series:
                return _gap("NoSeries", f"no series of pod {pod}", text)
            chosen = _of_one_source(_of_model(series, model), spec.replica_labels)
            found.append((_total(chosen, name), chosen))
        except Unreadable as error:
            return _gap("Unreadable", f"pod {pod}: {error}", text)
        age = max(one.age for one in chosen)
        if age > patience:
            return _gap(
                conditions.SAMPLES_STALE,
                f"pod {pod}: the newest sample is {age:.0f} s old, limit {patience:g} s",
                text,
            )
    (running, shares), (queued, waiting) = found
    return Reading(
        stamp=min(one.stamp for one in (*shares, *waiting)),
        running=running,
        queued=queued,
        capacity=None,
        tokens_total=None,
        ranks=len({one.labels.get("dp_rank", "") for one in shares}),
        age=max(one.age for one in (*shares, *waiting)),
    )


def _series(
    values: Mapping[frozenset[tuple[str, str]], tuple[float, float]],
    times: Mapping[frozenset[tuple[str, str]], tuple[float, float]],
    quantum: float | None,
) -> list[_Series]:
    """Join values with the times of their samples.

    Args:
        values: Value and time of evaluation by labels.
        times: The same, the values being times of samples.
        quantum: Scrape interval where the query may be an expression. The time of its value is
            that of its evaluation; new evidence it is once in a scrape interval at most.
    """
    series = []
    for labels, (value, at) in values.items():
        stamp, evaluated = times.get(labels, (math.nan, at))
        if not math.isfinite(stamp):
            raise Unreadable("a sample has no time")
        if quantum is not None and stamp >= evaluated - 0.001:
            stamp = math.floor(evaluated / quantum) * quantum
            age = 0.0
        else:
            age = max(0.0, evaluated - stamp)
        series.append(_Series(dict(labels), value, stamp, age))
    return series


def _of_model(series: list[_Series], model: str) -> list[_Series]:
    ours = [one for one in series if one.labels.get("model_name", model) == model]
    if not ours:
        other = min(one.labels["model_name"] for one in series)
        raise Unreadable(f"its series are of the model {other}, not {model}")
    return ours


def _of_one_source(series: list[_Series], further: Iterable[str]) -> list[_Series]:
    """Those of the source with the newest sample, without the labels that come with scraping."""
    scraping = _SCRAPING | set(further)
    sources: dict[frozenset[tuple[str, str]], list[_Series]] = {}
    for one in series:
        source = frozenset(item for item in one.labels.items() if item[0] in scraping)
        sources.setdefault(source, []).append(one)
    source = max(sources, key=lambda name: (_newest(sources[name]), sorted(name)))
    return [
        _Series(
            {name: value for name, value in one.labels.items() if name not in scraping},
            one.value,
            one.stamp,
            one.age,
        )
        for one in sources[source]
    ]


def _newest(series: list[_Series]) -> float:
    return max(one.stamp for one in series)


def _total(series: list[_Series], name: str) -> int:
    """Add up the shares of one source.

    Raises:
        Unreadable: They are no shares by all that is known of their labels, or hold no count.
    """
    known = {
        label
        for one in series
        for label in one.labels
        if label in _SHARES or signals.tells_copies_apart(label)
    }
    for label in sorted({label for one in series for label in one.labels} - known):
        if len({one.labels.get(label) for one in series}) > 1:
            raise Unreadable(
                f"{len(series)} series that differ by the label {label}; narrow them by "
                "policy.prometheus.labelMatchers, or name it in replicaLabels if they are copies"
            )
    if len({"dp_rank" in one.labels for one in series}) > 1:
        raise Unreadable("some series have the label dp_rank and some have not")
    return signals.total(((one.labels, one.value) for one in series), name)


def _both(asked: Query) -> str:
    return f"{asked.running} and {asked.queued}"


def _gap(code: str, what: str, text: str) -> Gap:
    return Gap(code, f"Prometheus: {what}; query: {' '.join(text.split())}"[:_MESSAGE])
