from __future__ import annotations

import pytest

from tests.wire.apiserver import api_server


@pytest.fixture
async def server():
    async with api_server() as running:
        yield running


@pytest.fixture
async def kube(server):
    async with server.kube() as connected:
        yield connected
