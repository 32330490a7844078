"""`specserve local` from its options to its exit status."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from specserve import document, names
from specserve.bench import connection
from specserve.bench.command import fail, interruptible
from specserve.bench.connection import BadOption
from specserve.curves import ConfigMapText
from specserve.document import Document
from specserve.engine import EngineClient
from specserve.local import news, session, start, state
from specserve.local.launch import Launch
from specserve.local.news import News
from specserve.local.places import Place
from specserve.local.processes import Keeper, Records
from specserve.local.session import Wish
from specserve.local.state import State
from specserve.policy import Curve, CurveError


def conduct(options: argparse.Namespace) -> int:
    """Do what the options ask for; returns the exit status."""
    try:
        asked = _document(options.file)
        _check(options)
        given = _keys(options, os.environ)
        curve = _curve(options.curve)
        folder = options.state or state.default_folder(asked.name, os.environ)
        if options.print:
            made, _ = start.prepared(options, asked, folder, os.environ, given)
            for launch in made:
                print(f"# {launch.place.name}\n{launch.shell()}")  # noqa: T201 - it prints
            return 0
        with state.held(folder) as held:
            if options.start:
                made, token = start.prepared(options, asked, folder, os.environ, given)
                start.runnable(made)
                places = tuple(launch.place for launch in made)
            else:
                made, token = (), _token(given[0])
                places = places_of(options.engine, options.admin_url, asked.name)
            wish = session.Wish(
                (asked.namespace, asked.name), asked.spec, (token,), given[1], curve
            )
            return interruptible(_steer(options, wish, places, made, held))
    except (BadOption, state.StateLocked) as error:
        return fail(error)
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")


def _check(options: argparse.Namespace) -> None:
    started = options.start or options.print
    if started and (options.engine or options.admin_url):
        raise BadOption("--engine: these run already; leave it out with --start and --print")
    if not started and not options.engine:
        raise BadOption(
            "--engine: name at least one, such as http://127.0.0.1:30000, or use --start"
        )
    if options.keep and not options.start:
        raise BadOption("--keep: only with --start; engines given by URL always run on")
    for name in ("port", "admin_port"):
        if not 1 <= getattr(options, name) <= 65_535:
            raise BadOption(f"--{name.replace('_', '-')}: a port is from 1 to 65535")


def places_of(engines: list[str], admin_urls: list[str], name: str) -> tuple[Place, ...]:
    """Where the engines are that the options name.

    Raises:
        BadOption: An address is none, or two are the same.
    """
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


def _document(path: Path) -> Document:
    try:
        return document.read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"-f: {path}: {getattr(error, 'strerror', error)}") from None
    except document.BadDocument as error:
        raise BadOption(f"{path}: {error}") from None


def _curve(path: Path | None) -> ConfigMapText | None:
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


def _keys(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[str | None, str | None]:
    """The plugin's token and the serving port's key, as far as they are given."""
    return (
        connection.secret("--token-file", options.token_file, environ.get(connection.ENV_TOKEN)),
        connection.secret(
            "--api-key-file", options.api_key_file, environ.get(connection.ENV_API_KEY)
        ),
    )


def _token(given: str | None) -> str:
    if given is None:
        raise BadOption(
            f"--token-file: the plugin's token is needed (or set {connection.ENV_TOKEN}); it is "
            "what the engine was started with, in the file "
            f"{names.KEY_PLUGIN_TOKEN} of its credentials folder"
        )
    return given


async def _steer(
    options: argparse.Namespace,
    wish: Wish,
    places: tuple[Place, ...],
    made: tuple[Launch, ...],
    held: State,
) -> int:

    async with contextlib.AsyncExitStack() as stack:
        log = None if options.log is None else stack.enter_context(news.open_log(options.log))
        board = news.Board(time.time, _print, log)
        stack.enter_context(news.logged(board))
        state = held.of(wish.key[1], wish.spec)
        if state.trouble:
            board.say("warning", "", state.trouble)
        client = await stack.enter_async_context(EngineClient(session.METRICS))
        work = session.Session(client, places, state, wish, board, wall=time.time)
        folder, records = state.folder / start.FOLDER, Records(state.folder)
        keepers = [
            Keeper(launch, wish.key, client, records, folder, os.environ, board, work.show)
            for launch in made
        ]
        for place in places:
            board.say("note", place.name, f"{place.serving}, admin {place.admin}")
            if not keepers:
                work.show(place.pod(wish.key))
        if not options.lines and sys.stdout.isatty() and find_spec("rich") is not None:
            from specserve.local.view import View  # noqa: PLC0415 - lines need no rich

            seen = stack.enter_context(View(_title(options, wish), work.rows))
            board.tell = seen.tell
        try:
            await work.run(*(keeper.run() for keeper in keepers))
        except asyncio.CancelledError:
            board.say("note", "", _ending(options))
        finally:
            work.save()
            if keepers and not options.keep:
                hurry = _hurry()
                ended = await asyncio.gather(*(keeper.end(hurry) for keeper in keepers))
                well = all(ended)
            else:
                well = await work.leave()
        return 0 if well else 1


def _title(options: argparse.Namespace, wish: Wish) -> str:
    policy = wish.spec.policy
    how = policy.strategy if policy.mode in {"Auto", "Observe"} else f"pinned {policy.mode}"
    watching = ", observing only" if policy.mode == "Observe" else ""
    return f"{wish.key[1]} ({options.file}): {how}{watching}. Ctrl-C ends it"


def _ending(options: argparse.Namespace) -> str:
    if not options.start:
        return "ending: every engine takes the fallback of its last order"
    if options.keep:
        return "ending: the engines run on, in the fallback of their last orders"
    return "ending: the engines finish their requests; once more ends them by force"


def _hurry() -> asyncio.Event:
    """An event that a further SIGINT or SIGTERM sets."""
    hurry, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hurry.set)
    return hurry


def _print(line: News) -> None:
    print(line.line(), flush=True)  # noqa: T201 - a command line prints
