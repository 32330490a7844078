"""The kill switch: what its ConfigMap may say, and what holds while it cannot be read."""

import asyncio
from typing import Any

import pytest

from specserve import telemetry
from specserve.kube import KubeRefused, KubeUnreachable
from specserve.override import PERIOD, OverrideReader, Unusable, parse, words
from specserve.target import Override, Standing
from tests.unit.virtual_time import in_virtual_time, now

WALL = 1_900_000_000.0
GONE = KubeUnreachable("GET configmap: timed out")


class FakeCluster:
    """One ConfigMap, or what is answered in its place."""

    def __init__(self, **data: str) -> None:
        self.answer: Any = {"data": data} if data else None
        self.asked = 0

    async def get(self, kind: str, namespace: str, name: str) -> Any:
        assert (kind, namespace, name) == ("ConfigMap", "system", "specserve-override")
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class World:
    def __init__(self, **data: str) -> None:
        self.cluster = FakeCluster(**data)
        self.told: list[Standing] = []
        self.reader = OverrideReader(
            self.cluster,  # type: ignore[arg-type]
            "system",
            "specserve-override",
            self.told.append,
            wall=lambda: WALL + now(),
        )


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"mode": "Off"}, Override("Off")),
        ({"mode": "On", "reason": " two\n lines "}, Override("On", None, "two lines")),
        (
            {"mode": "Observe", "until": "2030-03-17T17:46:40Z"},
            Override("Observe", 1_900_000_000.0),
        ),
        ({"mode": "Off", "until": ""}, Override("Off")),
        ({"mode": "Off", "until": "2030-03-17T18:46:40+01:00"}, Override("Off", WALL)),
    ],
)
def test_what_it_may_say(data: dict[str, str], expected: Override):
    assert parse(data) == expected


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "mode is None"),
        ({"mode": "off"}, "mode is 'off', not one of On, Off, Observe"),
        ({"mode": "Auto"}, "mode is 'Auto'"),
        ({"mode": "Off", "untill": "x"}, "key untill"),
        ({"mode": "Off", "until": "tomorrow"}, "until is 'tomorrow'"),
        ({"mode": "Off", "until": "2030-01-01T00:00:00"}, "without a time zone"),
    ],
)
def test_what_it_may_not_say(data: dict[str, str], said: str):
    with pytest.raises(Unusable, match=said):
        parse(data)


def test_words_for_people():
    assert words(None) == "none"
    assert words(Override("Off", reason="garbled")) == "Off (garbled)"


@in_virtual_time
async def test_it_is_followed():
    w = World()
    task = asyncio.create_task(w.reader.run())
    await asyncio.sleep(PERIOD + 0.1)
    assert w.told == [Standing()]
    w.cluster.answer = {"data": {"mode": "Off"}}
    await asyncio.sleep(PERIOD)
    assert w.told[-1] == Standing(Override("Off"))
    assert telemetry.override.labels("Off")._value.get() == 1
    await asyncio.sleep(10 * PERIOD)
    assert len(w.told) == 2  # nothing new, nothing told
    w.cluster.answer = None
    await asyncio.sleep(PERIOD)
    assert w.told[-1] == Standing()
    assert telemetry.override.labels("Off")._value.get() == 0
    task.cancel()


@pytest.mark.parametrize("trouble", [GONE, {"data": {"mode": "of"}}, KubeRefused(500, "x", "y")])
@in_virtual_time
async def test_what_was_last_known_holds_while_it_cannot_be_read(trouble: Any):
    w = World(mode="Off")
    await w.reader.read()
    w.cluster.answer = trouble
    await w.reader.read()
    assert w.told[-1].override == Override("Off")
    assert w.told[-1].problem.startswith("ConfigMap system/specserve-override: ")
    assert telemetry.override_unreadable._value.get() == 1
    w.cluster.answer = None
    await w.reader.read()
    assert w.told[-1] == Standing()
    assert telemetry.override_unreadable._value.get() == 0


@in_virtual_time
async def test_it_ends_at_its_time_also_while_it_cannot_be_read():
    w = World(mode="Off", until="2030-03-17T18:46:40Z")
    await w.reader.read()
    assert w.told[-1].override is not None
    w.cluster.answer = GONE
    await asyncio.sleep(3600)
    await w.reader.read()
    assert w.told[-1].override is None


@in_virtual_time
async def test_nothing_is_steered_before_the_api_server_has_an_answer():
    w = World(mode="Off")
    told, w.cluster.answer = w.cluster.answer, GONE
    first = asyncio.create_task(w.reader.first())
    await asyncio.sleep(10)
    assert not first.done()
    w.cluster.answer = told
    await asyncio.sleep(1)
    assert first.done()
    assert w.told[-1] == Standing(Override("Off"))


@in_virtual_time
async def test_an_installation_without_the_right_to_read_it_goes_on_and_says_so():
    w = World()
    w.cluster.answer = KubeRefused(403, "Forbidden", "cannot get resource configmaps")
    await w.reader.first()
    assert w.told[-1].override is None
    assert "cannot get resource configmaps" in w.told[-1].problem
