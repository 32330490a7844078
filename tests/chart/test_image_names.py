"""What `make images` leaves is what the chart asks for."""

from __future__ import annotations

import io
import json
import tarfile

import pytest

from tests.chart.rendering import container, render
from tests.cluster import builder
from tests.e2e import operator_image

LAYER = b"bytes of a layer"
NAME = "specserve/specserve-operator:1.2.3"
FULL = f"docker.io/{NAME}"
REF = "org.opencontainers.image.ref.name"

BY_BUILDAH = {"index.json": {"manifests": [{"digest": "d", "annotations": {REF: "x.test/y:h"}}]}}
BY_DOCKER = {
    "index.json": {
        "manifests": [
            {"digest": "d", "annotations": {"io.containerd.image.name": "x.test/y:h", REF: "h"}}
        ]
    },
    "manifest.json": [{"Config": "c", "RepoTags": ["x.test/y:h"], "Layers": ["blobs/layer"]}],
    "repositories": {"x.test/y": {"h": "layer"}},
}


def _archive(path, documents):
    with tarfile.open(path, "w") as tar:
        for name, data in (
            ("blobs/layer", LAYER),
            *((name, json.dumps(document).encode()) for name, document in documents.items()),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def renamed(tmp_path):
    def rename(documents):
        target = tmp_path / "new.tar"
        operator_image.rename(_archive(tmp_path / "old.tar", documents), NAME, target)
        with tarfile.open(target) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}
        assert files.pop("blobs/layer") == LAYER
        return target, {name: json.loads(data) for name, data in files.items()}

    return rename


def test_operator_image_is_the_one_that_the_chart_asks_for():
    assert operator_image.published()[0] == container(render())["image"]


def test_archive_of_buildah_gets_the_name_that_containerd_looks_for(renamed):
    archive, documents = renamed(BY_BUILDAH)
    assert builder.name_of(archive) == FULL
    assert documents == {
        "index.json": {"manifests": [{"digest": "d", "annotations": {REF: FULL}}]}
    }


def test_archive_of_docker_gets_the_name_in_all_its_places(renamed):
    archive, documents = renamed(BY_DOCKER)
    assert builder.name_of(archive) == FULL
    (manifest,) = documents["index.json"]["manifests"]
    assert manifest["annotations"] == {"io.containerd.image.name": FULL, REF: "1.2.3"}
    assert documents["manifest.json"] == [{**BY_DOCKER["manifest.json"][0], "RepoTags": [NAME]}]
    assert documents["repositories"] == {"specserve/specserve-operator": {"1.2.3": "layer"}}
