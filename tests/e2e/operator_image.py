"""The operator's image, built from images/operator/Dockerfile as the simulator's is from its own.

`python -m tests.e2e.operator_image` builds both and puts their archives into build/images.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import tomllib
from pathlib import Path

from tests.cluster import builder, images
from tests.cluster.binaries import cache_folder, locked
from tests.cluster.progress import Progress
from tests.cluster.versions import architecture

ROOT = Path(__file__).resolve().parents[2]
NAME = "specserve.test/specserve-operator"
"""Repository of the image; its tag is a hash of what it is built from."""

_SOURCES = ("operator", "images/operator", "pyproject.toml", "uv.lock", "README.md", "LICENSE")
_KEPT = 4


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


def _version() -> str:
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return version


def main() -> None:
    """Builds the images of this repository and prints their names and archives."""
    progress = Progress()
    target = ROOT / "build" / "images"
    target.mkdir(parents=True, exist_ok=True)
    for archive in (operator(progress), images.simulator(progress)):
        name = builder.name_of(archive)
        file = target / f"{name.rpartition('/')[2].partition(':')[0]}.tar"
        shutil.copy(archive, file)
        print(f"{name}\t{file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
