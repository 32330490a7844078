"""`specserve bench`: its options, and the run from the first request to the report."""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.bench import connection, plan
from specserve.bench.connection import EXIT_REFUSED, BadOption, Connection, Refused

if TYPE_CHECKING:
    from specserve.bench.client import Client
    from specserve.bench.dialects import Api
    from specserve.bench.prompts import Prompts
    from specserve.bench.runner import Measured, Side
    from specserve.bench.server import Server

#: More connections than this one client process cannot serve.
MOST = 10_000

DESCRIPTION = """\
Measure a server of a language model under a closed loop: a fixed number of requests is kept in
flight, level after level, and the engine sets the pace. The result is a table of tokens per second
with the latencies behind them.

With --flip the same live server is measured with speculation on, off and left to the engine. The
three take turns (on, off, auto, auto, off, on), so that a slow drift of the machine cancels.
Nothing is restarted, and the server is put back to the mode it was found in, also after Ctrl-C."""

EPILOG = """\
examples:
  specserve bench --url http://gpu-box:30000
      the server as it is, with the built-in coding prompts
  specserve bench --url http://gpu-box:30000 --flip --token-file token --plot table.png
      is speculation worth it here, and up to which load
  specserve bench --url http://gpu-box:30000 --baseline http://gpu-box:30001
      against a second, plain server
  specserve bench --url http://gpu-box:30000 --levels 1,8,64 --prompts mine.jsonl --json out.json

What the prompts are decides how often the draft is right: for random token ids hardly ever.
Measure with prompts like your traffic's before you decide anything.

exit status: 0 all requests were answered in full; 1 some were lost; 2 nothing could be measured;
3 the API key or the plugin token is refused; 130 interrupted, with what was measured until then
reported."""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="measure throughput and latency, with speculation on and off",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    connection.add_arguments(parser)
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--flip",
        action="store_true",
        help="on, off and auto in this one server; needs the plugin's listener and its token",
    )
    what.add_argument(
        "--steps", type=int, help="draft steps of 'on' (default: the most the engine has)"
    )
    what.add_argument(
        "--draft-kv",
        choices=("cold", "warm"),
        default="cold",
        help="what 'off' does to the draft: nothing at all, or keep its cache filled",
    )
    what.add_argument(
        "--baseline",
        metavar="URL",
        help="a second server to compare with; it is sent the same key",
    )
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--levels",
        type=levels,
        default=plan.DEFAULT_LEVELS,
        help="requests in flight, with commas (default: "
        f"{','.join(map(str, plan.DEFAULT_LEVELS))})",
    )
    load.add_argument(
        "--max-new-tokens", type=int, default=512, help="length of each answer (default: 512)"
    )
    load.add_argument(
        "--stop-at-end",
        action="store_true",
        help="let the model end its answers; without it all have the full length, and another "
        "length counts as lost",
    )
    load.add_argument(
        "--no-stream",
        action="store_true",
        help="ask for whole answers; the time to the first token is not measured then",
    )
    load.add_argument(
        "--rounds",
        type=int,
        help=f"requests of a cell for each in flight (default: {plan.ROUNDS}, from "
        f"{plan.LARGE} in flight {plan.ROUNDS_LARGE})",
    )
    load.add_argument(
        "--seconds", type=float, help="instead of counting, send new requests for so long"
    )
    load.add_argument(
        "--repeats", type=int, default=1, help="how often each level is gone through (default: 1)"
    )
    load.add_argument(
        "--api",
        choices=("auto", "generate", "completions", "chat"),
        default="auto",
        help="route: SGLang's own /generate, or an OpenAI one (default: what the server has)",
    )
    asked = parser.add_argument_group("the prompts")
    asked.add_argument(
        "--prompts",
        default="coding",
        metavar="SET",
        help="coding (the built-in set), random (token ids), or a JSONL file: a text, or an "
        "object with prompt, text, input_ids or messages on each line",
    )
    asked.add_argument(
        "--prompt-tokens", type=int, default=128, help="length of random prompts (default: 128)"
    )
    asked.add_argument("--id-range", **ID_RANGE)
    asked.add_argument(
        "--shared-prefix",
        action="store_true",
        help="let prompts share their beginnings, so that the server's prefix cache helps; "
        "otherwise every prompt begins with something new",
    )
    asked.add_argument(
        "--seed", type=int, help="make the order of prompts repeatable (default: new each run)"
    )
    out = parser.add_argument_group("the report")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    out.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw throughput over concurrency as PNG"
    )
    out.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        _check(options)
        target = connection.connection_of(options, os.environ)
    except BadOption as error:
        return fail(error)
    return interruptible(measure(options, target))


def fail(error: object) -> int:
    """Say on standard error why nothing could be done; returns the exit status."""
    for text in (error, *getattr(error, "__notes__", ())):
        print(f"specserve: {text}", file=sys.stderr)  # noqa: T201 - a command line prints
    return EXIT_REFUSED if isinstance(error, Refused) else 2


def writable(option: str, path: Path | None) -> None:
    """Find out before anything is measured whether a file can be written.

    Raises:
        BadOption: It cannot.
    """
    if path is None:
        return
    place = path if path.exists() else path.parent
    if path.is_dir() or not place.exists():
        raise BadOption(f"{option}: {path}: no file in a folder that is there")
    if not os.access(place, os.W_OK):
        raise BadOption(f"{option}: {path}: may not be written")


def save(option: str, path: Path, text: str) -> int:
    """Write a file; if that fails, what took minutes to measure goes to standard output instead.

    Returns:
        The exit status.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(text)  # noqa: T201 - a command line prints
        return fail(f"{option}: {path}: {error.strerror}; it is on standard output instead")
    return 0


def unprepared(wanted: int, prepared: Sequence[int]) -> str:
    """Why a step count cannot be measured, and what to do about it."""
    if not prepared:
        return "the engine has prepared no draft steps: have it started with some (draft.steps)"
    ready = ", ".join(map(str, prepared))
    return (
        f"--steps: the engine has not prepared {wanted}: it has prepared {ready}; ask for these, "
        "or have it started with more (draft.steps)"
    )


def interrupted(error: BaseException) -> int:
    """Say what an interruption left undone; returns the exit status."""
    for note in getattr(error, "__notes__", ()):
        print(f"specserve: {note}", file=sys.stderr)  # noqa: T201 - as above
    return 130


def interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Run to the end, or until SIGINT or SIGTERM cancels the work.

    Only the first of them does: impatience must not cut short what puts the engine back.
    """

    async def main() -> int:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            if not task.cancelling():
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, cancel)
        return await task

    return asyncio.run(main())


def _check(options: argparse.Namespace) -> None:
    from specserve.bench import plot  # noqa: PLC0415 - a command loads what it needs

    if options.plot and not plot.available():
        raise BadOption(f"--plot: {plot.MISSING}")
    for name in ("max_new_tokens", "rounds", "seconds", "repeats", "prompt_tokens", "steps"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise BadOption(f"--{name.replace('_', '-')}: {value} is not a number above 0")
    writable("--json", options.json)
    writable("--plot", options.plot)
    if options.steps is not None and not options.flip:
        raise BadOption("--steps: only with --flip")


def id_range(text: str) -> range:
    """Read a range of token ids, such as `1000-30000`, both ends included.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
        raise argparse.ArgumentTypeError("two numbers with a dash between them, as 1000-30000")
    return range(int(low), int(high) + 1)


ID_RANGE: dict[str, Any] = {
    "type": id_range,
    "metavar": "FROM-TO",
    "help": "ids of random prompts (default: ids that each server's own tokenizer makes). Keep "
    "within the vocabulary of each model: an id beyond it ends SGLang",
}


def levels(text: str) -> tuple[int, ...]:
    """Read an option of several numbers, such as `1,8,64`; they come back ascending.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    parts = {part.strip() for part in text.split(",")} - {""}
    if not parts or not all(
        part.isdecimal() and len(part) <= len(str(MOST)) and 0 < int(part) <= MOST
        for part in parts
    ):
        raise argparse.ArgumentTypeError(f"numbers from 1 to {MOST:,}, with commas between them")
    return tuple(sorted(map(int, parts)))


async def measure(options: argparse.Namespace, target: Connection) -> int:
    """Measure and report; returns the exit status. Cancelled, it reports what there is."""
    from contextlib import AsyncExitStack  # noqa: PLC0415

    from specserve.bench import runner, screen, server, steering  # noqa: PLC0415
    from specserve.bench.client import Client, Unreachable  # noqa: PLC0415
    from specserve.bench.prompts import BadPrompts  # noqa: PLC0415

    began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    measured: Measured | None = None
    told: dict[str, Any] = {}
    status = 0
    cells: list[plan.Cell] = []
    try:
        # Not a secret: it only has to differ from run to run.
        source = random.Random(options.seed)  # noqa: S311
        written = _written(options, source)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client())
            described = await server.describe(client, target)
            told["server"] = described.facts()
            side = await _side(options, client, target, described, written, source)
            other = None
            if options.baseline:
                there = connection.base_url("--baseline", options.baseline)
                second = Connection(there, there, api_key=target.api_key)
                plain = await server.describe(client, second)
                told["baseline"] = plain.facts()
                if written is not None and written.has_ids:
                    await server.same_ids(client, (target, described), (second, plain))
                other = await _side(options, client, second, plain, written, source)
            hand = steps = None
            if options.flip:
                hand = await stack.enter_async_context(steering.steering(client, target))
                steps = _steps(options, hand.available_steps)
                told["server"]["plugin"] = hand.found["versions"]["plugin"]
            arms = plan.arms_of(
                flip=options.flip,
                baseline=other is not None,
                steps=steps,
                draft_kv=options.draft_kv,
            )
            cells = plan.cells_of(options.levels, arms, options.repeats)
            work = runner.Runner(
                client,
                side,
                baseline=other,
                hand=hand,
                rounds=options.rounds,
                seconds=options.seconds,
            )
            measured = work.measured
            with screen.Screen(len(cells), quiet=options.quiet) as shown:
                await work.run(cells, runner.Watch(shown.begins, shown.ends))
    except asyncio.CancelledError as interruption:
        status = interrupted(interruption)
    except (
        BadOption,
        BadPrompts,
        Refused,
        Unreachable,
        runner.NothingCame,
        server.NotServing,
        steering.NotSteerable,
    ) as error:
        status = fail(error)
    if measured is None or not measured.visits:
        return status
    return _report(options, measured, began=began, servers=told, total=len(cells), status=status)


def _written(options: argparse.Namespace, source: random.Random) -> "Prompts | None":
    """Prompts that are given; None if random ones are wanted."""
    from specserve.bench import prompts  # noqa: PLC0415

    if options.prompts == prompts.RandomIds.name:
        return None
    shared = options.shared_prefix
    if options.prompts == prompts.BUILT_IN:
        return prompts.Written(prompts.BUILT_IN, prompts.built_in(), source, shared=shared)
    path = Path(options.prompts)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8 text"
        raise BadOption(f"--prompts: {path}: {why}; or use coding or random") from None
    return prompts.Written(path.name, prompts.read_lines(lines, str(path)), source, shared=shared)


async def _side(
    options: argparse.Namespace,
    client: "Client",
    target: Connection,
    described: "Server",
    written: "Prompts | None",
    source: random.Random,
) -> "Side":
    """One of the servers, with prompts out of its own vocabulary unless others are given."""
    from specserve.bench import prompts, runner, server  # noqa: PLC0415
    from specserve.bench.dialects import Wish  # noqa: PLC0415

    asked = written
    if asked is None:
        ids = options.id_range or await server.known_ids(client, target, described)
        shared = options.shared_prefix
        asked = prompts.RandomIds(options.prompt_tokens, source, ids=ids, shared=shared)
    api: Api = server.api_for(described, options.api, ids=asked.has_ids)
    wish = Wish(
        api,
        described.model,
        options.max_new_tokens,
        stream=not options.no_stream,
        until_end=options.stop_at_end,
    )
    return runner.Side(target, wish, asked, has_draft=described.may_speculate)


def _steps(options: argparse.Namespace, available: Sequence[int]) -> int:
    wanted: int = options.steps or max(available)
    if wanted not in available or wanted == 0:
        raise BadOption(unprepared(wanted, [count for count in available if count]))
    return wanted


def _report(
    options: argparse.Namespace,
    measured: "Measured",
    *,
    began: str,
    servers: dict[str, Any],
    total: int,
    status: int,
) -> int:
    from specserve.bench import plot, report, screen  # noqa: PLC0415

    table = measured.figures()
    done = sum(len(visits) for visits in measured.visits.values())
    document = report.document(
        table,
        at=began,
        settings={
            "url": connection.base_url("--url", options.url),
            "levels": list(options.levels),
            "maxNewTokens": options.max_new_tokens,
            "stream": not options.no_stream,
            "stopAtEnd": options.stop_at_end,
            "prompts": Path(options.prompts).name,
            "sharedPrefix": options.shared_prefix,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "repeats": options.repeats,
            "draftKv": options.draft_kv if options.flip else None,
        },
        servers=servers,
        complete=done == total,
        version=version("specserve"),
    )
    failed = 0
    try:
        screen.print_table(*report.throughput_rows(table))
        screen.print_table(*report.latency_rows(table))
        for sentence in document["summary"]:
            screen.print_line(sentence)
        if done < total:
            screen.print_line(f"incomplete: {done} of {total} cells were measured")
    finally:
        # A reader that leaves early must not cost the measurement.
        if options.json:
            failed = save("--json", options.json, json.dumps(document, indent=1) + "\n")
        if options.plot:
            try:
                plot.draw(document, options.plot)
            except OSError as error:
                failed = fail(f"--plot: {options.plot}: {error.strerror}")
    return failed or status or (1 if report.lost(table) else 0)
