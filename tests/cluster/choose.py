"""Which cluster the demo and the end-to-end tests run on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.cluster.existing import ExistingCluster
from tests.cluster.node import node_cluster

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.cluster.handle import Cluster

FLAG = "SPECSERVE_EXISTING_CLUSTER"
"""Variable that, set to 1, chooses the cluster of KUBECONFIG."""


def cluster(
    *,
    images: Iterable[Path] = (),
    crds: Iterable[Path] = (),
    existing: bool | None = None,
    directory: Path | None = None,
    gpus: int = 8,
) -> Cluster:
    """A cluster with these images and CRDs: the user's own when asked for, else a node cluster.

    KUBECONFIG alone chooses nothing: many people have it set to a cluster that is no playground.

    Args:
        images: archives to make available.
        crds: files and folders to create.
        existing: whether to use the cluster of KUBECONFIG; by the variable when not given.
        directory: state of a node cluster.
        gpus: GPUs that the node of a node cluster pretends to have.
    """
    if existing is None:
        existing = os.environ.get(FLAG) == "1"
    if not existing:
        return node_cluster(directory, images=images, crds=crds, gpus=gpus)
    chosen = ExistingCluster()
    try:
        chosen.apply(*crds)
        for archive in images:
            chosen.load_image(archive)
    except BaseException:
        chosen.close()
        raise
    return chosen
