"""The environment of a real SGLang on a CPU: interpreter, packages and what stands in for a GPU.

    python -m tests.engine.environment [VERSION ...]

prepares the versions that are proved and prints their command line. All of it lies in the user's
cache, each part under a hash of what it is made of, and is made once:

- a virtual environment with the pinned packages and stand-ins for NVIDIA's libraries,
- SGLang's wheel, unpacked and compiled,
- the metadata by which SGLang finds plugins: ours and that of `doubles`.

Our plugin and the doubles themselves are used as they lie in this checkout.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from specserve_engine.sglang.upstream import PROVED
from tests.cluster import packages as debian
from tests.cluster.binaries import cache_folder, locked
from tests.cluster.progress import Progress
from tests.engine import install, standins
from tests.engine.wheels import SHA256, wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
DOUBLES = HERE / "doubles"
VERSIONS = tuple(sorted(PROVED))

VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # SGLang loads NCCL by itself, and a stand-in is not enough for that. It does without.
    "SGLANG_NCCL_SO_PATH": "/nonexistent",
    # Small matrices: threads would only wait for one another.
    "OMP_NUM_THREADS": "1",
    # Compiled kernels need a compiler at run time, and save nothing here.
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
FLAGS = (
    *("--device=cpu", "--attention-backend=intel_amx", "--dtype=float32"),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    *("--disable-overlap-schedule", "--mem-fraction-static=0.05", "--max-total-tokens=16384"),
    # An idle scheduler would take a whole core.
    "--sleep-on-idle",
)
"""What SGLang's command line needs on a CPU, beside what says which model to serve."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a real SGLang needs to be started on this machine.

    Attributes:
        version: SGLang's.
        python: The interpreter to run it with.
        path: For PYTHONPATH, in this order.
        packages: Where the interpreter has its packages; on the PYTHONPATH of another Python
            3.11 they serve as well.
        roots: Every folder that it reads, for a container to see at the same place. Nothing is
            written there.
    """

    version: str
    python: Path
    path: tuple[Path, ...]
    packages: Path
    roots: tuple[Path, ...]

    def variables(self, ranks: int = 1) -> dict[str, str]:
        """Return the environment variables to add, for a number of tensor-parallel ranks."""
        # Each rank is told its core.
        cores = sorted(os.sched_getaffinity(0))
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        return {
            **VARIABLES,
            "SGLANG_CPU_OMP_THREADS_BIND": bound,
            "PYTHONPATH": os.pathsep.join(map(str, self.path)),
        }

    def environ(self, ranks: int = 1, **more: str) -> dict[str, str]:
        """Return the whole environment of a server that is a child of this process."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            # Without bytecode each of its processes compiles a thousand modules.
            if name != "PYTHONDONTWRITEBYTECODE" and not name.startswith(("SGLANG_", "SPECSERVE_"))
        }
        return inherited | self.variables(ranks) | more


def prepare(version: str) -> Environment:
    """Return the environment of a version, made if need be.

    Raises:
        subprocess.CalledProcessError: A tool failed; it has said why.
        tests.engine.wheels.NoWheel: SGLang is not to be had.
    """
    python = interpreter()
    sglang = _unpacked(version, python)
    metadata = _metadata()
    base = Path(os.path.realpath(python)).parents[1]
    return Environment(
        version,
        python,
        (sglang, DOUBLES, install.ENGINE, metadata),
        _packages(python.parents[1]),
        (python.parents[1], sglang, DOUBLES, install.ENGINE, metadata, base),
    )


@cache
def interpreter() -> Path:
    """Return the interpreter that has all packages but SGLang."""
    key = hash_of(
        REQUIREMENTS.read_bytes(),
        Path(standins.__file__).read_bytes(),
        f"{sys.version} {platform.machine()}".encode(),
    )

    def fill(folder: Path) -> None:
        # SGLang's wheels that are pinned are for Python 3.11.
        base = sys._base_executable if sys.version_info[:2] == (3, 11) else "3.11"
        _uv("venv", "--quiet", "--relocatable", "--python", base, folder)
        _uv(
            *("pip", "install", "--quiet", "--no-deps", "--compile-bytecode"),
            *("--python", folder / "bin/python", "--requirements", REQUIREMENTS),
        )
        if shutil.which("gcc") is None:
            debian.install(Progress(), ("gcc", "libc6-dev"))
        standins.build(_packages(folder))

    title = "Installing torch and what else SGLang imports"
    return made(f"python-{key}", fill, title, "a minute, up to 850 MB") / "bin/python"


def _packages(venv: Path) -> Path:
    [packages] = venv.glob("lib/python3.*/site-packages")
    return packages


def _unpacked(version: str, python: Path) -> Path:
    def fill(folder: Path) -> None:
        with zipfile.ZipFile(wheel(version)) as archive:
            archive.extractall(folder)
        # As an installer would; SGLang has a few modules that cannot be compiled.
        subprocess.run(
            [python, "-m", "compileall", "-q", "-q", "-j", "0", folder / "sglang"],
            check=False,
            stdout=subprocess.DEVNULL,
            env=_writing(),
        )

    name = f"sglang-{version}-{SHA256[version][:12]}"
    return made(name, fill, f"Unpacking SGLang {version}", "half a minute")


def _metadata() -> Path:
    """Return the folder by which SGLang finds both plugins."""

    def fill(folder: Path) -> None:
        install.install(folder)
        install.entry_point(folder, "cpu_engine", "cpu_engine:register")

    key = hash_of(
        (install.ENGINE / "pyproject.toml").read_bytes(), Path(install.__file__).read_bytes()
    )
    return made(f"plugins-{key}", fill)


def made(name: str, fill: Callable[[Path], None], title: str = "", estimate: str = "") -> Path:
    """Return a folder of the cache; an absent one is filled first.

    It gets its name once it is filled, so that what has the name is whole.

    Args:
        name: The folder's, with a hash of all that its content depends on.
        fill: Fills an empty folder.
        title: What is told to whoever waits.
        estimate: How long that usually takes, in words.
    """
    cached = cache_folder() / "engine"
    cached.mkdir(exist_ok=True)
    final = cached / name
    if final.exists():
        return final
    progress = Progress()
    with locked(cached / f"{name}.lock", progress):
        if final.exists():
            return final
        if title:
            progress.start(title, estimate)
        with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=cached) as scratch:
            filled = Path(scratch) / "filled"
            filled.mkdir()
            fill(filled)
            filled.rename(final)
        if title:
            progress.finish()
    return final


def hash_of(*parts: bytes) -> str:
    """Return the key of what is made of these."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:12]


def _uv(*words: object) -> None:
    setup = [str(install.REPOSITORY / "tests/setup.sh")]
    uv = subprocess.run(setup, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    subprocess.run([uv, *map(str, words)], check=True, env=_writing())


def _writing() -> Mapping[str, str]:
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "VIRTUAL_ENV": ""}


def main() -> None:
    """Run from the command line."""
    for version in sys.argv[1:] or VERSIONS:
        environment = prepare(version)
        variables = " ".join(f"{name}={text}" for name, text in environment.variables().items())
        print(f"{variables} {environment.python} -m sglang.launch_server {' '.join(FLAGS)}")


if __name__ == "__main__":
    main()
