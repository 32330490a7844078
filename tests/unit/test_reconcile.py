"""What the first loop makes of SpecServes that vanish, and of an API server in trouble."""

import copy
import datetime
import time
from base64 import b64encode
from typing import Any

import pytest

from specserve import conditions, curves, names, observed, workload
from specserve.kube import KubeRefused
from specserve.reconcile import Reconciler
from specserve.status import Engine
from specserve.target import Access, Override, Standing
from specserve.workqueue import WorkQueue

KEY = ("team", "chat")
WALL = 1_900_000_000.0
CURVE_SECONDS = 30.0


def merged(base: Any, patch: Any) -> Any:
    """A JSON merge patch without deletions, applied."""
    if not (isinstance(base, dict) and isinstance(patch, dict)):
        return patch
    return base | {key: merged(base.get(key), value) for key, value in patch.items()}


class FakeCluster:
    """Objects by kind and name; refuses what a test wants refused."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.refusals: dict[str, KubeRefused] = {}
        self.statuses: list[dict[str, Any]] = []
        self.merged: list[tuple[str, dict[str, Any]]] = []
        self.version = 0

    async def get(self, kind: str, _: str, name: str) -> dict[str, Any] | None:
        if kind == "ConfigMap" and kind in self.refusals:
            raise self.refusals[kind]
        return self.objects.get((kind, name))

    async def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in self.refusals:
            raise self.refusals[kind]
        old = self.objects.get((kind, name))
        if old and observed.written_parts(old) == observed.written_parts(manifest):
            return old
        self.version += 1
        meta = {"uid": f"{kind}-uid", "resourceVersion": str(self.version)}
        made = {**manifest, "metadata": {**meta, **manifest["metadata"]}}
        self.objects[kind, name] = made
        return made

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        if (manifest["kind"], manifest["metadata"]["name"]) in self.objects:
            return None
        return await self.apply(manifest)

    async def merge(self, kind: str, _: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        self.merged.append((kind, patch))
        self.refusals.pop(kind, None)
        self.objects[kind, name] = merged(self.objects[kind, name], patch)
        return self.objects[kind, name]

    async def status(self, _: str, name: str, status: dict[str, Any]) -> None:
        if (names.KIND, name) not in self.objects:
            raise KubeRefused(404, "NotFound", "gone")
        self.statuses.append(status)


class FakeSteering:
    """Remembers who is steered."""

    stretch = 1.0

    def __init__(self) -> None:
        self.targets: dict[Any, Any] = {}

    def configure(self, target: Any) -> None:
        self.targets[target.key] = target

    def release(self, key: Any) -> None:
        self.targets.pop(key, None)

    def observe(self, old: Any, new: Any) -> None:
        """Pods play no part here."""

    def engines(self, _: Any) -> list[Any]:
        return [Engine(f"chat-{n}", sglang=one) for n, one in enumerate(self.versions)]

    def asked(self, _: Any) -> bool:
        return True

    def live(self, _: Any) -> bool:
        return False

    def switches(self, _: Any) -> tuple[Any, ...]:
        return ()

    def mode(self, target: Any) -> str:
        return str(target.policy.mode)

    standing = Standing()
    versions: tuple[str, ...] = ()


class World:
    """One reconciler over a cluster in memory."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.steering = FakeSteering()
        self.queue: WorkQueue[Any] = WorkQueue()
        self.notices: list[Any] = []
        self.now = 100.0
        self.loop = Reconciler(
            self.cluster,  # type: ignore[arg-type]
            self.steering,
            self.queue,
            self.notices.append,
            curve_seconds=CURVE_SECONDS,
            clock=lambda: self.now,
            wall=lambda: WALL,
        )

    def show(self, uid: str = "u1", generation: int = 1, **spec: Any) -> dict[str, Any]:
        item = {
            "metadata": {
                "namespace": "team", "name": "chat", "uid": uid, "generation": generation
            },
            "spec": {
                "model": {"source": "hf://a/b"}, "engine": {"image": "engine:1", **spec}
            },
        }  # fmt: skip
        self.cluster.objects[names.KIND, "chat"] = item
        self.loop.take_resource(item)
        return item


@pytest.fixture
def world() -> World:
    return World()


async def test_one_whose_end_nobody_told_is_forgotten(world):
    world.show()
    assert await world.loop.reconcile(KEY) == "ok"
    del world.cluster.objects[names.KIND, "chat"]
    world.show(generation=2)
    del world.cluster.objects[names.KIND, "chat"]
    assert await world.loop.reconcile(KEY) == "gone"
    assert world.loop.keys() == frozenset()
    assert world.steering.targets == {}


async def test_a_full_list_finds_what_no_watch_has_told(world):
    world.show()
    assert await world.loop.reconcile(KEY) == "ok"
    before = world.loop.keys()
    del world.cluster.objects[names.KIND, "chat"]
    world.loop.relist([], before)
    assert await world.queue.get() == KEY
    assert await world.loop.reconcile(KEY) == "gone"
    assert world.loop.keys() == frozenset()


async def test_a_full_list_that_is_older_than_the_watch_forgets_nothing(world):
    before = world.loop.keys()
    world.show()
    world.loop.relist([], before)
    assert world.loop.keys() == {KEY}


async def test_the_late_end_of_a_namesake_is_not_its_own(world):
    old = world.show(uid="old")
    world.show(uid="new")
    world.loop.take_resource(old, deleted=True)
    assert world.loop.keys() == {KEY}


@pytest.mark.parametrize(
    ("refusal", "result", "reason"),
    [
        (KubeRefused(422, "Invalid", "spec.x: no"), "blocked", conditions.SPEC_REJECTED),
        (KubeRefused(403, "Forbidden", "quota"), "blocked", "ApplyForbidden"),
        (
            KubeRefused(500, "InternalError", "failed to create typed patch object: .spec.x"),
            "blocked",
            conditions.SPEC_REJECTED,
        ),
        (KubeRefused(500, "InternalError", "etcdserver: leader changed"), "error", None),
        (KubeRefused(503, "ServiceUnavailable", "later"), "error", None),
    ],
)
async def test_a_server_in_trouble_is_no_fault_of_the_spec(world, refusal, result, reason):
    world.show()
    world.cluster.refusals["Deployment"] = refusal
    assert await world.loop.reconcile(KEY) == result
    ready = [c for s in world.cluster.statuses for c in s["conditions"] if c["type"] == "Ready"]
    assert [c["reason"] for c in ready] == ([] if reason is None else [reason])


def said(world: World, reason: str = "WorkloadApplied") -> list[str]:
    return [notice.message for notice in world.notices if notice.reason == reason]


async def test_what_replaces_pods_is_said_also_after_a_restart(world):
    world.show()
    await world.loop.reconcile(KEY)
    world.show(generation=2, image="engine:2")
    await world.loop.reconcile(KEY)
    again = World()
    again.cluster.objects = world.cluster.objects
    deployment = world.cluster.objects["Deployment", "chat"]
    again.loop.take_owned(None, observed.owned("Deployment", deployment))
    again.show(generation=3, image="engine:3")
    await again.loop.reconcile(KEY)
    replaced = "Deployment chat changed, pods are replaced: spec.engine.image"
    assert said(world) == ["Deployment chat created", replaced]
    assert said(again) == [replaced]
    assert said(again, "SetBack") == []


async def test_pods_that_the_server_refuses_are_news(world):
    world.show(image="engine:1")
    await world.loop.reconcile(KEY)
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    item = {**world.cluster.objects["Deployment", "chat"], "status": {"conditions": [refused]}}
    world.loop.take_owned(None, observed.owned("Deployment", item))
    await world.loop.reconcile(KEY)
    (notice,) = (notice for notice in world.notices if notice.reason == "PodsRefused")
    assert notice.kind == "Warning"
    assert "exceeded quota: gpus; lower spec.replicas" in notice.message


# -- what somebody else has changed ---------------------------------------------------------


async def drift(world: World, kind: str, change: Any) -> None:
    """Let somebody change an object that is as it should be, and be looked at."""
    world.show()
    await world.loop.reconcile(KEY)
    world.notices.clear()
    item = copy.deepcopy(world.cluster.objects[kind, "chat"])
    change(item)
    world.cluster.objects[kind, "chat"] = item
    world.loop.take_owned(None, observed.owned(kind, item))


def another_image(item: dict[str, Any]) -> None:
    item["spec"]["template"]["spec"]["containers"][0]["image"] = "nginx:1"


SET_BACK = "Deployment chat set back, as somebody else had changed it"


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (
            "Deployment",
            another_image,
            f"{SET_BACK}, pods are replaced: spec.containers[engine].image of the pod template",
        ),
        (
            "Deployment",
            lambda item: item["spec"].update(replicas=7),
            f"{SET_BACK}, no pod is replaced",
        ),
        (
            "Service",
            lambda item: item["spec"]["selector"].update(foo="bar"),
            "Service chat set back, as somebody else had changed it",
        ),
    ],
)
async def test_what_somebody_else_has_changed_is_set_back_and_said(world, kind, change, words):
    await drift(world, kind, change)
    assert await world.loop.reconcile(KEY) == "ok"
    assert said(world, "SetBack") == [words]
    assert said(world) == []
    assert await world.loop.reconcile(KEY) == "ok"
    assert len(world.notices) == 1


async def test_what_a_watch_tells_late_is_nobodys_change(world):
    world.show()
    await world.loop.reconcile(KEY)
    first = observed.owned("Deployment", world.cluster.objects["Deployment", "chat"])
    world.show(generation=2, image="engine:2")
    await world.loop.reconcile(KEY)
    world.notices.clear()
    world.loop.take_owned(None, first)
    assert await world.loop.reconcile(KEY) == "ok"
    assert world.notices == []


async def test_one_whose_object_was_refused_has_the_others_brought_to_its_spec(world):
    await drift(world, "Service", lambda item: item["spec"].update(ports=[]))
    world.cluster.refusals["Service"] = KubeRefused(422, "Invalid", "Duplicate value: http")
    world.show(generation=2, image="engine:2")
    assert await world.loop.reconcile(KEY) == "blocked"
    template = world.cluster.objects["Deployment", "chat"]["spec"]["template"]
    assert template["spec"]["containers"][0]["image"] == "engine:2"
    status, reason, message = known(world, "Stalled")
    assert (status, reason) == ("True", "ChangedByHand")
    assert "Duplicate value: http; kubectl delete service chat has it made anew" in message


async def test_a_service_that_leaves_no_room_is_taken_over(world):
    def another_port(item: dict[str, Any]) -> None:
        fields = {"f:spec": {"f:ports": {'k:{"port":80}': {}}}}
        item["spec"]["ports"] = [{"name": "http", "port": 80}]
        item["metadata"] |= {
            "resourceVersion": "7",
            "managedFields": [
                {"manager": names.MANAGER, "operation": "Apply"},
                {"manager": "kubectl-patch", "operation": "Update", "fieldsV1": fields},
            ],
        }

    await drift(world, "Service", another_port)
    world.cluster.refusals["Service"] = KubeRefused(422, "Invalid", "Duplicate value: http")
    assert await world.loop.reconcile(KEY) == "ok"
    ((kind, patch),) = world.cluster.merged
    assert (kind, patch["metadata"]["resourceVersion"]) == ("Service", "7")
    ours, hand = patch["metadata"]["managedFields"]
    assert ours["fieldsV1"]["f:spec"]["f:ports"] == {'k:{"port":80}': {}}
    assert hand["fieldsV1"]["f:spec"] == {}
    assert said(world, "SetBack") == ["Service chat set back, as somebody else had changed it"]


@pytest.mark.parametrize("kind", ["NetworkPolicy", "Service"])
async def test_no_engine_starts_before_what_goes_with_it_is_there(world, kind):
    world.loop._provision = workload.Provision(admin=workload.Peer("system", {"app": "x"}))
    world.cluster.refusals[kind] = KubeRefused(403, "Forbidden", "quota")
    world.show()
    assert await world.loop.reconcile(KEY) == "blocked"
    assert known(world, "Stalled")[1] == "ApplyForbidden"
    assert ("Deployment", "chat") not in world.cluster.objects


@pytest.mark.parametrize("label", [names.LABEL_MANAGED_BY, names.LABEL_INSTANCE])
async def test_what_lost_a_label_is_still_ours_and_gets_it_back(world, label):
    world.show()
    await world.loop.reconcile(KEY)
    await world.loop.reconcile(KEY)
    for kind, name in (("Service", "chat"), ("Secret", "chat-credentials")):
        old = world.cluster.objects[kind, name]
        item = copy.deepcopy(old)
        del item["metadata"]["labels"][label]
        world.cluster.objects[kind, name] = item
        seen = observed.owned(kind, item) if label == names.LABEL_INSTANCE else None
        if kind == "Service":
            world.loop.take_owned(observed.owned(kind, old), seen)
        else:
            world.loop.take_credentials(observed.credentials(old), None)
    data = world.cluster.objects["Secret", "chat-credentials"]["data"]
    assert await world.loop.reconcile(KEY) == "ok"
    for kind, name in (("Service", "chat"), ("Secret", "chat-credentials")):
        assert world.cluster.objects[kind, name]["metadata"]["labels"][label]
    assert world.cluster.objects["Secret", "chat-credentials"]["data"] == data


async def test_what_others_made_under_its_name_is_left_alone(world):
    world.cluster.objects["Secret", "chat-credentials"] = {
        "metadata": {"name": "chat-credentials", "namespace": "team", "uid": "x"}
    }
    world.show()
    assert await world.loop.reconcile(KEY) == "blocked"
    assert known(world, "Stalled")[1] == "NameTaken"


# -- the Prometheus server ------------------------------------------------------------------


def secret(**data: str) -> dict[str, Any]:
    return {"data": {key: b64encode(value.encode()).decode() for key, value in data.items()}}


def ask_prometheus(world: World, **refs: Any) -> None:
    item = world.show()
    item["spec"]["policy"] = {
        "source": "Prometheus",
        "prometheus": {"url": "http://prometheus", "scrapeIntervalSeconds": 20, **refs},
    }
    item["metadata"]["generation"] = 2
    world.loop.take_resource(item)


async def test_what_the_secrets_hold_goes_to_the_second_loop(world):
    world.cluster.objects["Secret", "login"] = secret(username="reader", password="word\n")
    world.cluster.objects["Secret", "ca"] = secret(**{"ca.crt": "PEM\n"})
    ask_prometheus(world, basicAuthSecretRef={"name": "login"}, caSecretRef={"name": "ca"})
    assert await world.loop.reconcile(KEY) == "ok"
    target = world.steering.targets[KEY]
    assert target.access == Access(basic=("reader", "word"), authorities="PEM")
    assert "word" not in repr(target)
    assert target.policy.sample_period_milliseconds == 5000
    assert target.policy.stale_after_seconds == 60
    assert world.cluster.statuses[-1]["speculation"]["samplePeriodMilliseconds"] == 5000


async def test_a_missing_secret_is_named_and_the_server_not_asked_without(world):
    ask_prometheus(world, bearerTokenSecretRef={"name": "querier"})
    assert await world.loop.reconcile(KEY) == "blocked"
    missing = "Secret querier is missing (spec.policy.prometheus.bearerTokenSecretRef)"
    assert world.steering.targets[KEY].access.missing == missing
    ready = next(c for c in world.cluster.statuses[-1]["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", conditions.SECRET_MISSING)
    assert missing in ready["message"]


async def test_secrets_of_a_server_that_is_not_asked_are_not_read(world):
    item = world.show()
    item["spec"]["policy"] = {
        "prometheus": {"url": "http://prometheus", "bearerTokenSecretRef": {"name": "querier"}}
    }
    item["metadata"]["generation"] = 2
    world.loop.take_resource(item)
    assert await world.loop.reconcile(KEY) == "ok"
    assert world.steering.targets[KEY].access == Access()


# -- curves and pins ------------------------------------------------------------------------

TEXT = curves.shipped("h200-a").to_json()


def weighing(world: World, **policy: Any) -> None:
    item = world.show()
    item["spec"] |= {
        "draft": {"method": "EAGLE3", "source": "hf://a/d"},
        "policy": {"strategy": "BreakEven", **policy},
    }
    item["metadata"]["generation"] = len(world.cluster.statuses) + 2
    world.loop.take_resource(item)


def hold(world: World, **data: str) -> None:
    world.cluster.objects["ConfigMap", "measured"] = {"metadata": {}, "data": data}


def known(world: World, kind: str = "CurveKnown") -> tuple[str, str, str]:
    found = next(c for c in world.cluster.statuses[-1]["conditions"] if c["type"] == kind)
    return found["status"], found["reason"], found["message"]


async def test_a_profile_becomes_the_curve_of_the_pods(world):
    weighing(world, breakEven={"profile": "h200-a"})
    assert await world.loop.reconcile(KEY) == "ok"
    assert world.steering.targets[KEY].curve == curves.shipped("h200-a")
    assert known(world)[:2] == ("True", "Profile")


async def test_the_threshold_strategy_is_given_no_curve(world):
    weighing(world, strategy="Threshold", breakEven={"profile": "h200-a"})
    assert await world.loop.reconcile(KEY) == "ok"
    assert world.steering.targets[KEY].curve is None
    assert known(world)[:2] == ("True", "NotUsed")


async def test_a_curve_in_a_configmap_is_read_again_in_time(world):
    weighing(world, breakEven={"curveConfigMap": "measured"})
    await world.loop.reconcile(KEY)
    assert known(world)[:2] == ("False", "Unreadable")
    assert "ConfigMap measured: there is none" in known(world)[2]
    hold(world, **{"curve.json": TEXT.replace("0.5.16", "0.5.23")})
    await world.loop.reconcile(KEY)
    assert known(world)[1] == "Unreadable"  # not asked for at every look
    world.now += CURVE_SECONDS
    await world.loop.reconcile(KEY)
    assert known(world)[:2] == ("True", "Calibrated")
    assert world.steering.targets[KEY].curve is not None
    world.steering.versions = ("0.5.16",)
    await world.loop.reconcile(KEY)
    assert known(world)[:2] == ("False", "Stale")
    assert world.steering.targets[KEY].curve is None


def keep(world: World, uid: str, request: str = "1") -> None:
    owner = workload.Owner("chat", "team", uid)
    world.cluster.objects["ConfigMap", "chat-curve"] = workload.curve_config_map(
        owner, request, {curves.KEY: TEXT}
    )


async def test_what_was_measured_of_a_namesake_is_not_used(world):
    keep(world, "u0")
    weighing(world)
    await world.loop.reconcile(KEY)
    assert known(world)[:2] == ("False", "NoCurve")
    again = World()
    keep(again, "u1")
    weighing(again)
    await again.loop.reconcile(KEY)
    assert known(again)[:2] == ("True", "Calibrated")


def ask(world: World, request: str) -> None:
    item = world.cluster.objects[names.KIND, "chat"]
    item["metadata"]["annotations"] = {names.ANNOTATION_CALIBRATE: request} if request else {}
    world.loop.take_resource(item)


async def test_another_request_has_what_is_kept_read_anew(world):
    keep(world, "u1")
    weighing(world)
    ask(world, "1")
    await world.loop.reconcile(KEY)
    assert known(world, "Calibrated")[:2] == ("True", "Measured")
    del world.cluster.objects["ConfigMap", "chat-curve"]
    ask(world, "")
    ask(world, "1")
    await world.loop.reconcile(KEY)
    assert known(world, "Calibrated")[1] != "Measured"


async def test_an_event_is_told_also_if_the_watch_is_faster_than_the_answer(world):
    weighing(world, breakEven={"curveConfigMap": "measured"})
    written = world.cluster.status

    async def status(namespace: str, name: str, status: dict[str, Any]) -> None:
        await written(namespace, name, status)
        item = world.cluster.objects[names.KIND, "chat"]
        world.loop.take_resource({**item, "status": status})

    world.cluster.status = status
    await world.loop.reconcile(KEY)
    assert "Unreadable" in {notice.reason for notice in world.notices}


async def test_a_configmap_without_the_key_says_so(world):
    weighing(world, breakEven={"curveConfigMap": "measured"})
    hold(world, other="x")
    await world.loop.reconcile(KEY)
    assert "it has no key curve.json" in known(world)[2]


@pytest.mark.parametrize("status", [500, 503])
async def test_what_was_read_of_a_curve_outlasts_an_api_server_in_trouble(world, status):
    weighing(world, breakEven={"curveConfigMap": "measured"})
    hold(world, **{"curve.json": TEXT})
    await world.loop.reconcile(KEY)
    world.now += CURVE_SECONDS
    world.cluster.refusals["ConfigMap"] = KubeRefused(status, "x", "etcd leader changed")
    assert await world.loop.reconcile(KEY) == "ok"
    assert world.steering.targets[KEY].curve is not None


async def test_a_right_that_is_missing_shows_and_costs_no_more_than_the_curve(world):
    weighing(world, breakEven={"curveConfigMap": "measured", "profile": "h200-a"})
    world.cluster.refusals["ConfigMap"] = KubeRefused(403, "Forbidden", "cannot get configmaps")
    assert await world.loop.reconcile(KEY) == "ok"
    assert known(world)[:2] == ("False", "Unreadable")
    assert "cannot get configmaps" in known(world)[2]
    assert world.steering.targets[KEY].curve == curves.shipped("h200-a")


async def test_a_pin_is_looked_at_when_it_ends(world):
    until = datetime.datetime.fromtimestamp(WALL + 30, datetime.UTC)
    weighing(world, mode="Off", modeUntil=until.isoformat())
    assert await world.queue.get() == KEY
    await world.loop.reconcile(KEY)
    world.queue.done(KEY)
    assert world.steering.targets[KEY].mode_until == WALL + 30
    assert known(world, "StrategyDecides")[1] == "Pinned"
    due = world.queue._due[KEY]
    assert due - time.monotonic() == pytest.approx(30.1, abs=1)


async def test_a_time_that_cannot_be_read_is_named(world):
    weighing(world, mode="Off", modeUntil="2016-12-31T23:59:60Z")
    assert await world.loop.reconcile(KEY) == "blocked"
    status, reason, message = known(world, "Stalled")
    assert (status, reason) == ("True", "SpecRejected")
    assert "modeUntil: 2016-12-31T23:59:60Z is no time like" in message


async def test_an_override_is_told_with_its_end(world):
    world.steering.standing = Standing(Override("Off", WALL, "garbled output"))
    weighing(world)
    await world.loop.reconcile(KEY)
    status, reason, message = known(world, "StrategyDecides")
    assert (status, reason) == ("False", "Overridden")
    assert message.endswith("Off until 2030-03-17T17:46:40Z, garbled output")
    assert "Overridden" in {notice.reason for notice in world.notices}
