"""SGLang's names and parameters without its code, made from the source in a wheel.

A real SGLang needs torch to be imported. A skeleton has, of each module that the plugin rests on,
the classes and functions with their parameters and empty bodies, so that the plugin's own check
and SGLang's own hook registry can be tried on it in a moment.
"""

from __future__ import annotations

import ast
import zipfile
from typing import TYPE_CHECKING

from specserve_engine.sglang import upstream

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

TARGETS = (*upstream.USED, *upstream.HTTP_USED, *upstream.RANK_HOOKS, *upstream.HTTP_HOOKS)
REGISTRY = upstream.HOOK_REGISTRY.module
"""Taken as it is: it needs nothing but the standard library."""


def write(wheel: Path, version: str, folder: Path) -> None:
    """Write the skeleton of a wheel; what its source lacks is lacking there too."""
    with zipfile.ZipFile(wheel) as archive:
        for module in sorted({target.module for target in TARGETS}):
            source = archive.read(module.replace(".", "/") + ".py").decode()
            if module == upstream.VERSION.module:
                text = f"__version__ = {version!r}\n"
            elif module == REGISTRY:
                text = source
            else:
                names = {target.name for target in TARGETS if target.module == module}
                text = ast.unparse(_module(ast.parse(source), names))
            path = module_file(folder, module)
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.relative_to(folder).parents:
                (folder / parent / "__init__.py").touch()
            path.write_text(text)


def module_file(folder: Path, module: str) -> Path:
    """Where a module lies in a skeleton."""
    return folder / (module.replace(".", "/") + ".py")


def _module(tree: ast.Module, names: Iterable[str]) -> ast.Module:
    """Keep what is named; `a.b` keeps `b` of the class `a`, or of the class of the value `a`."""
    wanted: dict[str, set[str]] = {}
    for name in names:
        first, _, rest = name.partition(".")
        wanted.setdefault(first, set()).update({rest} - {""})
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in wanted:
            body.append(_class(node, wanted[node.name]))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in wanted:
            body.append(_function(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in _assigned(node) & wanted.keys():
                made = node.value.func if isinstance(node.value, ast.Call) else None
                maker = classes.get(made.id) if isinstance(made, ast.Name) else None
                kept = _class(maker, wanted[name]) if maker else ast.parse("class object_: ...")
                kind = kept.name if isinstance(kept, ast.ClassDef) else "object_"
                body += [kept, *ast.parse(f"{name} = {kind}()").body]
    return ast.fix_missing_locations(ast.Module(body, []))


def _class(node: ast.ClassDef, members: set[str]) -> ast.ClassDef:
    body: list[ast.stmt] = []
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name in members:
            body.append(_function(item))
        elif isinstance(item, ast.Assign | ast.AnnAssign):
            body += [
                statement
                for name in _assigned(item) & members
                for statement in ast.parse(f"{name} = None").body
            ]
    return ast.ClassDef(node.name, [], [], body or [ast.Pass()], [])


def _function(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Keep its name and parameters; decorators, annotations and the values of defaults go."""
    given = node.args
    for parameter in [*given.posonlyargs, *given.args, *given.kwonlyargs]:
        parameter.annotation = None
    for rest in (given.vararg, given.kwarg):
        if rest is not None:
            rest.annotation = None
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [value and ast.Constant(None) for value in given.kw_defaults]
    return type(node)(node.name, given, [ast.Pass()], [])


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}
