from __future__ import annotations

import pytest

from tests.cluster import builder, images
from tests.cluster.choose import cluster as choose_cluster
from tests.cluster.progress import Progress
from tests.e2e import operator_image


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
