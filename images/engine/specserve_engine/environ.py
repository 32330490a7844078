"""The plugin's settings, from its process environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class BadEnvironment(ValueError):  # noqa: N818 - named for the fact, as all our exceptions
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
    raise NotImplementedError
