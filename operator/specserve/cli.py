"""The command line: parsing and printing only.

Every subcommand brings its own parser and loads what it works with only when it is run: the
operator needs no benchmark, and a benchmark no cluster.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

from specserve.bench import command as bench
from specserve.calibrate import command as calibrate
from specserve.doctor import command as doctor
from specserve.local import command as local
from specserve.replay import command as replay
from specserve.settings import PREFIX, BadSetting, Settings, described

#: What a shell says of a program that was ended as nobody read what it printed.
EXIT_UNREAD: Final = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `specserve` command; returns the exit code.

    A reader who leaves early (`| head`) ends a command that has more to print, without a word;
    one that had come to its end keeps its exit code.
    """
    try:
        return _command(argv)
    except BrokenPipeError:
        return EXIT_UNREAD
    except SystemExit as end:
        # rich ends the program by itself then, with 1, which means something else to commands.
        if isinstance(end.__context__, BrokenPipeError):
            return EXIT_UNREAD
        raise
    finally:
        _flush()


def _flush() -> None:
    """Print what is left; if nobody reads it, leave nothing that Python would stumble over."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # As the notes on SIGPIPE in Python's documentation of `signal` have it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="specserve", description="Keeps speculative decoding on exactly while it pays."
    )
    parser.add_argument("--version", action="version", version=version("specserve"))
    commands = parser.add_subparsers(dest="command", required=True)
    operate = commands.add_parser(
        "run",
        help="run the operator",
        description="Run the operator until SIGTERM. It reaches the API server as the service\n"
        "account of its pod, or by KUBECONFIG.",
        epilog=f"settings, from the environment:\n{described()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    operate.set_defaults(run=_run)
    bench.add_parser(commands)
    calibrate.add_parser(commands)
    doctor.add_parser(commands)
    local.add_parser(commands)
    replay.add_parsers(commands)
    options = parser.parse_args(argv)
    code: int = options.run(options)
    return code


def _run(_: argparse.Namespace) -> int:
    from specserve import operator, telemetry  # noqa: PLC0415 - see above
    from specserve.kube import NoCluster  # noqa: PLC0415
    from specserve.leader import LeadershipLost  # noqa: PLC0415

    try:
        settings = Settings.from_environ(os.environ)
    except BadSetting as error:
        print(f"specserve: {error}", file=sys.stderr)  # noqa: T201 - a command line prints
        return 2
    logging.basicConfig(
        level=settings.log_level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    health = telemetry.Health()
    try:
        server = telemetry.serve(health, settings.http_port)
    except OSError as error:
        where = f"{PREFIX}HTTP_PORT={settings.http_port}"
        print(f"specserve: {where}: {error.strerror}", file=sys.stderr)  # noqa: T201 - as above
        return 2
    try:
        asyncio.run(operator.run(settings, health))
    except NoCluster as error:
        print(  # noqa: T201 - as above
            f"specserve: no API server: {error}; set KUBECONFIG, or run in a pod with a service "
            "account",
            file=sys.stderr,
        )
        return 2
    except LeadershipLost as error:
        logging.getLogger(__name__).error("leadership lost: %s", error)  # noqa: TRY400
        return 1
    finally:
        server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
