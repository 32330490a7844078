"""Results as JSON files and as tables; the same tables on the terminal and in the docs."""

from __future__ import annotations

import datetime
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import measure
from tests.cluster.versions import pinned

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "bench"
LIBRARIES = ("specserve", "specserve-sim", "aiohttp", "kopf", "uvicorn")


def stamp() -> dict[str, Any]:
    """When and where something was measured."""
    return {
        "at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": measure.machine(),
    }


def heading(name: str) -> dict[str, Any]:
    """What every result begins with: when, where and with which versions it was measured."""
    return {
        "benchmark": name,
        **stamp(),
        "versions": {
            "python": platform.python_version(),
            "kubernetes": pinned().of["kubernetes"],
            "etcd": pinned().of["etcd"],
            **{name: version(name) for name in LIBRARIES},
        },
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, its columns aligned."""
    cells = [[str(each) for each in row] for row in (columns, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    lines = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        + " |"
        for row in cells
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def provenance(result: dict[str, Any]) -> str:
    """The lines that say where a result comes from."""
    on, versions = result["machine"], result["versions"]
    return (
        f"Measured {result['at']} on {on['cores']} cores of {on['processor']}, "
        f"{on['memoryGiB']} GiB, Linux {on['kernel']}; load average at the start "
        f"{', '.join(map(str, on['loadAverageAtStart']))}.\n"
        f"Versions: {', '.join(f'{name} {each}' for name, each in versions.items())}."
    )
