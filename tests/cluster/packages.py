"""The Debian packages that node clusters and image builds need."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.cluster.progress import Progress

PACKAGES = (
    "buildah",
    "busybox-static",
    "ca-certificates",
    "conntrack",
    "containernetworking-plugins",
    "iproute2",
    "iptables",
    "mmdebstrap",
    "openssl",
    "runc",
    "util-linux",
)

_STEP = "installing Debian packages"


def missing(packages: Sequence[str] = PACKAGES) -> list[str]:
    """Those of the packages that are not installed.

    Raises:
        ClusterError: this is no Debian, so nobody knows.
    """
    if shutil.which("dpkg-query") is None:
        raise ClusterError(
            _STEP, "no dpkg-query", "Install with your own package manager: " + " ".join(packages)
        )
    asked = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages],
        capture_output=True,
        text=True,
        check=False,  # status 1 when one is unknown
    )
    rows = [line.split() for line in asked.stdout.splitlines()]
    installed = {row[0] for row in rows if row[1:] == ["installed"]}
    return [package for package in packages if package not in installed]


def install(progress: Progress, packages: Sequence[str] = PACKAGES) -> None:
    """Installs what is missing, which takes root; nothing happens when all is there.

    Raises:
        ClusterError: not root, or apt-get failed; names the packages.
    """
    absent = missing(packages)
    if not absent:
        return
    command = "apt-get install --no-install-recommends " + " ".join(absent)
    if os.geteuid():
        raise ClusterError(_STEP, f"not root, and not installed: {' '.join(absent)}", command)
    progress.start(f"Installing Debian packages: {' '.join(absent)}", "about a minute")
    # The lists may be as old as the machine's image: first try with those there, then with new.
    if not any(Path("/var/lib/apt/lists").glob("*_Packages*")) or _apt_get(*_INSTALL, *absent):
        if problem := _apt_get("update"):
            raise ClusterError("apt-get update", problem, "Is the package mirror reachable?")
        if problem := _apt_get(*_INSTALL, *absent):
            raise ClusterError(_STEP, problem, command)
    progress.finish()


_INSTALL = ("install", "--yes", "--no-install-recommends")


def _apt_get(*arguments: str) -> str:
    # Another apt-get, as of automatic updates, is waited for.
    done = subprocess.run(
        ["apt-get", "-o", "DPkg::Lock::Timeout=300", *arguments],
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if not done.returncode else done.stderr.strip()[-2000:] or "failed"
