from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import builder, images
from tests.cluster.choose import cluster as choose_cluster
from tests.cluster.node import enable_controllers
from tests.cluster.progress import Progress
from tests.e2e import operator_image

HERE = Path(__file__).parent
BESIDE_DEMO = {"test_demo", "test_engine_image"}
"""Files of one of the two workers; about as long as the others together."""


def pytest_configure(config):
    """What the nodes of several workers change on the machine is changed once for all of them."""
    if config.getoption("numprocesses", default=None):
        mounts = Path("/proc/self/mounts").read_text()
        config.add_cleanup(enable_controllers(mounts).close)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Deal whole files out to two workers: the tests of a file share a node."""
    for item in items:
        if item.path.parent == HERE:
            share = "demo" if item.path.stem in BESIDE_DEMO else "others"
            item.add_marker(pytest.mark.xdist_group(share))


@pytest.fixture(scope="session")
def image_archives():
    """Archives of the operator's and of the simulator's image."""
    progress = Progress()
    return operator_image.operator(progress), images.simulator(progress)


@pytest.fixture(scope="session")
def helm_cluster(image_archives):
    """A cluster with both images and without SpecServe; the user's when asked for."""
    with choose_cluster(images=image_archives) as started:
        yield started


@pytest.fixture(scope="session")
def image_names(helm_cluster, image_archives):
    """How the cluster finds the operator's and the simulator's image."""
    return tuple(helm_cluster.image(builder.name_of(archive)) for archive in image_archives)
