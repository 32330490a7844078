"""Helm 3, which many people still run; tests of the chart render with it as well.

A module of its own: it shares libraries with the one of the cluster's binaries, at the same
versions, so that most of what it needs is in Go's build cache already.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tests.cluster import gobuild, releases
from tests.cluster.binaries import cache_folder, locked
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress
from tests.cluster.versions import Release, architecture, pinned

MODULE = Path(__file__).with_name("gomod-helm3")

_STEP = "building Helm 3"
_FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly", "-gcflags=all=-dwarf=false")


def version() -> str:
    """The version that is used, without its v."""
    match = re.search(r"helm\.sh/helm/v3 v(\S+)", (MODULE / "go.mod").read_text())
    assert match is not None
    return match[1]


@cache
def resolve() -> str:
    """Path of the binary: from the cache, from its project's download, or built.

    Raises:
        ClusterError: it can neither be downloaded nor built.
    """
    progress = Progress()
    said = (MODULE / "go.sum").read_text() + _stamps()
    digest = hashlib.sha256(said.encode()).hexdigest()[:12]
    folder = cache_folder() / "helm3" / f"{version()}-{digest}"
    binary = folder / "helm"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock"), progress):
        if os.access(binary, os.X_OK):
            return str(binary)
        release = _release()
        try:
            progress.start(f"Downloading {release.url}")
            releases.fetch(release, folder, progress.update)
            progress.finish()
        except releases.DownloadError as error:
            progress.note(f"{error}\nBuilding from Go modules instead")
            _build(binary, progress)
    return str(binary)


def _release() -> Release:
    place = f"linux-{architecture()}"
    url = f"https://get.helm.sh/helm-v{version()}-{place}.tar.gz"
    return Release(("helm",), url, f"{url}.sha256sum", {"helm": f"{place}/helm"}, "")


def _stamps() -> str:
    """What its own Makefile sets; without it Helm 3 takes every cluster for Kubernetes 1.20."""
    major, minor, _ = pinned().of["kubernetes"].split(".", 2)
    given = {
        "internal/version.version": f"v{version()}",
        **{
            f"{package}.k8sVersion{part}": value
            for package in ("pkg/chartutil", "pkg/lint/rules")
            for part, value in (("Major", major), ("Minor", minor))
        },
    }
    return " ".join(f"-X helm.sh/helm/v3/{name}={value}" for name, value in given.items())


def _build(binary: Path, progress: Progress) -> None:
    environment = gobuild._environment()
    gobuild._require_go(environment)
    progress.start("Building Helm 3", "about a minute after the other binaries, else four")
    with tempfile.TemporaryDirectory(prefix=".build-", dir=binary.parent) as folder:
        built = Path(folder) / "helm"
        done = subprocess.run(
            [
                *("go", "build", *_FLAGS, f"-ldflags=-s -w {_stamps()}", "-o", str(built)),
                "helm.sh/helm/v3/cmd/helm",
            ],
            cwd=MODULE,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ClusterError(
                _STEP, f"go build ended with {done.returncode}", done.stderr[-2000:]
            )
        built.replace(binary)
    progress.finish()
