"""The command line: parsing and printing only.

Every subcommand brings its own parser and loads what it works with only when it is run: the
operator needs no benchmark, and a benchmark no cluster.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from specserve.bench import command as bench
from specserve.calibrate import command as calibrate
from specserve.doctor import command as doctor
from specserve.local import command as local
from specserve.replay import command as replay
from specserve.settings import PREFIX, BadSetting, Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `specserve` command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="specserve", description="Keeps speculative decoding on exactly while it pays."
    )
    parser.add_argument("--version", action="version", version=version("specserve"))
    commands = parser.add_subparsers(dest="command", required=True)
    operate = commands.add_parser(
        "run",
        help="run the operator",
        description="Run the operator until SIGTERM. It reaches the API server as the service "
        "account of its pod, or by KUBECONFIG.",
        epilog="Settings come from the environment: "
        + ", ".join(PREFIX + name.upper() for name in Settings.model_fields),
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
