"""The test bed: a real API server, pods of a real Deployment controller, engines, one operator.

The engines are simulated, all in one process, at loopback addresses that the pods' statuses name;
this process plays scheduler and kubelet. Operator, engines and API server are processes of their
own, so each one's CPU can be told apart. All SpecServes share one set of credentials, made before
them as the operator would make it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import aiohttp
from kubernetes.aio import client, config
from prometheus_client.parser import text_string_to_metric_families

from specserve import names, workload
from specserve.kube import MERGE, Kube
from specserve_sim.launch import addresses
from tests.bench.measure import Meter
from tests.bench.report import BUILD, ROOT
from tests.cluster.light import LightCluster, light_cluster
from tests.cluster.processes import Daemon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping

NAMESPACE = "bench"
OPERATOR_NAMESPACE = "specserve-system"
OPERATOR = "specserve-operator"
OPERATOR_USER = f"system:serviceaccount:{OPERATOR_NAMESPACE}:{OPERATOR}"
FIRST_ADDRESS = "127.96.0.1"
FLEET = f"http://{FIRST_ADDRESS}:{names.PORT_SERVING}/sim/v1/fleet"
MODEL = "org/model"
#: Above, the engines listen at a wildcard address: two sockets each would use up file handles.
OWN_SOCKETS = 2000
IN_FLIGHT = 24
POLL_SECONDS = 0.25

#: The controllers that make pods; the others would only take CPU from what is measured.
CONTROLLERS = "deployment-controller,replicaset-controller,serviceaccount-controller"
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "Metadata",
            "users": [OPERATOR_USER],
            "verbs": ["create", "update", "patch", "delete", "deletecollection"],
        },
        {"level": "None"},
    ],
}

CALM = {"load": {"running": 5, "queued": 0}}
CROWDED = {"load": {"running": 60, "queued": 10}}
"""On either side of the default bounds, 32 and 48 in flight."""


class BenchError(Exception):
    """Something did not come about; the message says what."""


@dataclass(slots=True)
class Bed:
    """What runs; made by `bed`.

    Attributes:
        cluster: the control plane.
        kube: a connection with an administrator's rights.
        http: for engines and metrics.
        fleet: the process of all engines.
        engines: their addresses; the first is also where the fleet's own knobs are.
        operator: the operator's process, None while none runs.
        credentials: of all engines, as arguments of `workload.credentials`.
        audit: the log of the operator's writes, read as far as they are counted.
        port: of the operator's own metrics.
        pods: address by name of the pods that were brought up.
        written: the operator's writes that were read from the log, by resource.
        unread: the beginning of a line of the log whose end was not there yet.
    """

    cluster: LightCluster
    kube: Kube
    http: aiohttp.ClientSession
    fleet: Daemon
    engines: list[str]
    credentials: Mapping[str, str]
    audit: TextIO
    operator: Daemon | None = None
    port: int = 0
    pods: dict[str, str] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    unread: str = ""

    # -- processes ----------------------------------------------------------------------------

    def start_operator(self, **settings: str) -> None:
        """Start the operator under its own service account, with its own rights.

        Args:
            settings: that differ from the defaults, by the name of their field.
        """
        self.port = free_port()
        self.operator = daemon(
            self.cluster,
            "operator",
            [sys.executable, "-m", "specserve.cli", "run"],
            {
                "KUBECONFIG": str(self.cluster.kubeconfig_for(OPERATOR, OPERATOR_NAMESPACE)),
                "PYTHONPATH": str(ROOT / "operator"),
                "NO_PROXY": "127.0.0.0/8",
                "SPECSERVE_OPERATOR_NAMESPACE": OPERATOR_NAMESPACE,
                "SPECSERVE_OPERATOR_HTTP_PORT": str(self.port),
                **{f"SPECSERVE_OPERATOR_{key.upper()}": value for key, value in settings.items()},
            },
        )
        self.operator.start()

    def stop_operator(self) -> None:
        """End the operator; it gives its lease back."""
        if self.operator is not None:
            self.operator.stop()
            self.operator = None

    def meter(self) -> Meter:
        """Measure all of it from now on."""
        pids = {
            "engines": self.fleet.pid,
            "apiserver": self.cluster.apiserver.pid,
            "etcd": self.cluster.etcd.pid,
            "bench": os.getpid(),
        }
        if self.operator is not None:
            pids = {"operator": self.operator.pid, **pids}
        if self.cluster.controller_manager.running:
            pids["controllers"] = self.cluster.controller_manager.pid
        return Meter(pids)

    def writes(self) -> dict[str, int]:
        """The operator's writes to the API server so far, by resource."""
        *lines, self.unread = (self.unread + self.audit.read()).split("\n")
        for line in lines:
            about = json.loads(line)["objectRef"]
            what = "/".join(filter(None, (about["resource"], about.get("subresource", ""))))
            self.written[what] = self.written.get(what, 0) + 1
        return dict(self.written)

    async def metrics(self, *wanted: str) -> dict[str, float]:
        """The operator's own metrics, by name and labels; only those of these names if given."""
        query = [("name[]", each) for each in wanted]
        url = f"http://127.0.0.1:{self.port}/metrics"
        async with self.http.get(url, params=query) as answer:
            text = await answer.text()
        found = {}
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                tags = ",".join(f"{key}={each}" for key, each in sorted(labels.items()))
                found[f"{name}{{{tags}}}" if tags else name] = value
        return found

    # -- engines ------------------------------------------------------------------------------

    async def behave(self, behaviour: Mapping[str, Any]) -> float:
        """Have all engines behave so; the monotonic time at which they began to."""
        async with self.http.put(f"{FLEET}/behaviour", json=behaviour) as answer:
            answer.raise_for_status()
            return float((await answer.json())["at"])

    async def behave_one(self, address: str, behaviour: Mapping[str, Any]) -> float:
        """Have one engine behave so; the monotonic time at which it began to."""
        url = f"http://{address}:{names.PORT_SERVING}/sim/v1/behaviour"
        async with self.http.put(url, json=behaviour) as answer:
            answer.raise_for_status()
            return float((await answer.json())["at"])

    async def applied(self) -> dict[str, list[dict[str, Any]]]:
        """The orders each engine took over, by address, oldest first."""
        async with self.http.get(f"{FLEET}/applied") as answer:
            answer.raise_for_status()
            found: dict[str, list[dict[str, Any]]] = (await answer.json())["applied"]
            return found

    # -- objects ------------------------------------------------------------------------------

    async def create(self, name: str, replicas: int, policy: Mapping[str, Any]) -> None:
        """Create a SpecServe and, before it, the credentials that the engines know."""
        secret = workload.credentials(
            workload.Owner(name, NAMESPACE, ""), rotated="", **self.credentials
        )
        del secret["metadata"]["ownerReferences"]
        await self.kube.call("POST", f"/api/v1/namespaces/{NAMESPACE}/secrets", body=secret)
        await self.kube.call("POST", _collection(), body=_specserve(name, replicas, policy))

    async def scale(self, name: str, replicas: int) -> None:
        """Change the number of replicas of a SpecServe."""
        await self.kube.call(
            "PATCH",
            f"{_collection()}/{name}",
            body={"spec": {"replicas": replicas}},
            content_type=MERGE,
        )

    async def created(self, count: int, seconds: float) -> None:
        """Wait until so many pods are there, up or not.

        Raises:
            BenchError: They did not appear in `seconds`.
        """

        async def all_there() -> bool:
            path = f"/api/v1/namespaces/{NAMESPACE}/pods"
            page = await self.kube.call("GET", path, query={"limit": "1"})
            more = page["metadata"].get("remainingItemCount", 0)
            return len(page["items"]) + int(more) >= count

        await self.until(all_there, f"{count} pods created", seconds)

    async def bring_up(self, count: int, seconds: float) -> None:
        """Play scheduler and kubelet until `count` pods run and are ready.

        Raises:
            BenchError: They did not appear in `seconds`.
        """

        async def all_up() -> bool:
            fresh = [pod for pod in await self._pending() if pod[0] not in self.pods]
            batch = {}
            for (name, uid), address in zip(
                fresh, self.engines[len(self.pods) : count], strict=False
            ):
                self.pods[name] = address
                batch[name] = (address, uid)
            if batch:
                adopted = dict(batch.values())
                async with self.http.put(f"{FLEET}/pods", json=adopted) as answer:
                    answer.raise_for_status()
                await together(self._run(name, address) for name, (address, _) in batch.items())
            return len(self.pods) >= count

        await self.until(all_up, f"{count} pods", seconds, _pause(count))

    async def _pending(self) -> list[tuple[str, str]]:
        found = []
        token = ""
        while True:
            # Those that were brought up run: a list of all would be what the machine is busy with.
            query = {
                "limit": "500",
                "fieldSelector": "status.phase=Pending",
                **({"continue": token} if token else {}),
            }
            page = await self.kube.call(
                "GET", f"/api/v1/namespaces/{NAMESPACE}/pods", query=query, timeout=60
            )
            found += [(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in page["items"]]
            token = page["metadata"].get("continue", "")
            if not token:
                return found

    async def _run(self, name: str, address: str) -> None:
        await self.kube.call(
            "PATCH",
            f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/status",
            body=_running(address),
            content_type=MERGE,
            timeout=60,
        )

    async def settled(self, seconds: float) -> None:
        """Wait until every SpecServe says that all of its pods do what is wanted.

        Raises:
            BenchError: That took longer than `seconds`.
        """

        async def all_settled() -> bool:
            page = await self.kube.call("GET", _collection(), timeout=60)
            return all(_is_settled(item) for item in page["items"])

        await self.until(all_settled, "all SpecServes settled", seconds, _pause(len(self.pods)))

    async def quiet(self, seconds: float = 3.0, longest: float = 120.0) -> None:
        """Wait until the operator has written nothing but its lease for so many seconds.

        Raises:
            BenchError: It has not stopped in `longest` seconds.
        """
        last, since = -1, time.monotonic()

        async def long_quiet() -> bool:
            nonlocal last, since
            now = sum(count for what, count in self.writes().items() if what != "leases")
            if now != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since > seconds

        await self.until(long_quiet, "an operator that writes nothing", longest)

    async def until(
        self,
        holds: Callable[[], Coroutine[Any, Any, bool]],
        what: str,
        seconds: float,
        pause: float = POLL_SECONDS,
    ) -> None:
        """Wait for a condition.

        Raises:
            BenchError: The time ran out, or a process ended.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not await holds():
                    for each in (self.fleet, self.operator):
                        if each is not None and not each.running:
                            raise BenchError(f"{what}: {each.name} ended. {each.tail(20)}")
                    await asyncio.sleep(pause)
                return
        raise BenchError(f"{what}: not within {seconds:g} s")


@contextlib.asynccontextmanager
async def bed(engines: int) -> AsyncIterator[Bed]:
    """Run a control plane and so many engines, no operator yet."""
    audit = BUILD / "audit-policy.json"
    audit.parent.mkdir(parents=True, exist_ok=True)
    audit.write_text(json.dumps(AUDIT))
    with light_cluster(
        crds=[ROOT / "crds"], controllers=CONTROLLERS, scheduler=False, audit=audit
    ) as cluster:
        cluster.kubectl("apply", "-f", str(ROOT / "examples" / "install" / "rbac.yaml"))
        cluster.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        credentials = _credentials()
        fleet = _fleet(cluster, engines, credentials)
        fleet.start()
        log = cluster.logs / "audit.log"
        log.touch(0o600)
        async with (
            await _connect(cluster.kubeconfig) as kube,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as http,
        ):
            with log.open() as audit_log:
                made = Bed(
                    cluster=cluster,
                    kube=kube,
                    http=http,
                    fleet=fleet,
                    engines=addresses(FIRST_ADDRESS, engines),
                    credentials=credentials,
                    audit=audit_log,
                )

                async def serving() -> bool:
                    return b'"ready"' in fleet.log.read_bytes()

                await made.until(serving, "the engines", 60)
                await made.behave(CALM)
                yield made


def daemon(cluster: LightCluster, name: str, argv: list[str], env: Mapping[str, str]) -> Daemon:
    """A process that ends with this one, however that ends; its output is in build/bench/logs."""
    log = BUILD / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    return Daemon(name, argv, log, cluster._keeper, {**os.environ, **env})


async def together(work: Iterable[Coroutine[Any, Any, None]], most: int = IN_FLIGHT) -> None:
    """Run coroutines, so many of them at a time."""
    gate = asyncio.Semaphore(most)

    async def one(each: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await each

    await asyncio.gather(*(one(each) for each in work))


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _pause(pods: int) -> float:
    # A list of 1,000 pods is 10 MB: looking must not be what is measured.
    return max(POLL_SECONDS, pods / 1000)


async def _connect(kubeconfig: Path) -> Kube:
    settings = client.Configuration()
    await config.load_kube_config(
        config_file=str(kubeconfig), client_configuration=settings, persist_config=False
    )
    settings.connection_pool_maxsize = IN_FLIGHT
    return Kube(client.ApiClient(configuration=settings))


def _credentials() -> dict[str, str]:
    admin_key = "bench-admin-key"
    return {
        "plugin_token": "bench-token",
        "plugin_token_previous": "",
        "admin_key": admin_key,
        "nonce": "1",
        "config_yaml": workload.engine_config(admin_key),
    }


def _fleet(cluster: LightCluster, count: int, credentials: Mapping[str, str]) -> Daemon:
    folder = cluster.directory / "credentials"
    folder.mkdir()
    (folder / names.KEY_PLUGIN_TOKEN).write_text(credentials["plugin_token"])
    return daemon(
        cluster,
        "engines",
        [
            str(Path(sys.executable).with_name("specserve-sim")),
            "fleet",
            f"--count={count}",
            f"--first-address={FIRST_ADDRESS}",
            f"--port={names.PORT_SERVING}",
            f"--served-model-name={MODEL}",
            "--speculative-algorithm=EAGLE3",
            "--max-running-requests=256",
            *(["--wildcard"] if count > OWN_SOCKETS else []),
        ],
        {names.ENV_CREDENTIALS_DIR: str(folder), names.ENV_STEPS: "0,3"},
    )


def _collection() -> str:
    return f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}"


def _specserve(name: str, replicas: int, policy: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas,
            "model": {"source": f"hf://{MODEL}"},
            "draft": {"method": "EAGLE3", "source": "hf://org/draft", "steps": [0, 3]},
            "policy": dict(policy),
            "engine": {"image": "specserve-sim:bench"},
        },
    }


def _running(address: str) -> dict[str, Any]:
    began = "2026-01-01T00:00:00Z"
    return {
        "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [
                {"type": each, "status": "True", "lastTransitionTime": began}
                for each in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            ],
            "containerStatuses": [
                {
                    "name": names.ENGINE_CONTAINER,
                    "ready": True,
                    "started": True,
                    "restartCount": 0,
                    "image": "specserve-sim:bench",
                    "imageID": "sha256:bench",
                    "containerID": f"containerd://{address}",
                    "state": {"running": {"startedAt": began}},
                }
            ],
        }
    }


def _is_settled(item: Mapping[str, Any]) -> bool:
    status = item.get("status") or {}
    replicas = item["spec"]["replicas"]
    speculation = status.get("speculation") or {}
    true = {each["type"] for each in status.get("conditions") or () if each["status"] == "True"}
    return (
        status.get("readyReplicas") == replicas
        and speculation.get("on", 0) + speculation.get("off", 0) == replicas
        and speculation.get("drifted") == 0
        and {"Ready", "MetricsFresh", "SpeculationSettled"} <= true
    )
