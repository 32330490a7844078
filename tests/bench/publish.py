"""Copies the results of real runs to where people read them.

    python -m tests.bench.publish [--build build] [--docs docs/benchmarks]

A benchmark's result becomes a page, and the JSON file beside it, unchanged. So do the records of
real engines (`build/engine`) and of end-to-end runs (`build/e2e`, with `e2e-` before their name),
which README.md tells in one table each. Nothing is rounded up, left out or rerun: a goal that was
missed is published as missed. Only the record of a run that broke off is no result.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import flip_latency, regret, report, startup
from tests.gpu import cells as gpu_cells
from tests.gpu import show as gpu_show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Result = dict[str, Any]

#: How a result is shown, by the name that it gives itself.
PAGES: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "flip_latency": (flip_latency.TITLE, flip_latency.tables),
    "startup": (startup.TITLE, startup.tables),
    "regret": (regret.TITLE, regret.render),
}
#: What draws the pictures of a result that has any, into files of its name.
PICTURES: dict[str, Callable[[Mapping[str, Any], Path], list[Path]]] = {"regret": regret.plot}
INDEX = "README.md"
END_TO_END = "e2e-"
NOT_RECORDED = "not recorded"

_INDEX_HEAD = """\
# Benchmarks

Results of real runs, copied by `make publish-bench` from what the runs wrote; the JSON files hold
all numbers. Machines differ, so compare within a row or a page.
"""
_ENGINES_HEAD = """\
## Real engines

SGLang with the plugin, by `make test-engine` (CPU) and `python -m tests.gpu.job`.
`contract` counts the cases of the wire contract. The times are from an order received to the first
batch under it on every rank, in milliseconds, with requests running.
"""
_STUDIES_HEAD = """\
## Studies

One question each, asked of a real engine. The answers are in
[the engine plugin](../engine-plugin.md).
"""
_END_TO_END_HEAD = """\
## End to end

Containers on a real kubelet. `lost` leaves out the requests of an engine that the run killed
itself.
"""


def page(result: Mapping[str, Any]) -> str:
    """The Markdown page of a benchmark's result."""
    name = result["benchmark"]
    title, tables = PAGES[name]
    source = f"Run it: `python -m tests.bench.{name}`. All numbers: [{name}.json]({name}.json)."
    return "\n\n".join((f"# {title}", report.provenance(result), tables(result), source)) + "\n"


def publish(build: Path, docs: Path) -> list[Path]:
    """Write what `build` holds into `docs`, and the index of all that lies there; what changed.

    Results of other benchmarks are left alone: they have pages of their own making.
    """
    docs.mkdir(parents=True, exist_ok=True)
    written = [*_benchmarks(build / "bench", docs), *_gpus(build / "bench", docs)]
    written += _records(build / "engine", docs, "", _is_of_engine)
    written += _records(build / "e2e", docs, END_TO_END, _is_end_to_end)
    if written:
        (docs / INDEX).write_text(index(docs), encoding="utf-8")
    return written


def _benchmarks(build: Path, docs: Path) -> Iterator[Path]:
    for file in sorted(build.glob("*.json")):
        text = file.read_text(encoding="utf-8")
        name = json.loads(text).get("benchmark")
        if name not in PAGES:
            continue
        (docs / f"{name}.json").write_text(text, encoding="utf-8")
        written = docs / f"{name}.md"
        written.write_text(page(json.loads(text)), encoding="utf-8")
        yield written
        if name in PICTURES:
            yield from PICTURES[name](json.loads(text), docs / f"{name}.png")


def _gpus(build: Path, docs: Path) -> Iterator[Path]:
    """The results of GPUs, one file for each kind and number of them, and one page of all."""
    new = []
    for file in sorted(build.glob(f"{gpu_cells.BENCHMARK}-*.json")):
        text = file.read_text(encoding="utf-8")
        if json.loads(text)["simulated"]:
            print(f"{file}: of simulated engines, so this is no result", file=sys.stderr)
            continue
        (docs / file.name).write_text(text, encoding="utf-8")
        new.append(docs / file.name)
    if not new:
        return
    yield from new
    files = sorted(docs.glob(f"{gpu_cells.BENCHMARK}-*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    written = docs / f"{gpu_cells.BENCHMARK}.md"
    links = ", ".join(f"[{file.name}]({file.name})" for file in files)
    written.write_text(gpu_show.render(results) + f"\nAll numbers: {links}.\n", encoding="utf-8")
    yield written
    yield from gpu_show.plot(results, docs / f"{gpu_cells.BENCHMARK}.png")


def _records(
    build: Path, docs: Path, prefix: str, is_one: Callable[[Result], bool]
) -> Iterator[Path]:
    for file in sorted(build.glob("*.json")):
        text = file.read_text(encoding="utf-8")
        if not is_one(json.loads(text)):
            print(f"{file}: the run broke off, so this is no result", file=sys.stderr)
            continue
        written = docs / f"{prefix}{file.name}"
        written.write_text(text, encoding="utf-8")
        yield written


def _is_engine(record: Result) -> bool:
    return {"sglang", "device", "tp", "contract", "flips"} <= record.keys()


def _is_study(record: Result) -> bool:
    return {"study", "sglang", "device", "figures"} <= record.keys()


def _is_of_engine(record: Result) -> bool:
    return _is_engine(record) or _is_study(record)


def _is_end_to_end(record: Result) -> bool:
    return record.get("requestsLost") is not None


# The index.


def index(docs: Path) -> str:
    """The page that tells all results in `docs`."""
    engines, studies, runs = [], [], []
    for file in sorted(docs.glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        if file.name.startswith(END_TO_END):
            runs.append((file, record))
        elif isinstance(record, dict) and _is_engine(record):
            engines.append((file, record))
        elif isinstance(record, dict) and _is_study(record):
            studies.append((file, record))
    pages = [path for path in sorted(docs.glob("*.md")) if path.name != INDEX]
    parts = [_INDEX_HEAD + "\n" + "\n".join(f"- {_link(each)}" for each in pages)]
    if engines:
        columns = (
            *("SGLang", "device", "tensor parallel", "contract", "orders", "requests", "lost"),
            *("p50", "p99", "longest", "machine", "measured", "file"),
        )
        rows = [_engine_row(file, record) for file, record in sorted(engines, key=_by_version)]
        parts.append(f"{_ENGINES_HEAD}\n{report.table(columns, rows)}")
    if studies:
        columns = ("study", "SGLang", "device", "machine", "measured", "file")
        rows = [_study_row(*each) for each in studies]
        parts.append(f"{_STUDIES_HEAD}\n{report.table(columns, rows)}")
    if runs:
        columns = (
            *("run", "SGLang", "flips", "requests", "lost", "install to first token s"),
            *("takeover s", "whole run s", "machine", "measured"),
        )
        parts.append(
            f"{_END_TO_END_HEAD}\n{report.table(columns, [_run_row(*each) for each in runs])}"
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _link(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return f"[{first.lstrip('# ') or path.stem}]({path.name})"


def _by_version(item: tuple[Path, Result]) -> tuple[str, list[int], int]:
    record = item[1]
    version = [int(part) for part in str(record["sglang"]).split(".") if part.isdigit()]
    return str(record["device"]), version, record["tp"]


def _engine_row(file: Path, record: Result) -> tuple[object, ...]:
    contract, flips = record["contract"], record["flips"]
    passed, failed = contract["passed"], contract["failed"]
    times = flips.get("directiveToStateMs", {})
    return (
        record["sglang"],
        record["device"],
        record["tp"],
        f"{passed} of {passed + failed}",
        flips.get("count", "-"),
        flips.get("requests", "-"),
        flips.get("requestsLost", "-"),
        *(times.get(name, "-") for name in ("p50", "p99", "max")),
        _machine(record),
        record.get("at", NOT_RECORDED),
        f"[{file.name}]({file.name})",
    )


def _study_row(file: Path, record: Result) -> tuple[object, ...]:
    return (
        record["study"],
        record["sglang"],
        record["device"],
        _machine(record),
        record.get("at", NOT_RECORDED),
        f"[{file.name}]({file.name})",
    )


def _run_row(file: Path, record: Result) -> tuple[object, ...]:
    return (
        f"[{file.stem.removeprefix(END_TO_END)}]({file.name})",
        record.get("sglang", "simulated"),
        record.get("flips", "-"),
        record.get("requestsSent", "-"),
        record["requestsLost"],
        record.get("installToFirstTokenSeconds", "-"),
        record.get("takeoverSeconds", "-"),
        record.get("seconds", "-"),
        _machine(record),
        record.get("at", NOT_RECORDED),
    )


def _machine(record: Result) -> str:
    on = record.get("machine")
    if not isinstance(on, dict):
        return NOT_RECORDED
    accelerator = f"{on['accelerator']}, " if on.get("accelerator") else ""
    return f"{accelerator}{on['cores']} cores of {on['processor']}, {on['memoryGiB']} GiB"


def main() -> int:
    """Entry point; the exit status says whether there was anything to publish."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--build", type=Path, default=report.ROOT / "build")
    options.add_argument("--docs", type=Path, default=report.ROOT / "docs" / "benchmarks")
    given = options.parse_args()
    written = publish(given.build, given.docs)
    for path in written:
        print(path)
    if not written:
        print(f"no result in {given.build}; run the benchmarks first", file=sys.stderr)
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
