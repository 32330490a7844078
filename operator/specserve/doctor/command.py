"""`specserve doctor`: gathers, judges, prints."""

import argparse
import json
import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from specserve.bench import connection
from specserve.bench.command import fail, interruptible
from specserve.bench.connection import BadOption, Connection, Refused

if TYPE_CHECKING:
    from specserve.doctor.checks import Finding

DESCRIPTION = """\
Look at a live server for what makes speculative decoding slower than none: a silent limit of
48 requests, a draft that is hardly ever right, batches without a CUDA graph, and more. Each item
says what was seen, what it costs, and the flag that mends it. What the server does not show is
said to be not visible: nothing is guessed.

Nothing is changed and nothing is generated; it takes a second."""

EPILOG = """\
examples:
  specserve doctor --url http://gpu-box:30000
  specserve doctor --url http://gpu-box:30000 --token-file token --json | jq '.findings[].check'

exit status: 0 no problem was seen; 1 there is one; 2 nothing answers at the address; 3 the API key
or the plugin token is refused, and nothing was looked at."""

_MARKS = {
    "ok": ("ok", "green"),
    "problem": ("PROBLEM", "bold red"),
    "unknown": ("not visible", "yellow"),
    "not applicable": ("-", "dim"),
}


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="look at a live server for what makes speculation slow",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    connection.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        target = connection.connection_of(options, os.environ)
    except BadOption as error:
        return fail(error)
    return interruptible(examine(options, target))


async def examine(options: argparse.Namespace, target: Connection) -> int:
    """Look at the server and print; returns the exit status."""
    from specserve.bench.client import Client  # noqa: PLC0415 - a command loads what it needs
    from specserve.doctor import checks  # noqa: PLC0415
    from specserve.doctor.gather import NoAnswer, gather  # noqa: PLC0415

    try:
        async with Client() as client:
            evidence = await gather(client, target)
    except (NoAnswer, Refused) as error:
        return fail(error)
    found = checks.findings(evidence)
    problems = [finding for finding in found if finding.verdict == "problem"]
    if options.json:
        document = {
            "tool": f"specserve doctor {version('specserve')}",
            "url": target.url,
            "engine": evidence.info.get("version"),
            "problems": len(problems),
            "findings": [finding.to_json() for finding in found],
        }
        print(json.dumps(document, indent=1))  # noqa: T201 - a command line prints
    else:
        _show(found)
    return 1 if problems else 0


def _show(found: "list[Finding]") -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    lines = Table.grid(padding=(0, 2), pad_edge=False)
    lines.add_column(justify="right", no_wrap=True)
    lines.add_column()
    for finding in found:
        mark, style = _MARKS[finding.verdict]
        text = Text.assemble((finding.title, "bold"), f": {finding.seen}")
        if finding.verdict == "problem":
            text.append(f"\nwhy it costs: {finding.cost}\nmend it: {finding.remedy}")
        elif finding.remedy:
            text.append(f"\nlook: {finding.remedy}")
        lines.add_row(Text(mark, style), text)
    console.print(lines)
    counts = {mark: sum(f.verdict == mark for f in found) for mark in _MARKS}
    noun = "problem" if counts["problem"] == 1 else "problems"
    console.print(
        f"\n{counts['problem']} {noun}, {counts['ok']} fine, {counts['unknown']} not visible "
        f"from here, {counts['not applicable']} not applicable"
    )
