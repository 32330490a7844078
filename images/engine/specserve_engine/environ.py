"""The plugin's settings, from its process environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from specserve_engine.wire import ADMIN_PORT, MAX_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping

POD_UID: Final = "SPECSERVE_POD_UID"
ADMIN_PORT_VARIABLE: Final = "SPECSERVE_ADMIN_PORT"
CREDENTIALS_DIR: Final = "SPECSERVE_CREDENTIALS_DIR"
REQUIRE_LIVE: Final = "SPECSERVE_REQUIRE_LIVE"
STEPS: Final = "SPECSERVE_STEPS"

DEFAULT_CREDENTIALS: Final = "/etc/specserve/credentials"
DEFAULT_STEPS: Final = "0,1,3"


class BadEnvironment(ValueError):
    """A variable that cannot be used; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the pod tells the plugin.

    Attributes:
        pod_uid: `SPECSERVE_POD_UID`, from the downward API.
        admin_port: `SPECSERVE_ADMIN_PORT`.
        credentials: `SPECSERVE_CREDENTIALS_DIR`, where the Secret is mounted.
        require_live: `SPECSERVE_REQUIRE_LIVE`: without live control the pod is not ready.
        steps: `SPECSERVE_STEPS`, the step counts to prepare, ascending, 0 among them.
    """

    pod_uid: str
    admin_port: int
    credentials: Path
    require_live: bool
    steps: tuple[int, ...]


def settings_from(environ: Mapping[str, str]) -> Settings:
    """Read the settings; raise `BadEnvironment` for the first variable that is unusable."""
    pod_uid = environ.get(POD_UID, "").strip()
    if not pod_uid:
        raise BadEnvironment(
            f"{POD_UID} is not set: the engine must know its pod's UID to refuse orders meant for "
            "another; set it from the downward API (fieldRef metadata.uid)"
        )
    return Settings(
        pod_uid=pod_uid,
        admin_port=_port(environ, ADMIN_PORT_VARIABLE, ADMIN_PORT),
        credentials=Path(environ.get(CREDENTIALS_DIR) or DEFAULT_CREDENTIALS),
        require_live=_switch(environ, REQUIRE_LIVE),
        steps=_steps(environ.get(STEPS) or DEFAULT_STEPS),
    )


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if "://" in text:
        raise BadEnvironment(
            f"{name} is {text!r}, not a port number. Kubernetes sets such a variable where a "
            "Service's name fits (a service link): set enableServiceLinks: false in the pod spec, "
            f"or {name} itself"
        )
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 65_535):
        raise BadEnvironment(f"{name} is {text!r}, must be a port number from 1 to 65535")
    return int(text)


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip()
    if text not in {"", "0", "1"}:
        raise BadEnvironment(f"{name} is {text!r}, must be 0 or 1")
    return text == "1"


def _steps(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts):
        raise BadEnvironment(f"{STEPS} is {text!r}, must be step counts such as {DEFAULT_STEPS}")
    steps = tuple(sorted({int(part) for part in parts}))
    if steps[-1] > MAX_STEPS:
        raise BadEnvironment(f"{STEPS} is {text!r}, must not exceed {MAX_STEPS}")
    if steps[0] != 0:
        raise BadEnvironment(f"{STEPS} is {text!r}, must have 0 among them: off is 0 steps")
    return steps
