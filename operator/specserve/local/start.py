"""What `--start` and `--print` make of a SpecServe: files and launches."""

import argparse
import hashlib
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from specserve import keys, names, workload
from specserve.bench.connection import BadOption
from specserve.document import Document
from specserve.local.files import private_folder, write_whole
from specserve.local.launch import ENTRY_POINT, Files, Launch, launches

#: Folder of the state's in which engines find what a pod has in volumes.
FOLDER = "engine"
#: Prints those of its arguments that are no modules of this Python; imports none of them.
_ABSENT: Final = (
    "import sys; from importlib.util import find_spec; "
    "print(*(name for name in sys.argv[1:] if find_spec(name) is None))"
)
#: Seconds in which a Python says so; one that takes longer is tried all the same.
_PATIENCE: Final = 30.0


def drafted(
    options: argparse.Namespace, asked: Document, folder: Path, environ: Mapping[str, str]
) -> tuple[Launch, ...]:
    """The launches of all engines; nothing is written, as engines may run by what is there.

    Args:
        options: `--entry-point`, `--port` and `--admin-port`.
        asked: The SpecServe.
        folder: Of the state.
        environ: Variables of this process.

    Raises:
        BadOption: It cannot be started here; the message says what to change.
    """
    try:
        made = launches(
            asked,
            _files(folder),
            environ,
            entry_point=tuple(shlex.split(options.entry_point)) or ENTRY_POINT,
            port=options.port,
            admin_port=options.admin_port,
        )
    except workload.UnusableSpec as error:
        raise BadOption(f"{options.file}: {error}") from None
    if not made:
        raise BadOption(f"{options.file}: spec.replicas is 0: there is nothing to start")
    return made


def prepared(
    options: argparse.Namespace,
    asked: Document,
    folder: Path,
    environ: Mapping[str, str],
    given: tuple[str | None, str | None],
) -> tuple[tuple[Launch, ...], str]:
    """The launches of all engines, their files written, and the plugin's token.

    Args:
        options: As for `drafted`.
        asked: The SpecServe.
        folder: Of the state; it must be held.
        environ: Variables of this process.
        given: The plugin's token and the serving port's key, as far as they are given.

    Raises:
        BadOption: It cannot be started here; the message says what to change.
        OSError: A file cannot be written.
    """
    made = drafted(options, asked, folder, environ)
    files = _files(folder)
    private_folder(files.folder)
    private_folder(files.credentials)
    credentials = _credentials(files.credentials, given[0])
    contents = files.contents(asked.spec, credentials, given[1])
    for path, text in contents.items():
        if _text(path) != text:
            write_whole(path, text)
    # Credentials are read anew while an engine runs, the others only when it starts.
    read_once = [text for path, text in contents.items() if path.parent != files.credentials]
    digest = hashlib.sha256("\0".join(read_once).encode()).hexdigest()
    return tuple(replace(one, files=digest) for one in made), credentials[names.KEY_PLUGIN_TOKEN]


def renew(folder: Path, token: str) -> None:
    """Give engines that were started another token; they take the one before, too.

    Args:
        folder: Of the state; it must be held.
        token: The new one.

    Raises:
        OSError: A file cannot be written.
    """
    place = _files(folder).credentials
    # The one before comes last in it, and is written first: it is valid all the time.
    for name, text in reversed(_credentials(place, token).items()):
        if _text(place / name) != text:
            write_whole(place / name, text)


def runnable(made: tuple[Launch, ...], environ: Mapping[str, str]) -> None:
    """Refuse what cannot start, as far as that is seen before anything is started.

    Args:
        made: The launches.
        environ: Variables of this process.

    Raises:
        BadOption: The command, or the Python module that it runs, is not there.
    """
    command, *words = made[0].command
    if shutil.which(command) is None:
        raise BadOption(
            f"{command} is not found: say with --entry-point what starts an engine, or with "
            "spec.engine.command"
        )
    if len(words) > 1 and words[0] == "-m":
        absent = _absent(command, words[1].partition(".")[0], made[0].environment(environ))
        if absent:
            raise BadOption(
                f"{' and '.join(absent)} cannot be imported by {command}, which is to run "
                f"-m {words[1]}: install what is missing for it, or say with --entry-point "
                "(or spec.engine.command) what starts an engine"
            )


def _absent(python: str, package: str, environ: Mapping[str, str]) -> list[str]:
    """Which of the packages that an engine needs a Python lacks."""
    # SGLang alone would serve, and nobody could steer it.
    needed = [package, "specserve_engine"] if package == "sglang" else [package]
    try:
        done = subprocess.run(  # noqa: S603 - the user's own command
            [python, "-c", _ABSENT, *needed],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.split() if done.returncode == 0 else []


def _files(folder: Path) -> Files:
    return Files(folder.resolve() / FOLDER)


def _credentials(folder: Path, token: str | None) -> dict[str, str]:
    """Those that lie there, so that an engine that runs on knows them; what is missing is made."""
    made = {name: _text(folder / name) or make() for name, make in keys.MADE.items()}
    before = made[names.KEY_PLUGIN_TOKEN]
    if token is not None and token != before:
        # Engines take the one before until they have read the new one.
        return {
            **made,
            names.KEY_PLUGIN_TOKEN: token,
            names.KEY_PLUGIN_TOKEN_PREVIOUS: before,
        }
    previous = _text(folder / names.KEY_PLUGIN_TOKEN_PREVIOUS) or ""
    return {**made, names.KEY_PLUGIN_TOKEN_PREVIOUS: previous}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
