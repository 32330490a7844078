"""The simulator's image, really built from images/sim/Dockerfile, without network in the build."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster import builder
from tests.cluster.binaries import cache_folder, locked
from tests.cluster.errors import ClusterError
from tests.cluster.versions import architecture

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.cluster.progress import Progress

ROOT = Path(__file__).resolve().parents[2]

SIMULATOR = "specserve.test/specserve-sim"
"""Repository of the image; its tag is a hash of what it is built from."""

BASE = "docker.io/library/python:3.11-slim-bookworm"
"""The default base, where it can be pulled."""

BASE_VARIABLE = "SPECSERVE_BASE_IMAGE"
"""Variable that names another base; it must have python3.11."""

_REGISTRY = ("registry-1.docker.io", 443)
_PYTHON = "3.11"
_DEBIAN = "specserve.test/debian-python:3.11"
_DEBIAN_PACKAGES = (
    "base-files",
    "busybox-static",
    "ca-certificates",
    "libpython3-stdlib",
    "python3-minimal",
    "tzdata",
)
_SOURCES = ("images/engine", "images/sim", "uv.lock")


def simulator(progress: Progress) -> Path:
    """The archive of the simulator's image; built when its sources changed.

    Returns:
        An OCI or docker archive in the cache; `builder.name_of` says the image's name.

    Raises:
        ClusterError: no builder, or a step of the build failed.
    """
    tool = builder.choose()
    base = os.environ.get(BASE_VARIABLE, "")
    tag = fingerprint(ROOT, tool.kind, base)
    folder = cache_folder() / "images"
    folder.mkdir(exist_ok=True)
    archive = folder / f"specserve-sim-{tag}.tar"
    if archive.exists():
        return archive
    with locked(folder / "specserve-sim.lock", progress):
        if archive.exists():
            return archive
        name = f"{SIMULATOR}:{tag}"
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
            context = Path(scratch) / "context"
            wheels = context / "wheels"
            wheels.mkdir(parents=True)
            _wheels(wheels, folder, progress)
            shutil.copy(ROOT / "images/sim/Dockerfile", context)
            base = base or _base(tool, Path(scratch), progress)
            progress.start(f"Building {name} with {tool.kind}", "about 20 s")
            tool.build(context, name, {"BASE": base, "REVISION": tag})
            tool.save(name, Path(scratch) / "image.tar")
            tool.remove(name)  # the archive is what is used; stores only grow
            (Path(scratch) / "image.tar").replace(archive)
            progress.finish()
        # Not only the newest: another process may be about to import the one before.
        made = sorted(folder.glob("specserve-sim-*.tar"), key=lambda file: file.stat().st_mtime)
        for old in made[:-4]:
            old.unlink()
    return archive


def fingerprint(root: Path, *also: str) -> str:
    """Changes with whatever the image is built from."""
    digest = hashlib.sha256("\0".join([architecture(), *also]).encode())
    for file in _source_files(root):
        digest.update(f"\0{file.relative_to(root)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _source_files(root: Path) -> list[Path]:
    found: list[Path] = []
    for name in _SOURCES:
        path = root / name
        found += [path] if path.is_file() else path.rglob("*")
    left_out = {"__pycache__", "build", "dist", ".pytest_cache", ".venv"}
    return sorted(
        file
        for file in found
        if file.is_file()
        and not left_out & set(file.relative_to(root).parts)
        and not any(part.endswith(".egg-info") for part in file.parts)
    )


def _wheels(into: Path, cache: Path, progress: Progress) -> None:
    """Builds our wheels, and adds those they need as the lock file pins them, and pip itself."""
    progress.start("Building wheels of images/engine and images/sim", "a few seconds")
    for project in ("images/engine", "images/sim"):
        _command(
            "building wheels", "uv", "build", "--wheel", "-q", "--out-dir", str(into), project
        )
    progress.finish()
    own = sorted(str(wheel) for wheel in into.glob("*.whl"))
    needed = cache / f"wheels-{_PYTHON}-{_lock_hash()}"
    if not needed.is_dir():
        progress.start("Downloading the wheels that they need", "a few seconds")
        with tempfile.TemporaryDirectory(prefix=".wheels-", dir=cache) as folder:
            downloaded = Path(folder) / "wheels"
            _download(own, Path(folder), downloaded)
            downloaded.rename(needed)
        progress.finish()
    for wheel in needed.iterdir():
        shutil.copy(wheel, into)
    # pip runs from its own wheel, so the base needs none; the name must not change with its
    # version.
    (pip,) = into.glob("pip-*.whl")
    pip.rename(into / "pip.whl")
    (into / ".gitignore").unlink(missing_ok=True)


def _lock_hash() -> str:
    digest = hashlib.sha256((ROOT / "uv.lock").read_bytes())
    for project in ("engine", "sim"):
        digest.update((ROOT / "images" / project / "pyproject.toml").read_bytes())
    return digest.hexdigest()[:12]


def _download(own: list[str], folder: Path, into: Path) -> None:
    exported = _command(
        "reading uv.lock",
        *("uv", "export", "--frozen", "--all-groups", "--no-hashes", "--no-annotate"),
        *("--no-header", "--no-emit-project", "--format=requirements-txt"),
    )
    pins = [line for line in exported.splitlines() if line and line[0].isalnum()]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}[architecture()]
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in (17, 28, 34)]
    _command(
        "downloading wheels",
        *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"),
        *("--implementation=cp", f"--python-version={_PYTHON}", *platforms),
        f"--platform=manylinux2014_{machine}",
        *("--constraint", str(constraints), "--dest", str(into), "pip", *own),
    )
    for wheel in own:
        (into / Path(wheel).name).unlink(missing_ok=True)


def _base(tool: builder.Builder, scratch: Path, progress: Progress) -> str:
    if tool.has(BASE):
        return BASE
    if _answers(*_REGISTRY):
        progress.start(f"Pulling {BASE}", "about a minute")
        pulled = tool.pull(BASE)
        progress.finish()
        if pulled:
            return BASE
    if not tool.has(_DEBIAN):
        progress.note(f"{BASE} can't be pulled; making a base of Debian packages instead")
        context = scratch / "base"
        context.mkdir()
        shutil.copy(_debian(progress), context / "base.tar")
        (context / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        tool.build(context, _DEBIAN, {})
    return _DEBIAN


def _answers(host: str, port: int) -> bool:
    # In a thread, as name resolution has no deadline of its own.
    reached: list[bool] = []

    def attempt() -> None:
        try:
            socket.create_connection((host, port), 3).close()
        except OSError:
            return
        reached.append(True)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(4)
    return bool(reached)


def _debian(progress: Progress) -> Path:
    """A tar archive of a minimal Debian 12 with Python, kept in the cache."""
    packages = ",".join(_DEBIAN_PACKAGES)
    key = hashlib.sha256(packages.encode()).hexdigest()[:8]
    archive = cache_folder() / "images" / f"debian-{key}-{architecture()}.tar"
    if archive.exists():
        return archive
    if shutil.which("mmdebstrap") is None or os.geteuid():
        raise ClusterError(
            "making a Debian base",
            "it takes root and mmdebstrap",
            f"Run as root: python3 -m tests.cluster packages\nOr set {BASE_VARIABLE}.",
        )
    progress.start("Making a Debian base with Python", "about 10 s")
    with tempfile.TemporaryDirectory(prefix=".debian-", dir=archive.parent) as folder:
        root = Path(folder) / "root"
        # Extracted, not configured: no maintainer script has to run, and all works in any
        # container.
        _command(
            "making a Debian base",
            *("mmdebstrap", "--quiet", "--mode=root", "--variant=extract"),
            *(f"--include={packages}", "bookworm", str(root), *_mirror()),
        )
        _finish(root)
        made = Path(folder) / "base.tar"
        _command("packing a Debian base", "tar", "-C", str(root), "-cf", str(made), ".")
        made.replace(archive)
    progress.finish()
    return archive


def _mirror() -> list[str]:
    # The machine's own sources where it runs the same release: they may point to a near mirror.
    release = Path("/etc/os-release")
    if release.exists() and "VERSION_CODENAME=bookworm" in release.read_text():
        for file in ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"):
            if Path(file).is_file() and "bookworm" in Path(file).read_text():
                return [file]
    return []


def _finish(root: Path) -> None:
    """Does what the packages' own scripts would, and drops what no container reads."""
    for name in ("sh", "ls", "cat", "ps", "wget"):
        link = root / "bin" / name
        if not link.is_symlink() and not link.exists():
            link.symlink_to("busybox")
    (root / "usr/bin/python3").unlink(missing_ok=True)
    (root / "usr/bin/python3").symlink_to(f"python{_PYTHON}")
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    (root / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
    (root / "etc/ssl/certs/ca-certificates.crt").write_bytes(
        b"".join(each.read_bytes() for each in certificates)
    )
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    drop: Iterable[str] = (
        *("var/lib/apt", "var/lib/dpkg", "var/cache", "usr/share/doc", "usr/share/man"),
        *(
            "usr/share/locale",
            "usr/share/perl",
            "usr/share/perl5",
            "usr/lib/x86_64-linux-gnu/perl",
        ),
    )
    for name in drop:
        shutil.rmtree(root / name, ignore_errors=True)


def _command(step: str, *argv: str) -> str:
    done = subprocess.run(
        argv, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(step, f"{argv[0]} ended with {done.returncode}", done.stderr[-3000:])
    return done.stdout
