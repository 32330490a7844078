"""The engine's image, built as users do upon a base with SGLang; no model is run in it."""

from __future__ import annotations

import io
import json
import shutil
import tarfile

import pytest

from specserve import names
from tests.cluster import builder, images
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress
from tests.e2e import operator_image
from tests.engine.wheels import wheel

BASE = "specserve.test/sglang-files:1"
DOCKERFILE = """\
ARG BASE
FROM ${BASE}
COPY wheels/ /wheels/
RUN ["python3", "/wheels/pip.whl/pip", "install", "--no-index", "--no-deps", \
"--break-system-packages", "--find-links=/wheels", "sglang", "prometheus-client", "starlette", \
"uvicorn"]
"""


@pytest.fixture
def plugin(tmp_path):
    folder = tmp_path / "wheel"
    folder.mkdir()
    return operator_image.wheel(folder, Progress())


@pytest.fixture
def sglang(tmp_path, plugin):
    """An image with SGLang's own files and what the plugin imports, but nothing to compute on."""
    tool, progress = builder.choose(), Progress()
    context = tmp_path / "sglang"
    wheels = context / "wheels"
    images._download([str(plugin)], tmp_path, wheels)
    (pip,) = wheels.glob("pip-*.whl")
    pip.rename(wheels / "pip.whl")
    shutil.copy(wheel("0.5.23"), wheels)
    (context / "Dockerfile").write_text(DOCKERFILE)
    tool.build(context, BASE, {"BASE": images._base(tool, tmp_path, progress)})
    yield BASE
    tool.remove(BASE)


def contents(archive):
    """Configuration of the image in an archive, and the files of its last layer."""
    with tarfile.open(archive) as tar:

        def blob(digest):
            return tar.extractfile(f"blobs/{digest.replace(':', '/')}").read()

        (found,) = json.load(tar.extractfile("index.json"))["manifests"]
        manifest = json.loads(blob(found["digest"]))
        with tarfile.open(fileobj=io.BytesIO(blob(manifest["layers"][-1]["digest"]))) as layer:
            files = layer.getnames()
        return json.loads(blob(manifest["config"]["digest"]))["config"], files


def test_the_engines_image_is_its_base_and_the_plugin(tmp_path, sglang, plugin):
    archive = tmp_path / "engine.tar"
    name = operator_image.engine(sglang, plugin, archive, Progress())
    assert builder.name_of(archive) == f"docker.io/{name}"
    assert not builder.choose().has(name)
    config, files = contents(archive)
    assert config["Entrypoint"] == ["python3", "-m", "sglang.launch_server"]
    assert any(e.startswith("PYTHONPATH=/opt/specserve") for e in config["Env"])
    assert set(config["ExposedPorts"]) == {
        f"{port}/tcp" for port in (names.PORT_SERVING, names.PORT_ADMIN)
    }
    assert config["Labels"]["org.opencontainers.image.title"] == "specserve-engine"
    assert "opt/specserve/specserve_engine/sglang/plugin.py" in files
    assert {"/".join(file.split("/")[:2]) for file in files} <= {"opt", "opt/specserve"}


def test_a_base_that_cannot_be_had_is_named(tmp_path, plugin):
    with pytest.raises(ClusterError, match="Set SPECSERVE_ENGINE_BASE"):
        operator_image.engine("127.0.0.1:1/nobody:1", plugin, tmp_path / "x.tar", Progress())
