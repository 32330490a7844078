"""The operator's image, built from images/operator/Dockerfile as the simulator's is from its own.

`python -m tests.e2e.operator_image` builds both and puts their archives into build/images, there
under the names that the chart knows; beside them the plugin's wheel, and the engine's image when
an SGLang image to build it upon is named. Tests use names of their own, with a hash for a tag.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from tests.cluster import builder, images
from tests.cluster.binaries import cache_folder, locked
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress
from tests.cluster.versions import architecture

ROOT = Path(__file__).resolve().parents[2]
NAME = "specserve.test/specserve-operator"
"""Repository of the image; its tag is a hash of what it is built from."""

ENGINE_BASE = "SPECSERVE_ENGINE_BASE"
"""Variable that names the SGLang image which the engine's image is built upon."""

_SOURCES = ("operator", "images/operator", "pyproject.toml", "uv.lock", "README.md", "LICENSE")
_KEPT = 4
_REF = "org.opencontainers.image.ref.name"


def operator(progress: Progress) -> Path:
    """The archive of the operator's image; built when its sources changed.

    Raises:
        ClusterError: no builder, or a step of the build failed.
    """
    tool = builder.choose()
    base = os.environ.get(images.BASE_VARIABLE, "")
    tag = _fingerprint(tool.kind, base)
    folder = cache_folder() / "images"
    folder.mkdir(exist_ok=True)
    archive = folder / f"specserve-operator-{tag}.tar"
    # The lock of the simulator's builds: they share the tool's store and the base.
    with locked(folder / "specserve-sim.lock", progress):
        if archive.exists():
            return archive
        name = f"{NAME}:{tag}"
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
            context = Path(scratch) / "context"
            (context / "wheels").mkdir(parents=True)
            _wheels(context / "wheels", Path(scratch), progress)
            shutil.copy(ROOT / "images/operator/Dockerfile", context)
            base = base or images._base(tool, Path(scratch), progress)
            progress.start(f"Building {name} with {tool.kind}", "about 20 s")
            arguments = {"BASE": base, "REVISION": tag, "VERSION": _version()}
            tool.build(context, name, arguments)
            tool.save(name, Path(scratch) / "image.tar")
            tool.remove(name)
            (Path(scratch) / "image.tar").replace(archive)
            progress.finish()
        made = sorted(folder.glob("specserve-operator-*.tar"), key=lambda f: f.stat().st_mtime)
        for old in made[:-_KEPT]:
            old.unlink()
    return archive


def _fingerprint(*also: str) -> str:
    digest = hashlib.sha256("\0".join([architecture(), *also]).encode())
    for name in _SOURCES:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"\0{file.relative_to(ROOT)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _wheels(into: Path, scratch: Path, progress: Progress) -> None:
    progress.start("Building the operator's wheel and getting those it needs", "about 10 s")
    images._command(
        "building a wheel", "uv", "build", "--wheel", "-q", "--out-dir", str(into), "."
    )
    own = [str(wheel) for wheel in into.glob("*.whl")]
    images._download(own, scratch, scratch / "needed")
    for wheel in (scratch / "needed").iterdir():
        shutil.copy(wheel, into)
    (pip,) = into.glob("pip-*.whl")
    pip.rename(into / "pip.whl")
    (into / ".gitignore").unlink(missing_ok=True)
    progress.finish()


def wheel(into: Path, progress: Progress) -> Path:
    """Builds the wheel of the engine's plugin into a folder; returns its path."""
    progress.start("Building the wheel of the engine's plugin", "a few seconds")
    for old in into.glob("specserve_engine-*.whl"):
        old.unlink()
    project = "images/engine"
    images._command(
        "building a wheel", "uv", "build", "--wheel", "-q", "--out-dir", str(into), project
    )
    (into / ".gitignore").unlink(missing_ok=True)
    (made,) = into.glob("specserve_engine-*.whl")
    progress.finish()
    return made


def engine(base: str, plugin: Path, archive: Path, progress: Progress) -> str:
    """Builds the engine's image into an archive; returns its name.

    Args:
        base: the SGLang image, in the builder's store or to be pulled.
        plugin: wheel of the plugin.
        archive: where to. Tens of gigabytes, so that no copy of it is kept elsewhere.
        progress: told what is done.

    Raises:
        ClusterError: no builder, no such base, or a step of the build failed.
    """
    tool = builder.choose()
    if not tool.has(base):
        progress.start(f"Pulling {base}", "SGLang's images have tens of gigabytes")
        if not tool.pull(base):
            raise ClusterError(
                "building the engine's image",
                f"{base} is not in {tool.kind}'s store and can't be pulled",
                f"Set {ENGINE_BASE} to an image of SGLang.",
            )
        progress.finish()
    name = f"specserve/specserve-engine:{_version(ROOT / 'images' / 'engine')}"
    with tempfile.TemporaryDirectory(prefix=".build-", dir=archive.parent) as scratch:
        context = Path(scratch) / "context"
        (context / "wheels").mkdir(parents=True)
        shutil.copy(plugin, context / "wheels")
        # pip runs from its own wheel: a base need not have one.
        images._download([], Path(scratch), Path(scratch) / "pip")
        (pip,) = (Path(scratch) / "pip").glob("pip-*.whl")
        shutil.copy(pip, context / "wheels" / "pip.whl")
        shutil.copy(ROOT / "images/engine/Dockerfile", context)
        progress.start(f"Building {name} with {tool.kind}", "some minutes")
        revision = hashlib.sha256(plugin.read_bytes()).hexdigest()[:12]
        tool.build(context, name, {"BASE": base, "REVISION": revision})
        tool.save(name, Path(scratch) / "image.tar")
        tool.remove(name)
        rename(Path(scratch) / "image.tar", name, archive)
        progress.finish()
    return name


def _version(project: Path = ROOT) -> str:
    version: str = tomllib.loads((project / "pyproject.toml").read_text())["project"]["version"]
    return version


def published() -> tuple[str, str]:
    """Names of the operator's and the simulator's image, as users and the chart know them."""
    return (
        f"specserve/specserve-operator:{_version()}",
        f"specserve/specserve-sim:{_version(ROOT / 'images' / 'sim')}",
    )


def rename(archive: Path, name: str, target: Path) -> None:
    """Copies an archive so that docker, podman and containerd load its image under another name.

    Args:
        archive: an OCI archive, or what docker saves, with one image.
        name: repository and tag, without a registry.
        target: the new archive.
    """
    repository, _, tag = name.rpartition(":")
    # What a kubelet makes of a name without a registry; containerd looks for just this text.
    full = f"docker.io/{name}"

    def index(found: dict[str, Any]) -> dict[str, Any]:
        for manifest in found["manifests"]:
            given = manifest.setdefault("annotations", {})
            # Docker writes the name under a key of containerd's, and the tag alone under OCI's.
            key = "io.containerd.image.name"
            given |= {key: full, _REF: tag} if key in given else {_REF: full}
        return found

    def legacy(found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        (layers,) = found.values()
        (layer,) = layers.values()
        return {repository: {tag: layer}}

    edits = {
        "index.json": index,
        "manifest.json": lambda found: [{**one, "RepoTags": [name]} for one in found],
        "repositories": legacy,
    }
    with tarfile.open(archive) as old, tarfile.open(target, "w") as new:
        for member in old:
            content = old.extractfile(member) if member.isfile() else None
            if content is not None and member.name in edits:
                data = json.dumps(edits[member.name](json.load(content))).encode()
                member.size, content = len(data), io.BytesIO(data)
            new.addfile(member, content)


def main() -> None:
    """Builds the images of this repository and prints their names and archives."""
    progress = Progress()
    target = ROOT / "build" / "images"
    target.mkdir(parents=True, exist_ok=True)
    archives = (operator(progress), images.simulator(progress))
    for name, archive in zip(published(), archives, strict=True):
        file = target / f"{name.rpartition('/')[2].partition(':')[0]}.tar"
        rename(archive, name, file)
        print(f"{name}\t{file.relative_to(ROOT)}")
    plugin = wheel(target, progress)
    print(f"{plugin.name}\t{plugin.relative_to(ROOT)}")
    if base := os.environ.get(ENGINE_BASE):
        file = target / "specserve-engine.tar"
        print(f"{engine(base, plugin, file, progress)}\t{file.relative_to(ROOT)}")
    else:
        print(f"No engine image: set {ENGINE_BASE} to an SGLang image to build it upon.")


if __name__ == "__main__":
    main()
