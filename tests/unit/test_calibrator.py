"""What a calibration writes, step by step, and what it makes of an API server that refuses."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest

from specserve import api, curves, names, workload
from specserve.calibration import LOOK_AT_JOB, SETTLE_SECONDS, START_SECONDS
from specserve.calibrator import (
    FORBIDDEN_RECHECK,
    RECORD_TTL,
    UNKEPT_RECHECK,
    Calibrator,
    Subject,
)
from specserve.kube import KubeRefused, KubeUnreachable
from specserve.observed import Worker
from specserve.observed import pod as observed_pod
from specserve.signals import Reading
from specserve.status import Engine
from tests.unit.test_calibration import SPEC, WORDS, curve

OWNER = workload.Owner("chat", "team", "u-1")
KEY = ("team", "chat")
WALL = 1_900_000_000.0
SEEN = curves.Seen(sglang=frozenset({"0.5.23"}))


def pod_object(name):
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "labels": names.labels("chat"),
        },
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class FakeApi:
    """Objects by kind and name; merges as the API server does."""

    def __init__(self) -> None:
        self.objects = {("Pod", name): pod_object(name) for name in ("chat-a", "chat-b")}
        self.refusals = {}
        self.calls = Counter()

    def _call(self, verb, kind):
        self.calls[verb, kind] += 1
        if error := self.refusals.get((verb, kind)):
            raise error

    async def get(self, kind, _, name):
        self._call("get", kind)
        return copy.deepcopy(self.objects.get((kind, name)))

    async def create(self, manifest):
        self._call("create", manifest["kind"])
        return self._put(manifest)

    async def apply(self, manifest):
        self._call("apply", manifest["kind"])
        return self._put(manifest)

    def _put(self, manifest):
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        made = copy.deepcopy(manifest)
        made["metadata"]["uid"] = f"uid-{name}"
        self.objects[kind, name] = made
        return made

    async def merge(self, kind, _, name, patch):
        self._call("merge", kind)
        meta = self.objects[kind, name]["metadata"]
        assert patch["metadata"]["uid"] == meta["uid"]
        meta["labels"] |= patch["metadata"]["labels"]
        annotations = meta.get("annotations", {}) | patch["metadata"]["annotations"]
        meta["annotations"] = {key: value for key, value in annotations.items() if value}

    async def delete(self, kind, _, name, uid):
        self._call("delete", kind)
        assert self.objects.pop((kind, name))["metadata"]["uid"] == uid


class World:
    """A calibrator over objects in memory; a new one at each look, as after a restart."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.now = 0.0
        self.request = "r1"
        self.spec = copy.deepcopy(SPEC)
        self.workers = []
        self.reading = Reading(None, 0, 0, None, None, 1)
        self.notices = []
        self.gone = False
        self.uid = OWNER.uid
        self.wall = 0.0
        self.mode = "Auto"
        self.rolled_out, self.replaces = True, False
        self.calibrator = self.fresh()

    def fresh(self):
        return Calibrator(
            self.api,
            self,
            self.notices.append,
            provision=workload.Provision(calibrator="operator:1"),
            holder="system/specserve",
            clock=lambda: self.now,
            wall=lambda: WALL + self.wall + self.now,
        )

    async def ask(self, pod):
        assert pod.aside
        return self.reading

    async def confirm(self):
        if self.gone:
            raise KubeRefused(404, "NotFound", "the SpecServe is no more")

    def subject(self):
        pods = [observed_pod(o) for (kind, _), o in self.api.objects.items() if kind == "Pod"]
        return Subject(
            owner=replace(OWNER, uid=self.uid),
            request=self.request,
            spec=self.spec and api.SpecServeSpec.model_validate(self.spec),
            blocked=None,
            rolled_out=self.rolled_out,
            replaces=self.replaces,
            mode=self.mode,
            overridden=False,
            pods=pods,
            workers=self.workers,
            engines=[Engine(one.name, controllable=True) for one in pods if one.usable],
        )

    async def look(self):
        said, again = await self.calibrator.look(self.subject(), SEEN, self.confirm)
        return said.status, said.reason, again

    @property
    def job(self):
        made = [item for (kind, _), item in self.api.objects.items() if kind == "Job"]
        return made[-1] if made else None

    @property
    def kept(self):
        return self.api.objects.get(("ConfigMap", "chat-curve"))

    def aside(self):
        return [
            name
            for (kind, name), item in self.api.objects.items()
            if kind == "Pod" and item["metadata"]["labels"][names.LABEL_PART_OF] == names.ASIDE
        ]

    async def drained(self):
        for _ in range(2):
            assert (await self.look())[:2] == ("Unknown", "Draining")
        self.now += SETTLE_SECONDS

    async def to_the_job(self):
        await self.drained()
        assert (await self.look())[:2] == ("Unknown", "Running")
        name = self.job["metadata"]["name"]
        self.workers = [Worker("w", ("team", "chat"), f"{name}-x", name, None, "")]

    def ends(self, code, words):
        self.workers = [replace(self.workers[0], exit_code=code, words=words)]


@pytest.fixture
def world():
    return World()


async def test_the_whole_course_with_another_operator_at_each_step(world):
    assert (await world.look())[:2] == ("Unknown", "Draining")
    assert world.aside() == ["chat-a"]
    annotations = world.api.objects["Pod", "chat-a"]["metadata"]["annotations"]
    assert annotations == {
        names.ANNOTATION_CALIBRATION: "r1",
        names.ANNOTATION_ASIDE_SINCE: "2030-03-17T17:46:40Z",
        names.ANNOTATION_CALIBRATED: "r1",
    }
    world.calibrator = world.fresh()
    world.now = 6.0
    world.reading = replace(world.reading, running=1)
    assert (await world.look())[:2] == ("Unknown", "Draining")
    assert world.job is None
    world.reading = replace(world.reading, running=0, gpu="NVIDIA H200")
    world.now += SETTLE_SECONDS
    assert (await world.look())[:2] == ("Unknown", "Running")
    arguments = world.job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--gpu=NVIDIA H200" in arguments
    name = world.job["metadata"]["name"]
    world.workers = [Worker("w", ("team", "chat"), f"{name}-x", name, None, "")]
    world.calibrator = world.fresh()
    assert (await world.look())[:2] == ("Unknown", "Running")
    world.ends(0, WORDS)
    world.calibrator = world.fresh()
    assert (await world.look())[:2] == ("True", "Measured")
    assert world.kept["metadata"]["annotations"][names.ANNOTATION_CALIBRATED] == "r1"
    assert '"host": "chat-a"' in world.kept["data"]["curve.json"]
    assert world.aside() == ["chat-a"]
    world.calibrator = world.fresh()
    await world.look()
    assert world.aside() == []
    annotations = world.api.objects["Pod", "chat-a"]["metadata"]["annotations"]
    assert annotations == {names.ANNOTATION_CALIBRATED: "r1"}
    assert (await world.look()) == ("True", "Measured", RECORD_TTL)
    assert [one.reason for one in world.notices] == ["PodTakenAside", "PodPutBack"]
    found = await world.calibrator.curve(KEY, OWNER.uid)
    assert found is not None
    assert found.name == "chat-curve"


async def test_a_failure_keeps_the_curve_before_it_and_the_next_success_forgets_it(world):
    await world.to_the_job()
    world.ends(0, WORDS)
    await world.look()
    await world.look()
    world.request, world.workers = "r2", []
    await world.to_the_job()
    world.ends(2, "specserve: the token does not fit\n")
    assert (await world.look())[:2] == ("False", "Failed")
    data = world.kept["data"]
    assert "the token does not fit" in data["failure"]
    assert data["failure"].startswith("2030-03-17T")
    assert "curve.json" in data
    await world.look()
    assert world.aside() == []
    world.request, world.workers = "r3", []
    await world.to_the_job()
    world.ends(1, curve(1.6).to_json(compact=True))
    assert (await world.look())[:2] == ("True", "Measured")
    assert world.kept["data"].keys() == {"curve.json", "compared"}
    assert world.kept["data"]["compared"].startswith("at most 6.7 %")


async def test_a_curve_of_something_else_is_not_compared_with(world):
    old = workload.curve_config_map(
        OWNER, "r0", {curves.KEY: curve(9.0, sglang="0.5.16").to_json()}
    )
    await world.api.apply(old)
    await world.to_the_job()
    world.ends(0, WORDS)
    await world.look()
    assert world.kept["data"].keys() == {"curve.json"}


async def test_a_request_that_is_taken_back_ends_the_job_first(world):
    await world.to_the_job()
    world.request = ""
    await world.look()
    assert world.job is None
    assert world.aside() == ["chat-a"]
    assert (await world.look())[1] == "Ending"  # its worker may send still
    world.workers = []
    await world.look()
    assert world.aside() == []
    assert not world.kept["data"]
    assert (await world.look())[:2] == ("Unknown", "NotAskedFor")


async def test_pods_return_though_the_spec_cannot_be_read(world):
    await world.look()
    world.spec, world.request = None, ""
    await world.look()
    assert world.aside() == []


async def test_a_job_that_is_not_admitted_is_a_failure(world):
    await world.drained()
    world.api.refusals["create", "Job"] = KubeRefused(403, "Forbidden", "exceeded quota: team")
    await world.look()
    assert "no Job: exceeded quota: team" in world.kept["data"]["failure"]
    await world.look()
    assert world.aside() == []


async def test_a_job_whose_pod_does_not_start_is_a_failure(world):
    await world.to_the_job()
    world.workers = [replace(world.workers[0], waits="ErrImagePull: no such image")]
    assert (await world.look())[:2] == ("Unknown", "Running")
    world.now += START_SECONDS
    assert (await world.look())[:2] == ("False", "Failed")
    assert "ErrImagePull: no such image" in world.kept["data"]["failure"]
    await world.look()
    assert world.job is None
    world.workers = []
    await world.look()
    assert world.aside() == []


@pytest.mark.parametrize("made", ["2020-01-01T00:00:00Z", "2040-01-01T00:00:00Z"])
async def test_no_clock_is_compared_with_that_of_the_api_server(world, made):
    await world.to_the_job()
    world.job["metadata"]["creationTimestamp"] = made
    began = world.now
    while world.now - began < START_SECONDS:
        assert (await world.look())[:2] == ("Unknown", "Running")
        world.now += LOOK_AT_JOB
    assert (await world.look())[:2] == ("False", "Failed")
    # Another operator, whose clock is another one, finds a worker that is to end.
    world.calibrator, world.wall = world.fresh(), -1e6
    world.workers = [replace(world.workers[0], grace=30)]
    began = world.now
    while world.aside():
        await world.look()
        world.now += LOOK_AT_JOB
    assert 30 < world.now - began <= 40


@pytest.mark.parametrize("status", [400, 403, 422])
async def test_no_pod_is_taken_for_what_could_not_be_kept(world, status):
    world.api.refusals["apply", "ConfigMap"] = KubeRefused(status, "No", "exceeded quota: team")
    assert await world.look() == ("Unknown", "Forbidden", FORBIDDEN_RECHECK)
    assert world.aside() == []
    del world.api.refusals["apply", "ConfigMap"]
    await world.to_the_job()


async def measured_and_not_kept(world, status=403):
    await world.to_the_job()
    world.ends(0, WORDS)
    refused = KubeRefused(status, "No", "denied by policy")
    world.api.refusals["apply", "ConfigMap"] = refused
    assert (await world.look())[:2] == ("False", "NotKept")
    assert world.aside() == ["chat-a"]
    await world.look()
    assert world.aside() == []


@pytest.mark.parametrize("status", [400, 403, 422, 500])
async def test_a_pod_returns_though_nothing_can_be_kept(world, status):
    await measured_and_not_kept(world, status)
    said, again = await world.calibrator.look(world.subject(), SEEN, world.confirm)
    assert (said.reason, again) == ("NotKept", UNKEPT_RECHECK)
    assert said.message == (
        "a curve was measured; it cannot be kept, and is tried again: denied by policy"
    )


async def test_only_the_write_is_tried_again_also_when_the_job_is_gone(world):
    await measured_and_not_kept(world)
    del world.api.objects["Job", world.job["metadata"]["name"]]
    world.workers = []
    for _ in range(90):
        world.now += UNKEPT_RECHECK
        assert await world.calibrator.curve(KEY, OWNER.uid) is None
        assert await world.look() == ("False", "NotKept", UNKEPT_RECHECK)
        assert await world.look() == ("False", "NotKept", UNKEPT_RECHECK)
    assert world.api.calls["apply", "ConfigMap"] == 2 + 90
    assert (world.aside(), world.job) == ([], None)
    del world.api.refusals["apply", "ConfigMap"]
    world.now += UNKEPT_RECHECK
    assert (await world.look())[:2] == ("True", "Measured")
    assert '"host": "chat-a"' in world.kept["data"]["curve.json"]
    assert await world.calibrator.curve(KEY, OWNER.uid) is not None


async def test_a_later_operator_finds_in_the_job_what_was_not_kept(world):
    await measured_and_not_kept(world)
    world.calibrator = world.fresh()
    assert (await world.look())[:2] == ("False", "NotKept")
    del world.api.refusals["apply", "ConfigMap"]
    world.calibrator = world.fresh()
    assert (await world.look())[:2] == ("True", "Measured")
    assert world.aside() == []


async def test_what_was_not_kept_is_written_before_the_next_one_begins(world):
    await measured_and_not_kept(world)
    world.request = "r2"
    world.calibrator.doubt(KEY)
    assert (await world.look())[:2] == ("Unknown", "Forbidden")
    assert world.aside() == []
    del world.api.refusals["apply", "ConfigMap"]
    assert (await world.look())[:2] == ("Unknown", "Draining")
    assert world.kept["metadata"]["annotations"][names.ANNOTATION_CALIBRATED] == "r1"
    assert await world.calibrator.curve(KEY, OWNER.uid) is not None


async def test_what_was_not_kept_of_one_that_was_deleted_is_not_written_for_its_namesake(world):
    await measured_and_not_kept(world)
    del world.api.refusals["apply", "ConfigMap"]
    world.request = ""
    world.uid = "u-2"
    world.now += UNKEPT_RECHECK
    writes = world.api.calls["apply", "ConfigMap"]
    assert (await world.look())[:2] == ("Unknown", "NotAskedFor")
    assert world.api.calls["apply", "ConfigMap"] == writes
    assert await world.calibrator.curve(KEY, "u-2") is None


async def test_nothing_is_written_for_one_that_is_gone(world):
    await measured_and_not_kept(world)
    world.now += UNKEPT_RECHECK
    world.gone = True
    with pytest.raises(KubeRefused):
        await world.look()
    world.calibrator.forget(KEY)
    world.request = ""
    assert await world.look() == ("Unknown", "NotAskedFor", None)


async def test_nothing_is_measured_again_while_nothing_can_be_kept(world):
    await world.drained()
    world.reading = replace(world.reading, running=1)
    world.api.refusals["apply", "ConfigMap"] = KubeRefused(403, "Forbidden", "cannot patch")
    world.now += 3600
    assert (await world.look())[:2] == ("False", "Failed")
    await world.look()
    assert world.aside() == []
    world.calibrator = world.fresh()
    assert (await world.look())[:2] == ("Unknown", "Forbidden")
    assert world.aside() == []


async def test_an_object_of_somebody_else_is_not_taken_over(world):
    theirs = {
        "kind": "ConfigMap",
        "metadata": {"name": "chat-curve"},
        "data": {"curve.json": "{}"},
    }
    await world.api.apply(theirs)
    assert (await world.look())[:2] == ("False", "NameTaken")
    assert await world.calibrator.curve(KEY, OWNER.uid) is None


THEIRS = {"kind": "ConfigMap", "metadata": {"name": "chat-curve"}, "data": {"theirs": "1"}}


async def test_one_that_is_made_by_somebody_else_meanwhile_is_left_alone(world):
    await world.to_the_job()
    await world.api.apply(THEIRS)
    world.ends(0, WORDS)
    assert (await world.look())[:2] == ("False", "NotKept")
    assert world.kept["data"] == {"theirs": "1"}
    await world.look()
    assert world.aside() == []


async def test_no_pod_is_taken_when_the_name_is_taken_unseen(world):
    world.request = ""
    await world.look()
    await world.api.apply(THEIRS)
    world.request = "r1"
    await world.look()
    assert (await world.look())[:2] == ("False", "NameTaken")
    assert world.aside() == []
    assert world.kept["data"] == {"theirs": "1"}


async def test_what_is_kept_of_one_that_was_deleted_does_not_count(world):
    before = workload.Owner("chat", "team", "u-0")
    await world.api.apply(workload.curve_config_map(before, "r1", {curves.KEY: WORDS}))
    assert await world.calibrator.curve(KEY, OWNER.uid) is None
    assert (await world.look())[:2] == ("Unknown", "Draining")
    assert not world.kept["data"]
    assert world.kept["metadata"]["ownerReferences"][0]["uid"] == OWNER.uid


async def test_the_curve_of_one_that_was_deleted_is_none_of_its_namesake(world):
    await world.to_the_job()
    world.ends(0, WORDS)
    await world.look()
    assert await world.calibrator.curve(KEY, OWNER.uid) is not None
    # At once, and as long as its ConfigMap has not been collected.
    for _ in range(2):
        assert await world.calibrator.curve(KEY, "u-2") is None
        world.calibrator.forget(KEY)


async def test_a_request_that_is_made_anew_is_taken_up_though_nobody_tells(world):
    await world.to_the_job()
    world.ends(0, WORDS)
    await world.look()
    await world.look()
    assert await world.look() == ("True", "Measured", RECORD_TTL)
    # As if all of it had never been.
    del world.api.objects["ConfigMap", "chat-curve"]
    del world.api.objects["Job", world.job["metadata"]["name"]]
    world.workers = []
    assert await world.look() == ("True", "Measured", RECORD_TTL)
    world.now += RECORD_TTL
    assert (await world.look())[:2] == ("Unknown", "Draining")


async def test_what_is_kept_is_read_anew_for_another_request(world):
    await world.to_the_job()
    world.ends(0, WORDS)
    await world.look()
    await world.look()
    del world.api.objects["ConfigMap", "chat-curve"]
    del world.api.objects["Job", world.job["metadata"]["name"]]
    world.workers = []
    world.request = ""
    world.calibrator.doubt(KEY)
    assert (await world.look())[:2] == ("Unknown", "NotAskedFor")
    world.request = "r1"
    world.calibrator.doubt(KEY)
    assert (await world.look())[:2] == ("Unknown", "Draining")


async def test_a_name_that_was_taken_is_looked_at_again(world):
    await world.api.apply(THEIRS)
    assert await world.look() == ("False", "NameTaken", RECORD_TTL)
    del world.api.objects["ConfigMap", "chat-curve"]
    world.now += RECORD_TTL
    assert (await world.look())[:2] == ("Unknown", "Draining")


async def test_a_pod_returns_though_what_is_kept_cannot_be_read(world):
    await world.to_the_job()
    world.api.refusals["get", "ConfigMap"] = KubeRefused(403, "Forbidden", "cannot get")
    world.calibrator = world.fresh()
    await world.look()
    assert world.job is None
    world.workers = []
    await world.look()
    assert world.aside() == []
    said, _ = await world.calibrator.look(world.subject(), SEEN, world.confirm)
    assert (said.status, said.reason) == ("False", "Failed")
    assert "cannot be read: cannot get" in said.message


async def test_a_pin_in_the_middle_ends_it(world):
    await world.to_the_job()
    world.mode = "Off"
    assert (await world.look())[:2] == ("False", "Failed")
    assert "Pinned: policy.mode is Off" in world.kept["data"]["failure"]
    await world.look()
    assert world.job is None
    world.workers = []
    await world.look()
    assert world.aside() == []


async def test_an_autoscaler_in_the_middle_ends_nothing(world):
    await world.to_the_job()
    world.api.objects["Pod", "chat-c"] = pod_object("chat-c")
    world.rolled_out = False
    assert (await world.look())[:2] == ("Unknown", "Running")
    del world.api.objects["Pod", "chat-b"]
    assert (await world.look())[:2] == ("Unknown", "Running")
    world.ends(0, WORDS)
    assert (await world.look())[:2] == ("True", "Measured")


async def test_a_rollout_in_the_middle_ends_it(world):
    await world.to_the_job()
    world.rolled_out, world.replaces = False, True
    assert (await world.look())[:2] == ("False", "Failed")
    assert "RollingOut: pods of an older spec" in world.kept["data"]["failure"]


async def test_missing_rights_cost_the_calibration_alone(world):
    world.api.refusals["get", "ConfigMap"] = KubeRefused(403, "Forbidden", "cannot get")
    assert await world.look() == ("Unknown", "Forbidden", FORBIDDEN_RECHECK)
    world.request = ""
    assert await world.look() == ("Unknown", "Forbidden", None)


async def test_a_pod_that_may_not_be_put_back_is_tried_again_though_nobody_asks_any_more(world):
    await world.drained()
    world.request = ""
    world.api.refusals["merge", "Pod"] = KubeRefused(403, "Forbidden", "denied by policy")
    assert await world.look() == ("Unknown", "Forbidden", FORBIDDEN_RECHECK)
    del world.api.refusals["merge", "Pod"]
    await world.look()
    assert world.aside() == []


async def test_an_api_server_that_does_not_answer_is_asked_again(world):
    world.api.refusals["merge", "Pod"] = KubeUnreachable("timed out")
    with pytest.raises(KubeUnreachable):
        await world.look()
    world.api.refusals["merge", "Pod"] = KubeRefused(404, "NotFound", "gone")
    await world.look()


async def test_nothing_is_made_for_a_specserve_that_is_gone(world):
    await world.drained()
    world.gone = True
    with pytest.raises(KubeRefused):
        await world.look()
    assert world.job is None


async def test_at_rest_it_costs_no_calls(world):
    world.request = ""
    for _ in range(5):
        assert await world.look() == ("Unknown", "NotAskedFor", None)
    assert sum(world.api.calls.values()) == 1
    world.now += RECORD_TTL
    await world.look()
    assert sum(world.api.calls.values()) == 2
    world.spec["policy"]["strategy"] = "Threshold"
    world.now += RECORD_TTL
    await world.look()
    assert sum(world.api.calls.values()) == 2
