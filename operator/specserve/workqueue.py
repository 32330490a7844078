"""A queue of keys with due times; it coalesces, and never hands one key to two workers."""

import asyncio
import contextlib
import heapq
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class WorkQueue(Generic[Key]):
    """Keys waiting for a worker.

    A key that is added while it waits keeps the earlier of its due times. A key that is added
    while a worker has it is handed out again after `done`, so the last change is always seen.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = 0
        self._active: set[Key] = set()
        self._again: dict[Key, float] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        """Keys that wait or are worked on."""
        return len(self._due) + len(self._active)

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Ask for `key` to be worked on in `delay` seconds at the latest."""
        due = self._clock() + delay
        if key in self._active:
            self._again[key] = min(due, self._again.get(key, due))
        else:
            self._put(key, due)

    def _put(self, key: Key, due: float) -> None:
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._order += 1
            heapq.heappush(self._heap, (due, self._order, key))
            self._wake.set()

    def forget(self, key: Key) -> None:
        """Drop `key` unless a worker has it already."""
        self._due.pop(key, None)
        self._again.pop(key, None)

    async def get(self) -> Key:
        """Wait for the next due key and take it; call `done` with it afterwards."""
        while True:
            self._wake.clear()
            now = self._clock()
            while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
                heapq.heappop(self._heap)  # forgotten, or moved to an earlier time
            if self._heap and self._heap[0][0] <= now:
                key = heapq.heappop(self._heap)[2]
                del self._due[key]
                self._active.add(key)
                return key
            wait = self._heap[0][0] - now if self._heap else None
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it loses a cancellation that meets the wake-up,
                # and a worker that outlives its leadership goes on for ever.
                async with asyncio.timeout(wait):
                    await self._wake.wait()

    def done(self, key: Key) -> None:
        """Say that the work on `key` has ended."""
        self._active.discard(key)
        due = self._again.pop(key, None)
        if due is not None:
            # By the time it was asked for: nobody who asked later goes first.
            self._put(key, due)
