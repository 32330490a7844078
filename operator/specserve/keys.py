"""Credentials of engines, made by chance: what is in the Secret of a SpecServe."""

import secrets
from collections.abc import Callable, Mapping
from typing import Final

from specserve import names


def token() -> str:
    """A key that nobody guesses."""
    return secrets.token_urlsafe(32)


def nonce() -> str:
    """What orders on SGLang's own route must carry: a number that JSON readers keep exact."""
    return str(secrets.randbelow(2**53 - 1) + 1)


#: What is made, by key of the Secret.
MADE: Final[Mapping[str, Callable[[], str]]] = {
    names.KEY_PLUGIN_TOKEN: token,
    names.KEY_ADMIN_KEY: token,
    names.KEY_NONCE: nonce,
}
