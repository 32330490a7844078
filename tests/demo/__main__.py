"""Command line of the demo."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from tests.cluster import binaries, builder, choose, images
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress, duration
from tests.demo import plot, stage
from tests.demo.install import NAMESPACE, ROOT, Installation, example, write_private
from tests.demo.outcome import Outcome, outcome, table
from tests.demo.plan import STORY, Plan, profile, slow_motion
from tests.demo.view import about

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from tests.cluster.handle import Cluster

OUT = ROOT / "build" / "demo"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns 0 if all that it tells of happened and no request was lost."""
    options = _parser().parse_args(arguments)
    for number in _ENDING:
        signal.signal(number, _interrupt)
    began = time.monotonic()
    progress = Progress()
    try:
        record = _run(options, progress)
    except ClusterError as error:
        sys.stderr.write(f"\nThe demo failed while {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted; all that the demo started is gone.\n")
        return 128 + signal.SIGINT
    code = _report(record, options.out)
    progress.note(f"All of it took {duration(time.monotonic() - began)}.")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.demo",
        description="Watch speculation being switched off and on in live pods: a real Kubernetes, "
        "the real operator, simulated engines.",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of summary and picture")
    parser.add_argument(
        "--existing",
        action="store_true",
        default=os.environ.get(choose.FLAG) == "1",
        help="use the cluster of KUBECONFIG instead of one made for the demo; its pods must be "
        f"reachable from here. Also chosen by {choose.FLAG}=1",
    )
    return parser


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    _take_no_more()
    raise KeyboardInterrupt


def _take_no_more() -> None:
    # Taking down is short and bounded; cut short, it could leave something behind.
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


def _run(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("summary.json", "throughput.png"):
        (options.out / name).unlink(missing_ok=True)
    archive = images.simulator(progress)
    if not options.existing:
        binaries.resolve()  # so that its progress has lines of its own
    progress.start(
        "Reaching the cluster of KUBECONFIG"
        if options.existing
        else "Starting a Kubernetes with one node, in namespaces of its own",
        "about 8 s",
    )
    with choose.cluster(images=[archive], existing=options.existing) as cluster:
        progress.finish()
        try:
            return _on(cluster, archive, options, progress)
        finally:
            _take_no_more()


def _on(
    cluster: Cluster, archive: Path, options: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    image = cluster.image(builder.name_of(archive))
    log = options.out / "operator.log"
    installation = Installation(cluster, progress, ours=not options.existing)
    progress.start("Installing CRD, rights and operator", "about 2 s")
    with installation.rights(), installation.operator(log) as operator:
        progress.finish()
        progress.note(
            "Applying examples/demo.yaml three times: as it is, pinned on, pinned off\n"
            f"  its image here: {image}"
        )
        progress.start("Waiting for their pods", "about 20 s")
        try:
            arms = installation.serve(image, operator, log)
            progress.finish()
            given = example()
            plan = Plan(
                namespace=NAMESPACE,
                arms=arms,
                curve=STORY,
                profile=profile(given),
                operator_port=installation.port,
                slow_motion=slow_motion(given),
            )
            progress.note(f"{about(plan)}\n")
            return _load(cluster, plan)
        finally:
            _take_no_more()
            progress.note("Taking everything down again")


def _load(cluster: Cluster, plan: Plan) -> dict[str, Any]:
    plan_file, record_file = (cluster.directory / f"demo-{n}.json" for n in ("plan", "record"))
    write_private(plan_file, plan.to_json())
    process = cluster.popen(
        [sys.executable, "-m", "tests.demo.stage", str(plan_file), str(record_file)],
        stdin=subprocess.DEVNULL,
    )
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    finally:
        plan_file.unlink()
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code == stage.OUT_OF_REACH:
        raise ClusterError(
            "reaching the pods",
            "an engine did not answer or was not steered; see above",
            "On a cluster of your own, pod addresses must be reachable from this machine: run the "
            "demo on one of its nodes, or without --existing.",
        )
    if code:
        raise ClusterError("running the load", f"it ended with {code}; see above")
    record: dict[str, Any] = json.loads(record_file.read_text())
    record_file.unlink()
    return record


def _report(record: dict[str, Any], out: Path) -> int:
    result = outcome(record)
    picture = out / "throughput.png"
    plot.draw(record, picture)
    (out / "summary.json").write_text(json.dumps(result.summary, indent=2) + "\n")
    console = Console()
    console.print()
    console.print(table(record, result))
    _say(console, result, out, picture)
    return 1 if result.failures else 0


def _say(console: Console, result: Outcome, out: Path, picture: Path) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)

    if note := result.summary["note"]:
        say(note, "yellow")
    say(f"Picture: {_short(picture)}   Summary: {_short(out / 'summary.json')}")
    for failure in result.failures:
        say(f"Not as promised: {failure}", "bold red")


def _short(path: Path) -> str:
    here = Path.cwd()
    absolute = path.absolute()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


if __name__ == "__main__":
    sys.exit(main())
