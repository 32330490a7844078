"""What is done next about a calibration, in every situation; and that it always ends well."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specserve import api, calibration, conditions, curves, names
from specserve.calibration import (
    SETTLE_SECONDS,
    START_SECONDS,
    Begin,
    Job,
    Keep,
    PutBack,
    Record,
    Situation,
    Stop,
    TakeAside,
    plan,
)
from specserve.observed import Pod, Trouble, Worker
from specserve.policy.curve import Curve, CurveDocument, Point, Provenance

KEY = ("team", "chat")
PATIENCE = 30.0


def pod(name: str, **changes) -> Pod:
    fresh = Pod(
        uid=f"uid-{name}",
        key=KEY,
        name=name,
        ip="10.0.0.1",
        usable=True,
        alive=True,
        leaving=False,
        boot="c#0",
        trouble=None,
    )
    return replace(fresh, **changes)


def aside(one: Pod, request: str = "r1") -> Pod:
    return replace(one, usable=False, aside=request)


def curve(ratio: float = 1.5, spread: float | None = 0.03, **provenance) -> Curve:
    points = [
        Point(batch=batch, steps=3, ratio=ratio, spread=spread and spread * batch)
        for batch in (1, 4)
    ]
    origin = Provenance(date="2026-11-30T08:00:00Z", **provenance)
    return Curve(CurveDocument(provenance=origin, cells=points))


WORDS = curve().to_json(compact=True)
A, B = pod("chat-a"), pod("chat-b")
RECORDED = Record(request="r1")


def worker(
    code: int | None = None, words: str = "", job: str = "job-r1", grace: float | None = None
) -> Worker:
    return Worker("w1", KEY, "job-r1-x", job, code, words, grace)


def job(request: str = "r1", one: Pod = A, **changes) -> Job:
    return replace(Job(f"job-{request}", "j1", request, one.uid), **changes)


def situation(**changes) -> Situation:
    usual = Situation(
        now=1000.0,
        request="r1",
        record=Record(),
        fit=frozenset({A.name, B.name}),
        pods=(A, B),
        patience=PATIENCE,
    )
    return replace(usual, **changes)


def measuring(**changes) -> Situation:
    usual = situation(
        pods=(aside(A), B),
        since={A.uid: 900.0},
        jobs=(job(),),
        workers=(worker(),),
    )
    return replace(usual, **changes)


# -- one step -------------------------------------------------------------------------------


def test_nothing_is_done_unasked_or_again():
    assert plan(situation(request="")) == calibration.Plan()
    assert plan(situation(record=RECORDED)) == calibration.Plan()


def test_the_first_pod_by_name_that_can_be_measured_is_taken():
    assert plan(situation()).step == TakeAside(A)
    made = plan(situation(fit=frozenset({B.name})))
    assert made.step == TakeAside(B)
    assert made.state is not None
    assert (made.state.status, made.state.reason) == ("Unknown", "Draining")


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        ({"pods": (A,)}, "NotEnoughPods", "chat-a is the only pod"),
        ({"pods": ()}, "NotEnoughPods", "no pod is ready"),
        ({"pods": (A, replace(B, usable=False))}, "NotEnoughPods", "lastPod: Take"),
        ({"fit": frozenset()}, "NotControllable", "SpeculationControl"),
        ({"halt": ("Pinned", "policy.mode is Off")}, "Pinned", "waits: policy.mode is Off"),
        ({"obstacle": ("NoImage", "not told")}, "NoImage", "waits: not told"),
    ],
)
def test_what_is_asked_for_waits_and_says_why(changes, reason, said):
    made = plan(situation(**changes))
    assert (made.step, made.again) == (None, None)
    assert made.state is not None
    assert (made.state.status, made.state.reason) == ("False", reason)
    assert said in made.state.message


def test_the_only_pod_is_taken_where_that_is_allowed():
    assert plan(situation(pods=(A,), last_pod=True)).step == TakeAside(A)


@pytest.mark.parametrize(
    ("waited", "in_flight", "begins"),
    [
        (SETTLE_SECONDS - 1, 0, False),
        (SETTLE_SECONDS, 0, True),
        (SETTLE_SECONDS, 3, False),
        (SETTLE_SECONDS, None, False),
        (SETTLE_SECONDS + PATIENCE + 1, 0, True),
    ],
)
def test_the_job_waits_until_the_pod_has_ended_its_requests(waited, in_flight, begins):
    seen = measuring(jobs=(), workers=(), since={A.uid: 1000.0 - waited}, in_flight=in_flight)
    assert plan(seen).step == (Begin(aside(A)) if begins else None)


@pytest.mark.parametrize(
    ("in_flight", "said"), [(2, "still runs requests"), (None, "does not say")]
)
def test_a_pod_that_does_not_drain_is_given_up(in_flight, said):
    since = {A.uid: 1000.0 - SETTLE_SECONDS - PATIENCE - 1}
    step = plan(measuring(jobs=(), workers=(), since=since, in_flight=in_flight)).step
    assert isinstance(step, Keep)
    assert said in step.failure


def test_a_curve_is_kept_though_some_cells_do_not_agree():
    for code in (0, 1):
        step = plan(measuring(workers=(worker(code, WORDS),))).step
        assert isinstance(step, Keep)
        assert step.curve == Curve.from_json(WORDS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": (worker(2, "log\nspecserve: token\n\n"),)}, "with 2: specserve: token"),
        (
            {"workers": (worker(130, WORDS),)},
            "job-r1-x ended with 130: it was stopped before it had measured all",
        ),
        (
            {
                "workers": (worker(130, WORDS),),
                "jobs": (job(ended=True, failure="DeadlineExceeded: too long"),),
            },
            "Job job-r1: DeadlineExceeded: too long",
        ),
        (
            {
                "workers": (worker(2, "specserve: token"),),
                "jobs": (job(ended=True, failure="BackoffLimitExceeded: its pod failed"),),
            },
            "with 2: specserve: token",
        ),
        ({"workers": (worker(137),)}, "it said nothing"),
        ({"workers": (worker(0, WORDS[:100]),)}, "left no curve"),
        ({"workers": (), "jobs": (job(ended=True, failure="DeadlineExceeded"),)}, "Deadline"),
        ({"workers": (), "jobs": (job(ended=True),)}, "the pod with its curve is gone"),
        ({"pods": (B, pod("chat-c"))}, "the pod that was measured is gone"),
        ({"pods": (aside(B), pod("chat-c"))}, "the pod that was measured is gone"),
        ({"pods": (aside(A), replace(B, usable=False))}, "no pod but chat-a was ready"),
        (
            {"pods": (replace(aside(A), trouble=Trouble("Restarted", "x")), B)},
            "chat-a is not ready any more",
        ),
    ],
)
def test_what_fails_is_kept_in_words(changes, said):
    step = plan(measuring(**changes)).step
    assert isinstance(step, Keep)
    assert step.curve is None
    assert said in step.failure
    assert "{" not in step.failure


OFF = ("Overridden", "the override of this installation says Off")
SCALING = ("RollingOut", "not all pods are there, and of this spec")


def test_what_makes_it_moot_ends_what_is_under_way():
    for seen in (
        measuring(halt=OFF),
        measuring(halt=OFF, jobs=(), workers=(), in_flight=0),
    ):
        step = plan(seen).step
        assert isinstance(step, Keep)
        assert step.failure == ": ".join(OFF)
    step = plan(measuring(halt=OFF, workers=(worker(0, WORDS),))).step
    assert isinstance(step, Keep)
    assert step.curve is not None
    assert plan(measuring(halt=OFF, record=RECORDED)).step == Stop(job())


def test_pods_that_come_and_go_end_nothing():
    scaled = measuring(obstacle=SCALING, pods=(aside(A), B, replace(pod("chat-c"), usable=False)))
    assert plan(scaled).step is None
    assert plan(replace(scaled, pods=(aside(A), B))).step is None
    # The last one that serves is not done without.
    assert isinstance(plan(replace(scaled, pods=(aside(A),))).step, Keep)


def test_no_job_is_made_while_none_could_begin():
    drained = measuring(jobs=(), workers=(), in_flight=0, obstacle=SCALING)
    since = {A.uid: 1000.0 - SETTLE_SECONDS - PATIENCE}
    assert plan(replace(drained, since=since)).step is None
    assert plan(replace(drained, since=since, obstacle=None)).step == Begin(aside(A))
    step = plan(drained).step
    assert isinstance(step, Keep)
    assert step.failure == ": ".join(SCALING)


LATE = {A.uid: 900.0, "j1": 1000.0 - START_SECONDS}
PULLS = replace(worker(), waits="ImagePullBackOff: no such image")


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ((PULLS,), "within 120 s: ImagePullBackOff: no such image"),
        ((worker(),), "job-r1-x waits, and nothing says for what"),
        ((), "no pod of it was made; kubectl describe job tells"),
        ((replace(PULLS, job="another", started=True),), "no pod of it was made"),
    ],
)
def test_a_job_that_does_not_start_is_given_up(workers, said):
    step = plan(measuring(since=LATE, workers=workers)).step
    assert isinstance(step, Keep)
    assert said in step.failure


def test_a_job_is_given_the_time_to_start_and_then_its_deadline():
    for early in ({A.uid: 900.0}, {A.uid: 900.0, "j1": 1000.0 - START_SECONDS + 1}):
        assert plan(measuring(since=early, workers=(PULLS,))).step is None
        assert plan(measuring(since=early, workers=())).step is None
    assert plan(measuring(since=LATE, workers=(replace(worker(), started=True),))).step is None


def test_last_words_are_waited_for_when_the_job_is_told_first():
    made = plan(measuring(jobs=(job(ended=True, failure="BackoffLimitExceeded"),)))
    assert made.step is None
    assert made.again is not None


def test_the_load_ends_before_the_pod_returns():
    over = measuring(record=RECORDED)
    assert plan(over).step == Stop(job())
    over = replace(over, jobs=())
    assert plan(over).step is None
    # A node that is lost says nothing any more.
    lost = replace(over, workers=(worker(grace=30),))
    assert plan(lost).step is None
    assert plan(replace(lost, since={"w1": 970.0})).step is None
    assert plan(replace(lost, since={"w1": 969.0})).step == PutBack(aside(A))
    assert plan(replace(over, workers=())).step == PutBack(aside(A))
    assert plan(replace(over, workers=(worker(0, WORDS),))).step == PutBack(aside(A))


def test_a_job_that_has_ended_is_kept_for_its_log():
    over = measuring(record=RECORDED, workers=(worker(2),))
    assert plan(over).step == PutBack(aside(A))
    ended = replace(over, workers=(), jobs=(job(ended=True),))
    assert plan(ended).step == PutBack(aside(A))


def test_another_request_ends_the_one_before_it_first():
    other = measuring(request="r2")
    assert plan(other).step == Stop(job())
    assert plan(replace(other, jobs=(), workers=())).step == PutBack(aside(A))
    assert plan(replace(other, jobs=(), workers=(), pods=(A, B))).step == TakeAside(A)


def test_of_two_pods_aside_one_returns():
    two = situation(pods=(aside(A), aside(B), pod("chat-c")))
    assert plan(two).step == PutBack(aside(B))


# -- obstacles ------------------------------------------------------------------------------

SPEC = {
    "model": {"source": "hf://o/m"},
    "draft": {"method": "EAGLE3", "source": "hf://o/d"},
    "policy": {"strategy": "BreakEven"},
}


def obstacle(record=None, **changes):
    usual = {"blocked": None, "rolled_out": True, "image": "operator:1"}
    return calibration.obstacle(record or Record(), **{**usual, **changes})


def halt(spec=SPEC, **changes):
    usual = {"mode": "Auto", "overridden": False, "replaces": False}
    parsed = None if spec is None else api.SpecServeSpec.model_validate(spec)
    return calibration.halt(parsed, **{**usual, **changes})


def test_nothing_is_in_the_way_of_what_is_well():
    assert obstacle() is None
    assert halt() is None
    assert halt(overridden=True) is None  # one that has ended


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"blocked": Trouble("NameTaken", "Service chat")}, "NameTaken"),
        ({"record": Record(foreign=True)}, "NameTaken"),
        ({"image": ""}, "NoImage"),
        ({"rolled_out": False}, "RollingOut"),
    ],
)
def test_what_none_can_begin_with_is_named(changes, reason):
    found = obstacle(**changes)
    assert found is not None
    assert found[0] == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec": None}, "SpecRejected"),
        ({"spec": {**SPEC, "draft": {"method": "None"}}}, "NoDraft"),
        ({"mode": "Off"}, "Pinned"),
        ({"mode": "Observe"}, "Observing"),
        ({"mode": "Off", "overridden": True}, "Overridden"),
        ({"replaces": True}, "RollingOut"),
    ],
)
def test_what_none_goes_on_with_is_named(changes, reason):
    found = halt(**changes)
    assert found is not None
    assert found[0] == reason


# -- what is said ---------------------------------------------------------------------------


def said(record: Record, **seen):
    spec = api.SpecServeSpec.model_validate(SPEC)
    found = None
    if record.curve is not None:
        text = curves.ConfigMapText("chat-curve", record.curve)
        found = curves.judge(spec, text, curves.Seen(**seen), own=True)
    condition = calibration.condition(record, found)
    return condition.status, condition.reason, condition.message


def test_the_condition_tells_the_date_and_the_least_certain_cell():
    status, reason, message = said(Record(curve=curve().to_json(), compared="at most 1.0 %"))
    assert (status, reason) == ("True", conditions.MEASURED)
    assert message == (
        "2026-11-30T08:00:00Z: 2 cells, the least certain within 8.0 % "
        "(95 %; batch 4, 3 steps); at most 1.0 %"
    )
    assert said(Record(curve=curve(spread=None).to_json()))[2].endswith("visited once each")


def test_a_failure_is_told_and_the_curve_before_it_goes_on():
    status, reason, message = said(Record(curve=curve().to_json(), failure="chat-a is gone"))
    assert (status, reason) == ("False", "Failed")
    assert "chat-a is gone; of the curve before: ConfigMap chat-curve" in message
    assert said(Record(failure="x"))[1] == "Failed"
    assert said(Record()) == (
        "Unknown",
        "NotAskedFor",
        "none was asked for; annotate the SpecServe with specserve.dev/calibrate to ask",
    )


@pytest.mark.parametrize(
    ("provenance", "words"),
    [
        ({"model": "hf://o/other"}, "with model hf://o/other, and here it is hf://o/m"),
        ({"model": "hf://o/m@r2"}, "with model hf://o/m@r2"),
        ({"draft": "hf://o/other"}, "with draft"),
        ({"sglang": "0.5.16"}, "with sglang 0.5.16, and here it is 0.5.23"),
        ({"plugin": "0.0.1"}, "with plugin"),
        ({"gpu": "NVIDIA A100"}, "with gpu NVIDIA A100, and here it is NVIDIA H200"),
        ({"tensor_parallel": 2}, "with tensorParallel 2"),
    ],
)
def test_what_has_changed_is_named(provenance, words):
    record = Record(curve=curve(**provenance).to_json())
    seen = {
        "sglang": frozenset({"0.5.23"}),
        "plugin": frozenset({"0.1.0"}),
        "gpus": frozenset({"NVIDIA H200"}),
    }
    status, reason, message = said(record, **seen)
    assert (status, reason) == ("False", "Stale")
    assert words in message


def test_all_that_has_changed_is_named():
    record = Record(curve=curve(model="hf://o/x", draft="hf://o/y").to_json())
    assert said(record)[2].count("and here it is") == 2


def test_a_gpu_that_nobody_tells_is_what_was_asked_for():
    asked = "asked for: no device"
    assert said(Record(curve=curve(gpu=asked).to_json()))[0] == "True"
    other = Record(curve=curve(gpu="asked for: 2 x nvidia.com/gpu").to_json())
    assert "here it is asked for: no device" in said(other)[2]
    # An engine's own word is not held against what was asked for.
    assert said(Record(curve=curve(gpu="NVIDIA H200").to_json()))[0] == "True"


def test_it_is_said_where_a_changed_gpu_would_go_unnoticed():
    unread, read = {}, {"sglang": frozenset({"0.5.23"})}
    words = "measured on NVIDIA H200; what GPU the engines have now is not known"
    measured = Record(curve=curve(gpu="NVIDIA H200").to_json())
    assert words not in said(measured, **unread)[2]
    assert said(measured, **read)[0] == "True"
    assert said(measured, **read)[2].endswith(words)
    assert words not in said(measured, **read, gpus=frozenset({"NVIDIA H200"}))[2]
    assert said(replace(measured, failure="x"), **read)[2].endswith(words)
    asked = Record(curve=curve(gpu="asked for: no device").to_json())
    assert "not known" not in said(asked, **read)[2]


def test_two_curves_are_compared_where_they_share_cells():
    assert calibration.compared(curve(), None) == ""
    assert calibration.compared(curve(), "nonsense") == ""
    assert calibration.compared(curve(1.5), curve(1.6).to_json()) == (
        "at most 6.7 % from the curve before (batch 1, 3 steps)"
    )


# -- any course of events -------------------------------------------------------------------


@dataclass
class World:
    """A cluster that does what it is told."""

    now: float = 0.0
    request: str = ""
    record: Record = field(default_factory=Record)
    pods: dict[str, Pod] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    in_flight: int | None = 0
    last_pod: bool = False
    obstacle: tuple[str, str] | None = None
    halt: tuple[str, str] | None = None

    def seen(self) -> Situation:
        return Situation(
            now=self.now,
            request=self.request,
            record=self.record,
            last_pod=self.last_pod,
            obstacle=self.obstacle,
            halt=self.halt,
            fit=frozenset(self.pods),
            pods=tuple(self.pods.values()),
            since=self.since,
            jobs=tuple(self.jobs.values()),
            workers=tuple(self.workers.values()),
            in_flight=self.in_flight,
            patience=PATIENCE,
        )

    def do(self, step: calibration.Step) -> None:
        if isinstance(step, TakeAside):
            assert step.pod.usable
            if not self.last_pod:
                assert sum(one.usable for one in self.pods.values()) >= 2
            self.pods[step.pod.name] = aside(step.pod, self.request)
            self.since[step.pod.uid] = self.now
        elif isinstance(step, PutBack):
            busy = [w for w in self.workers.values() if w.exit_code is None]
            assert not [
                w for w in busy if self.jobs.get(w.job, job(one=A)).pod_uid == step.pod.uid
            ]
            self.pods[step.pod.name] = replace(step.pod, usable=True, aside=None)
        elif isinstance(step, Begin):
            name = f"job-{self.request}"
            assert name not in self.jobs
            self.jobs[name] = Job(name, f"uid-{name}", self.request, step.pod.uid)
            self.workers[name] = Worker(f"w-{name}", KEY, f"{name}-x", name, None, "")
        elif isinstance(step, Stop):
            self.jobs.pop(step.job.name, None)
            self.workers.pop(step.job.name, None)
        elif isinstance(step, Keep):
            assert self.request != self.record.request
            kept = step.curve.to_json() if step.curve else self.record.curve
            self.record = Record(self.request, kept, step.failure)


class AnyCourse(RuleBasedStateMachine):
    """Requests, deaths and withdrawals in any order; nothing is remembered between two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(pods={one.name: one for one in (A, B)})
        self.births = 0

    @rule(request=st.sampled_from(["", "r1", "r2", "r3"]))
    def ask(self, request):
        self.world.request = request

    @rule(allowed=st.booleans())
    def may_take_the_last(self, allowed):
        self.world.last_pod = allowed

    @rule(obstacle=st.sampled_from([None, SCALING]), halt=st.sampled_from([None, OFF]))
    def something_gets_in_the_way(self, obstacle, halt):
        self.world.obstacle, self.world.halt = obstacle, halt

    @rule(seconds=st.sampled_from([1.0, 6.0, 40.0]))
    def time_passes(self, seconds):
        self.world.now += seconds

    @rule(in_flight=st.sampled_from([None, 0, 3]))
    def load(self, in_flight):
        self.world.in_flight = in_flight

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data())
    def a_pod_is_replaced(self, data):
        name = data.draw(st.sampled_from(sorted(self.world.pods)))
        del self.world.pods[name]
        self.births += 1
        fresh = pod(f"chat-{self.births}")
        self.world.pods[fresh.name] = fresh

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), code=st.sampled_from([0, 1, 2, 137]))
    def a_worker_ends(self, data, code):
        name = data.draw(st.sampled_from(sorted(self.world.workers)))
        one = self.world.workers[name]
        if one.exit_code is None:
            self.world.workers[name] = replace(one, exit_code=code, words=WORDS)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def a_job_vanishes(self, data):
        name = data.draw(st.sampled_from(sorted(self.world.jobs)))
        self.world.jobs.pop(name)
        self.world.workers.pop(name, None)

    @rule()
    def a_step(self):
        step = plan(self.world.seen()).step
        if step is not None:
            self.world.do(step)

    @invariant()
    def one_is_out_at_most(self):
        assert sum(one.aside is not None for one in self.world.pods.values()) <= 1

    def teardown(self):
        """However it went: nobody asks any more, and all pods serve."""
        self.world.request = ""
        for _ in range(20):
            step = plan(self.world.seen()).step
            if step is not None:
                self.world.do(step)
        assert all(one.usable for one in self.world.pods.values())
        assert not [w for w in self.world.workers.values() if w.exit_code is None]


TestAnyCourse = AnyCourse.TestCase
TestAnyCourse.settings = settings(max_examples=60, stateful_step_count=40)


def test_names_stay_within_what_labels_take():
    longest = "x" * 52
    assert len(names.calibration_job(longest, "uid", "request" * 100)) == 63
    assert names.calibration_job("a", "u", "1") != names.calibration_job("a", "u", "2")
