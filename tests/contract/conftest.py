from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.engines import (
    Admin,
    Launch,
    Plan,
    admin_of,
    external,
    launchable,
    mount_tokens,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try each test on all engines it can be tried on: `admin` on any, `launch` on our own."""
    if "engine_name" not in metafunc.fixturenames:
        return
    if "admin" in metafunc.fixturenames and external():
        # Beside a real engine the simulated one need not be installed.
        metafunc.parametrize("engine_name", ["external"])
    else:
        metafunc.parametrize("engine_name", list(launchable()))


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Any]:
    """Start engines that end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(launch: Launch, **fields: Any) -> Admin:
            plan = Plan(**fields)
            mount_tokens(tmp_path / "credentials", plan.token)
            engine = await stack.enter_async_context(launch(plan, tmp_path / "credentials"))
            return await stack.enter_async_context(admin_of(engine))

        yield start


@pytest.fixture
async def launch(engine_name: str, started: Any) -> Any:
    """Start an engine of the tried kind, according to a plan's fields."""

    async def start(**fields: Any) -> Admin:
        return await started(launchable()[engine_name], **fields)

    return start


@pytest.fixture
async def admin(engine_name: str, started: Any) -> AsyncIterator[Admin]:
    """Speak to an engine that is loaded and controllable, in whatever state."""
    if engine := external():
        async with admin_of(engine) as client:
            yield client
    else:
        yield await started(launchable()[engine_name])
