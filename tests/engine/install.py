"""Makes the plugin of this checkout visible to an interpreter, without an installer.

SGLang finds plugins by the metadata of installed distributions; a folder on PYTHONPATH with such
metadata will do. The wheel's own is tried where the image is built.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINE = REPOSITORY / "images/engine"


def install(folder: Path) -> list[Path]:
    """Write the metadata into `folder`; returns what belongs on PYTHONPATH."""
    project = tomllib.loads((ENGINE / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    sections = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(sections))
    return [ENGINE, folder]


def entry_point(folder: Path, name: str, target: str) -> None:
    """Write the metadata of a plugin that is only for tests."""
    metadata = folder / f"{name}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")


def mount_credentials(folder: Path, token: str, nonce: int = 4_242_424_242) -> None:
    """Write the files of the operator's Secret."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("plugin-token", token),
        ("plugin-token-previous", ""),
        ("nonce", str(nonce)),
    ):
        (folder / name).write_text(text)
