"""Every name of SGLang that the plugin rests on, and whether this version still has it.

SGLang logs and swallows what goes wrong with a plugin's hooks, and serves without them. So each
name is resolved and its leading parameters are compared before anything is hooked; the first that
moved ends the process (see `plugin`).
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

PROVED: Final = frozenset({"0.5.16", "0.5.23"})
"""Versions on which the whole contract was tried with real servers."""
CHECKED: Final = frozenset({"0.5.14", "0.5.18"})
"""Versions whose names and parameters were compared, and nothing more."""

SKIP_DRAFT_EXTEND: Final = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"
"""Read by the EAGLE worker at each round with 0 steps: leave the draft's cache as it is."""


class Moved(Exception):
    """A name of SGLang is not where, or not what, the plugin expects.

    Attributes:
        target: The dotted name.
    """

    def __init__(self, target: str, what: str) -> None:
        super().__init__(f"{target} {what}")
        self.target = target


@dataclass(frozen=True, slots=True)
class Target:
    """A name in SGLang.

    Attributes:
        module: Its module.
        name: Its dotted name in the module.
        parameters: Names of the leading parameters; None for what is not called.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None

    @property
    def path(self) -> str:
        """The full dotted name, as SGLang's hook registry takes it."""
        return f"{self.module}.{self.name}"

    def resolve(self) -> Any:
        """Return what the name stands for.

        Raises:
            Moved: It is missing, or takes other parameters.
        """
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except Exception as error:
            raise Moved(self.path, f"is missing ({type(error).__name__}: {error})") from error
        if self.parameters is None:
            return found
        try:
            given = tuple(inspect.signature(found).parameters)
        except (TypeError, ValueError) as error:
            raise Moved(self.path, f"cannot be called ({error})") from error
        if given[: len(self.parameters)] != self.parameters:
            expected, actual = ", ".join(self.parameters), ", ".join(given)
            raise Moved(self.path, f"takes ({actual}); expected ({expected}, ...)")
        return found


_SRT: Final = "sglang.srt"
_CONTROLLER: Final = f"{_SRT}.speculative.adaptive_runtime_state"
_SCHEDULER: Final = f"{_SRT}.managers.scheduler"
_TOKENIZER: Final = f"{_SRT}.managers.tokenizer_control_mixin"
_MESSAGES: Final = f"{_SRT}.managers.io_struct"
_HTTP: Final = f"{_SRT}.entrypoints.http_server"

CONTROLLER_INIT: Final = Target(_CONTROLLER, "AdaptiveController.__init__", ("self", "worker"))
CONTROLLER_ACTIVATE: Final = Target(
    _CONTROLLER, "AdaptiveController._activate", ("self", "speculative_num_steps")
)
SCHEDULER_INIT: Final = Target(_SCHEDULER, "Scheduler.__init__", ("self",))
SCHEDULER_SET: Final = Target(_SCHEDULER, "Scheduler.set_internal_state", ("self", "recv_req"))
SCHEDULER_GET: Final = Target(_SCHEDULER, "Scheduler.get_internal_state", ("self", "recv_req"))
HTTP_SETUP: Final = Target(
    _HTTP,
    "_setup_and_run_http_server",
    (
        "server_args",
        "tokenizer_manager",
        "template_manager",
        "port_args",
        "scheduler_infos",
        "subprocess_watchdog",
    ),
)

RANK_HOOKS: Final = (
    CONTROLLER_INIT,
    CONTROLLER_ACTIVATE,
    SCHEDULER_INIT,
    SCHEDULER_SET,
    SCHEDULER_GET,
)
"""Hooked in every process, as SGLang says in none of them what it will become."""

HTTP_HOOKS: Final = (HTTP_SETUP,)
"""Hooked in the process that SGLang was started as."""

VERSION: Final = Target("sglang.version", "__version__")
HOOK_REGISTRY: Final = Target(f"{_SRT}.plugins.hook_registry", "HookRegistry")
HOOK_TYPE: Final = Target(f"{_SRT}.plugins.hook_registry", "HookType")
SET_REPLY: Final = Target(_MESSAGES, "SetInternalStateReqOutput")
SET_REQUEST: Final = Target(_MESSAGES, "SetInternalStateReq")
UNSUPPORTED_REASON: Final = Target(
    f"{_SRT}.speculative.adaptive_spec_params", "adaptive_unsupported_reason", ("server_args",)
)
CONTEXT: Final = Target(f"{_SRT}.runtime_context", "get_context", ())

USED: Final = (
    VERSION,
    CONTEXT,
    HOOK_REGISTRY,
    HOOK_TYPE,
    SET_REPLY,
    SET_REQUEST,
    UNSUPPORTED_REASON,
    Target(_CONTROLLER, "AdaptiveController.activate_step_by_batch", ("self", "batch_size")),
    Target(
        _CONTROLLER,
        "AdaptiveController.on_verify_complete",
        ("self", "num_correct_drafts_per_req", "batch_size"),
    ),
    Target(f"{_SRT}.environ", f"envs.{SKIP_DRAFT_EXTEND}"),
)
"""Needed in every process beside what is hooked."""

HTTP_APP: Final = Target(_HTTP, "app")
HTTP_USED: Final = (
    HTTP_APP,
    Target(_TOKENIZER, "TokenizerControlMixin.set_internal_state", ("self", "obj")),
    Target(_TOKENIZER, "TokenizerControlMixin.get_internal_state", ("self",)),
)
"""Needed in the process that SGLang was started as."""


def check(targets: Iterable[Target]) -> None:
    """Resolve every target.

    Raises:
        Moved: For the first that is missing or takes other parameters.
    """
    for target in targets:
        target.resolve()
