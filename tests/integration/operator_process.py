"""The operator as its users run it: a process of its own, with its ServiceAccount's rights."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import claims
from tests.integration.api import eventually

if TYPE_CHECKING:
    from tests.cluster.light import ControlledCluster

ROOT = Path(__file__).resolve().parents[2]
RIGHTS = ROOT / "examples" / "install" / "rbac.yaml"
NAMESPACE = "specserve-system"
ACCOUNT = "specserve-operator"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
START_SECONDS = 20.0
STOP_SECONDS = 15.0
BRISK = {"lease_seconds": "6", "renew_seconds": "4", "retry_seconds": "1"}
"""For tests in which a leader is lost, and the time until another one leads is not what counts."""

_numbers = itertools.count(1)
_LEVEL = re.compile(r"^\S+ \S+ (\w+) ")


def install(cluster: ControlledCluster) -> Path:
    """Create the operator's account and rights; returns a kubeconfig that has no others."""
    cluster.apply(RIGHTS)
    return cluster.kubeconfig_for(ACCOUNT, NAMESPACE)


class OperatorProcess:
    """One operator process.

    Attributes:
        started: All of this session, for the reports of failures.
        settings: What it was told.

    Args:
        cluster: What it works on.
        kubeconfig: Whose rights it has.
        settings: Further SPECSERVE_OPERATOR_ variables, without the prefix, in lower case.
    """

    started: ClassVar[list[OperatorProcess]] = []

    def __init__(self, cluster: ControlledCluster, kubeconfig: Path, **settings: str) -> None:
        number = next(_numbers)
        self.identity = f"operator-{number}"
        self.lease = settings.get("lease_name", "specserve")
        self.log = cluster.logs / f"{self.identity}.log"
        self.port = claims.port()
        given = {
            "namespace": NAMESPACE,
            "identity": self.identity,
            "http_port": str(self.port),
            "image": "specserve-operator:1",
            **settings,
        }
        self.settings = given
        self.started.append(self)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specserve.cli", "run"],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT / "operator"),
                    "KUBECONFIG": str(kubeconfig),
                    **{f"SPECSERVE_OPERATOR_{key.upper()}": v for key, v in given.items()},
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    async def leads(self, within: float = START_SECONDS) -> None:
        """Wait until this process is the leader and all that it watches is listed."""

        async def leading() -> bool:
            assert self.running, self.tail()
            return await self.value("specserve_leader") == 1

        await eventually(leading, within, f"{self.identity} to lead")

    async def answers(self, within: float = START_SECONDS) -> None:
        """Wait until the process says that it is ready, leader or not."""

        async def ready() -> bool:
            assert self.running, self.tail()
            return await self.probe("/readyz") == 200

        await eventually(ready, within, f"{self.identity} to be ready")

    async def probe(self, at: str) -> int:
        """The HTTP status of a path; 0 without an answer."""
        try:
            async with aiohttp.request("GET", f"http://127.0.0.1:{self.port}{at}") as answer:
                return answer.status
        except aiohttp.ClientError:
            return 0

    async def value(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 if there are none."""
        try:
            async with aiohttp.request("GET", f"http://127.0.0.1:{self.port}/metrics") as answer:
                text = await answer.text()
        except aiohttp.ClientError:
            return 0.0
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def lines(self, *levels: str) -> list[str]:
        """Lines of its log, those of some levels or all."""
        found = self.log.read_text(errors="replace").splitlines()
        if not levels:
            return found
        return [line for line in found if (m := _LEVEL.match(line)) and m[1] in levels]

    def tail(self, since: float = 0.0) -> str:
        """The end of its log, as far as it is younger than a wall-clock time in seconds."""
        if not self.log.exists() or self.log.stat().st_mtime < since:
            return ""
        return "\n".join(self.lines()[-40:])

    async def stop(self) -> int:
        """Ask it to end, as its kubelet would; returns its exit status."""
        return await asyncio.to_thread(self.end)

    def end(self) -> int:
        """Do as `stop`, outside of an event loop."""
        self.terminate()
        return self._process.wait(STOP_SECONDS)

    def terminate(self) -> None:
        """Ask it to end, and wait for nothing."""
        self._process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Wait until it has ended; returns its exit status."""
        return await asyncio.to_thread(self._process.wait, STOP_SECONDS)

    def kill(self) -> None:
        """End it as a lost node would."""
        self._process.kill()
        self._process.wait()
