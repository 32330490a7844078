"""Stand-ins for the NVIDIA libraries that PyPI's torch is linked to.

The wheel of torch for Linux is the CUDA build. To compute on a CPU it needs a dozen libraries of
NVIDIA, gigabytes of them, for the dynamic linker alone. Each stand-in has the functions that
torch's libraries want of it, and all of them say that there is no device.

Needs gcc and binutils. A machine with a GPU must not be given these.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice: torch takes it for a machine without GPUs and says nothing
VENDOR = re.compile(r"lib(cu|nv|nccl)")
DRIVER = "libcuda.so.1"
"""Comes with a driver, not with torch; nothing that runs on a CPU loads it."""
RUNTIME = "libcudart.so"
FOLDER = "nvidia/cu13/lib"
"""Where torch's libraries look for them, from the folder of packages on."""


def build(packages: Path) -> dict[str, int]:
    """Compile the stand-ins next to an installed torch.

    Args:
        packages: The folder that torch is installed in.

    Returns:
        How many functions each library has.

    Raises:
        subprocess.CalledProcessError: A tool failed.
    """
    folder = packages / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _wanted(sorted((packages / "torch/lib").glob("*.so")))
    for library, versions in wanted.items():
        _compile(folder / library, versions)
    return {
        library: sum(len(names) for names in versions.values())
        for library, versions in wanted.items()
    }


def _wanted(binaries: list[Path]) -> dict[str, dict[str, set[str]]]:
    """Return the functions of each NVIDIA library by the version that they are asked for.

    One without a version is found wherever it is, so all of these go to the runtime, which
    everything loads.
    """
    wanted: dict[str, dict[str, set[str]]] = {}
    unversioned: set[str] = set()
    defined: set[str] = set()
    for binary in binaries:
        facts = _tool("readelf", "--wide", "--dynamic", "--version-info", binary)
        for library in re.findall(r"NEEDED.*\[(.*)\]", facts):
            if VENDOR.match(library) and library != DRIVER:
                wanted.setdefault(library, {})
        owner, owners = "", dict[str, str]()
        for library, version in re.findall(r"File: (\S+)|Name: (\S+) +Flags", facts):
            owner = library or owner
            owners[version] = owner
        for line in _tool("nm", "--dynamic", "--with-symbol-versions", binary).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind != "U":
                defined.add(name)
            elif not version:
                unversioned.add(name)
            elif owners[version] in wanted:
                wanted[owners[version]].setdefault(version, set()).add(name)
    [runtime] = [library for library in wanted if library.startswith(RUNTIME)]
    wanted[runtime][""] = {name for name in unversioned - defined if VENDOR.match(f"lib{name}")}
    return wanted


def _compile(library: Path, versions: dict[str, set[str]]) -> None:
    names = sorted(set().union(*versions.values()))
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names)
    script = [
        f"{version} {{ global: {'; '.join(sorted(symbols))}; }};\n"
        for version, symbols in versions.items()
        if version
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".map") as file:
        file.writelines(script or ["{ global: *; };\n"])
        file.flush()
        subprocess.run(
            [
                *("gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)),
                *(f"-Wl,-soname,{library.name}", f"-Wl,--version-script,{file.name}"),
            ],
            input=source,
            text=True,
            check=True,
        )


def _tool(*words: object) -> str:
    command = [str(word) for word in words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
