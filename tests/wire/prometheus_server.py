"""A real Prometheus server on loopback: Debian's package, unpacked into the user's cache.

Unpacked and not installed: installing it would start a server on the machine.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

from tests.cluster.binaries import cache_folder, locked
from tests.cluster.progress import Progress
from tests.integration.api import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

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
    """

    url: str
    folder: Path
    process: subprocess.Popen[bytes]

    def watch(self, targets: Mapping[str, Mapping[str, str]]) -> None:
        """Scrape these addresses and no others; their series get these labels."""
        listed = [{"targets": [at], "labels": dict(labels)} for at, labels in targets.items()]
        new = self.folder / "targets.new"
        new.write_text(json.dumps(listed))
        new.rename(self.folder / "targets.json")

    @property
    def log(self) -> str:
        """What the server has said."""
        return (self.folder / "log").read_text(errors="replace")


@contextlib.asynccontextmanager
async def prometheus(
    folder: Path, *, web: dict[str, Any] | None = None, labels: Mapping[str, str] | None = None
) -> AsyncIterator[PrometheusServer]:
    """Run a server that scrapes twice a second, for the length of a `with` block.

    Args:
        folder: For its files.
        web: Its --web.config.file.
        labels: External labels. Unlike a global querier a server does not show them in answers;
            here they become labels of its targets, so that it looks like one behind such a querier.
    """
    folder.mkdir(parents=True)
    (folder / "targets.json").write_text("[]")
    shown = [{"target_label": name, "replacement": v} for name, v in (labels or {}).items()]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [
            {
                "job_name": "engines",
                "relabel_configs": shown,
                "file_sd_configs": [
                    {"files": [str(folder / "targets.json")], "refresh_interval": "1s"}
                ],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--web.console.libraries={folder}",
        f"--web.console.templates={folder}",
        "--storage.tsdb.min-block-duration=2h",
    ]
    if web is not None:
        (folder / "web.yml").write_text(yaml.safe_dump(web))
        arguments.append(f"--web.config.file={folder / 'web.yml'}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(binary()), *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    scheme = "https" if web and "tls_server_config" in web else "http"
    server = PrometheusServer(f"{scheme}://127.0.0.1:{port}", folder, process)
    try:

        async def ready() -> bool:
            assert process.poll() is None, server.log
            try:
                async with aiohttp.request("GET", f"{server.url}/-/ready", ssl=False) as answer:
                    # 401: it asks for a login, so it is up.
                    return answer.status in {200, 401}
            except aiohttp.ClientError:
                return False

        await eventually(ready, START_SECONDS, "Prometheus to be ready")
        yield server
    finally:
        process.terminate()
        process.wait(10)
