"""A control plane with one real node, all of it in namespaces of its own. Needs root.

The machine sees no address, route, interface or mount of it, so clusters run side by side with the
same addresses, and all is gone when the first process of the PID namespace is. Commands of tests
run inside, next to the node: they reach pods, services and the API server directly.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster import cgroups, oci
from tests.cluster.binaries import Binaries, resolve
from tests.cluster.controlplane import START_SECONDS, ControlPlane, Options, Ports
from tests.cluster.errors import ClusterError
from tests.cluster.light import ControlledCluster, state_folder
from tests.cluster.namespaces import connector
from tests.cluster.processes import Daemon, Keeper, until
from tests.cluster.versions import NODE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NODE_NAME = "node-1"
ADDRESS = "10.99.0.2"
POD_RANGE = "10.244.0.0/24"
GPU = "nvidia.com/gpu"

_HERE = Path(__file__).parent
_TOOLS = ("unshare", "nsenter", "mount", "ip", "iptables", "conntrack", "runc", "openssl")
_CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
_SCRIPT = (sys.executable, "-I", "-S")


class NodeCluster(ControlledCluster):
    """A control plane and a node; made by `node_cluster`.

    Attributes:
        containerd, kubelet, proxy: the node's daemons.
    """

    containerd: Daemon
    kubelet: Daemon
    proxy: Daemon

    def __init__(
        self, directory: Path, keeper: Keeper, binaries: Binaries, group: cgroups.Tree
    ) -> None:
        super().__init__(directory, keeper, binaries)
        self._group = group
        self._node = directory / "node"
        self._namespace = -1
        self._first = 0

    def start(self, options: Options) -> None:
        """Starts everything and waits until the node is Ready."""
        for name in ("lib", "log", "flex", "cni"):
            (self._node / name).mkdir(parents=True)
        self._make_namespaces()
        self._take(
            ControlPlane(
                self.directory,
                self._keeper,
                self._binaries,
                address=ADDRESS,
                ports=Ports(),
                options=options,
                # The network alone: these daemons are then not a fork away, and need no more.
                enter=("nsenter", f"--net=/proc/{self._first}/ns/net", "--"),
                connector=connector(self._namespace),
            )
        )
        self._make_daemons()
        self.containerd.start()
        self._plane.start()
        self._wait_for_containerd()
        self.load_image(oci.busybox(self._node / "busybox.tar"))
        self.kubelet.start()
        self.proxy.start()
        until(self._node_ready, "the node", START_SECONDS, alive=[self.containerd, self.kubelet])

    def enter(self, argv: Sequence[str]) -> list[str]:
        """Runs a command beside the node, in the same network and PID namespace."""
        return [*_SCRIPT, str(_HERE / "enter.py"), str(self._first), str(Path.cwd()), *argv]

    def load_image(self, archive: Path) -> None:
        """Imports an OCI or docker archive into the node's containerd."""
        self.run(
            ["ctr", "-a", str(self._socket), "-n", "k8s.io", "images", "import", str(archive)]
        )

    def set_extended_resource(self, name: str, count: int) -> None:
        """Makes the node offer a resource that no device stands behind, such as GPUs."""
        amount = {name: str(count)}
        self.api.request(
            "PATCH",
            f"/api/v1/nodes/{NODE_NAME}/status",
            {"status": {"capacity": amount, "allocatable": amount}},
            content_type="application/merge-patch+json",
        )

    def close(self) -> None:
        """Ends all processes, and with them namespaces and mounts; removes groups and state."""
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1
        super().close()

    @property
    def _socket(self) -> Path:
        return self._node / "containerd.sock"

    def _make_namespaces(self) -> None:
        ready = self.directory / "network-up"
        prefix = ADDRESS + "/24"
        init = self._outside(
            "namespaces",
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"],
            [*_SCRIPT, str(_HERE / "namespace_init.py"), str(ready), prefix],
        )
        init.start()
        until(ready.exists, "the namespaces", 30, alive=[init])
        self._first = init.pid
        self._namespace = os.open(f"/proc/{self._first}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        mounts = self._outside(
            "mounts",
            ["nsenter", "-t", str(self._first), "-n", "-m", "-p", "--", "unshare", "--mount"],
            ["sh", str(_HERE / "node_mounts.sh"), str(self._node)],
        )
        mounts.start()
        until((self._node / "mounted").exists, "the node's mounts", 30, alive=[mounts])
        self._holder = mounts.pid

    def _outside(self, name: str, enter: list[str], argv: list[str]) -> Daemon:
        return Daemon(
            name=name,
            argv=[*enter, *argv],
            log=self.logs / f"{name}.log",
            keeper=self._keeper,
            env=self._daemon_environment(),
            inner=True,
        )

    def _daemon_environment(self) -> dict[str, str]:
        env = dict(os.environ)
        path = (self.search_path, env.get("PATH", ""), "/usr/sbin", "/sbin")
        return env | {"PATH": os.pathsep.join(filter(None, path))}

    def _make_daemons(self) -> None:
        enter = ["nsenter", "-t", str(self._holder), "-n", "-m", "-p", "--"]

        def daemon(name: str, *arguments: str) -> Daemon:
            return self._outside(name, enter, [self._binaries[name], *arguments])

        self.containerd = daemon("containerd", f"--config={self._containerd_config()}")
        kubeconfig, config = self._kubelet_config()
        self.kubelet = daemon(
            "kubelet",
            f"--config={config}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={ADDRESS}",
        )
        self.proxy = daemon("kube-proxy", f"--config={self._proxy_config()}")

    def _wait_for_containerd(self) -> None:
        def answers() -> bool:
            return self._socket.exists() and self._ctr("version", check=False) == 0

        until(answers, "containerd", START_SECONDS, alive=[self.containerd])

    def _ctr(self, *arguments: str, check: bool = True) -> int:
        command = ["ctr", "--address", str(self._socket), *arguments]
        return self.run(command, check=check).returncode

    def _node_ready(self) -> bool:
        node = self.api.get(f"/api/v1/nodes/{NODE_NAME}")
        conditions = node.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _containerd_config(self) -> Path:
        network = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods0",
                    "isGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": POD_RANGE}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
        (self._node / "cni" / "10-pods.conflist").write_text(json.dumps(network))
        file = self._node / "containerd.toml"
        # - opt: by default /opt/containerd is made on the machine
        # - restrict_oom_score_adj: sandboxes want -998, which takes CAP_SYS_RESOURCE
        # - sandbox: by default the pause image is pulled from its registry
        file.write_text(
            f"""\
version = 3
[grpc]
  address = "{self._socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "{_snapshotter(self._node)}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{oci.BUSYBOX}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{_cni_plugins()}"]
  conf_dir = "{self._node / "cni"}"
"""
        )
        return file

    def _kubelet_config(self) -> tuple[Path, Path]:
        user = f"system:node:{NODE_NAME}"
        kubeconfig = self._plane.client("kubelet", user, organization="system:nodes")
        certificate, key = self._plane.authority.issue(
            "kubelet-server", NODE_NAME, alternatives=f"IP:{ADDRESS},DNS:{NODE_NAME}"
        )
        # Pods ask the machine's name servers for nothing: there is no way to them.
        resolv = self._node / "resolv.conf"
        resolv.write_text("nameserver 127.0.0.1\n")
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "cgroupRoot": f"/{self._group.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,  # the usual -999 takes CAP_SYS_RESOURCE
            "volumePluginDir": str(self._node / "flex"),
            "authentication": {
                "x509": {"clientCAFile": str(self.ca)},
                "anonymous": {"enabled": False},
            },
            "tlsCertFile": str(certificate),
            "tlsPrivateKeyFile": str(key),
            "resolvConf": str(resolv),
            # The images are few and local, and a full disk of the machine is no fault of a test's.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
        }
        file = self._node / "kubelet.json"
        file.write_text(json.dumps(config, indent=1))
        return kubeconfig, file

    def _proxy_config(self) -> Path:
        config: dict[str, Any] = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "hostnameOverride": NODE_NAME,
            "clientConnection": {
                "kubeconfig": str(self._plane.client("proxy", "system:kube-proxy"))
            },
            "clusterCIDR": POD_RANGE,
            "oomScoreAdj": 0,
            # Zeros: limits of connection tracking are the machine's.
            "conntrack": {
                "maxPerCore": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }
        file = self._node / "proxy.json"
        file.write_text(json.dumps(config, indent=1))
        return file


def node_cluster(
    directory: Path | None = None,
    *,
    images: Iterable[Path] = (),
    crds: Iterable[Path] = (),
    gpus: int = 8,
    audit: bool | Path = False,
    apiserver_arguments: Sequence[str] = (),
    resources: Mapping[str, int] | None = None,
    binaries: Binaries | None = None,
) -> NodeCluster:
    """Starts a control plane with a node; Ready when this returns. Use it in a `with` statement.

    It ends with this process, however that ends.

    Args:
        directory: for state and logs, made when absent and kept; a temporary one when not given.
            Not below /var/lib, /var/log or /run, which the node has for itself.
        images: OCI or docker archives to import; `oci.BUSYBOX` is always there.
        crds: files and folders of CustomResourceDefinitions to create.
        gpus: how many GPUs the node pretends to have.
        audit: log requests (see `ControlledCluster.audit_events`); a policy file, or true.
        apiserver_arguments: more arguments of the API server.
        resources: other extended resources to pretend, by name.
        binaries: what to run; the pinned versions when not given.

    Raises:
        ClusterError: it did not start; says which step failed.
    """
    _require_root_and_tools()
    binaries = binaries or resolve(NODE)
    folder, temporary = state_folder(directory)
    if any(folder.is_relative_to(taken) for taken in ("/var/lib", "/var/log", "/run")):
        raise ClusterError("making a node", f"{folder} would be hidden from it", "Set TMPDIR.")
    group = cgroups.plan(
        f"specserve-{os.getpid()}-{secrets.token_hex(3)}", Path("/proc/self/mounts").read_text()
    )
    keeper = Keeper(folder / "log" / "keeper.log")
    cluster = NodeCluster(folder, keeper, binaries, group)
    try:
        # Told before it is made, so that nothing stays when this process is killed in between.
        keeper.at_end(
            rmdir=group.folders, write=group.restore(), rmtree=[folder] if temporary else []
        )
        group.create()
        cluster.start(
            Options(crds=tuple(crds), audit=audit, apiserver_arguments=tuple(apiserver_arguments))
        )
        for archive in images:
            cluster.load_image(archive)
        for name, count in ({GPU: gpus} | dict(resources or {})).items():
            if count:
                cluster.set_extended_resource(name, count)
    except BaseException:
        cluster.close()
        raise
    return cluster


def enable_controllers(mounts: str) -> Keeper:
    """Enables the controllers that nodes need, for nodes of several processes side by side.

    Without it the first node to end takes from the other ones what it enabled itself.

    Args:
        mounts: content of /proc/self/mounts.

    Returns:
        What takes them back when it is closed, or when this process ends, however that ends.

    Raises:
        ClusterError: the control groups of this machine can't be written.
    """
    root = replace(cgroups.plan("", mounts), folders=())
    folder, _ = state_folder(None)
    keeper = Keeper(folder / "log" / "keeper.log")
    keeper.at_end(write=root.restore(), rmtree=[folder])
    root.create()
    return keeper


def _require_root_and_tools() -> None:
    advice = "Run as root: python3 -m tests.cluster packages"
    if os.geteuid():
        raise ClusterError("making a node", "containers and namespaces need root")
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if missing := [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]:
        raise ClusterError("making a node", f"no {', '.join(missing)}", advice)
    _cni_plugins()


def _cni_plugins() -> Path:
    for folder in _CNI_FOLDERS:
        if (folder / "bridge").exists():
            return folder
    raise ClusterError(
        "making a node", "no CNI plugins", "Install the package containernetworking-plugins."
    )


def _snapshotter(folder: Path) -> str:
    # An overlay can't lie on another one, as in the file system of a container.
    best = max(
        (line.split() for line in Path("/proc/self/mounts").read_text().splitlines()),
        key=lambda row: len(row[1]) if folder.is_relative_to(row[1]) else -1,
    )
    return "native" if best[2] == "overlay" else "overlayfs"
