"""What the first loop makes of SpecServes that vanish, and of an API server in trouble."""

from base64 import b64encode
from typing import Any

import pytest

from specserve import conditions, names, observed
from specserve.kube import KubeRefused
from specserve.reconcile import Reconciler
from specserve.target import Access, Standing
from specserve.workqueue import WorkQueue

KEY = ("team", "chat")


class FakeCluster:
    """Objects by kind and name; refuses what a test wants refused."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.refusals: dict[str, KubeRefused] = {}
        self.statuses: list[dict[str, Any]] = []

    async def get(self, kind: str, _: str, name: str) -> dict[str, Any] | None:
        return self.objects.get((kind, name))

    async def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in self.refusals:
            raise self.refusals[kind]
        made = {**manifest, "metadata": {"uid": f"{kind}-uid", **manifest["metadata"]}}
        self.objects[kind, name] = made
        return made

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        return await self.apply(manifest)

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
        return []

    def asked(self, _: Any) -> bool:
        return True

    def live(self, _: Any) -> bool:
        return False

    def switches(self, _: Any) -> tuple[Any, ...]:
        return ()

    def mode(self, target: Any) -> str:
        return str(target.policy.mode)

    standing = Standing()


class World:
    """One reconciler over a cluster in memory."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.steering = FakeSteering()
        self.queue: WorkQueue[Any] = WorkQueue()
        self.notices: list[Any] = []
        self.loop = Reconciler(
            self.cluster,  # type: ignore[arg-type]
            self.steering,
            self.queue,
            self.notices.append,
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


async def test_after_a_restart_nothing_is_said_of_pods_that_is_not_known(world):
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
    said = [n.message for n in world.notices if n.reason == "WorkloadApplied"]
    assert said[0] == "Deployment chat created"
    assert "pods are replaced: spec.containers[engine].image" in said[1]
    assert [n.message for n in again.notices if n.reason == "WorkloadApplied"] == [
        "Deployment chat changed"
    ]


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
