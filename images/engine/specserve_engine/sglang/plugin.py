"""The entry point: checks this SGLang, and hooks it or ends the process.

SGLang swallows every `Exception` of a plugin and serves without it. `SystemExit` is none.
"""

from __future__ import annotations

import importlib.metadata
import logging
import multiprocessing
import os
import secrets
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from pathlib import Path

    from specserve_engine.sglang.upstream import Target

NONCE: Final = "SPECSERVE_NONCE"
"""Where the first process leaves the nonce for those it starts."""
NONCE_FILE: Final = "nonce"
"""The key of the credentials that holds it: pods of one engine on several nodes share it."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Hook SGLang in this process.

    Raises:
        SystemExit: This SGLang, its switches or the environment rule live control out. The
            message names what is at fault.
    """
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - SGLang would serve without us
        _refuse(f"{type(error).__name__}: {error}")


def _register() -> None:
    from specserve_engine.environ import BadEnvironment, settings_from  # noqa: PLC0415
    from specserve_engine.sglang import last_words, upstream  # noqa: PLC0415
    from specserve_engine.sglang.agent import Agent  # noqa: PLC0415
    from specserve_engine.sglang.redaction import blank_log  # noqa: PLC0415

    blank_log()
    last_words.listen()
    first = multiprocessing.parent_process() is None
    hooked = [*upstream.RANK_HOOKS, *(upstream.HTTP_HOOKS if first else ())]
    used = [*upstream.USED, *(upstream.HTTP_USED if first else ())]
    try:
        upstream.check([*used, *hooked])
    except upstream.Moved as error:
        _refuse(f"this SGLang is not supported: {error}")
    versions = (upstream.VERSION.resolve(), importlib.metadata.version("specserve-engine"))
    if first:
        if os.environ.get("SGLANG_RUST_SERVER", "0").lower() in {"1", "true", "yes"}:
            _refuse("SGLANG_RUST_SERVER leaves no Python HTTP server to carry the admin listener")
        try:
            settings = settings_from(os.environ)
        except BadEnvironment as error:
            _refuse(str(error))
        os.environ[NONCE] = str(_nonce(settings.credentials))
    agent = Agent(
        nonce=int(os.environ[NONCE]),
        versions=versions,
        reply=upstream.SET_REPLY.resolve(),
        unsupported_reason=upstream.UNSUPPORTED_REASON.resolve(),
        context=upstream.CONTEXT.resolve(),
    )
    hooks: list[tuple[Target, Any, str]] = [
        (upstream.CONTROLLER_INIT, agent.after_controller_init, "AFTER"),
        (upstream.CONTROLLER_ACTIVATE, agent.around_activate, "AROUND"),
        (upstream.SCHEDULER_INIT, agent.after_scheduler_init, "AFTER"),
        (upstream.SCHEDULER_SET, agent.around_set_internal_state, "AROUND"),
        (upstream.SCHEDULER_GET, agent.after_get_internal_state, "AFTER"),
    ]
    if first:
        from specserve_engine.sglang.host import Host  # noqa: PLC0415

        host = Host(settings, versions, int(os.environ[NONCE]))
        hooks.append((upstream.HTTP_SETUP, host.before_setup, "BEFORE"))
    _apply(hooks)
    _log.warning(
        "specserve: hooked SGLang %s (%s)",
        versions[0],
        "proved"
        if versions[0] in upstream.PROVED
        else "names and parameters checked, not proved by running",
    )


def _apply(hooks: list[tuple[Target, Any, str]]) -> None:
    from specserve_engine.sglang import upstream  # noqa: PLC0415

    registry, kinds = upstream.HOOK_REGISTRY.resolve(), upstream.HOOK_TYPE.resolve()
    for target, hook, kind in hooks:
        registry.register(target.path, hook, getattr(kinds, kind))
    registry.apply_hooks()
    for target, _, _ in hooks:
        if target.path not in registry._patched:  # noqa: SLF001 - failures are only logged
            _refuse(f"{target.path} could not be hooked")


def _nonce(credentials: Path) -> int:
    try:
        text = (credentials / NONCE_FILE).read_text().strip()
    except FileNotFoundError:
        return secrets.randbelow(2**53 - 1) + 1
    if not (text.isascii() and text.isdigit() and 0 < int(text[:17]) < 2**53):
        _refuse(f"{credentials / NONCE_FILE} must hold a whole number below 2**53")
    return int(text)


def _refuse(message: str) -> NoReturn:
    _log.critical("specserve: %s", message)
    raise SystemExit(f"specserve: {message}")
