"""A release on a cluster without nodes: helm installs it, tests run its operator by its rights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from specserve.settings import PREFIX
from tests.chart.rendering import CHART, NAMESPACE, environment
from tests.integration.operator_process import OperatorProcess

if TYPE_CHECKING:
    import contextlib
    from pathlib import Path

    from tests.cluster.light import ControlledCluster


class Release:
    """One release, and the processes that its Deployment would run.

    Args:
        cluster: Where it is installed.
        stack: Ends the processes.
        name: Of the release; its ServiceAccount has the same.
        namespace: Where it is installed; made by the test.
        values: Given to each helm command.
    """

    def __init__(
        self,
        cluster: ControlledCluster,
        stack: contextlib.ExitStack,
        name: str = "specserve",
        namespace: str = NAMESPACE,
        **values: Any,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.namespace = namespace
        self.values = values
        self._stack = stack

    @property
    def user(self) -> str:
        """The operator's name in the audit log."""
        return f"system:serviceaccount:{self.namespace}:{self.account}"

    @property
    def account(self) -> str:
        """The operator's ServiceAccount."""
        account: str = self._deployment()["spec"]["template"]["spec"]["serviceAccountName"]
        return account

    def helm(self, verb: str, *arguments: str, chart: Path | None = CHART) -> str:
        """Run helm for this release; returns what it said."""
        what = (str(chart), "-f", "-") if chart else ()
        command = ["helm", verb, self.name, *what, "-n", self.namespace, *arguments]
        return self.cluster.run(command, stdin=yaml.safe_dump(self.values), timeout=120).stdout

    def start(self) -> OperatorProcess:
        """Start the operator with what the installed Deployment gives it."""
        given = environment([self._deployment()])
        settings = {
            key.removeprefix(PREFIX).lower(): value
            for key, value in given.items()
            if key.startswith(PREFIX) and key != f"{PREFIX}HTTP_PORT"
        }
        kubeconfig = self.cluster.kubeconfig_for(self.account, self.namespace)
        process = OperatorProcess(
            self.cluster, kubeconfig, **{**settings, "namespace": self.namespace}
        )
        self._stack.callback(process.kill)
        self._stack.callback(lambda: print(process.tail()))  # shown for failed tests
        return process

    def _deployment(self) -> Any:
        label = f"app.kubernetes.io/instance={self.name}"
        (found,) = self.cluster.get("deployments", "-n", self.namespace, "-l", label)["items"]
        return found
