"""etcd, API server, controller manager and scheduler."""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.cluster import pki
from tests.cluster.apiclient import ApiClient, Connector, connect
from tests.cluster.processes import Daemon, Keeper, until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.cluster.binaries import Binaries

SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"

START_SECONDS = 90.0
"""Bound on each wait of a start; an idle machine needs 5 s for all of them."""

AUDIT_POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}
"""Who asked for what and what was answered, without bodies."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The listeners of a control plane."""

    apiserver: int = 6443
    etcd: int = 2379
    etcd_peer: int = 2380
    controller_manager: int = 10257
    scheduler: int = 10259


@dataclass(frozen=True, slots=True)
class Options:
    """What may differ between control planes.

    Attributes:
        crds: files and folders of CustomResourceDefinitions, created before the controllers
            start: the garbage collector looks for new kinds every 30 s only.
        controllers: the controllers that run, as --controllers takes them; none when empty.
        scheduler: whether a scheduler runs.
        audit: whether requests are logged for `audit_events`, or the policy file that says which.
        apiserver_arguments: more arguments of the API server.
    """

    crds: tuple[Path, ...] = ()
    controllers: str = "*"
    scheduler: bool = True
    audit: bool | Path = False
    apiserver_arguments: tuple[str, ...] = ()


class ControlPlane:
    """The control plane of one cluster.

    Args:
        directory: an existing folder for its state.
        keeper: parent of its processes.
        binaries: what to run.
        address: where all of it listens; the API server's certificate is for it.
        ports: where on that address.
        options: what differs from the usual.
        enter: command that enters the network namespace with that address.
        connector: opens connections in that namespace.
    """

    def __init__(
        self,
        directory: Path,
        keeper: Keeper,
        binaries: Binaries,
        *,
        address: str,
        ports: Ports,
        options: Options,
        enter: tuple[str, ...] = (),
        connector: Connector = connect,
    ) -> None:
        self._directory = directory
        self._keeper = keeper
        self._binaries = binaries
        self._address = address
        self._ports = ports
        self._options = options
        self._enter = enter
        self._connector = connector
        self.log = directory / "log"
        self.log.mkdir(exist_ok=True)
        (directory / "pki").mkdir(mode=0o700)
        self.server = f"https://{address}:{ports.apiserver}"
        self.authority = pki.authority(directory / "pki")
        self.kubeconfig = self.client("admin", "admin", organization="system:masters")
        self.etcd = self._daemon("etcd", self._etcd())
        self.apiserver = self._daemon("kube-apiserver", self._apiserver())
        self.controller_manager = self._daemon(
            "kube-controller-manager", self._controller_manager()
        )
        self.scheduler = self._daemon("kube-scheduler", self._scheduler())
        self.api = ApiClient(
            address,
            ports.apiserver,
            ca=self.authority.certificate,
            certificate=directory / "pki" / "admin.crt",
            key=directory / "pki" / "admin.key",
            connector=connector,
        )

    def client(self, name: str, user: str, *, organization: str = "") -> Path:
        """Writes a kubeconfig with a certificate for a user."""
        certificate, key = self.authority.issue(name, user, organization=organization)
        return pki.kubeconfig(
            self._directory / f"{name}.kubeconfig",
            self.server,
            self.authority.certificate,
            {"client-certificate": str(certificate), "client-key": str(key)},
        )

    def start(self) -> None:
        """Starts everything and waits until it is of use.

        Raises:
            ClusterError: a component ended or did not get ready; carries the end of its log.
        """
        self.etcd.start()
        self.apiserver.start()
        self.wait_ready()
        self._create_crds()
        if self._options.controllers:
            self.controller_manager.start()
        if self._options.scheduler:
            self.scheduler.start()
        if self._options.controllers:
            # Pods are refused until it exists.
            until(
                lambda: self.api.get("/api/v1/namespaces/default/serviceaccounts/default"),
                "the ServiceAccount default",
                START_SECONDS,
                alive=[self.controller_manager],
            )
        if self._options.scheduler:
            until(
                lambda: self._healthy(self._ports.scheduler),
                "the scheduler",
                START_SECONDS,
                alive=[self.scheduler],
            )

    def wait_ready(self) -> None:
        """Waits until the API server says that it is ready, as after a restart."""
        until(
            lambda: self.api.get("/readyz", timeout=2) == "ok",
            "the API server",
            START_SECONDS,
            alive=[self.etcd, self.apiserver],
        )

    def audit_events(self) -> list[dict[str, Any]]:
        """What the API server has logged so far, oldest first; needs the option `audit`."""
        lines = (self.log / "audit.log").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def _create_crds(self) -> None:
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        names = []
        for crd in _documents(self._options.crds):
            self.api.request("POST", path, crd)
            names.append(crd["metadata"]["name"])
        for name in names:
            until(partial(self._established, f"{path}/{name}"), name, START_SECONDS)

    def _established(self, path: str) -> bool:
        conditions = self.api.get(path).get("status", {}).get("conditions") or []
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    def _daemon(self, name: str, arguments: list[str]) -> Daemon:
        return Daemon(
            name=name,
            argv=[*self._enter, self._binaries[name], *arguments],
            log=self.log / f"{name}.log",
            keeper=self._keeper,
            env=dict(os.environ),
        )

    def _healthy(self, port: int) -> bool:
        # Answers anybody, with a certificate of its own making.
        tls = ssl.create_default_context()
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
        raw = self._connector(self._address, port, 2)
        with tls.wrap_socket(raw) as connection:
            connection.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            return connection.recv(64).split(b"\r\n")[0].endswith(b"200 OK")

    def _etcd(self) -> list[str]:
        client = f"http://{self._address}:{self._ports.etcd}"
        peer = f"http://{self._address}:{self._ports.etcd_peer}"
        return [
            f"--data-dir={self._directory / 'etcd'}",
            "--log-level=warn",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # The data need not outlive a crash of the machine; this saves 2 s of the start.
            "--unsafe-no-fsync",
        ]

    def _apiserver(self) -> list[str]:
        folder = self._directory / "pki"
        names = "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
        own = {self._address, "127.0.0.1", API_SERVICE_ADDRESS}
        certificate, key = self.authority.issue(
            "apiserver",
            "kube-apiserver",
            alternatives=",".join([*(f"IP:{each}" for each in sorted(own)), names]),
        )
        to_kubelet, to_kubelet_key = self.authority.issue(
            "kubelet-client", "apiserver-kubelet-client", organization="system:masters"
        )
        arguments = [
            f"--etcd-servers=http://{self._address}:{self._ports.etcd}",
            f"--bind-address={self._address}",
            f"--advertise-address={self._address}",
            f"--secure-port={self._ports.apiserver}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={self.authority.certificate}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'sa.pub'}",
            f"--service-account-signing-key-file={folder / 'sa.key'}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged",
            f"--kubelet-client-certificate={to_kubelet}",
            f"--kubelet-client-key={to_kubelet_key}",
            f"--kubelet-certificate-authority={self.authority.certificate}",
            # Its host name would be asked of the DNS.
            "--kubelet-preferred-address-types=InternalIP",
        ]
        if self._address.startswith("127."):
            # Loopback is no valid endpoint of the Service `kubernetes`.
            arguments.append("--endpoint-reconciler-type=none")
        if audit := self._options.audit:
            policy = self._directory / "audit-policy.json"
            policy.write_text(
                json.dumps(AUDIT_POLICY) if audit is True else Path(audit).read_text()
            )
            arguments += [
                f"--audit-policy-file={policy}",
                f"--audit-log-path={self.log / 'audit.log'}",
            ]
        return [*arguments, *self._options.apiserver_arguments]

    def _controller_manager(self) -> list[str]:
        config = self.client("controllers", "system:kube-controller-manager")
        return [
            f"--kubeconfig={config}",
            f"--bind-address={self._address}",
            f"--secure-port={self._ports.controller_manager}",
            f"--controllers={self._options.controllers}",
            f"--service-account-private-key-file={self._directory / 'pki' / 'sa.key'}",
            f"--root-ca-file={self.authority.certificate}",
            "--use-service-account-credentials",
            # Every controller fetches a token at the start; at the usual 20 requests a second the
            # default ServiceAccount appears 5 s later.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            f"--cluster-signing-cert-file={self.authority.certificate}",
            f"--cluster-signing-key-file={self.authority.key}",
            # Else it makes /usr/libexec/kubernetes on the machine.
            f"--flex-volume-plugin-dir={self._directory / 'flex'}",
            "--leader-elect=false",
        ]

    def _scheduler(self) -> list[str]:
        config = self.client("scheduler", "system:kube-scheduler")
        return [
            f"--kubeconfig={config}",
            f"--bind-address={self._address}",
            f"--secure-port={self._ports.scheduler}",
            "--leader-elect=false",
        ]


def _documents(paths: Iterable[Path]) -> list[dict[str, Any]]:
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    return [each for file in files for each in yaml.safe_load_all(file.read_text()) if each]
