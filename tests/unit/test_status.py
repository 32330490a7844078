"""What is observed becomes conditions that tools and people can rely on."""

import datetime
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, create_model

from specserve import api, conditions, status
from specserve.decisions import Switch
from specserve.observed import Owned, Pod, Trouble
from specserve.status import Engine, Observation

NOW = "2030-01-01T00:00:00Z"
LATER = "2030-01-01T01:00:00Z"
ROLLED_OUT = Owned("Deployment", "d", ("team", "chat"), "chat", "o", b"")
STEERED = Engine(
    "chat-0",
    on=True,
    wanted="On",
    controllable=True,
    sampled=True,
    ranks=1,
    epoch=3,
    capacity=64,
    cache_tokens=96,
)


def iso(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def spec(replicas: int = 1, **parts: Any) -> api.SpecServeSpec:
    return api.SpecServeSpec.model_validate(
        {
            "model": {"source": "hf://a/b"},
            "draft": {"method": "EAGLE", "source": "hf://a/c"},
            "engine": {"image": "engine:1"},
            "replicas": replicas,
            **parts,
        }
    )


def pod(name: str = "chat-0", *, trouble: Trouble | None = None, **changes: Any) -> Pod:
    usable = trouble is None
    fresh = Pod(
        f"uid-{name}", ("team", "chat"), name, "10.0.0.1", usable, True, False, "b", trouble
    )
    return replace(fresh, **changes)


def seen(**changes: Any) -> Observation:
    well = Observation(
        name="chat",
        generation=2,
        spec=spec(),
        blocked=None,
        deployment=ROLLED_OUT,
        pods=[pod()],
        engines=[STEERED],
        requests=64,
        period_milliseconds=None,
        previous={},
        calibrated=conditions.Condition("Calibrated", "True", conditions.MEASURED),
    )
    return replace(well, **changes)


def engines(*changes: dict[str, Any]) -> list[Engine]:
    return [replace(STEERED, name=f"chat-{n}", **change) for n, change in enumerate(changes)]


def build(observation: Observation, now: str = NOW) -> dict[str, Any]:
    return status.build(observation, now, iso)


def condition(observation: Observation, kind: str) -> tuple[str, str, str]:
    found = next(c for c in build(observation)["conditions"] if c["type"] == kind)
    return found["status"], found["reason"], found["message"]


# -- the whole ------------------------------------------------------------------------------


def test_all_is_well():
    made = build(seen())
    assert {c["type"]: c["status"] for c in made["conditions"]} == {
        "Ready": "True",
        "Reconciling": "False",
        "Stalled": "False",
        "Available": "True",
        "MetricsFresh": "True",
        "EnginesHealthy": "True",
        "SpeculationControl": "True",
        "SpeculationSettled": "True",
        "ThresholdReachable": "True",
        "RequestCapacity": "True",
        "StrategyDecides": "True",
        "DraftEffective": "Unknown",
        "CurveKnown": "True",
        "Calibrated": "True",
    }
    assert (made["ready"], made["speculation"]["summary"]) == ("1/1", "On 1/1")
    assert made["observedGeneration"] == 2


def test_every_condition_is_published_on_the_first_visit():
    made = build(seen(pods=[], engines=[], deployment=None))
    assert [c["type"] for c in made["conditions"]] == list(conditions.TYPES)


def test_equal_observations_give_equal_statuses_whatever_the_time_and_order():
    two = engines({"control_error": ("A", "a")}, {"stalled": True})
    first = build(seen(engines=two))
    again = build(seen(engines=two[::-1], previous=first), LATER)
    assert again == first


def test_the_time_of_a_transition_is_kept_until_the_next():
    first = build(seen())
    second = build(seen(previous=first, pods=[], engines=[]), LATER)
    times = {c["type"]: c["lastTransitionTime"] for c in second["conditions"]}
    assert times["Ready"] == LATER
    assert times["Stalled"] == NOW


# -- workload -------------------------------------------------------------------------------

CRASH = Trouble("CrashLooping", "container engine ended with Error, exit code 1")
FULL = Trouble("Unschedulable", "no nvidia.com/gpu")
WORKLOAD = {
    "starting": (
        {"pods": [], "engines": [], "deployment": None},
        ("False", "ReplicasNotReady", "0/1 pods ready"),
    ),
    "crash loop": ({"pods": [pod(trouble=CRASH)]}, ("False", "CrashLooping", "pod chat-0: cont")),
    "the worst of several": (
        {"pods": [pod("chat-0", trouble=FULL), pod("chat-1", trouble=CRASH)]},
        ("False", "CrashLooping", "chat-1"),
    ),
    "trouble of a new kind": (
        {"pods": [pod(trouble=Trouble("Novel", "never seen"))]},
        ("False", "Novel", "never seen"),
    ),
    "no room while an old pod leaves": (
        {
            "pods": [pod(trouble=FULL), pod("chat-1", alive=False, leaving=True)],
            "deployment": replace(ROLLED_OUT, rolled_out=False),
        },
        ("False", "ReplicasNotReady", "0/1"),
    ),
    "no room beside a pod that never leaves": (
        {"pods": [pod(trouble=FULL), pod("chat-1", alive=False, leaving=True)]},
        ("False", "Unschedulable", "nvidia.com/gpu"),
    ),
    "quota": (
        {
            "pods": [],
            "deployment": replace(ROLLED_OUT, problem=Trouble("PodsRefused", "exceeded quota")),
        },
        ("False", "PodsRefused", "0/1 pods ready; exceeded quota"),
    ),
    "scaled to zero": (
        {"spec": spec(0), "pods": [], "engines": []},
        ("True", "ScaledToZero", "no pods are asked for"),
    ),
    "rejected": (
        {"blocked": Trouble("SpecRejected", "spec.x is bad")},
        ("False", "SpecRejected", "go on serving"),
    ),
    "rejected before any pod": (
        {"blocked": Trouble("SpecRejected", "spec.x is bad"), "pods": [], "engines": []},
        ("False", "SpecRejected", "spec.x is bad"),
    ),
    "unreadable": (
        {"spec": None, "blocked": Trouble("SpecRejected", "spec.x is bad")},
        ("False", "SpecRejected", "spec.x is bad"),
    ),
    "a Secret is missed by the next pod only": (
        {"blocked": Trouble("SecretMissing", "Secret x")},
        ("True", "ReplicasReady", "1/1"),
    ),
}


@pytest.mark.parametrize("case", WORKLOAD)
def test_ready(case: str):
    changes, (state, reason, words) = WORKLOAD[case]
    found = condition(seen(**changes), "Ready")
    assert found[:2] == (state, reason)
    assert words in found[2]


def test_pods_that_clients_may_not_reach_are_not_said_to_serve():
    blocked = Trouble("ChangedByHand", "kubectl delete service chat has it made anew")
    found = condition(seen(blocked=blocked), "Ready")
    assert found == ("False", "ChangedByHand", blocked.message)


NOT_STARTED = (
    "pod chat-0: container engine has not started: its image is pulled, volumes are mounted or "
    "init containers run"
)


def test_a_container_that_has_not_started_is_told_from_one_that_loads():
    starting = pod(usable=False, boot="#0")
    first = build(seen(pods=[starting], engines=[]))
    assert condition(seen(pods=[starting], engines=[]), "Ready") == (
        "False",
        "ReplicasNotReady",
        f"0/1 pods ready; {NOT_STARTED}",
    )
    # However long it takes, nothing is written again.
    assert build(seen(pods=[starting], engines=[], previous=first), LATER) == first
    loading = replace(starting, boot="containerd://1#0", trouble=Trouble("Loading", "loads"))
    assert condition(seen(pods=[loading], engines=[]), "Ready")[1] == "Loading"


def test_one_pod_serves_and_two_pods_serve():
    assert condition(seen(), "Available")[2] == "1 pod serves"
    two = seen(spec=spec(2), pods=[pod("chat-0"), pod("chat-1")])
    assert condition(two, "Available")[2] == "2 pods serve"


def test_a_full_rollout_with_no_room_says_what_makes_room():
    observation = seen(
        deployment=replace(ROLLED_OUT, rolled_out=False), pods=[pod(), pod("new", trouble=FULL)]
    )
    assert condition(observation, "Ready")[0] == "True"
    assert condition(observation, "Reconciling")[:2] == ("True", "RolloutBlocked")


@pytest.mark.parametrize("case", WORKLOAD)
def test_tools_that_wait_for_any_object_are_not_misled(case: str):
    # kstatus: never both under way and given up; what is given up is not ready.
    made = {c["type"]: c["status"] for c in build(seen(**WORKLOAD[case][0]))["conditions"]}
    assert (made["Reconciling"], made["Stalled"]) != ("True", "True")
    if made["Stalled"] == "True":
        assert made["Ready"] == "False"
    if made["Ready"] == "False":
        assert "True" in (made["Reconciling"], made["Stalled"])


def test_zero_pods_are_no_alarm():
    made = build(seen(spec=spec(0), pods=[], engines=[]))
    assert (made["ready"], made["speculation"]["summary"]) == ("0/0", "-")
    unsure = {c["type"]: c["reason"] for c in made["conditions"] if c["status"] == "Unknown"}
    assert set(unsure.values()) == {"NoPods"}


# -- engines --------------------------------------------------------------------------------

WIDE = spec(engine={"image": "e", "dataParallel": 8})
RUNNING = spec(policy={"signal": "Running"})
STATES = [
    ("MetricsFresh", {"engines": []}, "Unknown", "NoPods"),
    ("MetricsFresh", {"engines": engines({"sampled": False})}, "Unknown", "NoSamples"),
    (
        "MetricsFresh",
        {"engines": engines({}, {"sample_error": ("SamplesStale", "")})},
        "False",
        "SamplesStale",
    ),
    (
        "MetricsFresh",
        {"spec": WIDE, "ranks": 8, "engines": engines({"ranks": 1})},
        "False",
        "RanksMissing",
    ),
    (
        "MetricsFresh",
        {"spec": WIDE, "ranks": 8, "engines": engines({"ranks": 8})},
        "True",
        "SamplesFresh",
    ),
    ("EnginesHealthy", {"engines": engines({"stalled": True})}, "False", "EngineStalled"),
    (
        "SpeculationControl",
        {"engines": engines({"control_error": ("LeaseHeld", "x holds it")})},
        "False",
        "LeaseHeld",
    ),
    ("SpeculationControl", {"engines": engines({"controllable": None})}, "Unknown", "NotObserved"),
    (
        "SpeculationControl",
        {"engines": engines({"controllable": False, "control_reason": "NGRAM"})},
        "False",
        "NotControllable",
    ),
    ("SpeculationControl", {"spec": spec(draft={})}, "False", "NoDraft"),
    ("SpeculationSettled", {"spec": spec(draft={})}, "True", "NoDraft"),
    (
        "SpeculationSettled",
        {"engines": engines({}, {"difference": "mode is on, wanted off"})},
        "False",
        "SwitchPending",
    ),
    ("SpeculationSettled", {"engines": engines({"on": None})}, "Unknown", "NotObserved"),
    ("SpeculationSettled", {"spec": spec(policy={"mode": "Observe"})}, "True", "Observing"),
    (
        "ThresholdReachable",
        {"engines": engines({"unreachable": "caps at 8"})},
        "False",
        "ThresholdUnreachable",
    ),
    (
        "ThresholdReachable",
        {"spec": spec(policy={"mode": "On"}), "engines": engines({"unreachable": "x"})},
        "True",
        "Pinned",
    ),
    ("ThresholdReachable", {"engines": engines({"sampled": False})}, "True", "WithinReach"),
    ("ThresholdReachable", {"engines": [], "pods": []}, "True", "WithinReach"),
    (
        "ThresholdReachable",
        {"engines": [], "requests": 48, "spec": RUNNING},
        "False",
        "ThresholdUnreachable",
    ),
    (
        "ThresholdReachable",
        {"engines": [], "requests": 49, "spec": RUNNING},
        "True",
        "WithinReach",
    ),
    (
        "ThresholdReachable",
        {"engines": [], "requests": None, "spec": RUNNING},
        "Unknown",
        "NoPods",
    ),
    ("ThresholdReachable", {"engines": [], "spec": None}, "Unknown", "NoPods"),
    ("RequestCapacity", {"engines": engines({}, {"capacity": 48})}, "False", "CapacityReduced"),
    ("RequestCapacity", {"engines": engines({"capacity": 80})}, "True", "AsAsked"),
    ("RequestCapacity", {"engines": engines({"capacity": None})}, "Unknown", "NotReported"),
    ("RequestCapacity", {"engines": []}, "Unknown", "NoPods"),
    ("RequestCapacity", {"requests": None}, "Unknown", "NotReported"),
    (
        "RequestCapacity",
        {
            "engines": engines({"capacity": 48}),
            "deployment": replace(ROLLED_OUT, rolled_out=False),
        },
        "Unknown",
        "RollingOut",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "state", "reason"), STATES)
def test_condition_of_engines(kind: str, changes: dict[str, Any], state: str, reason: str):
    assert condition(seen(**changes), kind)[:2] == (state, reason)


@pytest.mark.parametrize(("mode", "reason"), [("Auto", "ThresholdUnreachable"), ("On", "Pinned")])
def test_a_threshold_is_in_force_again_when_a_pin_has_ended(mode: str, reason: str):
    pinned = spec(policy={"signal": "Running", "mode": "On", "modeUntil": UNTIL})
    observation = seen(engines=[], requests=8, mode=mode, spec=pinned)
    assert condition(observation, "ThresholdReachable")[1] == reason


def test_a_reading_of_one_rank_is_no_reading_of_all():
    words = condition(seen(spec=WIDE, ranks=8, engines=engines({"ranks": 1})), "MetricsFresh")[2]
    assert "chat-0 shows 1 of 8 data-parallel ranks" in words


def test_a_lowered_limit_is_told_with_its_numbers_and_what_to_change():
    words = condition(seen(engines=engines({"capacity": 48})), "RequestCapacity")[2]
    assert "64 requests at once are asked for" in words
    assert "chat-0: runs at most 48, as its KV cache holds 96 tokens" in words
    assert "engine.memFractionStatic" in words


@pytest.mark.parametrize(
    ("changes", "mode", "why"),
    [
        ({}, "Live", ""),
        (
            {
                "spec": spec(draft={"method": "NGRAM"}),
                "engines": engines({"controllable": False, "control_reason": "width is fixed"}),
            },
            "None",
            "width is fixed",
        ),
        ({"spec": spec(draft={})}, "None", "draft.method is None"),
        ({"engines": engines({}, {"controllable": False})}, "None", "takes no switches"),
        ({"engines": engines({"controllable": None})}, "Unknown", "no engine is read yet"),
    ],
)
def test_methods_without_live_control_say_so_in_the_engines_own_words(
    changes: dict[str, Any], mode: str, why: str
):
    made = build(seen(**changes))["speculation"]
    assert made["controlMode"] == mode
    assert why in made["controlReason"]
    assert bool(made["controlReason"]) == bool(why)


def test_many_pods_are_named_in_few_words():
    many = engines(*({"control_error": ("EngineTimeout", "no answer")} for _ in range(50)))
    words = condition(seen(engines=many), "SpeculationControl")[2]
    assert words.count("no answer") == 3
    assert words.endswith("and 47 more")


# -- speculation ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "mode", "summary"),
    [
        ([True, True], "On", "On 2/2"),
        ([False, False], "Off", "Off 2/2"),
        ([True, False], "Mixed", "Mixed (1 on, 1 off)"),
        ([True, None], "Unknown", "Unknown (1 on, 0 off)"),
        ([], "Unknown", "-"),
    ],
)
def test_mode_and_summary(on: list[bool | None], mode: str, summary: str):
    made = build(seen(engines=engines(*({"on": one} for one in on))))["speculation"]
    assert (made["mode"], made["summary"]) == (mode, summary)
    assert (made["on"], made["off"], made["unknown"]) == (
        on.count(True),
        on.count(False),
        on.count(None),
    )


def test_the_epoch_never_falls_and_the_last_switch_is_kept():
    first = build(seen(engines=engines({"epoch": 9, "switched_at": 1e9, "switched_why": "why"})))
    second = build(seen(engines=engines({"epoch": 1}), previous=first))["speculation"]
    assert second["epoch"] == 9
    assert (second["lastSwitchTime"], second["lastSwitchReason"]) == (iso(1e9), "why")


def test_an_older_switch_does_not_replace_a_newer_one():
    first = build(seen(engines=engines({"switched_at": 2e9, "switched_why": "new"})))
    second = build(
        seen(engines=engines({"switched_at": 1e9, "switched_why": "old"}), previous=first)
    )
    assert second["speculation"]["lastSwitchReason"] == "new"


@pytest.mark.parametrize(("accept", "told"), [(2.6, 250), (2.74, 250), (2.8, 280), (None, 250)])
def test_small_moves_of_acceptance_are_not_written(accept: float | None, told: int):
    first = build(seen(engines=engines({"accept": 2.5})))
    second = build(seen(engines=engines({"accept": accept}), previous=first))
    assert second["speculation"]["acceptLengthCenti"] == told


# -- columns of kubectl get -o wide ---------------------------------------------------------

GO_ON = "the pods of the last accepted spec go on serving"
SWITCHED = replace(STEERED, switched_at=1e9, switched_why="chat-0: off: 96 in flight above 48")


def test_why_is_the_last_switch_while_all_is_ready():
    assert build(seen())["why"] == ""
    assert build(seen(engines=[SWITCHED]))["why"] == "chat-0: off: 96 in flight above 48"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"blocked": Trouble("SpecRejected", "spec.engine.args: no --port")},
            f"SpecRejected: spec.engine.args: no --port; {GO_ON}",
        ),
        (
            {"pods": [pod(trouble=CRASH)], "engines": []},
            f"CrashLooping: 0/1 pods ready; pod chat-0: {CRASH.message}",
        ),
        ({"pods": [], "engines": []}, "ReplicasNotReady: 0/1 pods ready"),
        # Of a pod that is no more.
        ({"pods": [pod("chat-1")], "engines": engines({})[:0]}, ""),
        ({"pods": [], "engines": [], "spec": spec(0)}, ""),
        ({"engines": [], "spec": spec(0)}, ""),
    ],
)
def test_why_tells_what_keeps_it_from_being_ready_and_nothing_of_the_past(
    changes: dict[str, Any], why: str
):
    before = build(seen(engines=[SWITCHED]))
    assert build(seen(previous=before, **changes))["why"] == why


def test_why_is_one_short_line():
    long = Trouble("ImagePullFailed", "container engine:\n" + "word " * 100)
    why = build(seen(pods=[pod(trouble=long)], engines=[]))["why"]
    assert why.startswith("ImagePullFailed: 0/1 pods ready; pod chat-0: container engine: word")
    assert why.endswith("word …")
    assert len(why) <= status.WHY_LENGTH
    assert "\n" not in why


@pytest.mark.parametrize(
    ("reason", "strategy", "shown"),
    [
        ("NotAskedFor", "Threshold", ""),
        ("NotAskedFor", "BreakEven", "NotAskedFor"),
        ("Running", "Threshold", "Running"),
        ("Measured", "Threshold", "Measured"),
    ],
)
def test_the_curve_shows_where_there_is_one_or_one_would_be_used(
    reason: str, strategy: str, shown: str
):
    calibrated = conditions.Condition("Calibrated", "Unknown", reason)
    asked = spec(policy={"strategy": strategy})
    assert build(seen(spec=asked, calibrated=calibrated))["curve"] == shown


# -- decisions ------------------------------------------------------------------------------

BREAK_EVEN = {"strategy": "BreakEven"}
UNTIL = "2030-01-01T12:00:00Z"
UNUSED = "policy.modeUntil ends the modes On and Off, and does nothing here"
UNREAD = "the override cannot be read, what was last known of it holds"
DECIDES: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "auto": ({}, ("True", "Auto", "strategy Threshold, scope Pod")),
    "pinned": (
        {"spec": spec(policy={"mode": "Off"}), "mode": "Off"},
        ("False", "Pinned", "policy.mode is Off"),
    ),
    "pinned for a while": (
        {"spec": spec(policy={"mode": "On", "modeUntil": UNTIL}), "mode": "On"},
        ("False", "Pinned", f"policy.mode is On until {UNTIL}, then Auto"),
    ),
    "an end without a pin": (
        {"spec": spec(policy={"mode": "Auto", "modeUntil": UNTIL})},
        (
            "True",
            "Auto",
            f"strategy Threshold, scope Pod; {UNUSED}",
        ),
    ),
    "no longer pinned": (
        {"spec": spec(policy={"mode": "On", "modeUntil": UNTIL}), "mode": "Auto"},
        ("True", "PinEnded", f"policy.mode On ended at {UNTIL}: strategy Threshold"),
    ),
    "observing": (
        {"spec": spec(policy={"mode": "Observe"})},
        ("False", "Observing", "policy.mode is Observe: nothing is sent to the pods"),
    ),
    "overridden": (
        {"mode": "Off", "override": "Off, garbled output"},
        (
            "False",
            "Overridden",
            "override of all SpecServes of this installation: Off, garbled output",
        ),
    ),
    "unreadable": (
        {"override_problem": "ConfigMap a/b: timed out"},
        (
            "True",
            "Auto",
            f"strategy Threshold, scope Pod; {UNREAD}: ConfigMap a/b: timed out",
        ),
    ),
}


@pytest.mark.parametrize("case", DECIDES)
def test_who_decides(case: str):
    changes, expected = DECIDES[case]
    assert condition(seen(**changes), "StrategyDecides") == expected


def test_an_override_shows_in_the_summary_and_rules_the_other_conditions():
    made = seen(mode="Observe", override="Observe")
    assert build(made)["speculation"]["summary"] == "On 1/1, override"
    assert condition(made, "SpeculationSettled")[1] == "Observing"
    assert condition(seen(mode="Off", override="Off"), "ThresholdReachable")[1] == "Pinned"


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ([{"effective": None}], "Unknown", "NotSeen"),
        ([{"effective": True}, {"effective": None}], "True", "DraftsAccepted"),
        ([{"effective": True}, {"effective": False}], "False", "DraftIneffective"),
        ([{"effective": False}, {"crashed": True}], "False", "CrashedWhileOn"),
    ],
)
def test_whether_the_draft_is_any_good(changes: list[Any], state: str, reason: str):
    told = condition(seen(engines=engines(*changes)), "DraftEffective")
    assert told[:2] == (state, reason)
    if state == "False":
        assert "chat-1" in told[2]


def test_no_draft_is_neither_good_nor_bad():
    bare = spec(draft={"method": "None"})
    assert condition(seen(spec=bare), "DraftEffective")[:2] == ("Unknown", "NoDraft")
    assert condition(seen(spec=bare), "CurveKnown")[:2] == ("True", "NoDraft")
    assert condition(seen(engines=[]), "DraftEffective")[:2] == ("Unknown", "NoPods")


@pytest.mark.parametrize(
    ("changes", "state", "reason", "said"),
    [
        ({"spec": spec()}, "True", "NotUsed", "Threshold"),
        ({}, "Unknown", "NotObserved", ""),
        ({"curve": ("Profile", "profile h200-b")}, "True", "Profile", "profile h200-b"),
        ({"curve": ("Calibrated", "ConfigMap c")}, "True", "Calibrated", "ConfigMap c"),
        ({"curve": ("NoCurve", "none named")}, "False", "NoCurve", "the bounds"),
        ({"curve": ("Stale", "other model")}, "False", "Stale", "other model. Until live"),
        ({"curve": ("NoCurve", "none named"), "live": True}, "True", "Live", "round times"),
        ({"curve": ("Stale", "other model"), "live": True}, "True", "Live", "other model"),
    ],
)
def test_what_rounds_take_is_known_from(
    changes: dict[str, Any], state: str, reason: str, said: str
):
    told = condition(seen(**{"spec": spec(policy=BREAK_EVEN), **changes}), "CurveKnown")
    assert told[:2] == (state, reason)
    assert said in told[2]


def test_switches_are_on_record():
    switch = Switch(0.0, "chat-0", "Off", "off: 60 in flight above 48")
    first = build(seen(switches=[switch]))
    assert first["speculation"]["decisions"] == [
        {
            "time": "1970-01-01T00:00:00Z",
            "pod": "chat-0",
            "mode": "Off",
            "reason": "off: 60 in flight above 48",
        }
    ]
    again = build(seen(previous=first))
    assert again["speculation"]["decisions"] == first["speculation"]["decisions"]
    assert "decisions" not in build(seen())["speculation"]


def test_a_stretched_period_is_told():
    assert build(seen(period_milliseconds=750))["speculation"]["samplePeriodMilliseconds"] == 750
    assert "samplePeriodMilliseconds" not in build(seen())["speculation"]


# -- anything -------------------------------------------------------------------------------


def strict(model: type[BaseModel]) -> type[BaseModel]:
    """The model, with members that it does not know forbidden at every level."""
    nodes = {api.Speculation: "speculation", api.Condition: "conditions"}
    inner = {kind: create_model(kind.__name__, __base__=kind, __config__=None) for kind in nodes}
    for made in inner.values():
        made.model_config = ConfigDict(**{**made.model_config, "extra": "forbid"})
        made.model_rebuild(force=True)
    whole = create_model(
        "Strict",
        __base__=model,
        speculation=(inner[api.Speculation], ...),
        conditions=(list[inner[api.Condition]], ...),
    )
    whole.model_config = ConfigDict(**{**whole.model_config, "extra": "forbid"})
    whole.model_rebuild(force=True)
    return whole


STRICT = strict(api.SpecServeStatus)
words = st.text(max_size=20) | st.just("x" * 40_000)
errors = st.none() | st.tuples(words, words)
some_engine = st.builds(
    Engine,
    name=st.sampled_from(["a", "b"]),
    on=st.none() | st.booleans(),
    wanted=st.sampled_from([None, "On", "Off"]),
    code=words,
    difference=st.none() | words,
    controllable=st.none() | st.booleans(),
    control_reason=words,
    control_error=errors,
    sample_error=errors,
    sampled=st.booleans(),
    ranks=st.none() | st.integers(0, 9),
    stalled=st.booleans(),
    unreachable=st.none() | words,
    epoch=st.integers(0, 2**53),
    accept=st.none() | st.floats(0, 100),
    switched_at=st.none() | st.floats(0, 4e9),
    switched_why=words,
    effective=st.none() | st.booleans(),
    crashed=st.booleans(),
)
some_pod = st.builds(
    pod,
    name=st.sampled_from(["a", "b", "c"]),
    trouble=st.none() | st.builds(Trouble, words, words),
    alive=st.booleans(),
    leaving=st.booleans(),
)
some_spec = st.none() | st.builds(
    lambda replicas, mode, draft, ranks: spec(
        replicas,
        policy={"mode": mode, "strategy": "BreakEven" if ranks % 2 else "Threshold"},
        engine={"image": "e", "dataParallel": ranks},
        **({} if draft else {"draft": {}}),
    ),
    st.integers(0, 3),
    st.sampled_from(["Auto", "On", "Off", "Observe"]),
    st.booleans(),
    st.integers(1, 8),
)
observations = st.builds(
    Observation,
    name=st.just("chat"),
    generation=st.integers(1, 9),
    spec=some_spec,
    blocked=st.none()
    | st.builds(Trouble, st.sampled_from(["SecretMissing", "SpecRejected", "x"]), words),
    deployment=st.none()
    | st.builds(
        lambda problem, done: replace(ROLLED_OUT, problem=problem, rolled_out=done),
        st.none() | st.builds(Trouble, words, words),
        st.booleans(),
    ),
    pods=st.lists(some_pod, max_size=4),
    engines=st.lists(some_engine, max_size=5),
    period_milliseconds=st.none() | st.integers(1, 10_000),
    previous=st.just({}),
    mode=st.sampled_from([None, "Auto", "On", "Off", "Observe"]),
    override=words,
    override_problem=words,
    curve=st.none() | st.tuples(st.sampled_from(["Stale", "Profile"]), words),
    live=st.booleans(),
    switches=st.lists(
        st.builds(Switch, st.floats(0, 4e9), st.just("a"), st.sampled_from(["On", "Off"]), words),
        max_size=7,
    ),
)


@settings(max_examples=100)
@given(observations, observations)
def test_any_observation_gives_a_status_that_the_schema_takes(before, after):
    first = build(before)
    second = build(replace(after, previous=first), LATER)
    for made in (first, second):
        STRICT.model_validate(made)
    assert build(replace(after, previous=second), "2031-01-01T00:00:00Z") == second


MOVING = re.compile(r"\d{3,}")


@pytest.mark.parametrize(("kind", "changes", "state", "reason"), STATES)
def test_no_message_carries_a_load(kind: str, changes: dict[str, Any], state: str, reason: str):
    assert not any(MOVING.search(c["message"]) for c in build(seen(**changes))["conditions"])
