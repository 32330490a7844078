"""The options of SGLang's own parser, read from the source in a wheel."""

from __future__ import annotations

import ast
import zipfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ARGUMENTS = "sglang/srt/server_args.py"
FIELDS = "sglang/srt/arg_groups/fields/"
ANNOTATED = {"A", "Annotated"}


def options(wheel: Path) -> dict[str, str]:
    """Return each spelling of an option with the name of the setting that it sets.

    The names are as on a command line: `--model` sets `--model-path`. Of switches, only the
    spelling that turns them on is there.
    """
    found: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name == ARGUMENTS or (name.startswith(FIELDS) and name.endswith(".py")):
                for node in ast.walk(ast.parse(archive.read(name).decode())):
                    found.update(_of_field(node))
                    found.update(_of_call(node))
    return found


def _of_field(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Read a field such as `model_path: A[str, Arg(help="...", aliases=["--model"])]`."""
    match node:
        case ast.AnnAssign(
            target=ast.Name(id=field),
            annotation=ast.Subscript(value=ast.Name(id=kind), slice=ast.Tuple(elts=[_, *extras])),
        ) if kind in ANNOTATED:
            settings = _keywords(extras)
            if settings.get("no_cli"):
                return
            name = settings.get("cli_name") or _flag(field)
            for spelling in (name, *(settings.get("aliases") or ())):
                yield spelling, name


def _of_call(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Read a call such as `parser.add_argument("--old", dest="new")`."""
    match node:
        case ast.Call(func=ast.Attribute(attr="add_argument")):
            spellings = [item.value for item in node.args if isinstance(item, ast.Constant)]
            dest = _keywords([node]).get("dest")
            for spelling in spellings:
                yield str(spelling), _flag(dest) if dest else str(spellings[0])


def _keywords(calls: list[ast.expr]) -> dict[str, Any]:
    return {
        keyword.arg: ast.literal_eval(keyword.value)
        for call in calls
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg in {"no_cli", "cli_name", "aliases", "dest"}
    }


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
