"""Settings, directives and read-backs, held against the engine's own reader of the wire."""

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve import api
from specserve.policy import Mode, Setting, Verdict, directive, threshold
from specserve_engine import wire

DRAFT = api.Draft(method="EAGLE3", source="path:///draft", steps=[0, 3, 1])
TIERS = [{"minBatch": 16, "steps": 1}, {"minBatch": 1, "steps": 3}, {"minBatch": 64, "steps": 1}]


def policy(**fields) -> api.Policy:
    return api.Policy.model_validate(fields)


def wanted(rule: api.Policy, mode: Mode, ranks: int = 1) -> dict:
    """The setting of a mode, without a table of the BreakEven strategy."""
    tiers = ((1, 0),) if mode == "Off" else threshold.tiers(rule, max(DRAFT.steps))
    setting = Setting(tiers, "Warm" if rule.draft_kv == "Warm" else "Cold")
    return directive.wanted(rule, DRAFT, Verdict(mode, "", "", False, setting), ranks)


def put(setting: dict, **fields) -> dict:
    arguments = {
        "pod_uid": "uid-1",
        "boot_id": "boot-1",
        "epoch": 7,
        "holder": "specserve/specserve",
        "lease_seconds": 60,
        "deadline_ms": 2000,
        "reason": "off: 61 in flight above 48",
    }
    return directive.body(setting, **{**arguments, **fields})


BOUND_TABLE = [{"minBatch": 1, "steps": 3}, {"minBatch": 49, "steps": 0}]
USER_TABLE = [
    {"minBatch": 1, "steps": 3},
    {"minBatch": 16, "steps": 1},
    {"minBatch": 64, "steps": 1},
]


@pytest.mark.parametrize(
    ("fields", "mode", "expected"),
    [
        pytest.param(
            {},
            "On",
            {
                "mode": "on",
                "steps": 3,
                "draftKv": "cold",
                "fallback": {"mode": "tiers", "tiers": BOUND_TABLE, "draftKv": "cold"},
            },
            id="on takes the most steps there are",
        ),
        pytest.param(
            {"steps": 1, "draftKv": "Warm"},
            "On",
            {
                "mode": "on",
                "steps": 1,
                "draftKv": "warm",
                "fallback": {
                    "mode": "tiers",
                    "tiers": [{"minBatch": 1, "steps": 1}, {"minBatch": 49, "steps": 0}],
                    "draftKv": "warm",
                },
            },
            id="the policy's steps win",
        ),
        pytest.param(
            {},
            "Off",
            {
                "mode": "off",
                "draftKv": "cold",
                "fallback": {"mode": "tiers", "tiers": BOUND_TABLE, "draftKv": "cold"},
            },
            id="off falls back to the same table",
        ),
        pytest.param(
            {"tiers": TIERS},
            "On",
            {
                "mode": "tiers",
                "tiers": USER_TABLE,
                "draftKv": "cold",
                "fallback": {
                    "mode": "tiers",
                    "tiers": [*USER_TABLE[:2], {"minBatch": 49, "steps": 0}],
                    "draftKv": "cold",
                },
            },
            id="tiers in order, cut at the bound in the fallback",
        ),
        pytest.param(
            {"mode": "On"},
            "On",
            {
                "mode": "on",
                "steps": 3,
                "draftKv": "cold",
                "fallback": {"mode": "on", "steps": 3, "draftKv": "cold"},
            },
            id="pin on outlives the operator",
        ),
        pytest.param(
            {"mode": "On", "tiers": TIERS},
            "On",
            {
                "mode": "tiers",
                "tiers": USER_TABLE,
                "draftKv": "cold",
                "fallback": {"mode": "tiers", "tiers": USER_TABLE, "draftKv": "cold"},
            },
            id="pin on with tiers",
        ),
        pytest.param(
            {"mode": "Off"},
            "Off",
            {
                "mode": "off",
                "draftKv": "cold",
                "fallback": {"mode": "off", "draftKv": "cold"},
            },
            id="pin off outlives the operator",
        ),
        pytest.param(
            {"signal": "Queued"},
            "Off",
            {
                "mode": "off",
                "draftKv": "cold",
                "fallback": {"mode": "auto", "draftKv": "cold"},
            },
            id="the queue says nothing about the batch",
        ),
        pytest.param(
            {"signal": "Queued", "tiers": TIERS},
            "Off",
            {
                "mode": "off",
                "draftKv": "cold",
                "fallback": {"mode": "tiers", "tiers": USER_TABLE, "draftKv": "cold"},
            },
            id="a table of the user's is for any signal",
        ),
        pytest.param(
            {"threshold": {"offAbove": 65_535, "onBelow": 1}},
            "Off",
            {
                "mode": "off",
                "draftKv": "cold",
                "fallback": {
                    "mode": "tiers",
                    "tiers": [{"minBatch": 1, "steps": 3}, {"minBatch": 65_536, "steps": 0}],
                    "draftKv": "cold",
                },
            },
            id="the largest batch that can be written",
        ),
    ],
)
def test_wanted(fields, mode, expected):
    assert wanted(policy(**fields), mode) == expected


@st.composite
def policies(draw: st.DrawFn) -> api.Policy:
    below = draw(st.integers(1, 65_534))
    batches = draw(st.lists(st.integers(2, 65_536), unique=True, max_size=15))
    tiers = [
        {"minBatch": batch, "steps": draw(st.sampled_from([0, 1, 3]))} for batch in [1, *batches]
    ]
    return policy(
        mode=draw(st.sampled_from(["Auto", "Observe", "On", "Off"])),
        signal=draw(st.sampled_from(["InFlight", "Running", "Queued"])),
        threshold={"onBelow": below, "offAbove": draw(st.integers(below + 1, 65_535))},
        draftKv=draw(st.sampled_from(["Cold", "Warm"])),
        steps=draw(st.sampled_from([None, 1, 3])),
        tiers=draw(st.sampled_from([[], tiers])),
    )


@given(policy=policies(), mode=st.sampled_from(["On", "Off"]), reason=st.text(max_size=400))
def test_the_engine_reads_what_is_written_and_reports_it_back(policy, mode, reason):
    setting = wanted(policy, mode)
    parsed = wire.parse_directive(put(setting, reason=reason))
    assert parsed.setting.needed_steps() | parsed.fallback.needed_steps() <= set(DRAFT.steps)
    readback = {
        **wire.setting_json(parsed.setting),
        "fallback": wire.setting_json(parsed.fallback),
    }
    assert directive.matches(readback, setting) is None
    if mode == "Off":
        assert directive.is_on(readback) is False
    if mode == "On" and not policy.tiers:
        assert directive.is_on(readback) is True


@given(policy=policies(), mode=st.sampled_from(["On", "Off"]), batch=st.integers(1, 65_536))
def test_without_an_operator_no_batch_above_the_bound_speculates(policy, mode, batch):
    parsed = wire.parse_directive(put(wanted(policy, mode)))
    steps = parsed.fallback.steps_for(batch)
    if policy.mode in {"Auto", "Observe"} and policy.signal != "Queued":
        assert steps is not None
        if batch > policy.threshold.off_above:
            assert steps == 0
        elif not policy.tiers:
            assert steps > 0


def test_body():
    body = put({"mode": "off", "draftKv": "cold", "fallback": {"mode": "off", "draftKv": "cold"}})
    assert body == {
        "podUID": "uid-1",
        "bootID": "boot-1",
        "epoch": 7,
        "holder": "specserve/specserve",
        "leaseSeconds": 60,
        "mode": "off",
        "draftKv": "cold",
        "fallback": {"mode": "off", "draftKv": "cold"},
        "deadlineMs": 2000,
        "reason": "off: 61 in flight above 48",
    }


def test_a_reason_is_one_printable_line_of_256_characters():
    reason = put({}, reason="first\n second\x1b[31m " + "x" * 400)["reason"]
    assert reason.startswith("first second?[31m xxx")
    assert len(reason) == 256


def report(**changes) -> dict:
    setting = wanted(policy(), "On")
    fallback = {"steps": None, **setting["fallback"]}
    return {"tiers": None, **setting, "fallback": fallback, "epoch": 7, **changes}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, None),
        ({"epoch": 99, "controllable": True}, None),
        ({"mode": "off", "steps": None}, "mode is off, wanted on"),
        ({"steps": 1}, "steps is 1, wanted 3"),
        ({"steps": None}, "steps is missing, wanted 3"),
        ({"draftKv": "warm"}, "draftKv is warm, wanted cold"),
        ({"fallback": {"mode": "off", "draftKv": "cold"}}, "fallback.mode is off, wanted tiers"),
        (
            {"fallback": {"mode": "tiers", "tiers": [{"minBatch": 1, "steps": 3}]}},
            (
                "fallback.tiers is [minBatch=1 steps=3], "
                "wanted [minBatch=1 steps=3, minBatch=49 steps=0]"
            ),
        ),
        (
            {"fallback": None},
            (
                "fallback is missing, wanted mode=tiers "
                "tiers=[minBatch=1 steps=3, minBatch=49 steps=0] draftKv=cold"
            ),
        ),
    ],
)
def test_matches_names_the_first_difference(changes, difference):
    assert directive.matches(report(**changes), wanted(policy(), "On")) == (difference)


def test_an_engine_that_has_lost_everything_differs():
    assert directive.matches({}, wanted(policy(), "Off")) == ("mode is missing, wanted off")


def test_tiers_are_compared():
    setting = wanted(policy(tiers=TIERS), "On")
    readback = deepcopy(setting)
    assert directive.matches(readback, setting) is None
    readback["tiers"][1]["steps"] = 0
    difference = directive.matches(readback, setting)
    assert difference is not None
    assert difference.startswith("tiers is [")


def ranks(*pairs) -> dict:
    members = [{"activeSteps": steps, "decodeRounds": rounds} for steps, rounds in pairs]
    return {"mode": "auto", "groups": [{"ranks": members}]}


@pytest.mark.parametrize(
    ("readback", "expected"),
    [
        ({"mode": "on", "steps": 3}, True),
        ({"mode": "off"}, False),
        ({"mode": "tiers", "tiers": [{"minBatch": 1, "steps": 0}]}, False),
        ({"mode": "tiers", "tiers": BOUND_TABLE}, True),
        (ranks((3, 10), (3, 10)), True),
        (ranks((0, 10)), False),
        (ranks((0, 10), (3, 0)), False),
        (ranks((3, 0)), None),
        (ranks((None, 5)), None),
        ({"mode": "auto"}, None),
        ({"mode": "auto", "groups": None}, None),
        ({}, None),
        ({"mode": "other"}, None),
    ],
)
def test_is_on(readback, expected):
    assert directive.is_on(readback) is expected


@pytest.mark.parametrize(("ranks", "first_off"), [(1, 49), (2, 25), (8, 7), (48, 2)])
def test_a_table_for_ranks_holds_a_rank_s_share_of_the_pod_s_bound(ranks, first_off):
    fallback = wanted(policy(), "On", ranks)["fallback"]
    assert fallback["tiers"][-1] == {"minBatch": first_off, "steps": 0}


def test_more_ranks_than_the_bound_has_requests_fall_back_to_off():
    assert wanted(policy(), "On", 64)["fallback"] == {
        "mode": "off",
        "draftKv": "cold",
    }


def reported(mode, ranks, steps=None):
    listed = [
        {"rank": n, "activeSteps": active, "decodeRounds": rounds}
        for n, (active, rounds) in enumerate(ranks)
    ]
    return {"mode": mode, "steps": steps, "groups": [{"ranks": listed}]}


@pytest.mark.parametrize(
    ("readback", "words"),
    [
        pytest.param(reported("off", [(0, 9), (0, 9)]), None, id="all obey"),
        pytest.param(reported("off", [(0, 9), (3, 9)]), "rank 1 runs 3 steps", id="one does not"),
        pytest.param(reported("off", [(3, 0)]), None, id="an idle rank keeps its steps"),
        pytest.param(reported("off", [(3, 2)]), None, id="the round under way may end"),
        pytest.param(reported("on", [(0, 9)], 3), "ordered 3", id="on, but not active"),
        pytest.param(reported("on", [(3, 9)], 3), None, id="on and active"),
        pytest.param(reported("off", [(None, None)]), None, id="a silent rank is not judged"),
        pytest.param(reported("tiers", [(3, 9)]), None, id="a table is not judged"),
        pytest.param(reported("auto", [(3, 9)]), None, id="nor the engine's own policy"),
        pytest.param({"mode": "off"}, None, id="nothing reported"),
    ],
)
def test_astray_names_the_rank_that_does_otherwise(readback, words):
    found = directive.astray(readback)
    assert found is None if words is None else words in found
