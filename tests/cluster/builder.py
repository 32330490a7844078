"""Builds and pushes images with docker, podman or buildah, whichever is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.cluster.binaries import cache_folder
from tests.cluster.errors import ClusterError, CommandError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Builder:
    """A tool that builds images from a Dockerfile.

    Attributes:
        kind: docker, podman or buildah.
        command: how it is called.
        env: set for it.
    """

    kind: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def build(self, context: Path, name: str, arguments: Mapping[str, str]) -> None:
        """Builds the Dockerfile of a folder, without network."""
        options = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        self._run("build", "--network=none", "--tag", name, *options, str(context))

    def has(self, name: str) -> bool:
        """Whether the image is in this tool's store."""
        kind = ("--type=image",) if self.kind == "buildah" else ()
        verb = ("inspect",) if self.kind == "buildah" else ("image", "inspect")
        return self._call(*verb, *kind, name).returncode == 0

    def pull(self, name: str) -> bool:
        """Whether the image could be pulled from its registry."""
        return self._call("pull", name).returncode == 0

    def save(self, name: str, archive: Path) -> None:
        """Writes an image to an archive that containerd imports."""
        if self.kind == "buildah":
            self._run("push", name, f"oci-archive:{archive}:{name}")
        elif self.kind == "podman":
            self._run("save", "--format=oci-archive", "--output", str(archive), name)
        else:
            self._run("save", "--output", str(archive), name)

    def remove(self, name: str) -> None:
        """Removes an image from this tool's store."""
        self._run("rmi", name)

    def push(self, archive: Path, name: str, target: str) -> None:
        """Pushes the image of an archive under another name.

        Args:
            archive: as made by `save` of the same tool.
            name: the image's own name.
            target: with the registry.
        """
        if self.kind == "docker":
            self._run("load", "--input", str(archive))
            self._run("tag", name, target)
            self._run("push", target)
        else:
            self._run("pull", f"oci-archive:{archive}")
            # What docker does by itself: local registries speak plain HTTP.
            local = target.split(":", maxsplit=1)[0] == "localhost" or target.startswith("127.")
            plain = ("--tls-verify=false",) if local else ()
            self._run("push", *plain, name, f"docker://{target}")
            self.remove(name)

    def _run(self, *arguments: str) -> None:
        done = self._call(*arguments)
        if done.returncode:
            argv = [*self.command, *arguments]
            raise CommandError(argv, done.returncode, done.stdout, done.stderr)

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *arguments],
            env=os.environ | dict(self.env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )


def choose() -> Builder:
    """The first of docker, podman and buildah that is there and works.

    Raises:
        ClusterError: none is.
    """
    if shutil.which("docker") and _succeeds("docker", "info"):
        return Builder("docker", ("docker",))
    if shutil.which("podman") and _succeeds("podman", "info"):
        return Builder("podman", ("podman",))
    if shutil.which("buildah"):
        # No daemon, no overlay, no namespaces: works inside containers, and leaves no trace
        # outside the cache.
        store = cache_folder() / "buildah"
        return Builder(
            "buildah",
            (
                "buildah",
                "--storage-driver=vfs",
                f"--root={store}/storage",
                f"--runroot={store}/run",
            ),
            {"BUILDAH_ISOLATION": "chroot"},
        )
    raise ClusterError(
        "building an image",
        "no docker with a running daemon, no podman, no buildah",
        "Install one of them: apt-get install --no-install-recommends buildah",
    )


def name_of(archive: Path) -> str:
    """The name of the image in an OCI or docker archive."""
    with tarfile.open(archive) as tar:
        for member, path in (
            ("index.json", ("manifests", 0, "annotations")),
            ("manifest.json", (0, "RepoTags", 0)),
        ):
            try:
                file = tar.extractfile(member)
            except KeyError:
                continue
            assert file is not None
            found = json.load(file)
            try:
                for key in path:
                    found = found[key]
            except (KeyError, IndexError):
                continue
            if isinstance(found, str):
                return found
            for key in ("io.containerd.image.name", "org.opencontainers.image.ref.name"):
                if key in found:
                    return str(found[key])
    raise ClusterError(f"reading {archive}", "the image has no name")


def _succeeds(*command: str) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
