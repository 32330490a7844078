"""A control plane on loopback, without nodes and without root.

Several run side by side. Tests play kubelet by patching the status of pods; Nodes are objects that
a test creates, and stay as it made them: the controller that marks silent nodes does not run.
"""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.binaries import Binaries, resolve
from tests.cluster.claims import claim
from tests.cluster.controlplane import ControlPlane, Options, Ports
from tests.cluster.errors import ClusterError
from tests.cluster.handle import Cluster
from tests.cluster.processes import Daemon, Keeper
from tests.cluster.versions import LIGHT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.cluster.apiclient import ApiClient

CONTROLLERS = "*,-node-lifecycle-controller,-taint-eviction-controller"
"""All, but those that would drive pods from nodes without a kubelet."""


class ControlledCluster(Cluster):
    """A cluster whose control plane is this process's own, to stop, freeze and watch.

    Attributes:
        api: a client of the API server with an administrator's rights.
        ca: certificate of the cluster's authority.
        etcd, apiserver, controller_manager, scheduler: the components' processes.
    """

    def __init__(self, directory: Path, keeper: Keeper, binaries: Binaries) -> None:
        self.directory = directory
        self._keeper = keeper
        self._binaries = binaries

    def _take(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.kubeconfig = plane.kubeconfig
        self.ca = plane.authority.certificate
        self.api: ApiClient = plane.api
        self.etcd: Daemon = plane.etcd
        self.apiserver: Daemon = plane.apiserver
        self.controller_manager: Daemon = plane.controller_manager
        self.scheduler: Daemon = plane.scheduler

    @property
    def server(self) -> str:
        """URL of the API server; the same over all restarts."""
        return self._plane.server

    @property
    def search_path(self) -> str:
        """Folders of kubectl and the other binaries."""
        return self._binaries.search_path

    @property
    def logs(self) -> Path:
        """Folder with a log file for each component."""
        return self.directory / "log"

    def wait_ready(self) -> None:
        """Waits until the API server is ready, as after a restart."""
        self._plane.wait_ready()

    def audit_events(self, user: str = "") -> list[dict[str, Any]]:
        """The logged requests, of one user or of all; needs the option `audit`."""
        events = self._plane.audit_events()
        return [e for e in events if not user or e["user"].get("username") == user]

    def image(self, name: str) -> str:
        """The image's own name: it is imported under it."""
        return name

    def close(self) -> None:
        """Ends all processes and removes the state."""
        self._keeper.close()


class LightCluster(ControlledCluster):
    """A control plane on a loopback address of its own; made by `light_cluster`."""

    def __init__(
        self, directory: Path, keeper: Keeper, binaries: Binaries, options: Options
    ) -> None:
        super().__init__(directory, keeper, binaries)
        address, self._claim = _claim_address()
        self._take(
            ControlPlane(
                directory,
                keeper,
                binaries,
                address=address,
                ports=_free_ports(address),
                options=options,
            )
        )

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command itself: loopback is reachable from everywhere on the machine."""
        return list(argv)

    def load_image(self, archive: Path) -> None:
        """Not possible without a node."""
        raise ClusterError(f"loading {archive}", "a light cluster runs no containers")

    def close(self) -> None:
        """Ends all processes, removes the state and gives the address back."""
        super().close()
        self._claim.close()


def light_cluster(
    directory: Path | None = None,
    *,
    crds: Iterable[Path] = (),
    controllers: str = CONTROLLERS,
    scheduler: bool = True,
    audit: bool | Path = False,
    apiserver_arguments: Sequence[str] = (),
    binaries: Binaries | None = None,
) -> LightCluster:
    """Starts a control plane; ready when this returns. Use it in a `with` statement.

    It ends with this process, however that ends.

    Args:
        directory: for state and logs, made when absent and kept; a temporary one when not given.
        crds: files and folders of CustomResourceDefinitions to create.
        controllers: which run, as --controllers takes them; empty for no controller manager.
        scheduler: whether a scheduler runs.
        audit: log requests (see `LightCluster.audit_events`); a policy file, or true for metadata.
        apiserver_arguments: more arguments of the API server.
        binaries: what to run; the pinned versions when not given.

    Raises:
        ClusterError: it did not start; says which step failed.
    """
    binaries = binaries or resolve(LIGHT)
    folder, temporary = state_folder(directory)
    keeper = Keeper(folder / "log" / "keeper.log")
    try:
        if temporary:
            keeper.at_end(rmtree=[folder])
        options = Options(
            crds=tuple(crds),
            controllers=controllers,
            scheduler=scheduler,
            audit=audit,
            apiserver_arguments=tuple(apiserver_arguments),
        )
        cluster = LightCluster(folder, keeper, binaries, options)
        cluster._plane.start()
    except BaseException:
        keeper.close()
        raise
    return cluster


def state_folder(directory: Path | None) -> tuple[Path, bool]:
    """An empty folder for a cluster's state, and whether it is a temporary one.

    Raises:
        ClusterError: the folder holds the state of another cluster.
    """
    if directory is None:
        folder = Path(tempfile.mkdtemp(prefix="specserve-cluster-"))
    else:
        folder = directory.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "pki").exists():
            raise ClusterError("making a cluster", f"{folder} holds the state of another one")
    (folder / "log").mkdir(exist_ok=True)
    return folder, directory is None


def _claim_address() -> tuple[str, socket.socket]:
    # Each cluster has a loopback address of its own, so that no other one can take a port between
    # its choice and its use.
    start = os.getpid()
    for offset in itertools.count():
        number = (start + offset) % (250 * 250)
        address = f"127.83.{number // 250 + 1}.{number % 250 + 1}"
        if held := claim(f"cluster-{address}"):
            return address, held
    raise AssertionError


def _free_ports(address: str) -> Ports:
    with_ports = [socket.socket() for _ in range(5)]
    try:
        for each in with_ports:
            each.bind((address, 0))
        return Ports(*(each.getsockname()[1] for each in with_ports))
    finally:
        for each in with_ports:
            each.close()
