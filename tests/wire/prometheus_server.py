"""A real Prometheus server on loopback: Debian's package, unpacked into the user's cache.

Unpacked and not installed: installing it would start a server on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import urlopen

import yaml

from tests.cluster import claims
from tests.cluster.binaries import cache_folder, locked
from tests.cluster.processes import Daemon, Keeper, until
from tests.cluster.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

START_SECONDS = 20.0


class NoPrometheus(Exception):
    """The package cannot be had; the message says what was tried."""


def binary() -> Path:
    """The server's binary, fetched on first use.

    Raises:
        NoPrometheus: No apt-get, or it failed.
    """
    cache = cache_folder()
    found = cache / "prometheus" / "usr" / "bin" / "prometheus"
    with locked(cache / "prometheus.lock", Progress()):
        if not found.exists():
            with tempfile.TemporaryDirectory(prefix=".prometheus-", dir=cache) as work:
                _fetch(Path(work))
                (Path(work) / "unpacked").rename(cache / "prometheus")
    return found


def _fetch(work: Path) -> None:
    download = ["apt-get", "download", "prometheus"]
    # The lists may be as old as the machine's image.
    if _run(work, *download) and (
        problem := _run(work, "apt-get", "update") or _run(work, *download)
    ):
        raise NoPrometheus(problem)
    package = next(work.glob("prometheus_*.deb"))
    if problem := _run(work, "dpkg-deb", "-x", package.name, "unpacked"):
        raise NoPrometheus(problem)


def _run(work: Path, *command: str) -> str:
    """Run a command; returns why that failed."""
    try:
        done = subprocess.run(command, cwd=work, check=False, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return f"{' '.join(command)}: {done.stderr.strip()[-500:]}" if done.returncode else ""


@dataclass
class PrometheusServer:
    """A running server.

    Attributes:
        url: Its address.
        folder: Its configuration, data and log.
        daemon: Its process.
    """

    url: str
    folder: Path
    daemon: Daemon

    def watch(self, targets: Sequence[Target]) -> None:
        """Scrape these and no others; the server takes up to five seconds to notice."""
        listed = [
            {"targets": [one.address], "labels": {"__metrics_path__": one.path, **one.labels}}
            for one in targets
        ]
        new = self.folder / "targets.new"
        new.write_text(json.dumps(listed))
        new.rename(self.folder / "targets.json")


@dataclass(frozen=True)
class Target:
    """Where a page of metrics is, and the labels that its series get."""

    address: str
    labels: Mapping[str, str]
    path: str = "/metrics"


@contextlib.contextmanager
def prometheus(
    folder: Path, *, targets: Sequence[Target] = (), web: Mapping[str, Any] | None = None
) -> Iterator[PrometheusServer]:
    """Run a server that scrapes twice a second, for the length of a `with` block.

    Args:
        folder: For its files; made.
        targets: What it scrapes from the beginning.
        web: Its --web.config.file: certificate and login.
    """
    folder.mkdir(parents=True)
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [
            {
                "job_name": "engines",
                "file_sd_configs": [
                    {"files": [str(folder / "targets.json")], "refresh_interval": "1s"}
                ],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = claims.port()
    arguments = [
        str(binary()),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        # Debian's pages are not unpacked to where it looks for them.
        f"--web.console.libraries={folder}",
        f"--web.console.templates={folder}",
    ]
    if web is not None:
        (folder / "web.yml").write_text(yaml.safe_dump(dict(web)))
        arguments.append(f"--web.config.file={folder / 'web.yml'}")
    scheme = "https" if web and "tls_server_config" in web else "http"
    keeper = Keeper(folder / "keeper.log")
    daemon = Daemon("prometheus", arguments, folder / "log", keeper, dict(os.environ))
    server = PrometheusServer(f"{scheme}://127.0.0.1:{port}", folder, daemon)
    server.watch(targets)
    try:
        daemon.start()
        until(lambda: _ready(server), "Prometheus to be ready", START_SECONDS, alive=[daemon])
        yield server
    finally:
        daemon.stop()
        keeper.close()


def _ready(server: PrometheusServer) -> bool:
    # Whoever calls from here has no login; 401 is a sign of life as well.
    context = ssl._create_unverified_context()
    try:
        with urlopen(f"{server.url}/-/ready", timeout=2, context=context) as answer:
            return bool(answer.status == 200)
    except HTTPError as error:
        return error.code == 401


if __name__ == "__main__":
    # For tests that are to run without a network later.
    binary()
