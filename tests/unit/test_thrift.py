"""What the operator does without, and must not lose: memory, pauses, leases, writes."""

import asyncio
import gc
import math
import weakref

import pytest

from specserve import operator, telemetry
from specserve.engine import EngineError
from specserve.kube import NoCluster
from specserve.observed import Pod
from specserve.reconcile import GATHER
from specserve.regulate import LONGEST_LEASE, PATIENT_PERIODS
from specserve.settings import Settings
from tests.unit.engines import FakeEngines
from tests.unit.regulation import KEY, target, world
from tests.unit.test_reconcile import World as Reconciliation
from tests.unit.virtual_time import in_virtual_time

# -- memory ---------------------------------------------------------------------------------


class Remembering(FakeEngines):
    """Engines that know whether anybody still holds an error of theirs."""

    def __init__(self):
        super().__init__()
        self.errors = []

    async def _reach(self, *call, **more):
        try:
            return await super()._reach(*call, **more)
        except EngineError as error:
            self.errors.append(weakref.ref(error))
            raise


@in_virtual_time
async def test_of_an_error_its_words_are_kept_and_no_more():
    engines = Remembering()
    async with world(engines) as w:
        w.regulator.configure(target())
        w.add(faults={"load": "refused", "read": "refused"})
        await asyncio.sleep(30)
        report = w.engine()
        assert report.sample_error == ("EngineHTTP500", "500 oops")
        assert report.control_error == ("EngineHTTP500", "500 oops")
        assert len(engines.errors) > 5
        gc.collect()
        # An exception holds the frames it went through, and with them the call and its answer.
        assert [error() for error in engines.errors if error() is not None] == []


async def test_full_collections_are_rare(monkeypatch):
    before = gc.get_threshold()
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    try:
        with pytest.raises(NoCluster):
            await operator.run(Settings(), telemetry.Health())
        assert gc.get_threshold() == operator.GC_THRESHOLDS
        young, *_ = operator.GC_THRESHOLDS
        # So many objects must outlive their call for one full collection.
        assert math.prod(operator.GC_THRESHOLDS) >= 1_000_000 > young
    finally:
        gc.set_threshold(*before)


# -- leases ---------------------------------------------------------------------------------


@in_virtual_time
async def test_leases_outlive_the_wait_for_their_renewal_when_periods_are_stretched():
    async with world(samples_per_second=1) as w:
        w.regulator.configure(target(leaseSeconds=15))
        for n in range(20):
            w.add(f"u{n}", f"10.0.4.{n}")
        # 20 pods, one reading a second: each is due every 20 seconds.
        period = 0.5 * w.regulator.stretch
        assert period == 20
        await asyncio.sleep(1200)
        held = {body["leaseSeconds"] for body in w.switches}
        assert held == {math.ceil(period * PATIENT_PERIODS)}
        for engine in w.engines.at.values():
            lease = engine.read_back()["lease"]
            assert lease["expirations"] == 0
            assert lease["remainingSeconds"] > 0


@in_virtual_time
async def test_no_lease_is_longer_than_the_contract_allows():
    async with world(samples_per_second=0.01) as w:
        w.regulator.configure(target(leaseSeconds=15))
        for n in range(5):
            w.add(f"u{n}", f"10.0.5.{n}")
        await asyncio.sleep(3600)
        assert {body["leaseSeconds"] for body in w.switches} == {LONGEST_LEASE}


# -- writes ---------------------------------------------------------------------------------


@in_virtual_time
async def test_a_slow_moment_of_the_process_is_no_state():
    told = []
    async with world(samples_per_second=10, stretched=told.append) as w:
        w.regulator.configure(target())
        for n in range(20):
            w.add(f"u{n}", f"10.0.6.{n}")
        await asyncio.sleep(5)
        asked = w.regulator.stretch
        # Nothing ran for three seconds: the loop is late, and starts less for a while.
        asyncio.get_running_loop()._jumping.now += 3.0
        await asyncio.sleep(0.05)
        assert told[-1] > asked
        assert w.regulator.stretch == asked


@in_virtual_time
async def test_a_burst_of_changes_is_one_write():
    reconciliation = Reconciliation()
    reconciliation.queue._clock = asyncio.get_running_loop().time
    reconciliation.show()
    worker = asyncio.create_task(reconciliation.loop.work())
    try:
        await asyncio.sleep(5)
        before = len(reconciliation.cluster.statuses)
        for n in range(50):
            new = Pod(f"u{n}", KEY, f"chat-{n}", None, False, True, False, "b", None)
            reconciliation.loop.take_pod(None, new)
            await asyncio.sleep(GATHER / 100)
        await asyncio.sleep(GATHER * 2)
        assert len(reconciliation.cluster.statuses) - before == 1
        assert reconciliation.cluster.statuses[-1]["replicas"] == 50
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
