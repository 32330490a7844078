"""An event loop whose clock jumps to the next timer: hours of a loop's life in milliseconds."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: Steps of the loop without time passing that count as one that will never end.
SPIN_LIMIT = 100_000


class _Jumping(selectors.SelectSelector):
    """Waits by moving the clock."""

    now = 1000.0
    spins = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("everything waits for something that never comes")
        self.spins = 0 if timeout > 0 else self.spins + 1
        if self.spins > SPIN_LIMIT:
            raise RuntimeError("the loop spins without time passing")
        self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return wrapper


def now() -> float:
    return asyncio.get_running_loop().time()
