"""`specserve local`: its options, and how it ends."""

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve import document, names
from specserve.bench import connection
from specserve.bench.command import fail, interruptible
from specserve.bench.connection import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specserve.curves import ConfigMapText
    from specserve.document import Document
    from specserve.local.news import News
    from specserve.local.places import Place
    from specserve.local.state import State

DESCRIPTION = """\
Steer speculation on this box without a cluster. The policy of a SpecServe, its loop and its
decision log are the operator's own: the load of each engine is read, the policy decides, and the
engine is switched while it serves.

The engines run already and are given by URL; each needs the SpecServe plugin, and its token.
Orders hold for policy.leaseSeconds and are renewed. Ended by Ctrl-C or SIGTERM, every engine is
put into the fallback of its last order at once; killed, the engines go there by themselves when
the lease is over. What was learnt is kept in the state folder and used by the next run."""

EPILOG = """\
examples:
  specserve local -f examples/breakeven.yaml --engine http://127.0.0.1:30000 --token-file token
      one engine, the plugin's listener at port 9470 of the same host
  specserve local -f cr.yaml --engine http://127.0.0.1:30000 --admin-url http://127.0.0.1:9470 \\
      --engine http://127.0.0.1:30001 --admin-url http://127.0.0.1:9471 --token-file token
      two on one box; --engine http://127.0.0.1:30001,http://127.0.0.1:9471 says the same
  specserve local -f cr.yaml --engine ... --log decisions.jsonl > lines.txt
      not on a terminal: one line for each change, and all decisions with their numbers as JSON

exit status: 0 ended as asked, and all engines are in their fallback; 1 ended as asked, but an
engine did not take it and goes there when its lease is over; 2 nothing was begun: standard error
says what to change."""


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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from specserve.local import state  # noqa: PLC0415 - a command loads what it needs

    try:
        asked = _document(options.file)
        places = places_of(options.engine, options.admin_url, asked.name)
        curve = _curve(options.curve)
        keys = _keys(options, os.environ)
        folder = options.state or state.default_folder(asked.name, os.environ)
        with state.held(folder) as held:
            return interruptible(_steer(options, asked, places, curve, keys, held))
    except (BadOption, state.StateLocked) as error:
        return fail(error)
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")


def places_of(engines: "list[str]", admin_urls: "list[str]", name: str) -> "tuple[Place, ...]":
    """Where the engines are that the options name.

    Raises:
        BadOption: None is named, an address is none, or two are the same.
    """
    from specserve.local.places import Place  # noqa: PLC0415

    if not engines:
        raise BadOption("--engine: name at least one, such as http://127.0.0.1:30000")
    if len(admin_urls) > len(engines):
        raise BadOption(f"--admin-url: {len(admin_urls)} for {len(engines)} of --engine")
    found: list[Place] = []
    for number, text in enumerate(engines):
        serving, _, beside = text.partition(",")
        apart = admin_urls[number] if number < len(admin_urls) else ""
        if beside and apart:
            raise BadOption(f"--admin-url: {apart}, and --engine {text} names another")
        url = connection.base_url("--engine", serving)
        admin = beside or apart
        place = Place(
            f"{name}-{number}",
            url,
            connection.base_url("--admin-url", admin) if admin else connection.plugin_url(url),
        )
        for other in found:
            if other.serving == place.serving or other.admin == place.admin:
                raise BadOption(
                    f"--engine: {text} and {other.serving} share an address; two engines on one "
                    "host need an --admin-url each"
                )
        found.append(place)
    return tuple(found)


def _document(path: Path) -> "Document":
    try:
        return document.read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"-f: {path}: {getattr(error, 'strerror', error)}") from None
    except document.BadDocument as error:
        raise BadOption(f"{path}: {error}") from None


def _curve(path: Path | None) -> "ConfigMapText | None":
    from specserve.curves import ConfigMapText  # noqa: PLC0415
    from specserve.policy import Curve, CurveError  # noqa: PLC0415

    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
        Curve.from_json(text)
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"--curve: {path}: {getattr(error, 'strerror', error)}") from None
    except CurveError as error:
        raise BadOption(f"--curve: {path}: {error}") from None
    return ConfigMapText(str(path), text, kind="file")


def _keys(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, str | None]:
    token = connection.secret(
        "--token-file", options.token_file, environ.get(connection.ENV_TOKEN)
    )
    if token is None:
        raise BadOption(
            f"--token-file: the plugin's token is needed (or set {connection.ENV_TOKEN}); it is "
            "what the engine was started with, in the file "
            f"{names.KEY_PLUGIN_TOKEN} of its credentials folder"
        )
    return token, connection.secret(
        "--api-key-file", options.api_key_file, environ.get(connection.ENV_API_KEY)
    )


async def _steer(
    options: argparse.Namespace,
    asked: "Document",
    places: "Iterable[Place]",
    curve: "ConfigMapText | None",
    keys: tuple[str, str | None],
    held: "State",
) -> int:
    from specserve.engine import EngineClient  # noqa: PLC0415
    from specserve.local import news, session  # noqa: PLC0415

    token, api_key = keys
    wish = session.Wish((asked.namespace, asked.name), asked.spec, (token,), api_key, curve)
    async with contextlib.AsyncExitStack() as stack:
        log = None if options.log is None else stack.enter_context(news.open_log(options.log))
        board = news.Board(time.time, _print, log)
        state = held.of(asked.name, asked.spec)
        if state.trouble:
            board.say("warning", "", state.trouble)
        client = await stack.enter_async_context(EngineClient(session.METRICS))
        work = session.Session(client, places, state, wish, board, wall=time.time)
        for place in work.places:
            board.say("note", place.name, f"{place.serving}, admin {place.admin}")
            work.begin(place)
        try:
            await work.run()
        except asyncio.CancelledError:
            board.say("note", "", "ending: every engine takes the fallback of its last order")
        finally:
            work.save()
        return 0 if await work.leave() else 1


def _print(line: "News") -> None:
    print(line.line(), flush=True)  # noqa: T201 - a command line prints
