from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING

import pytest

from tests.cluster import builder, images, oci, packages
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress

if TYPE_CHECKING:
    from pathlib import Path


def tool(folder: Path, name: str, script: str = "exit 0") -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_docker_is_used_when_its_daemon_answers(tools: Path) -> None:
    tool(tools, "docker")
    tool(tools, "buildah")
    assert builder.choose().kind == "docker"


def test_docker_without_a_daemon_is_passed_over(tools: Path) -> None:
    tool(tools, "docker", "exit 1")
    tool(tools, "buildah")
    assert builder.choose().kind == "buildah"
    tool(tools, "podman")
    assert builder.choose().kind == "podman"


def test_without_a_builder_the_error_says_what_to_install(tools: Path) -> None:
    with pytest.raises(ClusterError, match=r"apt-get install .*buildah"):
        builder.choose()


def test_an_image_of_files_is_reproducible_and_named(tmp_path: Path) -> None:
    content = oci.Content({"bin/a": b"a"}, {"bin/b": "a"}, ["tmp"])
    first, second = (
        oci.write(tmp_path / name, "x.test/y:1", content, ["/bin/a"]) for name in ("1", "2")
    )
    assert first.read_bytes() == second.read_bytes()
    assert builder.name_of(first) == "x.test/y:1"


def archive(path: Path, files: dict[str, object]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, value in files.items():
            data = json.dumps(value).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def test_names_are_read_from_all_kinds_of_archives(tmp_path: Path) -> None:
    reference = {"annotations": {"org.opencontainers.image.ref.name": "x.test/y:2"}}
    by_buildah = archive(tmp_path / "1", {"index.json": {"manifests": [reference]}})
    assert builder.name_of(by_buildah) == "x.test/y:2"
    by_docker = archive(tmp_path / "2", {"manifest.json": [{"RepoTags": ["x.test/y:3"]}]})
    assert builder.name_of(by_docker) == "x.test/y:3"
    nameless = archive(tmp_path / "3", {"index.json": {"manifests": [{}]}})
    with pytest.raises(ClusterError, match="no name"):
        builder.name_of(nameless)


def test_the_image_follows_its_sources_and_nothing_else(tmp_path: Path) -> None:
    for name in ("images/sim/pkg/a.py", "images/engine/b.py", "uv.lock", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = images.fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("2")
    (tmp_path / "images/sim/pkg/__pycache__").mkdir()
    (tmp_path / "images/sim/pkg/__pycache__/a.pyc").write_text("2")
    assert images.fingerprint(tmp_path) == before
    assert images.fingerprint(tmp_path, "another base") != before
    (tmp_path / "images/sim/pkg/a.py").write_text("2")
    assert images.fingerprint(tmp_path) != before


DPKG = 'shift 3; for p; do [ "$p" = runc ] || echo "$p installed"; done'


def test_only_missing_packages_are_installed(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    tool(tools, "dpkg-query", DPKG)
    tool(tools, "apt-get", f'echo "$@" >>{tmp_path}/calls')
    told = io.StringIO()
    packages.install(Progress(told))
    assert "runc" in told.getvalue()
    (*_, call) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith("install --yes --no-install-recommends runc")


def test_without_root_the_missing_packages_are_named(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    tool(tools, "dpkg-query", DPKG)
    with pytest.raises(ClusterError, match="not installed: runc\napt-get install"):
        packages.install(Progress(io.StringIO()))


def test_a_failed_installation_shows_what_apt_said(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    tool(tools, "dpkg-query", DPKG)
    tool(tools, "apt-get", "echo 'Temporary failure resolving' >&2; exit 100")
    with pytest.raises(ClusterError, match="Temporary failure resolving"):
        packages.install(Progress(io.StringIO()))
