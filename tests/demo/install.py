"""Puts the operator and the SpecServes of the demo onto a cluster, and takes them away again."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specserve import names
from tests.cluster.errors import ClusterError, CommandError
from tests.demo.plan import TITLES, Arm, ArmKey, Pod, arm_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.cluster.handle import Cluster
    from tests.cluster.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "demo.yaml"
CRDS = ROOT / "crds"
RIGHTS = ROOT / "examples" / "install" / "rbac.yaml"

NAMESPACE = "specserve-demo"
OPERATOR_NAMESPACE = "specserve-system"
OPERATOR = "specserve-operator"
LEASE = "specserve"

READY_SECONDS = 90.0
_LOOK_SECONDS = 1.0
_STOP_SECONDS = 15.0


def example() -> dict[str, Any]:
    """The SpecServe of examples/demo.yaml."""
    manifest: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return manifest


class Installation:
    """The demo's objects on a cluster.

    Args:
        cluster: where.
        progress: told of each step.
        ours: whether the cluster ends with the demo, so that nothing needs to be deleted.

    Attributes:
        port: where the operator tells its metrics and decisions, on loopback.
    """

    def __init__(self, cluster: Cluster, progress: Progress, *, ours: bool) -> None:
        self._cluster = cluster
        self._progress = progress
        self._ours = ours
        self._made: list[tuple[str, ...]] = []
        self.port = _free_port()

    @contextlib.contextmanager
    def rights(self) -> Iterator[None]:
        """Kind, rights and namespace, for the length of a `with` block.

        On a cluster that stays, what was there before is left as it is.

        Raises:
            ClusterError: another operator is at work there, or the namespace is taken.
        """
        cluster = self._cluster
        if not self._ours:
            self._refuse_company()
        try:
            crd = f"{names.PLURAL}.{names.GROUP}"
            for kind, name, path in (
                ("crd", crd, CRDS),
                ("clusterrole", OPERATOR, RIGHTS),
            ):
                if self._ours or not self._exists(kind, name):
                    self._made.append(("-f", str(path)))
                cluster.apply(path)
            cluster.kubectl("wait", "--for=condition=Established", f"crd/{crd}", "--timeout=30s")
            self._made.append(("namespace", NAMESPACE))
            cluster.kubectl("create", "namespace", NAMESPACE)
            yield
        finally:
            if not self._ours:
                self._remove()

    @contextlib.contextmanager
    def operator(self, log: Path) -> Iterator[subprocess.Popen[str]]:
        """The operator as a process with its own ServiceAccount's rights alone."""
        kubeconfig = self._cluster.kubeconfig_for(OPERATOR, OPERATOR_NAMESPACE)
        settings = {
            "NAMESPACE": OPERATOR_NAMESPACE,
            "WATCH_NAMESPACES": NAMESPACE,
            "HTTP_PORT": str(self.port),
        }
        with log.open("w") as output:
            process = self._cluster.popen(
                [sys.executable, "-m", "specserve.cli", "run"],
                kubeconfig=kubeconfig,
                env={f"SPECSERVE_OPERATOR_{key}": value for key, value in settings.items()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # An interrupt of the terminal ends the demo, and the demo ends the operator.
                process_group=0,
            )
            try:
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def serve(self, image: str, operator: subprocess.Popen[str], log: Path) -> tuple[Arm, ...]:
        """Applies the three SpecServes and waits until the kubelet finds all their pods ready.

        Args:
            image: of the simulated engine, as the cluster finds it.
            operator: that must stay alive meanwhile.
            log: of the operator, named in errors.

        Raises:
            ClusterError: they did not become Ready; carries their conditions.
        """
        manifests = {
            key: arm_manifest(example(), key, image=image, gpus=self._ours) for key in TITLES
        }
        self._cluster.apply(*manifests.values(), namespace=NAMESPACE)
        wanted = sum(manifest["spec"]["replicas"] for manifest in manifests.values())
        deadline = time.monotonic() + READY_SECONDS
        while True:
            items = self._get("specserve")
            ready = sum(item.get("status", {}).get("readyReplicas", 0) for item in items)
            self._progress.update(ready, wanted, "pods ready")
            if len(items) == len(manifests) and all(_is_ready(item) for item in items):
                break
            if operator.poll() is not None:
                end = "\n".join(log.read_text().splitlines()[-15:])
                raise ClusterError(
                    "running the operator", f"it ended with {operator.returncode}", end
                )
            if time.monotonic() > deadline:
                raise ClusterError(
                    "waiting for pods",
                    f"{ready} of {wanted} ready after {READY_SECONDS:.0f} s",
                    f"{_unready(items)}\n{self._logs()}The operator's log: {log}",
                )
            time.sleep(_LOOK_SECONDS)
        pods = self._get("pod")
        return tuple(
            self._arm(key, manifest["metadata"]["name"], pods)
            for key, manifest in manifests.items()
        )

    def _arm(self, key: ArmKey, name: str, pods: list[dict[str, Any]]) -> Arm:
        own = [p for p in pods if p["metadata"]["labels"].get(names.LABEL_INSTANCE) == name]
        secret = self._cluster.get("secret", names.credentials_secret(name), "-n", NAMESPACE)
        token = base64.b64decode(secret["data"][names.KEY_PLUGIN_TOKEN]).decode().strip()
        return Arm(
            key,
            name,
            tuple(
                sorted(
                    (Pod(pod["metadata"]["name"], pod["status"]["podIP"]) for pod in own),
                    key=lambda pod: pod.name,
                )
            ),
            token,
        )

    def _get(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._cluster.get(kind, "-n", NAMESPACE)["items"]
        return found

    def _logs(self) -> str:
        """The last words of a container that restarted or is not ready, if there are any."""
        for pod in self._get("pod"):
            for container in pod["status"].get("containerStatuses", ()):
                if container["ready"]:
                    continue
                name = pod["metadata"]["name"]
                before = ("--previous",) if container["restartCount"] else ()
                with contextlib.suppress(CommandError):
                    said = self._cluster.kubectl(
                        "logs", name, "-n", NAMESPACE, "--tail=15", *before
                    )
                    return f"End of the log of pod {name}:\n{said}"
        return ""

    def _exists(self, kind: str, name: str, *scope: str) -> bool:
        found = self._cluster.kubectl(
            "get", kind, name, *scope, "--ignore-not-found", "-o", "name"
        )
        return bool(found.strip())

    def _refuse_company(self) -> None:
        step = "using an existing cluster"
        if self._exists("namespace", NAMESPACE):
            raise ClusterError(
                step,
                f"it has a namespace {NAMESPACE} already",
                f"Another demo runs there, or was killed: kubectl delete namespace {NAMESPACE}",
            )
        scope = ("-n", OPERATOR_NAMESPACE)
        if self._exists("lease", LEASE, *scope):
            spec = self._cluster.get("lease", LEASE, *scope).get("spec", {})
            if spec.get("holderIdentity") and _fresh(spec.get("renewTime")):
                raise ClusterError(
                    step,
                    f"an operator runs there: {spec['holderIdentity']}",
                    "The demo brings its own. Use a cluster without SpecServe.",
                )

    def _remove(self) -> None:
        for what in reversed(self._made):
            try:
                self._cluster.kubectl(
                    "delete", *what, "--ignore-not-found", "--wait", "--timeout=90s"
                )
            except (CommandError, subprocess.TimeoutExpired) as error:
                self._progress.note(f"Not removed: {' '.join(what)}\n{error}")


def _is_ready(item: Mapping[str, Any]) -> bool:
    status = item.get("status", {})
    return status.get("readyReplicas") == item["spec"]["replicas"] and any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in status.get("conditions", ())
    )


def _unready(items: list[dict[str, Any]]) -> str:
    lines = []
    for item in items:
        name = item["metadata"]["name"]
        conditions = item.get("status", {}).get("conditions", [])
        ready = next((each for each in conditions if each["type"] == "Ready"), None)
        if ready is None:
            lines.append(f"{name}: no status, so the operator did not see it")
        elif ready["status"] != "True":
            lines.append(f"{name}: {ready['reason']}: {ready['message']}")
    return "\n".join(lines)


def _fresh(renewed: str | None) -> bool:
    if not renewed:
        return False
    at = datetime.fromisoformat(renewed)
    return datetime.now(UTC) - at < timedelta(minutes=1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def write_private(file: Path, document: Mapping[str, Any]) -> None:
    """Writes JSON that holds tokens, for the user alone."""
    file.touch(mode=0o600)
    file.write_text(json.dumps(document))
