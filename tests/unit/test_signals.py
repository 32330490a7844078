"""Load out of engines' answers: as real servers give it, as others have met it, and as garbage."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.signals import MetricNames, Unreadable, from_loads, from_metrics

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = MetricNames(
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:generation_tokens_total"
)
VERSIONS = ["0.5.16", "0.5.23"]
LOADS = {"fresh": (0, 0), "load4": (4, 0), "queue14": (8, 6), "off": (0, 0)}
QUEUE = 'sglang:num_queue_reqs{model_name="model-a"} 3.0\n'


def golden(version: str) -> dict:
    return json.loads((GOLDEN / f"sglang-{version}" / "load.json").read_text())


def loads(*entries: dict) -> dict:
    return {
        "loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, **entry} for entry in entries]
    }


def metrics(running: str, queued: str = QUEUE) -> str:
    return f"{running}\n{queued}"


def series(values: list[tuple[str, float]], name: str = "sglang:num_running_reqs") -> str:
    return "".join(f"{name}{{{labels}}} {value}\n" for labels, value in values)


# -- real servers ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", LOADS)
def test_loads_of_a_real_server(version: str, case: str):
    body = golden(version)[case]["loads"]
    reading = from_loads(body)
    assert (reading.running, reading.queued) == LOADS[case]
    assert (reading.capacity, reading.ranks) == (8, 1)
    assert reading.stamp == body["loads"][0]["timestamp"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", LOADS)
def test_metrics_of_a_real_server(version: str, case: str):
    reading = from_metrics("\n".join(golden(version)[case]["metrics"]), NAMES, "tiny")
    assert (reading.running, reading.queued) == LOADS[case]
    assert (reading.stamp, reading.capacity, reading.ranks) == (None, None, 1)
    assert reading.cache_tokens is None


def test_tokens_of_streamed_and_other_requests_add_up():
    # 0.5.23 counts them apart: 1384 for the one, 128 for the other.
    reading = from_metrics("\n".join(golden("0.5.23")["queue14"]["metrics"]), NAMES)
    assert reading.tokens_total == 1384 + 128


def test_tokens_of_an_older_server_are_one_series():
    reading = from_metrics("\n".join(golden("0.5.16")["after_queue14"]["metrics"]), NAMES)
    assert reading.tokens_total == 5712


def test_throughput_is_no_proof_of_traffic():
    # O-C3: the throughput gauge never went back to zero.
    text = metrics(
        "sglang:num_running_reqs 0\nsglang:gen_throughput 900", "sglang:num_queue_reqs 0"
    )
    assert from_metrics(text, NAMES).running == 0


def test_a_gauge_that_stays_at_its_last_busy_value_is_believed():
    text = metrics("sglang:num_running_reqs 24\nsglang:gen_throughput 900")
    assert from_metrics(text, NAMES).running == 24


# -- names ----------------------------------------------------------------------------------

COLON = 'sglang:num_running_reqs{model_name="model-a"} 40.0\n' + QUEUE
UNDERSCORE = COLON.replace("sglang:", "sglang_")
LONGER = COLON + 'sglang:num_running_reqs_offline{model_name="model-a"} 900.0\n'
TYPED = "# HELP sglang:num_running_reqs Running.\n# TYPE sglang:num_running_reqs gauge\n" + COLON


@pytest.mark.parametrize(
    "wanted", [NAMES, MetricNames("sglang_num_running_reqs", "sglang_num_queue_reqs", "x")]
)
@pytest.mark.parametrize("text", [COLON, UNDERSCORE, COLON + UNDERSCORE, LONGER, TYPED])
def test_both_separators_count_once(text: str, wanted: MetricNames):
    reading = from_metrics(text, wanted, "model-a")
    assert (reading.running, reading.queued) == (40, 3)


def test_the_names_looked_for_are_told():
    with pytest.raises(Unreadable) as caught:
        from_metrics('vllm:num_requests_running{model_name="model-a"} 40.0', NAMES)
    assert "sglang:num_running_reqs or sglang_num_running_reqs" in str(caught.value)
    assert "sglang:num_queue_reqs or sglang_num_queue_reqs" in str(caught.value)


def test_other_names_can_be_told():
    text = "vllm:num_requests_running 40\nvllm:num_requests_waiting 2"
    other = MetricNames("vllm:num_requests_running", "vllm:num_requests_waiting", "none")
    reading = from_metrics(text, other)
    assert (reading.running, reading.queued, reading.tokens_total) == (40, 2, None)


def test_a_body_of_another_model_is_discarded():
    with pytest.raises(Unreadable, match="another model than model-b"):
        from_metrics(COLON, NAMES, "model-b")


def test_a_series_of_another_model_does_not_count():
    text = COLON + COLON.replace("model-a", "model-b").replace("40.0", "7")
    assert from_metrics(text, NAMES, "model-b").running == 7


# -- ranks ----------------------------------------------------------------------------------


def test_tensor_parallel_ranks_hold_copies():
    text = series([(f'tp_rank="{rank}"', 10) for rank in range(4)])
    assert from_metrics(metrics(text), NAMES).running == 10


def test_data_parallel_ranks_hold_shares_of_which_tensor_parallel_ranks_hold_copies():
    values = [(0, 0, 10), (0, 1, 10), (1, 2, 14), (1, 3, 14)]
    text = series([(f'dp_rank="{dp}",tp_rank="{tp}"', value) for dp, tp, value in values])
    reading = from_metrics(metrics(text), NAMES)
    assert (reading.running, reading.ranks) == (24, 2)


def test_idle_ranks_of_attention_data_parallelism_add_nothing():
    values = [8, 0, 0, 9, 0, 0, 10, 9]
    text = series([(f'dp_rank="{k}",tp_rank="{k}"', value) for k, value in enumerate(values)])
    reading = from_metrics(metrics(text), NAMES)
    assert (reading.running, reading.ranks) == (36, 8)


def test_one_series_without_a_rank_covers_one_rank():
    assert from_metrics(metrics("sglang:num_running_reqs 5"), NAMES).ranks == 1


@pytest.mark.parametrize("copy", ["tp_rank", "pp_rank", "moe_ep_rank", "attn_cp_rank"])
def test_copies_of_any_kind_of_rank_count_once(copy: str):
    text = series([(f'{copy}="{rank}"', 6) for rank in range(3)])
    assert from_metrics(metrics(text), NAMES).running == 6


def test_the_series_without_a_priority_is_the_total():
    text = series([('priority=""', 12), ('priority="0"', 5), ('priority="1"', 7)])
    assert from_metrics(metrics(text), NAMES).running == 12


def test_priorities_add_up_where_there_is_no_total():
    text = series([('priority="0"', 5), ('priority="1"', 7)])
    assert from_metrics(metrics(text), NAMES).running == 12


def test_series_of_a_dead_process_are_not_guessed_at():
    # O-C9: 24 were of a worker that had died.
    with pytest.raises(Unreadable, match="several processes"):
        from_metrics(metrics(series([('pid="71"', 24), ('pid="903"', 2)])), NAMES)


def test_loads_of_ranks_add_up_and_are_as_old_as_the_oldest():
    body = loads(
        {"dp_rank": 0, "timestamp": 20.0, "max_running_requests": 8, "max_total_num_tokens": 90},
        {
            "dp_rank": 1,
            "timestamp": 10.5,
            "num_waiting_reqs": 4,
            "max_running_requests": 8,
            "max_total_num_tokens": 90,
        },
    )
    reading = from_loads(body)
    assert (reading.running, reading.queued, reading.capacity) == (2, 4, 16)
    assert (reading.stamp, reading.ranks, reading.cache_tokens) == (10.5, 2, 180)


def test_a_rank_listed_twice_counts_once():
    reading = from_loads(loads({"dp_rank": 0}, {"dp_rank": 0, "num_running_reqs": 5}))
    assert (reading.running, reading.ranks) == (5, 1)


def test_entries_without_a_rank_are_ranks_of_their_own():
    reading = from_loads(loads({"dp_rank": 1}, {}, {}))
    assert (reading.running, reading.ranks) == (3, 3)


@pytest.mark.parametrize("capacity", [{}, {"max_running_requests": None}])
def test_a_cap_that_one_rank_does_not_tell_is_unknown(capacity: dict):
    assert from_loads(loads({"max_running_requests": 8}, capacity)).capacity is None


@pytest.mark.parametrize("stamp", [None, "yesterday", math.nan, math.inf, -1, True])
def test_a_stamp_that_is_none_is_left_out(stamp: object):
    assert from_loads(loads({"timestamp": stamp})).stamp is None


# -- absent is not zero ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [None, [], "", 0, {}, {"loads": []}, {"loads": None}, {"loads": {}}]
)
def test_an_answer_without_entries_is_no_load(body: object):
    with pytest.raises(Unreadable, match="no entry under loads"):
        from_loads(body)


@pytest.mark.parametrize("field", ["num_running_reqs", "num_waiting_reqs"])
@pytest.mark.parametrize(
    "value", [None, "", "8", -1, math.nan, math.inf, True, [], {}, 10**400, 2**60]
)
def test_a_count_that_is_none_is_no_load(field: str, value: object):
    with pytest.raises(Unreadable, match=field):
        from_loads(loads({}, {field: value}))


@pytest.mark.parametrize("field", ["num_running_reqs", "num_waiting_reqs"])
def test_a_missing_count_is_no_load(field: str):
    body = loads({})
    del body["loads"][0][field]
    with pytest.raises(Unreadable, match=field):
        from_loads(body)


def test_an_entry_that_is_no_object_is_no_load():
    with pytest.raises(Unreadable, match="no object"):
        from_loads({"loads": [7]})


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "1e300"])
def test_a_series_that_is_no_count_is_no_load(value: str):
    with pytest.raises(Unreadable, match="num_running_reqs is"):
        from_metrics(metrics(f"sglang:num_running_reqs {value}"), NAMES)


def test_one_copy_that_is_no_count_spoils_the_reading():
    text = series([('tp_rank="0"', 10), ('tp_rank="1"', math.nan)])
    with pytest.raises(Unreadable):
        from_metrics(metrics(text), NAMES)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", QUEUE, "sglang:num_running_reqs 5\n"])
def test_a_missing_series_is_no_load(text: str):
    with pytest.raises(Unreadable, match="has no series"):
        from_metrics(text, NAMES)


def test_a_true_zero_is_zero():
    reading = from_metrics("sglang:num_running_reqs 0\nsglang:num_queue_reqs 0", NAMES)
    assert (reading.running, reading.queued) == (0, 0)


def test_a_series_that_cannot_be_parsed_is_no_load():
    with pytest.raises(Unreadable, match="cannot be parsed"):
        from_metrics(metrics('sglang:num_running_reqs{tp_rank="0} 4'), NAMES)


def test_what_else_an_engine_shows_need_not_be_well_formed():
    text = "other{a=} 1\n" + COLON + "half a li"
    assert from_metrics(text, NAMES).running == 40


def test_a_huge_body_is_read():
    rest = "".join(f'other_metric{{le="{n}"}} {n}\n' for n in range(50_000))
    assert from_metrics(rest + COLON, NAMES).running == 40


# -- garbage --------------------------------------------------------------------------------

garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["loads", "num_running_reqs", "num_waiting_reqs", "dp_rank", "timestamp"]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(garbage)
def test_garbage_is_unreadable_or_counts_what_it_says(body: object):
    try:
        reading = from_loads(body)
    except Unreadable:
        return
    shares = [entry["num_running_reqs"] for entry in body["loads"]]
    assert 0 <= reading.running <= round(sum(shares)) + len(shares)
    assert reading.ranks >= 1


LINES = st.text(alphabet='ab_rank{}"=,\\ 01.e+-NaIf#\n\t:', max_size=40)


@given(LINES, LINES)
def test_garbled_text_is_unreadable_or_a_count(running: str, queued: str):
    text = f"sglang:num_running_reqs{running}\nsglang:num_queue_reqs{queued}"
    try:
        reading = from_metrics(text, NAMES)
    except Unreadable:
        return
    assert reading.running >= 0
    assert reading.queued >= 0


@given(st.sets(st.sampled_from(["running", "queued", "tokens"])))
def test_absence_is_never_zero(present: set[str]):
    lines = {
        "running": "sglang:num_running_reqs 4",
        "queued": "sglang:num_queue_reqs 2",
        "tokens": "sglang:generation_tokens_total 9",
    }
    text = "\n".join(lines[name] for name in sorted(present))
    if {"running", "queued"} <= present:
        reading = from_metrics(text, NAMES)
        assert reading.tokens_total == (9 if "tokens" in present else None)
    else:
        with pytest.raises(Unreadable):
            from_metrics(text, NAMES)
