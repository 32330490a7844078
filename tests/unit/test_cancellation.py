"""A loop that is told to end must end, also when that meets the wake-up it was waiting for.

After a lost lease an operator that goes on is a second one that steers.
"""

from __future__ import annotations

import asyncio

from specserve.observed import Pod
from specserve.regulate import Regulator
from specserve.workqueue import WorkQueue

POD = Pod("uid", ("ns", "name"), "pod", None, False, True, False, "", None)


async def cancelled_at_wakeup(task, wake):
    await asyncio.sleep(0.01)  # the loop waits for its next due time
    wake()
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=1)
    return bool(done)


async def test_worker_ends():
    queue = WorkQueue()

    async def work():
        while True:
            queue.done(await queue.get())

    queue.add("later", 50)
    task = asyncio.create_task(work())
    assert await cancelled_at_wakeup(task, lambda: queue.add("now"))


async def test_regulator_ends():
    regulator = Regulator(None, holder="ns/lease", changed=lambda _: None, notice=lambda _: None)
    task = asyncio.create_task(regulator.run())

    def wake():
        regulator.observe(None, POD)
        regulator._wake.set()

    assert await cancelled_at_wakeup(task, wake)
