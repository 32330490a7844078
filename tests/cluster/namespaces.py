"""Sockets in another network namespace."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.apiclient import Connector

_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def connector(namespace: int) -> Connector:
    """A function that connects from a network namespace.

    Args:
        namespace: descriptor of the namespace's file; stays the caller's.
    """

    def connect(host: str, port: int, timeout: float) -> socket.socket:
        inside = _socket_in(namespace)
        try:
            inside.settimeout(timeout)
            inside.connect((host, port))
        except OSError:
            inside.close()
            raise
        return inside

    return connect


def _socket_in(namespace: int) -> socket.socket:
    # A socket stays in the namespace it was made in, and a thread can change its own alone.
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(namespace)
        try:
            return socket.socket()
        finally:
            _enter(home)
    finally:
        os.close(home)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"entering a network namespace: {os.strerror(code)}")
