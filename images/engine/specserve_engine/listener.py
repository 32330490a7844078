"""The admin listener: HTTP in front of the control core, and the watchdog of its lease."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from starlette.applications import Starlette

    from specserve_engine.auth import TokenFile
    from specserve_engine.control import Control
    from specserve_engine.ranks import Ranks


class Listener:
    """One engine's admin endpoint. Holds no global state: a process may host many.

    Attributes:
        app: The ASGI application; its lifespan runs the lease watchdog. Where an application is
            hosted without a lifespan, run `watching` around it instead.
    """

    app: Starlette

    def __init__(
        self,
        control: Control,
        ranks: Ranks,
        tokens: TokenFile,
        *,
        require_live: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None: ...

    def watching(self) -> AbstractAsyncContextManager[None]:
        """Run the lease watchdog for the length of a `with` block."""
        raise NotImplementedError


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; host `::` is dual stack, `0.0.0.0` where there is no IPv6."""
    raise NotImplementedError


def serving(app: Starlette, listening: socket.socket) -> AbstractAsyncContextManager[None]:
    """Serve `app` on a socket for the length of a `with` block, leaving signals to the host."""
    raise NotImplementedError
