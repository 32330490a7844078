"""Bearer tokens from a mounted Secret."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class TokenFile:
    """The tokens `plugin-token` and `plugin-token-previous` of a mounted directory."""

    def __init__(self, directory: Path) -> None: ...

    def authorises(self, header: str | None) -> bool:
        """Say whether an `Authorization` header carries a token that is valid now."""
        raise NotImplementedError
