"""An engine that refuses the API key is steered by what its plugin tells, and called so."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
import yaml

from specserve import names, observed
from specserve.reconcile import RECHECK, SECRET_RECHECK
from specserve.signals import Reading, Unreadable, from_read_back
from specserve.workload import Owner, desired, first_difference
from tests.unit.engines import FakeEngines
from tests.unit.regulation import target, world
from tests.unit.test_reconcile import KEY, World, secret
from tests.unit.test_status import condition, engines, seen, spec
from tests.unit.virtual_time import in_virtual_time


def rank(running: Any = 4, queued: Any = 2) -> dict[str, Any]:
    return {"running": running, "queued": queued}


def group(*ranks: dict[str, Any], **told: Any) -> dict[str, Any]:
    return {"ranks": list(ranks), "at": 7.5, "tokensTotal": 100, **told}


# -- what a read-back says of the load ------------------------------------------------------


def test_groups_hold_shares_of_which_their_ranks_hold_copies():
    body = {"groups": [group(rank(), rank(), at=8.5), group(rank(3, 0), rank(3, 0))]}
    assert from_read_back(body) == Reading(7.5, 7, 2, None, 200, 2)


def test_what_one_group_does_not_tell_is_unknown():
    told = from_read_back({"groups": [group(rank(), at=None, tokensTotal=None), group(rank())]})
    assert (told.stamp, told.tokens_total, told.running) == (7.5, None, 8)
    assert from_read_back({"groups": [group(rank(), at=None)]}).stamp is None


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [{}],
        [group()],
        [group(rank()), group()],
        [group(rank(running=None))],
        [group(rank(queued=-1))],
        [group(rank(running=True))],
        [group({"running": 4})],
        [group(rank(), rank(running=None))],
        # Attention data parallelism: each rank has requests of its own.
        [group(rank(8), rank(10)), group(rank(8), rank(10))],
    ],
)
def test_ranks_that_are_silent_or_differ_are_no_load(groups):
    with pytest.raises(Unreadable):
        from_read_back({"groups": groups})


# -- steering -------------------------------------------------------------------------------


class Locks(FakeEngines):
    """Engines that were started with another key than the one in force."""

    locked = False

    async def load(self, engine: Any) -> Reading:
        reading = await super().load(engine)
        if not self.locked:
            return replace(reading, gpu="H200", cache_tokens=9000)
        return replace(reading, capacity=None, key_refused=True)


@in_virtual_time
async def test_an_engine_that_refuses_the_key_is_steered_on_and_said_once():
    async with world(Locks()) as w:
        w.regulator.configure(target())
        engine = w.add(running=30, capacity=256)
        await asyncio.sleep(2)
        assert (engine.mode, w.engine().key_refused) == ("off", False)
        w.engines.locked = True
        engine.running = 1
        await asyncio.sleep(5)
        told = w.engine()
        assert (engine.mode, told.key_refused, told.sample_error) == ("on", True, None)
        # What does not change in the life of an engine process is still known.
        assert (told.capacity, told.cache_tokens, told.gpu) == (256, 9000, "H200")
        assert [n.kind for n in w.events("ApiKeyRefused")] == ["Warning"]
        w.engines.locked = False
        await asyncio.sleep(2)
        assert not w.engine().key_refused
        w.engines.locked = True
        await asyncio.sleep(2)
        assert len(w.events("ApiKeyRefused")) == 2


@in_virtual_time
async def test_another_process_in_the_pod_may_take_the_key_and_hold_less():
    async with world(Locks()) as w:
        w.regulator.configure(target())
        engine = w.add(capacity=256)
        await asyncio.sleep(2)
        w.engines.locked = True
        await asyncio.sleep(2)
        engine.boot()
        w.edit(boot="c2#1")
        told = w.engine()
        assert (told.key_refused, told.capacity, told.cache_tokens) == (False, None, None)


# -- what is said of it ---------------------------------------------------------------------


def test_the_condition_says_what_to_do():
    status, reason, message = condition(
        seen(engines=engines({}, {"key_refused": True})), "EnginesHealthy"
    )
    assert (status, reason) == ("False", "ApiKeyRefused")
    assert "chat-1: " in message
    assert "chat-0" not in message
    assert "kubectl rollout restart deployment chat" in message
    fresh, _, _ = condition(seen(engines=engines({"key_refused": True})), "MetricsFresh")
    assert fresh == "True"


# -- the Secret and its reference -----------------------------------------------------------


def annotations(**engine: Any) -> dict[str, str]:
    made = desired(Owner("chat", "team", "u"), spec(engine={"image": "engine:1", **engine}))[-1]
    return made["spec"]["template"]["metadata"]["annotations"]


def test_another_reference_replaces_the_pods():
    """An engine whose port was open must not stay so when its spec asks for a key."""
    assert names.ANNOTATION_API_KEY not in annotations()
    assert annotations(apiKeySecretRef={"name": "a"})[names.ANNOTATION_API_KEY] == "a/token"
    owner = Owner("chat", "team", "u")
    one, other = (
        desired(owner, spec(engine={"image": "engine:1", "apiKeySecretRef": {"name": name}}))[-1]
        for name in ("a", "b")
    )
    assert names.ANNOTATION_API_KEY in str(first_difference(one, other))


@pytest.fixture
def keyed(monkeypatch) -> World:
    """A SpecServe whose clients have a key."""
    world = World()

    async def merge(kind: str, _: str, name: str, change: dict[str, Any]) -> dict[str, Any]:
        made = world.cluster.objects[kind, name]
        made["data"] |= secret(**change["stringData"])["data"]
        return made

    monkeypatch.setattr(world.cluster, "merge", merge, raising=False)
    world.cluster.objects["Secret", "clients"] = secret(key="first\n")
    world.show(apiKeySecretRef={"name": "clients", "key": "key"})
    return world


async def next_look(world: World) -> float:
    """Reconcile; seconds until the next time, if nobody tells of anything."""
    world.queue.forget(KEY)
    assert await world.loop.reconcile(KEY) == "ok"
    return world.queue._due[KEY] - time.monotonic()


def given(world: World) -> Any:
    """The key that an engine takes which starts now."""
    made = world.cluster.objects["Secret", "chat-credentials"]["data"][names.KEY_CONFIG]
    return yaml.safe_load(observed.decode(made))["api-key"]


async def test_a_renewed_key_is_found_within_a_minute_and_given_to_engines_that_start(keyed):
    assert await next_look(keyed) == pytest.approx(SECRET_RECHECK, abs=1)
    assert (keyed.steering.targets[KEY].api_key, given(keyed)) == ("first", "first")
    template = keyed.cluster.objects["Deployment", "chat"]["spec"]["template"]
    keyed.cluster.objects["Secret", "clients"] = secret(key="second")
    keyed.now += SECRET_RECHECK
    await next_look(keyed)
    assert (keyed.steering.targets[KEY].api_key, given(keyed)) == ("second", "second")
    assert keyed.cluster.objects["Deployment", "chat"]["spec"]["template"] == template
    assert "second" not in repr((keyed.notices, keyed.cluster.statuses))


@pytest.mark.parametrize(
    "engine", [{"key_refused": True}, {"sample_error": ("Unauthorized", "401")}]
)
async def test_a_key_that_engines_refuse_is_looked_at_sooner(keyed, monkeypatch, engine):
    monkeypatch.setattr(keyed.steering, "engines", lambda _: engines(engine))
    assert await next_look(keyed) == pytest.approx(RECHECK, abs=1)


async def test_without_a_key_there_is_nothing_to_look_at():
    world = World()
    world.show()
    world.queue.forget(KEY)
    assert await world.loop.reconcile(KEY) == "ok"
    assert len(world.queue) == 0
