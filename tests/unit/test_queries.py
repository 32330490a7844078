"""What Prometheus is asked, and what its answers say of each pod."""

import itertools
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve import api, queries
from specserve.queries import Gap
from specserve.signals import MetricNames, Reading

KEY = ("demo-ns", "model-a")
NAMES = MetricNames("sglang:num_running_reqs", "sglang:num_queue_reqs", "")
NOW = 1_760_000_010.0
STAMP = 1_760_000_000.0
POD = "model-a-0"


def server(**fields: Any) -> api.Prometheus:
    given = {"url": "http://prometheus.monitoring.svc:9090", **fields}
    return api.Prometheus.model_validate(given)


def series(
    running: float | str = 40,
    queued: float | str = 3,
    stamp: float = STAMP,
    pod: str = POD,
    **labels: str,
) -> list[dict[str, Any]]:
    """The four elements that one target brings into an answer."""
    every = {"namespace": "demo-ns", "pod": pod, **labels}
    return [
        {
            "metric": {k: v for k, v in {**every, "specserve_signal": mark}.items() if v},
            "value": [NOW, str(value)],
        }
        for mark, value in (
            ("running", running),
            ("running_time", stamp),
            ("queued", queued),
            ("queued_time", stamp),
        )
    ]


def read(result: Any, patience: float = 90, model: str = "model-a", **fields: Any) -> Any:
    spec = server(**fields)
    asked = queries.query(spec, KEY, NAMES)
    return queries.readings(result, asked, spec, KEY, model, patience)


def load(result: list[Any], pod: str = POD, **more: Any) -> Any:
    answer = read(result, **more)
    assert isinstance(answer, dict), answer
    return answer[pod]


def flat(*groups: list[Any]) -> list[Any]:
    return list(itertools.chain(*groups))


# -- what is asked --------------------------------------------------------------------------


def test_one_query_asks_for_both_spellings_both_signals_and_their_times():
    """O-C1.4."""
    asked = queries.query(server(), KEY, NAMES)
    for name in ("sglang:num_running_reqs", "sglang_num_running_reqs"):
        selector = f'{{__name__="{name}",namespace="demo-ns",pod=~"model-a-.*"}}'
        assert asked.text.count(selector) == 2
        assert f"timestamp({selector})" in asked.text
    assert asked.text.count("timestamp(") == 4
    assert asked.running == (
        '{__name__="sglang:num_running_reqs",namespace="demo-ns",pod=~"model-a-.*"}'
    )


def test_a_name_set_with_an_underscore_is_asked_for_with_a_colon_too():
    names = MetricNames("my_running", "my_queued", "")
    asked = queries.query(server(), KEY, names).text
    assert '"my_running"' in asked
    assert '"my:running"' in asked


def test_matchers_are_added_and_labels_renamed():
    asked = queries.query(
        server(
            labelMatchers=[{"name": "cluster", "operator": "!~", "value": "a|b"}],
            namespaceLabel="kubernetes_namespace",
            podLabel="kubernetes_pod",
        ),
        KEY,
        NAMES,
    )
    assert asked.running.endswith(
        'kubernetes_namespace="demo-ns",kubernetes_pod=~"model-a-.*",cluster!~"a|b"}'
    )


@given(st.text(max_size=40))
def test_a_value_cannot_leave_its_quotes(value: str):
    spec = server(labelMatchers=[{"name": "cluster", "value": value}])
    selector = queries.query(spec, KEY, NAMES).running
    quoted = re.findall(r'"(?:[^"\\\n\r]|\\.)*"', selector)
    rest = re.sub(r'"(?:[^"\\\n\r]|\\.)*"', "", selector)
    assert rest == "{__name__=,namespace=,pod=~,cluster=}"
    assert json.loads(quoted[-1], strict=False) == value


def test_a_query_of_ones_own_takes_the_place_of_the_built_in_one():
    asked = queries.query(server(runningQuery="my_running # the new one"), KEY, NAMES)
    assert asked.running == "my_running # the new one"
    assert "timestamp(\nmy_running # the new one\n)" in asked.text
    assert "num_running_reqs" not in asked.text
    assert "num_queue_reqs" in asked.text


def test_a_long_name_is_asked_for_by_what_pods_surely_begin_with():
    asked = queries.query(server(), ("demo-ns", "a" * 52), NAMES)
    assert f'pod=~"{"a" * 45}.*"' in asked.running


# -- pace -----------------------------------------------------------------------------------


def policy(**fields: Any) -> api.Policy:
    given = {"source": "Prometheus", "prometheus": {"url": "http://p"}, **fields}
    return queries.paced(api.Policy.model_validate(given))


@pytest.mark.parametrize(("scrape", "period", "stale"), [(1, 500, 5), (30, 7500, 90)])
def test_times_follow_the_scrape_interval(scrape: int, period: int, stale: int):
    """O-C6: asked four times in an interval, lost after three."""
    paced = policy(prometheus={"url": "http://p", "scrapeIntervalSeconds": scrape})
    assert (paced.sample_period_milliseconds, paced.stale_after_seconds) == (period, stale)


def test_a_long_scrape_interval_keeps_leases_renewed():
    paced = policy(prometheus={"url": "http://p", "scrapeIntervalSeconds": 3600}, leaseSeconds=30)
    assert paced.sample_period_milliseconds == 10_000
    assert paced.lease_seconds == 30


def test_longer_times_of_the_user_stay():
    paced = policy(samplePeriodMilliseconds=20_000, staleAfterSeconds=600)
    assert (paced.sample_period_milliseconds, paced.stale_after_seconds) == (20_000, 600)


def test_source_engine_is_left_alone():
    plain = api.Policy.model_validate({"prometheus": {"url": "http://p"}})
    assert queries.paced(plain) is plain


# -- one pod --------------------------------------------------------------------------------


def test_a_pod_is_read_with_the_time_of_its_sample():
    assert load(series()) == Reading(STAMP, 40, 3, None, None, 1, age=10.0)


def test_a_true_zero_is_zero():
    """O-C4.3."""
    assert load(series(0, 0)).running == 0


def test_an_empty_answer_is_no_zero():
    """O-C4.1: what is missing is named by its query."""
    answer = read([])
    assert isinstance(answer, Gap)
    assert answer.code == "NoSeries"
    assert "the answer is empty; query: {__name__=" in answer.message


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "-Inf"])
@pytest.mark.parametrize("signal", ["running", "queued"])
def test_no_count_is_no_zero(signal: str, value: str):
    gap = load(series(**{signal: value}))
    assert gap.code == "Unreadable"
    assert f"{signal} is" in gap.message


def test_one_signal_alone_is_no_reading():
    gap = load([e for e in series() if e["metric"]["specserve_signal"].startswith("running")])
    assert gap.code == "NoSeries"
    assert "sglang:num_queue_reqs" in gap.message


def test_a_sample_without_a_time_is_not_trusted():
    gap = load([e for e in series() if e["metric"]["specserve_signal"] != "queued_time"])
    assert gap.code == "Unreadable"
    assert "no time" in gap.message


def test_an_old_sample_is_lost_even_if_the_server_still_returns_it():
    """O-C6.3."""
    gap = load(series(stamp=NOW - 91))
    assert gap.code == "SamplesStale"
    assert "91 s old, limit 90 s" in gap.message
    assert isinstance(load(series(stamp=NOW - 89)), Reading)


def test_a_sum_is_no_fresher_than_its_oldest_share():
    def ranks(age: float) -> Any:
        return load(flat(series(5, dp_rank="0"), series(6, stamp=NOW - age, dp_rank="1")))

    assert ranks(91).code == "SamplesStale"
    assert (ranks(60).stamp, ranks(60).age) == (NOW - 60, 60)


def test_an_unchanged_sample_keeps_its_stamp():
    """O-C6.2: nothing about it says that it is new."""
    later = json.loads(json.dumps(series()).replace(str(NOW), str(NOW + 20)))
    assert load(later).stamp == load(series()).stamp
    assert load(later).age == load(series()).age + 20


def test_a_clock_that_is_ahead_makes_no_negative_age():
    assert load(series(stamp=NOW + 5)).age == 0.0


@pytest.mark.parametrize(
    ("targets", "running"),
    [
        pytest.param([(10, {"tp_rank": str(r)}) for r in range(4)], 10, id="a"),
        pytest.param(
            [
                (10, {"dp_rank": "0", "tp_rank": "0"}),
                (10, {"dp_rank": "0", "tp_rank": "1"}),
                (14, {"dp_rank": "1", "tp_rank": "2"}),
                (14, {"dp_rank": "1", "tp_rank": "3"}),
            ],
            24,
            id="b",
        ),
        pytest.param(
            [
                (value, {"dp_rank": str(k), "tp_rank": str(k)})
                for k, value in enumerate([8, 0, 0, 9, 0, 0, 10, 9])
            ],
            36,
            id="c",
        ),
    ],
)
def test_shares_add_up_and_copies_do_not(targets: list[Any], running: int):
    """O-C2."""
    result = flat(*(series(value, 0, **labels) for value, labels in targets))
    reading = load(result)
    assert reading.running == running
    assert reading.ranks == len({labels.get("dp_rank", "") for _, labels in targets})


def test_one_series_of_many_ranks_shows_as_one():
    """O-C2 (d): the status can tell that ranks are missing."""
    assert load(series(5)).ranks == 1


def test_shares_and_a_series_without_a_rank_are_not_added_up():
    gap = load(flat(series(5), series(3, dp_rank="1")))
    assert "dp_rank" in gap.message


def test_replicas_of_the_server_count_once_and_the_newer_wins():
    """O-C5, its very answer."""
    result = flat(
        series(22, 0, STAMP, prometheus_replica="p-0"),
        series(40, 0, STAMP - 60, prometheus_replica="p-1"),
        series(5, 0, STAMP, pod="model-a-1", prometheus_replica="p-0"),
    )
    assert load(result).running == 22
    assert load(result, "model-a-1").running == 5


def test_replicas_that_are_both_old_are_no_data():
    """O-C5.2."""
    result = flat(
        series(22, stamp=NOW - 100, prometheus_replica="p-0"),
        series(40, stamp=NOW - 160, prometheus_replica="p-1"),
    )
    assert load(result).code == "SamplesStale"


@pytest.mark.parametrize("label", ["prometheus", "replica", "instance", "job", "endpoint"])
def test_labels_of_scraping_do_not_make_a_pod_twice_as_busy(label: str):
    result = flat(series(22, **{label: "a"}), series(22, **{label: "b"}))
    assert load(result).running == 22


def test_an_unknown_label_is_asked_about():
    """Copies or shares: the reason names the label and what to write."""
    result = flat(series(22, shard="a"), series(22, shard="b"))
    gap = load(result)
    assert gap.code == "Unreadable"
    assert "label shard" in gap.message
    assert load(result, replicaLabels=["shard"]).running == 22


def test_several_processes_are_ambiguous():
    """O-C9.3."""
    assert "pid" in load(flat(series(24, pid="71"), series(2, pid="903"))).message


def test_series_of_another_model_are_not_counted():
    result = flat(series(1, model_name="model-a"), series(50, model_name="model-b"))
    assert load(result).running == 1
    gap = load(series(50, model_name="model-b"))
    assert "model-b, not model-a" in gap.message


def test_pods_of_others_are_not_ours():
    other = series(9)
    for element in other:
        element["metric"]["namespace"] = "other-ns"
    assert set(read(flat(series(), other))) == {POD}
    gap = read(other)
    assert gap.code == "NoSeries"
    assert "namespace and pod" in gap.message


def test_an_expression_is_new_evidence_once_in_a_scrape_interval():
    """Its time is that of its evaluation, whatever its samples are."""

    def at(moment: float) -> Reading:
        result = series(stamp=moment)
        for element in result:
            element["value"][0] = moment
        reading = load(result, runningQuery="sum(a)", queuedQuery="sum(b)")
        assert isinstance(reading, Reading)
        return reading

    assert at(1200.0).stamp == at(1214.0).stamp == at(1229.9).stamp
    assert at(1230.0).stamp > at(1229.9).stamp


def test_a_message_names_its_query_and_stays_short():
    gap = load(series("NaN"), labelMatchers=[{"name": "cluster", "value": "x" * 500}])
    assert "query: {__name__=" in gap.message
    assert len(gap.message) <= 480


# -- all that can come ----------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(JSON)
def test_no_answer_whatever_breaks_the_loop(result: Any):
    answer = read(result)
    assert isinstance(answer, Gap)
    assert "query: " in answer.message


@pytest.mark.parametrize(
    ("member", "broken"),
    [
        *(("metric", value) for value in (None, [], "x", {"pod": 1}, ["ab"])),
        *(("value", value) for value in (None, {}, [], [NOW], [NOW, "x"], [NOW, None])),
        *(("value", value) for value in (["x", "1"], [True, "1"], [math.nan, "1"], "12")),
    ],
)
def test_one_broken_element_is_no_reading(member: str, broken: Any):
    result = series()
    result[1][member] = broken
    answer = read(result)
    assert isinstance(answer, Gap)


@given(
    shares=st.lists(st.integers(0, 1000), min_size=1, max_size=4),
    copies=st.integers(1, 4),
    ages=st.lists(st.integers(0, 80), min_size=1, max_size=3, unique=True),
    order=st.randoms(use_true_random=False),
)
def test_a_pod_is_as_busy_as_its_ranks_whoever_scrapes_it(
    shares: list[int], copies: int, ages: list[int], order: Any
):
    """Replica `i` of the server saw everything `i` requests busier; the newest one counts."""
    result = flat(
        *(
            series(
                value + extra,
                value,
                NOW - age,
                replica=f"r{extra}",
                dp_rank=str(rank) if len(shares) > 1 else "",
                tp_rank=str(copy),
            )
            for extra, age in enumerate(ages)
            for rank, value in enumerate(shares)
            for copy in range(copies)
        )
    )
    order.shuffle(result)
    newest = ages.index(min(ages))
    reading = load(result)
    assert reading.running == sum(shares) + newest * len(shares)
    assert reading.queued == sum(shares)
    assert reading.ranks == len(shares)
    assert reading.stamp == NOW - min(ages)
    assert math.isclose(reading.age, min(ages))
