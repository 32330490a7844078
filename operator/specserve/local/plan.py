"""What the options ask for, read and checked before anything is begun."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specserve import document, names
from specserve.bench import connection
from specserve.bench.connection import BadOption
from specserve.curves import ConfigMapText
from specserve.document import Document
from specserve.local import start, state
from specserve.local.launch import Launch
from specserve.local.notes import notes
from specserve.local.places import Place
from specserve.local.session import Wish
from specserve.policy import Curve, CurveError


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    Attributes:
        asked: The SpecServe.
        wish: What is to be done with the engines.
        places: Where they are.
        launches: How to start them; empty where they run already.
        notes: What of the SpecServe means nothing here.
    """

    asked: Document
    wish: Wish
    places: tuple[Place, ...]
    launches: tuple[Launch, ...]
    notes: tuple[str, ...]


def began(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Document, Path]:
    """The SpecServe that the options name, and the folder of its state; nothing is written.

    Raises:
        BadOption: Options exclude each other, or there is no SpecServe that can be used.
    """
    _check(options, started=options.start or options.print)
    asked = read(options.file)
    return asked, options.state or state.default_folder(asked.name, environ)


def plan(
    options: argparse.Namespace, environ: Mapping[str, str], asked: Document, folder: Path
) -> Plan:
    """Read the rest; files for engines that are to be started are written below the folder.

    With `--print` none is, as another process may hold the folder.

    Raises:
        BadOption: Something cannot be used; the message says what to change.
        OSError: A file cannot be written.
    """
    started = options.start or options.print
    curve = _curve(options.curve, asked)
    token, api_key = connection.token(options, environ), connection.api_key(options, environ)
    if not started and token is None:
        raise BadOption(
            f"--token-file: the plugin's token is needed (or set {connection.ENV_TOKEN}); it is "
            "what the engine was started with, in the file "
            f"{names.KEY_PLUGIN_TOKEN} of its credentials folder"
        )
    places = places_of(options.engine, options.admin_url, asked.name)
    count = asked.spec.replicas if started else len(places)
    said = tuple(
        notes(
            asked,
            engines=count,
            started=started,
            api_key=api_key is not None,
            curve=options.curve is not None,
        )
    )
    launches: tuple[Launch, ...] = ()
    if options.print:
        launches = start.drafted(options, asked, folder, environ)
    elif options.start:
        launches, token = start.prepared(options, asked, folder, environ, (token, api_key))
    if started:
        places = tuple(launch.place for launch in launches)
    return Plan(
        asked=asked,
        wish=Wish((asked.namespace, asked.name), asked.spec, (token or "",), api_key, curve),
        places=places,
        launches=launches,
        notes=said,
    )


def read(path: Path) -> Document:
    """The SpecServe in a file.

    Raises:
        BadOption: There is none that can be used.
    """
    try:
        return document.read(_text("-f", path))
    except document.BadDocument as error:
        raise BadOption(f"{path}: {error}") from None


def _check(options: argparse.Namespace, *, started: bool) -> None:
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


def places_of(engines: Sequence[str], admin_urls: Sequence[str], name: str) -> tuple[Place, ...]:
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


def _curve(path: Path | None, asked: Document) -> ConfigMapText | None:
    """What stands for the ConfigMap that the policy names, if it names one or a file is given."""
    named = asked.spec.policy.break_even.curve_config_map
    if path is None:
        missing = "there are no ConfigMaps here; give its curve.json with --curve"
        return None if named is None else ConfigMapText(named, None, missing)
    text = _text("--curve", path)
    try:
        Curve.from_json(text)
    except CurveError as error:
        raise BadOption(f"--curve: {path}: {error}") from None
    return ConfigMapText(str(path), text, kind="file")


def _text(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"{option}: {path}: {getattr(error, 'strerror', error)}") from None
