"""Makes the plugin of this checkout visible to an interpreter, without an installer.

SGLang finds plugins by the metadata of installed distributions; a folder on PYTHONPATH with such
metadata will do. The wheel's own is tried where the image is built.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINE = REPOSITORY / "images/engine"


def install(folder: Path) -> list[Path]:
    """Write the metadata into `folder`; returns what belongs on PYTHONPATH."""
    points = distribution(folder, ENGINE)
    sections = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in each.items())
        for group, each in _project(ENGINE)["entry-points"].items()
    ]
    (points / "entry_points.txt").write_text("\n".join(sections))
    return [ENGINE, folder]


def distribution(folder: Path, source: Path) -> Path:
    """Write into `folder` what makes the project at `source` count as installed.

    Returns:
        The folder of its metadata.
    """
    project = _project(source)
    return _metadata(folder, project["name"], project["version"])


def entry_point(folder: Path, name: str, target: str) -> None:
    """Write the metadata of a plugin that is only for tests."""
    metadata = _metadata(folder, name, "0")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")


def _project(source: Path) -> dict[str, Any]:
    return dict(tomllib.loads((source / "pyproject.toml").read_text())["project"])


def _metadata(folder: Path, name: str, version: str) -> Path:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    return metadata


def mount_credentials(folder: Path, token: str, nonce: int = 4_242_424_242) -> None:
    """Write the files of the operator's Secret."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("plugin-token", token),
        ("plugin-token-previous", ""),
        ("nonce", str(nonce)),
    ):
        (folder / name).write_text(text)
