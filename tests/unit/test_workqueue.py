"""The queue coalesces, keeps due times, and gives one key to one worker at a time."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specserve.workqueue import WorkQueue
from tests.unit.virtual_time import in_virtual_time, now


def queue() -> WorkQueue[str]:
    return WorkQueue(clock=asyncio.get_running_loop().time)


async def take(q: WorkQueue[str], within: float = 0.0) -> str:
    async with asyncio.timeout(within + 0.001):
        return await q.get()


@in_virtual_time
async def test_a_key_that_waits_is_added_once():
    q = queue()
    for _ in range(3):
        q.add("a")
    q.add("b")
    assert len(q) == 2
    assert [await take(q), await take(q)] == ["a", "b"]
    q.done("a")
    q.done("b")
    assert len(q) == 0


@in_virtual_time
async def test_keys_come_when_they_are_due():
    q, began = queue(), now()
    q.add("late", 5.0)
    q.add("soon", 1.0)
    assert await q.get() == "soon"
    assert now() - began == pytest.approx(1.0)
    assert await q.get() == "late"
    assert now() - began == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("delays", "due"), [((5.0, 1.0), 1.0), ((1.0, 5.0), 1.0), ((9.0, 0.0), 0.0)]
)
@in_virtual_time
async def test_the_earlier_due_time_counts(delays, due):
    q, began = queue(), now()
    for delay in delays:
        q.add("a", delay)
    await q.get()
    assert now() - began == pytest.approx(due)
    q.done("a")
    with pytest.raises(TimeoutError):
        await take(q, 20.0)


@in_virtual_time
async def test_an_earlier_key_wakes_a_worker_that_waits_for_a_later_one():
    q = queue()
    q.add("late", 100.0)
    worker = asyncio.create_task(q.get())
    await asyncio.sleep(1)
    q.add("now")
    assert await asyncio.wait_for(worker, 0.001) == "now"


@in_virtual_time
async def test_a_key_in_work_waits_for_its_worker():
    q = queue()
    q.add("a")
    await take(q)
    q.add("a", 3.0)
    q.add("a")
    with pytest.raises(TimeoutError):
        await take(q, 10.0)
    q.done("a")
    assert await take(q) == "a"


@in_virtual_time
async def test_a_key_added_for_later_while_in_work_keeps_its_time():
    q, began = queue(), now()
    q.add("a")
    await take(q)
    q.add("a", 5.0)
    await asyncio.sleep(2.0)
    q.done("a")
    await q.get()
    assert now() - began == pytest.approx(5.0)


@in_virtual_time
async def test_a_key_added_while_in_work_keeps_its_place_in_the_line():
    q = queue()
    q.add("a")
    await take(q)
    q.add("a")
    q.add("b", 1.0)
    await asyncio.sleep(1.0)
    q.done("a")
    assert [await take(q), await take(q)] == ["a", "b"]


@in_virtual_time
async def test_a_forgotten_key_does_not_come():
    q = queue()
    q.add("a")
    q.add("b")
    q.forget("a")
    assert await take(q) == "b"
    q.add("b")
    q.forget("b")
    q.done("b")
    q.forget("never seen")
    assert len(q) == 0


@in_virtual_time
async def test_two_workers_share_the_keys():
    q = queue()
    workers = [asyncio.create_task(q.get()) for _ in range(3)]
    await asyncio.sleep(0)
    for key in "abc":
        q.add(key)
    assert sorted(await asyncio.gather(*workers)) == ["a", "b", "c"]


@in_virtual_time
async def test_a_worker_that_is_cancelled_loses_no_key():
    q = queue()
    worker = asyncio.create_task(q.get())
    await asyncio.sleep(0)
    worker.cancel()
    q.add("a")
    await asyncio.gather(worker, return_exceptions=True)
    assert await take(q) == "a"


keys = st.sampled_from("abc")


class Queue(RuleBasedStateMachine):
    """Against a model: a set of wishes with due times, and who works on what."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.queue: WorkQueue[str] = WorkQueue(clock=lambda: self.time)
        self.wishes: dict[str, float] = {}
        self.active: set[str] = set()

    @rule(key=keys, delay=st.integers(0, 5))
    def add(self, key: str, delay: int) -> None:
        self.queue.add(key, float(delay))
        self.wishes[key] = min(self.time + delay, self.wishes.get(key, float("inf")))

    @rule(key=keys)
    def forget(self, key: str) -> None:
        self.queue.forget(key)
        self.wishes.pop(key, None)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.time += seconds

    @rule()
    def get(self) -> None:
        due = {k for k, at in self.wishes.items() if at <= self.time and k not in self.active}
        work = self.queue.get()
        try:
            work.send(None)
        except StopIteration as taken:
            key = taken.value
            assert key in due
            assert self.wishes[key] == min(self.wishes[k] for k in due)
            del self.wishes[key]
            self.active.add(key)
        except RuntimeError:  # it would wait, and there is no loop to wait in
            assert not due
        finally:
            work.close()

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def done(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(self.active)))
        self.queue.done(key)
        self.active.discard(key)

    @invariant()
    def counts(self) -> None:
        waiting = self.wishes.keys() - self.active
        assert len(self.queue) == len(waiting) + len(self.active)


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=200, stateful_step_count=40)
