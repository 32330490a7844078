"""The SGLang wheels that names and parameters are compared with; nothing of them is installed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster.binaries import cache_folder

SHA256 = {
    "0.5.14": "4fe16056b45c8aca00f5f90ceb174dc3a62a3f5dccf159c791370795cd00fc99",
    "0.5.16": "d5f345a18953dd35df568ac56bdcb7f5ee910ab39efea4469b714556d1070713",
    "0.5.18": "e97b585dd2d5db2802599feba47c84cce972f5e1231a6816fef996200207b5cf",
    "0.5.23": "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
}
TAG = "cp311-cp311-manylinux_2_34_x86_64"
FETCH_SECONDS = 300


class NoWheel(Exception):
    """A wheel is neither cached nor to be had; the message says what to do."""


def wheel(version: str) -> Path:
    """Return the wheel of a version: from the user's cache, else from the package index.

    Raises:
        NoWheel: It is not cached and the index gives none with the pinned digest.
    """
    folder = cache_folder() / "sglang"
    folder.mkdir(exist_ok=True)
    path = folder / f"sglang-{version}-{TAG}.whl"
    if path.exists() and _digest(path) == SHA256[version]:
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pinned = Path(scratch) / "pinned.txt"
        pinned.write_text(f"sglang=={version} --hash=sha256:{SHA256[version]}\n")
        # For the interpreter and system of the pin, whichever these here are.
        fetched = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--only-binary=:all:", "--implementation=cp", "--python-version=3.11"),
                *("--platform=manylinux_2_34_x86_64", "--disable-pip-version-check"),
                *("--require-hashes", "--requirement", str(pinned), "--dest", scratch),
            ],
            capture_output=True,
            text=True,
            timeout=FETCH_SECONDS,
            check=False,
        )
        found = Path(scratch) / path.name
        if fetched.returncode != 0 or not found.exists():
            raise NoWheel(
                f"SGLang {version} is not in {folder}, and pip could not fetch it:\n"
                f"{fetched.stderr.strip()[-800:]}\n"
                "With network, check PIP_INDEX_URL. Without, copy the file there from another "
                f"machine:\n  {path}\n  sha256 {SHA256[version]}"
            )
        found.replace(path)
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
