"""`specserve calibrate`: sweeps, fits, says what came out, writes the curve."""

import argparse
import asyncio
import os
import random
import socket
import sys
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specserve.bench import connection
from specserve.bench.command import (
    ID_RANGE,
    fail,
    interrupted,
    interruptible,
    levels,
    save,
    unprepared,
    writable,
)
from specserve.bench.connection import BadOption, Connection, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specserve.bench.client import Client
    from specserve.bench.server import Server
    from specserve.calibrate.fit import Ratio, Reading
    from specserve.policy.curve import Curve, Provenance

DEFAULT_SIZES = "1,2,4,8,16,32,64,128,256"

DESCRIPTION = """\
Measure from which acceptance on speculation pays on this engine, at which load. The engine is
held at each batch size with each of its step counts in turn, and its own round times are read:

    r_s(B) = time of a round with s draft steps / time of a round with none, at batch B

Speculation pays where a round wins more than r tokens a request. The curve is written to a file
that a SpecServe can use (policy.breakEven.curveConfigMap), with everything it was measured on.

The engine must have no other traffic meanwhile: take the pod out of its Service, or use one of
your own. It is put back to the mode it was found in, also after Ctrl-C."""

EPILOG = """\
examples:
  specserve calibrate --url http://gpu-box:30000 --token-file token --output curve.json \\
      --gpu '1 x NVIDIA H200'
  specserve calibrate --url ... --output new.json --against curve.json
      and name the cells that differ from an earlier run by more than 15 %
  kubectl create configmap my-curve --from-file=curve.json

It takes about nine minutes with the defaults at the round times of an H200; fewer --sizes or
--repeats take less.

exit status: 0 measured and written; 1 written, but in the cells that are named repeats or an
earlier run do not agree, or few rounds were timed; 2 nothing could be measured; 3 the API key or
the plugin token is refused; 130 interrupted, with the batch sizes that were complete by then
written."""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "calibrate",
        help="measure the break-even curve of a live engine",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    connection.add_arguments(parser)
    parser.add_argument(
        "--holder",
        help="steer the engine in this name: that of an operator which has let go of it while its "
        "lease still runs (default: a name of this process)",
    )
    sweep = parser.add_argument_group("the sweep")
    sweep.add_argument(
        "--sizes",
        type=levels,
        default=levels(DEFAULT_SIZES),
        help=f"batch sizes, with commas (default: {DEFAULT_SIZES}, as far as the engine goes)",
    )
    sweep.add_argument(
        "--steps", type=levels, help="draft steps, with commas (default: all that are prepared)"
    )
    sweep.add_argument("--repeats", type=int, default=3, help="visits of each cell (default: 3)")
    sweep.add_argument(
        "--prompt-tokens", type=int, default=128, help="length of each prompt (default: 128)"
    )
    sweep.add_argument("--id-range", **ID_RANGE)
    sweep.add_argument(
        "--max-new-tokens", type=int, default=256, help="length of each answer (default: 256)"
    )
    out = parser.add_argument_group("the curve")
    out.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    out.add_argument(
        "--against", type=Path, metavar="FILE", help="an earlier curve to compare with"
    )
    out.add_argument(
        "--model", help="model source as your SpecServe names it (default: what the server says)"
    )
    out.add_argument("--draft", help="draft source, likewise")
    out.add_argument(
        "--gpu", help="GPU, such as '1 x NVIDIA H200'; few servers tell, and none is guessed"
    )
    out.add_argument("--interconnect", help="what links the GPUs, such as NVLink")
    out.add_argument(
        "--most-bytes",
        type=int,
        metavar="N",
        help="write the curve in one line of at most so many bytes; a sweep whose curve would "
        "not fit is not begun",
    )
    out.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        for name in ("repeats", "prompt_tokens", "max_new_tokens"):
            if getattr(options, name) < 1:
                raise BadOption(f"--{name.replace('_', '-')}: below 1")  # noqa: TRY301
        writable("--output", options.output)
        target = connection.connection_of(options, os.environ)
    except BadOption as error:
        return fail(error)
    return interruptible(calibrate(options, target))


async def calibrate(options: argparse.Namespace, target: Connection) -> int:
    """Sweep, report and write; returns the exit status. Cancelled, it keeps complete sizes."""
    from specserve.bench import screen, server, steering  # noqa: PLC0415 - loads what it needs
    from specserve.bench.client import Client, Unreachable  # noqa: PLC0415
    from specserve.bench.dialects import Api, Wish  # noqa: PLC0415
    from specserve.bench.plan import Estimate  # noqa: PLC0415
    from specserve.bench.prompts import RandomIds  # noqa: PLC0415
    from specserve.calibrate import sweep  # noqa: PLC0415
    from specserve.policy.curve import CurveError  # noqa: PLC0415

    readings: list[Reading] = []
    origin: Provenance | None = None
    status = 0
    try:
        earlier = _earlier(options.against)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client())
            described = await server.describe(client, target)
            hand = await stack.enter_async_context(
                steering.steering(client, target, holder=options.holder)
            )
            accelerator, room = await _room(client, target, described)
            sizes = _sizes(options, room)
            steps = _steps(options, hand.available_steps)
            origin = _provenance(options, described, hand.found, accelerator, target)
            _must_fit(options, sizes, steps, origin)
            wish = Wish(Api.GENERATE, described.model, options.max_new_tokens, stream=False)
            # Not a secret: it only has to differ from run to run.
            source = random.Random()  # noqa: S311
            ids = options.id_range or await server.known_ids(client, target, described)
            prompts = RandomIds(options.prompt_tokens, source, ids=ids)
            work = sweep.Sweep(client, target, hand, wish, prompts, options.prompt_tokens, room)
            cells = sweep.cells_of(sizes, steps, options.repeats)
            estimate = Estimate(list(cells))
            loop = asyncio.get_running_loop()
            with screen.Screen(len(cells), quiet=options.quiet) as shown:
                for cell in cells:
                    shown.begins(cell, estimate)
                    began = loop.time()
                    reading = await work.visit(cell)
                    readings.append(reading)
                    estimate.done(cell, loop.time() - began)
                    shown.ends(cell, f"{reading.seconds * 1e3:8.3f} ms a round", estimate)
    except asyncio.CancelledError as interruption:
        status = interrupted(interruption)
        readings = _complete(readings, options.repeats)
    except (
        BadOption,
        CurveError,
        Refused,
        Unreachable,
        server.NotServing,
        steering.NotSteerable,
        sweep.NotMeasured,
    ) as error:
        return fail(error)
    if origin is None or not any(reading.steps for reading in readings):
        return status or fail("nothing was measured")
    code = _report(options, readings, origin, earlier)
    return code if code == 2 else status or code


def _earlier(path: Path | None) -> "Curve | None":
    from specserve.policy.curve import Curve  # noqa: PLC0415

    if path is None:
        return None
    try:
        return Curve.from_json(path.read_bytes())
    except OSError as error:
        raise BadOption(f"--against: {path}: {error.strerror}") from None


async def _room(
    client: "Client", target: Connection, described: "Server"
) -> "tuple[str | None, Any]":
    from specserve.bench import server  # noqa: PLC0415
    from specserve.calibrate import sweep  # noqa: PLC0415

    url = f"{target.url}/v1/loads"
    reply = await client.call("GET", url, bearer=target.api_key)
    server.refuse_wrong_key(url, reply, target)
    loads = reply.body.get("loads")
    loads = [load for load in loads if isinstance(load, dict)] if isinstance(loads, list) else []
    accelerator = reply.body.get("accelerator")
    # A prompt of that length may have an answer of a few tokens: so it bounds both together.
    context = described.info.get("max_req_input_len")
    room = sweep.Room.of(loads, context if isinstance(context, int) else None)
    return (str(accelerator) if accelerator else None), room


def _sizes(options: argparse.Namespace, room: Any) -> list[int]:
    from specserve.policy.rounds import bucket_of  # noqa: PLC0415

    sizes, buckets = [], set()
    for size in options.sizes:
        objection = room.objection(size, options.prompt_tokens + options.max_new_tokens)
        if not objection and bucket_of(size) in buckets:
            objection = f"batch {size}: the engine does not tell it from a smaller one of the list"
        if objection:
            print(f"left out: {objection}", file=sys.stderr)  # noqa: T201
            continue
        buckets.add(bucket_of(size))
        sizes.append(size)
    if not sizes:
        raise BadOption("--sizes: none of them can be held")
    return sizes


def _steps(options: argparse.Namespace, available: "Sequence[int]") -> list[int]:
    above = [count for count in available if count > 0]
    if 0 not in available or not above:
        raise BadOption(
            f"the engine has prepared {list(available)} steps: 0 and another are needed"
        )
    unknown = sorted(set(options.steps or ()) - set(above))
    if unknown:
        raise BadOption(unprepared(unknown[0], above))
    return list(options.steps or above)


def _must_fit(
    options: argparse.Namespace, sizes: "Sequence[int]", steps: "Sequence[int]", origin: Any
) -> None:
    from specserve.calibrate import fit  # noqa: PLC0415

    if options.most_bytes is None:
        return
    # No figure of a curve is longer than these.
    longest = [
        fit.Ratio(size, count, 99.9999, 99.9999, (), 1.0, 0, 0)
        for size in sizes
        for count in steps
    ]
    bytes_needed = len(fit.curve_of(longest, origin).to_json(compact=True).encode())
    if bytes_needed > options.most_bytes:
        raise BadOption(
            f"--most-bytes: the curve of {len(sizes)} sizes and {len(steps)} step counts may "
            f"take {bytes_needed} bytes, above {options.most_bytes}: name fewer --sizes"
        )


def _provenance(
    options: argparse.Namespace,
    described: "Server",
    found: Any,
    accelerator: str | None,
    target: Connection,
) -> "Provenance":
    from specserve.policy.curve import Provenance  # noqa: PLC0415

    facts = described.facts()
    versions = found.get("versions") or {}
    host = urlsplit(target.url).hostname or ""
    local = host in {"localhost", "::1"} or host.startswith("127.")
    simulated = "simulated engine: times of a model, not of a GPU; " * bool(facts.get("simulated"))
    return Provenance(
        source=f"specserve calibrate {version('specserve')}",
        model=options.model or facts.get("model"),
        draft=options.draft or facts.get("draft"),
        sglang=versions.get("sglang"),
        plugin=versions.get("plugin"),
        gpu=options.gpu or accelerator,
        tensor_parallel=facts.get("tensorParallel"),
        interconnect=options.interconnect,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        host=socket.gethostname() if local else host,
        settings=f"{simulated}{options.prompt_tokens} tokens in, {options.max_new_tokens} out, "
        f"{options.repeats} repeats; draft cold while off; "
        f"attention backend {facts.get('attentionBackend', 'not told')}, "
        f"dtype {facts.get('dtype', 'not told')}",
    )


def _complete(readings: "list[Reading]", repeats: int) -> "list[Reading]":
    """The readings of batch sizes that were gone through: all their steps in all repeats."""
    steps = {reading.steps for reading in readings}
    complete = {
        size
        for size in {reading.batch for reading in readings}
        if sum(reading.batch == size for reading in readings) == len(steps) * repeats
    }
    return [reading for reading in readings if reading.batch in complete]


def _report(
    options: argparse.Namespace,
    readings: "list[Reading]",
    origin: "Provenance",
    earlier: "Curve | None",
) -> int:
    from specserve.calibrate import fit  # noqa: PLC0415

    measured = fit.ratios(readings)
    curve = fit.curve_of(measured, origin)
    try:
        doubts = _say(options, measured, curve, earlier)
    finally:
        # A reader that leaves early must not cost the measurement.
        text = curve.to_json(compact=options.most_bytes is not None)
        failed = save("--output", options.output, text)
    return failed or (1 if doubts else 0)


def _say(
    options: argparse.Namespace,
    measured: "list[Ratio]",
    curve: "Curve",
    earlier: "Curve | None",
) -> list[str]:
    """Tell what came out; returns the doubts about it."""
    from specserve.bench import screen  # noqa: PLC0415
    from specserve.calibrate import fit, sweep  # noqa: PLC0415

    screen.print_table(
        ["batch", "steps", "plain round ms", "r", "95 % +/-", "rounds"],
        [
            [
                str(ratio.batch),
                str(ratio.steps),
                f"{ratio.off_seconds * 1e3:.3f}",
                f"{ratio.mean:.3f}",
                "" if ratio.spread is None else f"{ratio.spread:.3f}",
                str(ratio.rounds),
            ]
            for ratio in measured
        ],
    )
    for sentence in (*fit.break_even_words(measured), *fit.crossover_words(measured)):
        screen.print_line(sentence)
    doubts = [f"repeats differ: {each}" for each in fit.unsettled(measured)]
    doubts += [f"few rounds: {each}" for each in fit.sparse(measured, sweep.FEWEST_ROUNDS)]
    if earlier is not None:
        doubts += [f"runs differ: {each}" for each in fit.disagreements(curve, earlier)]
        if not doubts:
            screen.print_line(
                f"agrees with {options.against} within 15 % in every cell they share"
            )
    for doubt in doubts:
        screen.print_line(doubt)
    return doubts
