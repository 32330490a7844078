"""Bearer tokens from a mounted Secret."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

CURRENT: Final = "plugin-token"
PREVIOUS: Final = "plugin-token-previous"

_Stamp = tuple[int, int, int]


class TokenFile:
    """The tokens in the files `plugin-token` and `plugin-token-previous` of a directory.

    Both are valid, so that a token can be replaced while both sides still read the old one. A
    file is read again when it is another one or was changed, as the kubelet replaces a mounted
    Secret by swapping a link. A missing, unreadable or empty file authorises nobody. The tokens
    appear in no message and no repr.
    """

    def __init__(self, directory: Path) -> None:
        self._files = [_Cached(directory / CURRENT), _Cached(directory / PREVIOUS)]

    def authorises(self, header: str | None) -> bool:
        """Say whether an `Authorization` header carries a token that is valid now."""
        scheme, _, given = (header or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Header values are decoded as Latin-1: this gives back the bytes that were sent.
        presented = given.strip().encode("latin-1", "backslashreplace")
        valid = False
        for file in self._files:
            token = file.token()
            # No short cut at the first match: the time taken must not tell which one matched.
            valid |= bool(token) and hmac.compare_digest(token, presented)
        return valid


class _Cached:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: _Stamp | None = None
        self._token = b""

    def token(self) -> bytes:
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
            if stamp != self._stamp:
                self._token = self._path.read_bytes().strip()
                self._stamp = stamp
        except OSError:
            self._stamp = None
            self._token = b""
        return self._token
