"""First process of a node cluster's namespaces: lays the network, then reaps what is orphaned.

Run as a script with the file to make when the network is up and the node's address with its
prefix length. The kernel ends all other processes of the PID namespace with this one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

DEVICE = "node0"


def lay_network(address: str) -> None:
    """Gives this network namespace loopback and the node's address, and no way out."""
    for arguments in (
        ("link", "set", "lo", "up"),
        # A bridge without ports: some kernels have no dummy devices, and pods need bridges anyway.
        ("link", "add", DEVICE, "type", "bridge"),
        ("address", "add", address, "dev", DEVICE),
        ("link", "set", DEVICE, "up"),
        # Service addresses are rewritten after routing, so they need a route that leads anywhere.
        ("route", "add", "default", "dev", DEVICE),
    ):
        subprocess.run(["ip", *arguments], check=True)
    with open("/proc/sys/net/ipv4/ip_forward", "w") as file:  # noqa: PTH123 - a faster start
        file.write("1")


def main() -> None:
    """Lays the network and reaps until killed."""
    ready, address = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    lay_network(address)
    with open(ready, "w"):  # noqa: PTH123
        pass
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    main()
