"""Command line: prepare what clusters need, and run commands beside one."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress

if TYPE_CHECKING:
    from tests.cluster.handle import Cluster

# Imports of what needs more than the standard library are inside the functions: `packages` and
# `binaries` run before anything is installed.


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.action(options) or 0)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    binaries = commands.add_parser("binaries", help="prepare the Kubernetes binaries")
    binaries.add_argument("names", nargs="*", help="only these; prints where each is")
    binaries.set_defaults(action=_binaries)

    packages = commands.add_parser("packages", help="install the Debian packages, if absent")
    packages.set_defaults(action=_packages)

    image = commands.add_parser("image", help="build the simulator's image")
    image.set_defaults(action=_image)

    for kind, text in (
        ("light", "a control plane on loopback"),
        ("node", "a control plane and a node in namespaces of their own"),
    ):
        command = commands.add_parser(kind, help=text)
        action = command.add_subparsers(required=True, metavar="ACTION").add_parser(
            "exec", help="start it, run a command with KUBECONFIG and PATH set, end it"
        )
        action.add_argument("--dir", type=Path, help="keep state and logs in this folder")
        action.add_argument("--crd", type=Path, action="append", default=[], help="file or folder")
        action.add_argument("--audit", action="store_true", help="log requests")
        if kind == "node":
            action.add_argument("--image-archive", type=Path, action="append", default=[])
            action.add_argument(
                "--gpus", type=int, default=8, help="GPUs the node pretends to have"
            )
        action.add_argument("command", nargs="+", metavar="-- COMMAND")
        action.set_defaults(action=_exec, kind=kind)
    return parser


def _binaries(options: argparse.Namespace) -> None:
    from tests.cluster.binaries import resolve
    from tests.cluster.versions import NODE

    found = resolve(tuple(options.names) or NODE).paths
    if options.names:
        for name, path in found.items():
            print(f"{name}\t{path}")
    else:
        folders = ", ".join(sorted({str(path.parent) for path in found.values()}))
        print(f"{len(found)} Kubernetes binaries: {folders}")


def _packages(_: argparse.Namespace) -> None:
    from tests.cluster import packages

    packages.install(Progress())


def _image(_: argparse.Namespace) -> None:
    from tests.cluster import images

    print(images.simulator(Progress()))


def _exec(options: argparse.Namespace) -> int:
    from tests.cluster.light import light_cluster
    from tests.cluster.node import node_cluster

    # An interrupt of the terminal reaches the command too, which decides what becomes of it; until
    # there is one, it ends this process as usual.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if options.kind == "light":
        started: Cluster = light_cluster(options.dir, crds=options.crd, audit=options.audit)
    else:
        started = node_cluster(
            options.dir,
            images=options.image_archive,
            crds=options.crd,
            gpus=options.gpus,
            audit=options.audit,
        )
    with started as cluster:
        return _run_attached(cluster, options.command)


def _run_attached(cluster: Cluster, command: list[str]) -> int:
    try:
        process = cluster.popen(command)
    except FileNotFoundError as error:
        sys.stderr.write(f"{error}\n")
        return 127
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: process.send_signal(received))
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
