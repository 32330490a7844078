"""Where a server is and what opens it: the options that all commands against a URL share."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit, urlunsplit

from specserve import names

ENV_API_KEY = "SPECSERVE_API_KEY"
ENV_TOKEN = "SPECSERVE_PLUGIN_TOKEN"  # noqa: S105 - the name of a variable


#: Exit status of a command whose key or token is refused: not that of a server that is not there.
EXIT_REFUSED: Final = 3
#: HTTP status of an answer to a key that does not fit, or to none.
REFUSALS: Final = frozenset({401, 403})


class BadOption(ValueError):
    """An option that cannot be used; the message names it and says what would do."""


class Refused(Exception):
    """A server refuses a key or token; the message says which one, and the option that gives it.

    What such a server does not show would look like what it does not have.
    """

    @classmethod
    def key(cls, url: str, key: str | None) -> Self:
        """A serving route that refuses the API key, or wants one.

        Args:
            url: The route.
            key: The key that was sent, None if none was.
        """
        what = "wants an API key" if key is None else "refuses the API key"
        return cls(f"{url} {what}: give the server's own with --api-key-file or {ENV_API_KEY}")

    @classmethod
    def token(cls, url: str, token: str | None) -> Self:
        """A plugin's listener that refuses the token, or wants one.

        Args:
            url: The listener.
            token: The token that was sent, None if none was.
        """
        what = "wants the plugin token" if token is None else "refuses the plugin token"
        return cls(
            f"{url} {what}: give the engine's own with --token-file or {ENV_TOKEN}; it is the "
            f"file {names.KEY_PLUGIN_TOKEN} of its credentials folder, in a cluster of the Secret "
            "NAME-credentials"
        )


@dataclass(frozen=True, slots=True)
class Connection:
    """A server and the keys to it.

    Attributes:
        url: Of the serving routes, without a slash at its end.
        admin_url: Of the plugin's listener, likewise.
        api_key: User key of the serving routes, None if they are open.
        token: Plugin token, None if there is none to send.
    """

    url: str
    admin_url: str
    api_key: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the server is."""
    group = parser.add_argument_group("the server")
    group.add_argument(
        "--url",
        required=True,
        metavar="URL",
        help="serving address, such as http://10.0.0.5:30000",
    )
    group.add_argument(
        "--admin-url",
        metavar="URL",
        help="address of the plugin's listener (default: the host of --url, port "
        f"{names.PORT_ADMIN})",
    )
    add_keys(group)


def add_keys(group: Any) -> None:
    """Add the options that say what opens a server."""
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the server's API key (or set {ENV_API_KEY}); keys are not taken as "
        "options, which every user of the machine could read",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the plugin token (or set {ENV_TOKEN}); in a cluster it is the key "
        f"{names.KEY_PLUGIN_TOKEN} of the Secret NAME-credentials",
    )


def connection_of(options: argparse.Namespace, environ: Mapping[str, str]) -> Connection:
    """The connection that options and environment ask for.

    Raises:
        BadOption: A URL is no URL, or a file cannot be read.
    """
    url = base_url("--url", options.url)
    return Connection(
        url=url,
        admin_url=base_url("--admin-url", options.admin_url)
        if options.admin_url
        else plugin_url(url),
        api_key=api_key(options, environ),
        token=token(options, environ),
    )


def base_url(option: str, text: str) -> str:
    """A URL without user, query and closing slash; bare host:port is taken as http.

    Raises:
        BadOption: It is none.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError:
        raise BadOption(
            f"{option}: {text!r} has no valid port, or an IPv6 address without its brackets; "
            "it should look like http://127.0.0.1:30000 or http://[::1]:30000"
        ) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise BadOption(f"{option}: {text!r} is no address like http://127.0.0.1:30000")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    place = host if port is None else f"{host}:{port}"
    return urlunsplit((parts.scheme, place, parts.path.rstrip("/"), "", "")).removesuffix("/v1")


def plugin_url(url: str) -> str:
    """Where the plugin listens beside a serving URL, unless it is told otherwise."""
    host = urlsplit(url).hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{names.PORT_ADMIN}"


def api_key(options: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """The API key that options and environment give, None if they give none.

    Raises:
        BadOption: The file cannot be read, or holds no key; or the variable holds none.
    """
    return _secret("--api-key-file", options.api_key_file, ENV_API_KEY, environ)


def token(options: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """The plugin token that they give, likewise.

    Raises:
        BadOption: As for `api_key`.
    """
    return _secret("--token-file", options.token_file, ENV_TOKEN, environ)


def _secret(
    option: str, file: Path | None, variable: str, environ: Mapping[str, str]
) -> str | None:
    if file is None:
        text = environ.get(variable, "").strip()
        return _checked(variable, text) if text else None
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise BadOption(f"{option}: {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        text = ""
    return _checked(f"{option}: {file}", text)


def _checked(where: str, text: str) -> str:
    if not text.isascii() or not text.isprintable() or not text:
        raise BadOption(f"{where}: not one line of text with a key and nothing else")
    return text
