from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.cluster.light import light_cluster as start_light_cluster

CRDS = Path(__file__).resolve().parents[2] / "crds"

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def light_cluster():
    """A control plane with the project's CRDs and an audit log, for all tests of the session."""
    with start_light_cluster(crds=[CRDS], audit=True) as cluster:
        yield cluster


@pytest.fixture
def namespace(light_cluster):
    """A namespace of its own for each test, gone afterwards."""
    name = f"test-{next(_numbers)}"
    path = "/api/v1/namespaces"
    light_cluster.api.request("POST", path, {"metadata": {"name": name}})
    yield name
    light_cluster.api.request("DELETE", f"{path}/{name}")
