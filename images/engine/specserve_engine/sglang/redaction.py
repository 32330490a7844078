"""Keeps SGLang's keys out of the answers and the log that show its configuration.

`/server_info` shows all arguments, the admin key among them, to whoever holds the user's key, and
to anybody where only an admin key is set. The log has all of them from the start.
"""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

PATHS: Final = frozenset({"/server_info", "/get_server_info"})
KEYS: Final = frozenset({"api_key", "admin_api_key"})
BLANK: Final = "***"

_NAMED: Final = re.compile(r"""(api_key['"]?\s*[=:]\s*)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
"""A key as arguments are printed: named, and quoted as Python does."""


def blank(value: Any, secrets: frozenset[str] = frozenset()) -> Any:
    """Return a JSON value without keys: by their field's name, and wherever their text stands."""
    if isinstance(value, dict):
        return {
            name: BLANK if name in KEYS and item else blank(item, secrets)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [blank(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, BLANK)
    return value


def blank_log() -> None:
    """Blank the keys in what this process logs from now on, whoever logs it and where to."""
    make = logging.getLogRecordFactory()

    def made(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        # SGLang puts the text together before it logs it; what is in arguments is left alone,
        # as records are made too often to format each of them twice.
        if isinstance(record.msg, str) and "api_key" in record.msg:
            record.msg = _NAMED.sub(rf"\1'{BLANK}'", record.msg)
        return record

    logging.setLogRecordFactory(made)


class Redaction:
    """ASGI middleware that blanks the JSON answers of `PATHS`."""

    def __init__(self, app: App, secrets: Iterable[str | None] = ()) -> None:
        """Wrap an application; `secrets` are the keys themselves, None where one is not set."""
        self._app = app
        self._secrets = frozenset(secret for secret in secrets if secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["path"].rstrip("/") not in PATHS:
            await self._app(scope, receive, send)
            return
        start: MutableMapping[str, Any] = {}
        body = bytearray()

        async def hold(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            if message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
                if message.get("more_body"):
                    return
                shown = self._blanked(bytes(body))
                length = (b"content-length", str(len(shown)).encode())
                kept = [pair for pair in start["headers"] if pair[0].lower() != length[0]]
                await send({**start, "headers": [*kept, length]})
                message = {"type": "http.response.body", "body": shown}
            await send(message)

        await self._app(scope, receive, hold)

    def _blanked(self, body: bytes) -> bytes:
        try:
            value = json.loads(body)
        except ValueError:
            for secret in self._secrets:
                body = body.replace(secret.encode(), BLANK.encode())
            return body
        return json.dumps(blank(value, self._secrets), separators=(",", ":")).encode()
