"""`specserve local`: its options."""

import argparse
from pathlib import Path
from typing import Any

from specserve import names
from specserve.bench import connection

DESCRIPTION = """\
Steer speculation on this box without a cluster. The policy of a SpecServe, its loop and its
decision log are the operator's own: the load of each engine is read, the policy decides, and the
engine is switched while it serves.

The engines run already and are given by URL with --engine; each needs the SpecServe plugin, and
its token. Or they are started with --start, by the very command line that the operator would
render, watched by its probes, and started again when they end; --print shows that command line.

Orders hold for policy.leaseSeconds and are renewed. Ended by Ctrl-C or SIGTERM, given engines are
put into the fallback of their last order at once, and started ones are ended (unless --keep). If
this process is killed, the engines run on and go there by themselves when the lease is over. What
was learnt is kept in the state folder and used by the next run.

Edits of the policy, and new contents of --token-file and --api-key-file, hold within a second."""

EPILOG = """\
examples:
  specserve local -f examples/breakeven.yaml --engine http://127.0.0.1:30000 --token-file token
      one engine, the plugin's listener at port 9470 of the same host
  specserve local -f cr.yaml --engine http://127.0.0.1:30000 --admin-url http://127.0.0.1:9470 \\
      --engine http://127.0.0.1:30001 --admin-url http://127.0.0.1:9471 --token-file token
      two on one box; --engine http://127.0.0.1:30001,http://127.0.0.1:9471 says the same
  specserve local -f cr.yaml --start
      start the engines, too: SGLang and specserve-engine must be installed for this python3
  specserve local -f cr.yaml --print
      only show how they would be started
  specserve local -f cr.yaml --engine ... --log decisions.jsonl > lines.txt
      not on a terminal: one line for each change, and all decisions with their numbers as JSON

exit status: 0 ended as asked, and all engines are in their fallback or have ended; 1 ended as
asked, but an engine did not take its fallback (it goes there when its lease is over) or had to be
ended by force; 2 nothing was begun: standard error says what to change; 3 nothing was begun: an
engine refuses the API key or the plugin token."""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "local",
        help="steer speculation on this box, without a cluster",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-f", "--file", type=Path, required=True, metavar="CR", help="YAML of the SpecServe"
    )
    engines = parser.add_argument_group("the engines")
    engines.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL[,ADMIN_URL]",
        help="serving address of a running engine, and of its plugin's listener; may be repeated",
    )
    engines.add_argument(
        "--admin-url",
        action="append",
        default=[],
        metavar="URL",
        help="address of the plugin's listener of the engine at the same place in the order "
        f"(default: the engine's host, port {names.PORT_ADMIN})",
    )
    connection.add_keys(engines)
    started = parser.add_argument_group("engines started from here")
    started.add_argument("--start", action="store_true", help="start spec.replicas engines")
    started.add_argument(
        "--print",
        action="store_true",
        help="print the command line and the variables of each engine, and end; writes nothing",
    )
    started.add_argument(
        "--keep",
        action="store_true",
        help="leave the engines running at the end, in their fallback; the next --start with the "
        "same state takes them on",
    )
    started.add_argument(
        "--entry-point",
        default="",
        metavar="COMMAND",
        help="what an engine image would run, unless spec.engine.command says (default: "
        "python3 -m sglang.launch_server)",
    )
    started.add_argument(
        "--port",
        type=int,
        default=names.PORT_SERVING,
        help=f"serving port of the first engine, the others' follow (default: "
        f"{names.PORT_SERVING})",
    )
    started.add_argument(
        "--admin-port",
        type=int,
        default=names.PORT_ADMIN,
        help=f"port of its plugin's listener, likewise (default: {names.PORT_ADMIN})",
    )
    kept = parser.add_argument_group("what is known and kept")
    kept.add_argument(
        "--curve",
        type=Path,
        metavar="FILE",
        help="a calibrated curve, in place of the ConfigMap of policy.breakEven.curveConfigMap",
    )
    kept.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="what the policy remembers from run to run (default: "
        "$XDG_STATE_HOME/specserve/NAME, or ~/.local/state/specserve/NAME)",
    )
    kept.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="add each decision with its numbers to a file, one JSON object a line",
    )
    kept.add_argument(
        "--lines",
        action="store_true",
        help="print one line for each change, as where there is no terminal",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from specserve.local.conduct import conduct  # noqa: PLC0415 - a command loads what it needs

    return conduct(options)
