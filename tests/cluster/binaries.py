"""Finds the Kubernetes binaries that clusters run.

They come, in this order, from the folder that KUBEBUILDER_ASSETS names (whatever it holds), the
user's cache, the official downloads, and a build from Go modules.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.cluster import gobuild, releases
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress
from tests.cluster.versions import NODE, Release, Versions, pinned

Builder = Callable[[Versions, Path, Progress], None]


@dataclass(frozen=True, slots=True)
class Binaries:
    """Where each binary lies."""

    paths: dict[str, Path]

    def __getitem__(self, name: str) -> str:
        return str(self.paths[name])

    @property
    def search_path(self) -> str:
        """The folders of the binaries, for the front of PATH."""
        return os.pathsep.join(dict.fromkeys(str(p.parent) for p in self.paths.values()))


def cache_folder() -> Path:
    """The user's cache of this project, made when absent."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "specserve"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"making the cache {folder}", str(error), "Set XDG_CACHE_HOME to a writable folder."
        ) from error
    return folder


@contextmanager
def locked(file: Path, progress: Progress) -> Iterator[None]:
    """Holds a lock that ends with the process; waits for another holder and says so."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f"Another process is preparing {file.stem}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def resolve(names: tuple[str, ...] = NODE) -> Binaries:
    """The binaries at the pinned versions, prepared when absent; asked for once in a process."""
    return Resolver().resolve(names)


class Resolver:
    """Finds binaries, and prepares in the cache what is not there.

    Args:
        versions: what to find; the pinned ones when not given.
        folder: the cache; the user's when not given.
        assets: a folder to take binaries from first; KUBEBUILDER_ASSETS when not given.
        build: makes all binaries in a folder when they can't be downloaded.
    """

    def __init__(
        self,
        *,
        versions: Versions | None = None,
        folder: Path | None = None,
        assets: Path | None = None,
        build: Builder = gobuild.build,
        progress: Progress | None = None,
    ) -> None:
        self._versions = versions or pinned()
        self._cache = folder or cache_folder()
        named = os.environ.get("KUBEBUILDER_ASSETS")
        self._assets = assets or (Path(named).absolute() if named else None)
        self._build = build
        self._progress = progress or Progress()

    @property
    def folder(self) -> Path:
        """Where these versions lie in the cache."""
        name = "-".join((self._versions.of["kubernetes"], gobuild.fingerprint(self._versions)))
        return self._cache / "kubernetes" / name

    def resolve(self, names: Iterable[str] = NODE) -> Binaries:
        """Finds or prepares binaries.

        Raises:
            ClusterError: no way led to one of them; says which step failed and what to install.
        """
        names = tuple(names)
        paths = self._found(names)
        if len(paths) < len(names):
            folder = self.folder
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f"{folder.name}.lock"), self._progress):
                paths = self._found(names)
                if missing := [name for name in names if name not in paths]:
                    self._prepare(missing, folder)
                    paths = self._found(names)
        if absent := [name for name in names if name not in paths]:
            raise ClusterError("preparing the Kubernetes binaries", f"no {', '.join(absent)}")
        return Binaries(paths)

    def _found(self, names: Iterable[str]) -> dict[str, Path]:
        found = {}
        for name in names:
            for place in filter(None, (self._assets, self.folder)):
                if os.access(place / name, os.X_OK) and (place / name).is_file():
                    found[name] = place / name
                    break
        return found

    def _prepare(self, missing: list[str], folder: Path) -> None:
        for left in folder.glob(".*"):  # by a process that was killed: the lock is ours
            shutil.rmtree(left)
        try:
            self._download(missing, folder)
        except releases.DownloadError as download:
            # The build makes all of them at once, so the first failure ends the downloads.
            self._progress.note(f"{download}\nBuilding from Go modules instead")
            try:
                self._build(self._versions, folder, self._progress)
            except ClusterError as build:
                raise ClusterError(
                    "preparing the Kubernetes binaries",
                    f"no way led to {', '.join(missing)}\n- {download}\n- {build}",
                    "Or put binaries into a folder and name it in KUBEBUILDER_ASSETS.",
                ) from build

    def _download(self, missing: list[str], folder: Path) -> None:
        for release in self._wanted(missing):
            self._progress.start(f"Downloading {release.url}")
            releases.fetch(release, folder, self._progress.update)
            self._progress.finish()

    def _wanted(self, missing: list[str]) -> list[Release]:
        return [r for r in self._versions.releases if set(r.binaries) & set(missing)]
