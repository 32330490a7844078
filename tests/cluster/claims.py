"""Ports and addresses of loopback that no other test run on this machine takes.

A claim is the name of an abstract socket: the kernel frees it with the process that holds it.
"""

from __future__ import annotations

import os
import socket

PORTS = range(20_000, 29_900)
"""Below those that the kernel gives to whoever connects, and below the engines' own."""

_held: list[socket.socket] = []


def claim(name: str) -> socket.socket | None:
    """Takes a name; None when somebody has it. Closing the socket gives it back."""
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0specserve-{name}")
    except OSError:
        held.close()
        return None
    return held


def port() -> int:
    """A port on which nothing listens, at any address, this process's own until it ends.

    One that the kernel chose could go to a connection before its server is up.
    """
    first = os.getpid() * 100
    for offset in range(len(PORTS)):
        number = PORTS[(first + offset) % len(PORTS)]
        held = claim(f"port-{number}")
        if held is None:
            continue
        _held.append(held)
        with socket.socket() as probe:
            try:
                probe.bind(("", number))
            except OSError:
                continue
        return number
    raise AssertionError("all ports are taken")
