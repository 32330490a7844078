"""A played kubelet: pods that the scheduler has bound get an address and a simulated engine.

It does to the API what a kubelet does (status of containers, finished deletions, mounted Secrets),
and what tests want to see of bad days: images that are not there, crashes, lost readiness.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import itertools
import os
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from specserve import names
from tests.cluster.apiclient import ApiError
from tests.cluster.claims import claim
from tests.integration.api import Api, eventually, path
from tests.integration.played_engine import PlayedEngine, Running, config_of
from tests.integration.played_worker import PlayedWorker

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from specserve_sim.engine import EngineConfig

STOP_SECONDS = 20.0
ADDRESS_ATTEMPTS = 5


def _addresses() -> Iterator[str]:
    # All engines listen on the same ports, so each process has a block of addresses of its own.
    numbers = (90 + (os.getpid() + offset) % 90 for offset in range(90))
    block, _held = next((n, held) for n in numbers if (held := claim(f"engines-127.{n}")))
    for number in itertools.count():
        yield f"127.{block}.{number // 250}.{number % 250 + 1}"


_fresh = _addresses()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class PlayedPod:
    """A pod on the played node.

    Attributes:
        name: Its name.
        uid: Its uid.
        instance: The SpecServe it belongs to.
        address: Its address.
        item: The object as last seen.
        running: Its engine, None while none runs.
        restarts: Of the engine container.
        ready_at: Monotonic time at which it was last reported ready.
    """

    kubelet: Kubelet
    name: str
    uid: str
    instance: str
    item: Any
    address: str = ""
    running: Running | None = None
    restarts: int = 0
    ready_at: float = 0.0
    last_state: dict[str, Any] = field(default_factory=dict)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @property
    def engine(self) -> PlayedEngine:
        """Its engine."""
        assert self.running is not None
        return self.running.engine

    @property
    def visits(self) -> Counter[str]:
        """Connections and requests by side."""
        assert self.running is not None
        return self.running.door.visits

    async def report(self, *, ready: bool, state: Any = None, phase: str = "Running") -> None:
        """Write its status."""
        running = state is None
        if ready:
            self.ready_at = time.monotonic()
        image = self.item["spec"]["containers"][0]["image"]
        number = f"{self.uid}-{self.restarts}"
        await self.kubelet.write_status(
            self,
            {
                "phase": phase,
                "hostIP": "10.0.0.1",
                **(
                    {"podIP": self.address, "podIPs": [{"ip": self.address}]}
                    if self.address
                    else {}
                ),
                "startTime": _now(),
                "conditions": [
                    {"type": "PodScheduled", "status": "True", "lastTransitionTime": _now()},
                    {"type": "Initialized", "status": "True", "lastTransitionTime": _now()},
                    {
                        "type": "ContainersReady",
                        "status": str(ready),
                        "lastTransitionTime": _now(),
                    },
                    {"type": "Ready", "status": str(ready), "lastTransitionTime": _now()},
                ],
                "containerStatuses": [
                    {
                        "name": names.ENGINE_CONTAINER,
                        "image": image,
                        "imageID": "",
                        "ready": ready,
                        "started": running,
                        "restartCount": self.restarts,
                        **({"containerID": f"containerd://{number}"} if running else {}),
                        "state": state or {"running": {"startedAt": _now()}},
                        "lastState": self.last_state,
                    }
                ],
            },
        )

    async def waiting(self, reason: str, message: str, phase: str = "Pending") -> None:
        """Say why the engine container does not run."""
        state = {"waiting": {"reason": reason, "message": message}}
        await self.report(ready=False, state=state, phase=phase)

    async def unready(self) -> None:
        """Fail the readiness probe; the engine goes on."""
        await self.report(ready=False)

    async def ready(self) -> None:
        """Pass the readiness probe."""
        await self.report(ready=True)

    async def loaded(self) -> None:
        """End the loading of the engine."""
        self.engine.load()
        await self.ready()

    async def crash(self, message: str = "", exit_code: int = 1, reason: str = "Error") -> None:
        """Let the engine container end, and wait for its back-off."""
        await self.stop()
        self._ended(message, exit_code, reason)
        await self.waiting("CrashLoopBackOff", "back-off 10s restarting failed", "Running")

    async def restart(self, message: str = "") -> None:
        """Let the engine container crash and run again: same pod, same address, nothing kept."""
        self.engine.restart()
        self._ended(message, 1, "Error")
        await self.report(ready=False)
        await self.report(ready=True)

    def _ended(self, message: str, exit_code: int, reason: str) -> None:
        ended = {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": _now()}
        self.last_state = {"terminated": {**ended, "startedAt": _now()}}
        self.restarts += 1

    async def run(self, address: str = "") -> None:
        """Start the engine and pass the readiness probe."""
        await self.kubelet.start_engine(self, address)

    async def finish(self, phase: str, reason: str) -> None:
        """End for good, as an evicted or completed pod does; its address is kept in its status."""
        await self.stop()
        await self.kubelet.write_status(
            self, {"phase": phase, "reason": reason, "message": "the node was low on memory"}
        )

    async def stop(self) -> None:
        """End the engine process."""
        self.running = None
        await self.stack.aclose()


class Kubelet:
    """Plays the pods of one namespace.

    Attributes:
        pods: Those of engines that it runs, by name.
        workers: Those of Jobs, by name; ended ones are kept.
        works: Whether pods of Jobs run.
        pulls: Whether images can be pulled; `resync` after a change.
        loads: Whether engines finish loading by themselves.
        finishes: Whether deletions of pods are finished; `resync` after a change.
        mounts: Whether changed Secrets reach running pods; `resync` after a change.
        tune: Changes what engines are started with.
        begin: Told each engine before its pod is ready.
    """

    def __init__(self, api: Api, namespace: str, folder: Path) -> None:
        self.pods: dict[str, PlayedPod] = {}
        self.workers: dict[str, PlayedWorker] = {}
        self.works = True
        self._runs: dict[str, asyncio.Task[None]] = {}
        self.pulls = self.loads = self.finishes = self.mounts = True
        self.tune: Callable[[EngineConfig], EngineConfig] = lambda config: config
        self.begin: Callable[[PlayedEngine], object] = lambda _: None
        self._api = api
        self._namespace = namespace
        self.folder = folder
        self._secrets: dict[str, dict[str, str]] = {}
        self._secrets_known = asyncio.Event()
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for secret in await self._api.items("secrets", self._namespace):
            self._take_secret("ADDED", secret)
        self._tasks = [
            asyncio.create_task(self._follow_secrets()),
            asyncio.create_task(self._follow_pods()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Clear the namespace: a pod without its kubelet would never leave."""
        self.finishes = True
        for kind in (names.PLURAL, "deployments", "replicasets", "jobs"):
            with contextlib.suppress(ApiError):  # the CRD may be gone
                await self._api.delete(path(kind, self._namespace), propagationPolicy="Background")
        await self.resync()
        try:
            await eventually(self._cleared, STOP_SECONDS, f"pods of {self._namespace} to leave")
        finally:
            for task in self._tasks:
                task.cancel()
            for worker in self.workers.values():
                worker.stop()
            outcomes = await asyncio.gather(
                *self._tasks, *self._runs.values(), return_exceptions=True
            )
            for pod in list(self.pods.values()):
                await pod.stop()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _cleared(self) -> bool:
        left = await self._api.items("pods", self._namespace)
        for pod in left:
            if not pod["spec"].get("nodeName") or not pod["metadata"].get("deletionTimestamp"):
                await self._api.delete(
                    path("pods", self._namespace, pod["metadata"]["name"]), gracePeriodSeconds=0
                )
        # An engine that is being stopped swallows the cancellation of whoever waits for it.
        return not left and not self.pods

    def of(self, instance: str) -> list[PlayedPod]:
        """The pods of a SpecServe whose engines run, oldest first."""
        return [pod for pod in self.pods.values() if pod.instance == instance and pod.running]

    async def running(
        self, instance: str, count: int = 1, within: float = 10.0
    ) -> list[PlayedPod]:
        """Wait until so many engines of a SpecServe run."""

        def enough() -> list[PlayedPod] | None:
            for task in self._tasks:
                assert not task.done(), task
            found = self.of(instance)
            return found if len(found) == count else None

        found: list[PlayedPod] | None = await eventually(enough, within, f"{count} engines to run")
        assert found is not None
        return found

    async def engine(self, instance: str) -> PlayedPod:
        """Wait for the one engine of a SpecServe."""
        return (await self.running(instance))[0]

    async def resync(self) -> None:
        """Look at all pods again."""
        for pod in list(self.pods.values()):
            await self._look_again(pod)
        if self.mounts:
            for name in self._secrets:
                self._mount(name)

    # -- what the API says ------------------------------------------------------------------

    async def _follow_secrets(self) -> None:
        async for event, secret in self._api.follow(path("secrets", self._namespace)):
            self._take_secret(event, secret)
            for pod in list(self.pods.values()):
                if not pod.running:
                    await self._look_again(pod)

    def _take_secret(self, event: str, secret: Any) -> None:
        name = secret["metadata"]["name"]
        if event == "DELETED":
            self._secrets.pop(name, None)
            return
        self._secrets[name] = secret.get("data") or {}
        if self.mounts:
            self._mount(name)

    async def _follow_pods(self) -> None:
        async for event, item in self._api.follow(path("pods", self._namespace)):
            name = item["metadata"]["name"]
            async with self._turn:
                if event != "DELETED":
                    await self._bring(item)
                elif (pod := self.pods.get(name)) and pod.uid == item["metadata"]["uid"]:
                    await pod.stop()
                    del self.pods[name]

    async def _look_again(self, pod: PlayedPod) -> None:
        async with self._turn:
            if self.pods.get(pod.name) is pod:
                await self._bring(pod.item)

    async def _bring(self, item: Any) -> None:
        meta, spec = item["metadata"], item["spec"]
        if not spec.get("nodeName"):
            return
        if (meta.get("labels") or {}).get(names.LABEL_COMPONENT) == names.COMPONENT_CALIBRATION:
            await self._bring_worker(item)
            return
        pod = self.pods.get(meta["name"])
        if pod is None or pod.uid != meta["uid"]:
            instance = (meta.get("labels") or {}).get(names.LABEL_INSTANCE, "")
            pod = PlayedPod(self, meta["name"], meta["uid"], instance, item)
            self.pods[meta["name"]] = pod
        pod.item = item
        if meta.get("deletionTimestamp"):
            if self.finishes:
                await pod.stop()
                await self._api.delete(
                    path("pods", self._namespace, pod.name),
                    gracePeriodSeconds=0,
                    preconditions={"uid": pod.uid},
                )
            return
        phase = (item.get("status") or {}).get("phase")
        if phase in {"Failed", "Succeeded"} or pod.running or pod.restarts:
            return
        if not self.pulls:
            image = spec["containers"][0]["image"]
            await self._wait_once(pod, "ImagePullBackOff", f'Back-off pulling image "{image}"')
        elif missing := self._missing(spec):
            await self._wait_once(pod, "CreateContainerConfigError", missing)
        else:
            await self.start_engine(pod)

    async def _bring_worker(self, item: Any) -> None:
        name = item["metadata"]["name"]
        worker = self.workers.setdefault(name, PlayedWorker(item, self.folder))
        worker.item = item
        ended = (item.get("status") or {}).get("phase") in {"Failed", "Succeeded"}
        if item["metadata"].get("deletionTimestamp"):
            if name in self._runs and not self._runs[name].done():
                worker.stop()
            else:
                await self._api.delete(path("pods", self._namespace, name), gracePeriodSeconds=0)
        elif self.works and not ended and name not in self._runs:
            self._runs[name] = asyncio.create_task(self._run(worker))

    async def _run(self, worker: PlayedWorker) -> None:
        status = await worker.run()
        at = path("pods", self._namespace, worker.name)
        with contextlib.suppress(ApiError):  # it may be gone
            await self._api.merge(f"{at}/status", {"status": status})
        item = await self._api.find(at)
        if item is not None and item["metadata"].get("deletionTimestamp"):
            await self._api.delete(at, gracePeriodSeconds=0)

    async def worker(self, within: float = 15.0) -> PlayedWorker:
        """Wait until a process of a Job runs; returns the last one."""

        def runs() -> PlayedWorker | None:
            found = list(self.workers.values())
            return found[-1] if found and found[-1].process else None

        found: PlayedWorker = await eventually(runs, within, "a worker to run")
        return found

    async def _wait_once(self, pod: PlayedPod, reason: str, message: str) -> None:
        statuses = (pod.item.get("status") or {}).get("containerStatuses") or [{}]
        waiting = (statuses[0].get("state") or {}).get("waiting") or {}
        if (waiting.get("reason"), waiting.get("message")) != (reason, message):
            await pod.waiting(reason, message)

    def _missing(self, spec: Any) -> str:
        """Why a container cannot be made, in a kubelet's words; empty if it can."""
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            for variable in container.get("env", ()):
                reference = (variable.get("valueFrom") or {}).get("secretKeyRef")
                if reference is None or reference.get("optional"):
                    continue
                data = self._secrets.get(reference["name"])
                if data is None:
                    return f'secret "{reference["name"]}" not found'
                if reference["key"] not in data:
                    return f"couldn't find key {reference['key']} in Secret {reference['name']}"
        for volume in spec.get("volumes", ()):
            secret = volume.get("secret") or {}
            name = secret.get("secretName")
            if name and not secret.get("optional") and name not in self._secrets:
                return f'secret "{name}" not found'
        return ""

    # -- what it does -----------------------------------------------------------------------

    async def start_engine(self, pod: PlayedPod, address: str = "") -> None:
        """Start a pod's engine; at an address of its own if none is given."""
        mounted = self.folder / names.credentials_secret(pod.instance)
        config = self.tune(config_of(pod.item, mounted))
        if not self.loads:
            config = replace(config, startup_seconds=3600.0)
        for attempt in range(ADDRESS_ATTEMPTS):
            pod.address = address or pod.address or next(_fresh)
            try:
                pod.running = await pod.stack.enter_async_context(
                    Running.at(pod.address, config, mounted, pod.uid)
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if address or attempt + 1 == ADDRESS_ATTEMPTS:
                    at = f"port {names.PORT_SERVING} or {names.PORT_ADMIN} of {pod.address}"
                    error.add_note(f"{at}: does a fleet of engines listen at every address?")
                    raise
                pod.address = ""
            else:
                break
        self.begin(pod.engine)
        await pod.report(ready=self.loads)

    async def write_status(self, pod: PlayedPod, status: Any) -> None:
        """Merge into a pod's status; one that is gone by now is no error."""
        at = path("pods", self._namespace, pod.name)
        body = {"metadata": {"uid": pod.uid}, "status": status}
        try:
            pod.item = await self._api.merge(f"{at}/status", body)
        except ApiError as error:
            if error.status not in {404, 409}:
                raise

    def _mount(self, name: str) -> None:
        """Write a Secret as the kubelet does: a new folder, and a link swapped to it."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        version = folder / f"..v{len(list(folder.glob('..v*')))}"
        version.mkdir()
        for key, value in self._secrets[name].items():
            (version / key).write_bytes(base64.b64decode(value))
            if not (folder / key).is_symlink():
                (folder / key).symlink_to(f"..data/{key}")
        swap = folder / "..data_tmp"
        swap.symlink_to(version.name)
        swap.rename(folder / "..data")
