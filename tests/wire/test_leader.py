"""One leader at most, on a Lease that may be slow, lost, skewed or somebody else's."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import web

from specserve.leader import Elector, LeadershipLost
from tests.wire.apiserver import LEASES, ApiServer, failure, hang

LEASE, RENEW, RETRY = 1.2, 0.8, 0.2


class Candidate:
    def __init__(self, server: ApiServer, identity: str, floor: set[str]) -> None:
        self.kube = server.kube()
        self.identity = identity
        self.floor = floor
        self.leading = asyncio.Event()
        self.ended = 0.0
        self.elector = Elector(
            self.kube,
            "system",
            "specserve",
            identity,
            lease_seconds=LEASE,
            renew_seconds=RENEW,
            retry_seconds=RETRY,
        )

    async def work(self) -> None:
        self.floor.add(self.identity)
        assert self.floor == {self.identity}, "two lead at once"
        self.leading.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.floor.discard(self.identity)
            self.ended = time.monotonic()


@contextlib.asynccontextmanager
async def running(server: ApiServer, identity: str, floor: set[str]):
    made = Candidate(server, identity, floor)
    async with made.kube:
        made.task = asyncio.create_task(made.elector.lead(made.work))
        try:
            yield made
        finally:
            made.task.cancel()
            await asyncio.gather(made.task, return_exceptions=True)


def spec(server: ApiServer) -> dict:
    return server.leases["specserve"]["spec"]


async def led(candidate: Candidate, seconds: float = 5.0) -> None:
    await asyncio.wait_for(candidate.leading.wait(), seconds)


def occupy(server: ApiServer, holder: str, renewed: str, lasts: float = 1) -> None:
    server.leases["specserve"] = {
        "metadata": {"name": "specserve", "resourceVersion": "1"},
        "spec": {
            "holderIdentity": holder,
            "renewTime": renewed,
            "leaseDurationSeconds": lasts,
            "leaseTransitions": 4,
        },
    }


async def test_the_first_makes_the_lease(server):
    async with running(server, "a", set()) as one:
        await led(one)
        assert (spec(server)["holderIdentity"], spec(server)["leaseTransitions"]) == ("a", 0)


async def test_the_second_waits_and_takes_over_when_the_first_ends(server):
    floor: set[str] = set()
    async with running(server, "a", floor) as one:
        await led(one)
        async with running(server, "b", floor) as two:
            await asyncio.sleep(2 * LEASE)
            assert floor == {"a"}
            started = time.monotonic()
            one.task.cancel()
            await led(two)
            # Released, not waited out.
            assert time.monotonic() - started < LEASE
            assert spec(server)["holderIdentity"] == "b"
            assert spec(server)["leaseTransitions"] == 1


async def test_a_lease_that_is_not_renewed_is_taken_after_its_time(server):
    occupy(server, "dead", "2020-01-01T00:00:00.000000Z", lasts=1)
    started = time.monotonic()
    async with running(server, "a", set()) as one:
        await led(one)
        assert time.monotonic() - started >= 1.0
        assert spec(server)["leaseTransitions"] == 5


@pytest.mark.parametrize("year", ["2000", "2100"])
async def test_a_skewed_clock_of_the_holder_does_no_harm(server, year: str):
    occupy(server, "skewed", f"{year}-01-01T00:00:00.000000Z")
    async with running(server, "a", set()) as one:
        for second in range(1, 4):
            await asyncio.sleep(0.6)
            occupy(server, "skewed", f"{year}-01-01T00:00:0{second}.000000Z")
            assert not one.leading.is_set()
        await led(one)


async def test_a_hung_server_ends_the_work_within_the_lease(server):
    async with running(server, "a", set()) as one:
        await led(one)
        await asyncio.sleep(2 * RETRY)
        renewed = time.monotonic()
        server.fault = hang
        with pytest.raises(LeadershipLost, match="no renewal"):
            await asyncio.wait_for(one.task, 5)
        assert one.ended - renewed < RENEW + 0.1
        server.fault = None


@pytest.mark.parametrize("status", [401, 403, 409, 500])
async def test_any_refusal_counts_as_a_renewal_that_failed(server, status: int):
    async with running(server, "a", set()) as one:
        await led(one)

        async def refuse(_: web.Request) -> web.Response:
            return failure(status, "No")

        server.fault = refuse
        with pytest.raises(LeadershipLost):
            await asyncio.wait_for(one.task, 5)


async def test_one_failed_renewal_is_borne(server):
    async with running(server, "a", set()) as one:
        await led(one)
        failed = asyncio.Event()

        async def once(_: web.Request) -> web.Response | None:
            if failed.is_set():
                return None
            failed.set()
            return web.Response(text="<html>")

        server.fault = once
        await asyncio.sleep(2 * LEASE)
        assert failed.is_set()
        assert not one.task.done()


async def test_a_failed_renewal_is_borne_after_a_takeover_too(server):
    occupy(server, "dead", "2020-01-01T00:00:00.000000Z", lasts=1)
    async with running(server, "a", set()) as one:
        await led(one)
        failures = 0

        async def first_two(_: web.Request) -> web.Response | None:
            nonlocal failures
            failures += 1
            return failure(500, "No") if failures <= 2 else None

        server.fault = first_two
        await asyncio.sleep(2 * LEASE)
        assert failures > 2
        assert not one.task.done()


async def test_a_lease_taken_by_another_ends_the_work_at_once(server):
    async with running(server, "a", set()) as one:
        await led(one)
        occupy(server, "usurper", "2030-01-01T00:00:00.000000Z", lasts=60)
        taken = time.monotonic()
        with pytest.raises(LeadershipLost, match="usurper holds the lease"):
            await asyncio.wait_for(one.task, 5)
        assert one.ended - taken < 2 * RETRY + 0.1
        assert spec(server)["holderIdentity"] == "usurper"


async def test_never_two_while_the_server_comes_and_goes(server):
    floor: set[str] = set()
    lost = 0
    async with running(server, "a", floor) as one, running(server, "b", floor) as two:
        for _ in range(2):
            async with asyncio.timeout(10):
                while not floor:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            server.fault = hang
            await asyncio.sleep(LEASE)
            server.fault = None
            assert len(floor) <= 1
        for candidate in (one, two):
            if candidate.task.done():
                assert isinstance(candidate.task.exception(), LeadershipLost)
                lost += 1
    assert lost == 2


async def test_work_that_ends_releases_the_lease(server):
    async with server.kube() as kube:
        elector = Elector(kube, "system", "specserve", "a", LEASE, RENEW, RETRY)

        async def work() -> None:
            await asyncio.sleep(0.05)

        await asyncio.wait_for(elector.lead(work), 5)
        assert spec(server)["holderIdentity"] == ""


@pytest.mark.parametrize("when", ["at once", "when it is cancelled"])
async def test_work_that_fails_releases_the_lease(server, when: str):
    async with server.kube() as kube:
        elector = Elector(kube, "system", "specserve", "a", LEASE, RENEW, RETRY)
        begun = asyncio.Event()

        async def work() -> None:
            begun.set()
            try:
                await asyncio.sleep(0 if when == "at once" else 60)
            finally:
                raise ZeroDivisionError

        task = asyncio.create_task(elector.lead(work))
        await asyncio.wait_for(begun.wait(), 5)
        if when != "at once":
            task.cancel()
        with pytest.raises((ZeroDivisionError, asyncio.CancelledError)):
            await asyncio.wait_for(task, 5)
        assert spec(server)["holderIdentity"] == ""


async def test_a_lease_without_a_spec_is_free(server):
    server.leases["specserve"] = {"metadata": {"name": "specserve", "resourceVersion": "1"}}
    async with running(server, "a", set()) as one:
        await led(one)
        assert spec(server)["holderIdentity"] == "a"


async def test_of_two_that_make_the_lease_one_leads(server):
    floor: set[str] = set()
    async with running(server, "a", floor) as one, running(server, "b", floor) as two:
        await asyncio.sleep(2 * LEASE)
        assert one.leading.is_set() != two.leading.is_set()
    assert {request.path for request in server.requests if request.method == "POST"} == {LEASES}
