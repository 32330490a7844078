"""Copies the results of real runs to where people read them.

    python -m tests.bench.publish [--build build/bench] [--docs docs/benchmarks]

Each result becomes a page, and the JSON file beside it, unchanged. Nothing is rounded up, left
out or rerun: a goal that was missed is published as missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import flip_latency, report, startup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: How a result is shown, by the name that it gives itself.
PAGES: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "flip_latency": (flip_latency.TITLE, flip_latency.tables),
    "startup": (startup.TITLE, startup.tables),
}


def page(result: Mapping[str, Any]) -> str:
    """The Markdown page of a result."""
    name = result["benchmark"]
    title, tables = PAGES[name]
    source = f"Run it: `python -m tests.bench.{name}`. All numbers: [{name}.json]({name}.json)."
    return "\n\n".join((f"# {title}", report.provenance(result), tables(result), source)) + "\n"


def publish(build: Path, docs: Path) -> list[Path]:
    """Write a page for each result in `build`; the pages written.

    Results of other benchmarks are left alone: they have pages of their own making.
    """
    docs.mkdir(parents=True, exist_ok=True)
    pages = []
    for file in sorted(build.glob("*.json")):
        text = file.read_text()
        name = json.loads(text).get("benchmark")
        if name not in PAGES:
            continue
        (docs / f"{name}.json").write_text(text)
        written = docs / f"{name}.md"
        written.write_text(page(json.loads(text)))
        pages.append(written)
    return pages


def main() -> int:
    """Entry point; the exit status says whether there was anything to publish."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--build", type=Path, default=report.BUILD)
    options.add_argument("--docs", type=Path, default=report.ROOT / "docs" / "benchmarks")
    given = options.parse_args()
    pages = publish(given.build, given.docs)
    for written in pages:
        print(written)
    if not pages:
        print(f"no result in {given.build}; run the benchmarks first", file=sys.stderr)
    return 0 if pages else 1


if __name__ == "__main__":
    sys.exit(main())
