"""Metrics by SpecServe, made when they are asked for: nothing is kept for what is gone."""

from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specserve import api
from specserve.fleet import Fleet
from specserve.policy import directive

Served = tuple[Fleet, api.Policy | None]


def collect(served: Sequence[Served], now: float) -> Iterable[Metric]:
    """All of them.

    Args:
        served: Fleets, each with the policy in force, None where it is let go of.
        now: Monotonic seconds.
    """
    return [*_load(served, now), *_policy(served)]


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"specserve_{name}", text, labels=["namespace", "name", *labels])


def _load(served: Sequence[Served], now: float) -> list[Metric]:
    depth = _gauge("queue_depth", "Requests in the engines of a SpecServe by state.", "state")
    age = _gauge(
        "sample_age_seconds",
        "Age of the oldest load reading among the usable pods of a SpecServe.",
    )
    enabled = _gauge(
        "speculation_enabled", "Pods of a SpecServe whose engine reports speculation on."
    )
    for fleet, _ in served:
        usable = fleet.usable
        samples = [steered.sample for steered in usable if steered.sample is not None]
        if samples:
            depth.add_metric([*fleet.key, "running"], sum(s.running for s in samples))
            depth.add_metric([*fleet.key, "queued"], sum(s.queued for s in samples))
        ages = [old for steered in usable if (old := steered.memory.age(now)) is not None]
        if ages:
            age.add_metric(list(fleet.key), max(ages))
        enabled.add_metric(
            list(fleet.key), sum(directive.is_on(s.readback or {}) is True for s in usable)
        )
    return [depth, age, enabled]


def _policy(served: Sequence[Served]) -> list[Metric]:
    accept = _gauge(
        "policy_acceptance_length",
        "Tokens won per request and round at a step count, as the policy reckons: counted by "
        "draft position, mean over the pods that decided by it.",
        "steps",
    )
    even = _gauge(
        "policy_break_even_ratio",
        "Time of a round at a step count over that of a plain one at the present batch, mean "
        "over pods: the acceptance length from which it pays.",
        "steps",
    )
    value = _gauge(
        "policy_arm_value_ratio",
        "Tokens a second at a step count over those of a live pod that is off, mean over pods.",
        "steps",
    )
    batch = _gauge("policy_batch", "Batch in one rank that decisions were made for, mean.")
    would = _gauge(
        "policy_would_be_pods",
        "Pods under mode Observe by the mode they would be in.",
        "mode",
    )
    probing = _gauge("policy_probing_pods", "Pods whose engine is in a probe.")
    probes = CounterMetricFamily(
        "specserve_policy_probes",
        "Short looks at a step count that is not in use.",
        labels=["namespace", "name"],
    )
    lost = CounterMetricFamily(
        "specserve_policy_probe_seconds",
        "Seconds that engines spent in probes.",
        labels=["namespace", "name"],
    )
    by_name = {"accept": accept, "breakEven": even, "value": value}
    for fleet, patient in served:
        key = list(fleet.key)
        verdicts = [s.verdict for s in fleet.usable if s.verdict is not None]
        numbers: dict[str, list[float]] = {}
        for verdict in verdicts:
            for name, number in verdict.numbers:
                numbers.setdefault(name, []).append(number)
        for name, of in sorted(numbers.items()):
            what, _, steps = name.partition("@")
            mean = sum(of) / len(of)
            if what in by_name and steps:
                by_name[what].add_metric([*key, steps], mean)
            elif what == "batch":
                batch.add_metric(key, mean)
        if patient is not None and patient.mode == "Observe":
            wanted = Counter(verdict.mode for verdict in verdicts)
            for mode in ("On", "Off"):
                would.add_metric([*key, mode], wanted[mode])
        looking = [s for s in fleet.usable if s.memory.probing.active is not None]
        probing.add_metric(key, len(looking))
        probes.add_metric(key, fleet.probes)
        lost.add_metric(key, fleet.probe_seconds)
    return [accept, even, value, batch, would, probing, probes, lost]
