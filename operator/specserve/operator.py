"""Puts the process together: leader election around kopf, informers and the two loops."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any

import kopf

from specserve import handlers, names, observed, scope, signals, telemetry, workload
from specserve.cluster import Cluster
from specserve.engine import EngineClient
from specserve.informer import Informer
from specserve.kube import Kube, KubeError
from specserve.leader import Elector
from specserve.observed import Key
from specserve.prometheus import PrometheusClient
from specserve.reconcile import Reconciler
from specserve.regulate import Regulator
from specserve.settings import Settings
from specserve.target import Notice
from specserve.workqueue import WorkQueue

log = logging.getLogger(__name__)

#: Seconds without a sign of life after which the process is to be restarted.
TICK_LIMIT = 30.0
#: Seconds between two full lists of SpecServes, beside the watch.
RELIST_SECONDS = 300.0
WATCH_LIMIT = 360.0
#: Python's defaults make a full collection every few seconds, which walks all that is kept of all
#: pods and holds the event loop for a third of a second at 10,000; what is made for a call is
#: freed without one. What was listed is not walked at all.
GC_THRESHOLDS = (10_000, 10, 20)
#: Seconds in which notices of one kind about one SpecServe are gathered into one event.
NOTICE_GATHER = 1.0
NOTICE_BACKLOG = 10_000

_WATCHED = {
    "Deployment": "/apis/apps/v1/{}deployments",
    "Service": "/api/v1/{}services",
    "ServiceAccount": "/api/v1/{}serviceaccounts",
}
_POLICIES = {"NetworkPolicy": "/apis/networking.k8s.io/v1/{}networkpolicies"}
#: Seconds after which an ended watch of SpecServes is begun again.
AGAIN = 1.0
#: Seconds between two looks whether the installed schema has changed.
COMPARE_SECONDS = 30.0


async def run(settings: Settings, health: telemetry.Health) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        LeadershipLost: Another process may steer now; end this one.
        NoCluster: Nothing says where the API server is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    gc.set_threshold(*GC_THRESHOLDS)
    end = asyncio.current_task()
    on_signals(end)
    async with await Kube.connect(settings.api_connections) as kube:
        elector = Elector(
            kube,
            settings.namespace,
            settings.lease_name,
            settings.identity,
            lease_seconds=settings.lease_seconds,
            renew_seconds=settings.renew_seconds,
            retry_seconds=settings.retry_seconds,
        )
        health.watch("leader election", lambda: elector.heard, WATCH_LIMIT)
        health.ready = True
        with contextlib.suppress(asyncio.CancelledError):
            await elector.lead(partial(_lead, kube, settings, health, end))


def on_signals(end: asyncio.Task[Any] | None) -> None:
    """Have SIGTERM and SIGINT cancel a task; kopf takes them over while it runs."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.cancel if end else loop.stop)


async def _lead(
    kube: Kube, settings: Settings, health: telemetry.Health, end: asyncio.Task[Any] | None
) -> None:
    """Serve what there is to serve, again whenever that has changed."""
    telemetry.leader.set(1)
    crd = _Schema(kube, settings)
    try:
        async with _background([crd.watch()]):
            asked_to_end = False
            while not asked_to_end:
                found = await scope.wait(kube, settings.watch_namespaces)
                await crd.look()
                asked_to_end = await _steer(kube, settings, health, found)
                on_signals(end)
                if not asked_to_end:
                    await asyncio.sleep(AGAIN)
    finally:
        telemetry.leader.set(0)


async def _tell(kube: Kube, settings: Settings, kind: str, reason: str, message: str) -> None:
    """Post an event about the installation itself, which its Lease stands for."""
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "namespace": settings.namespace,
        "name": settings.lease_name,
    }
    try:
        await Cluster(kube, settings.identity).event(lease, kind, reason, message, reason)
    except KubeError as error:
        log.warning("event %s not posted: %s", reason, error)


class _Schema:
    """Tells how the installed schema differs from ours, at the start and whenever it changes."""

    def __init__(self, kube: Kube, settings: Settings) -> None:
        self._kube = kube
        self._settings = settings
        self._seen = ""
        self._said: tuple[str, str] | None = None
        self._turn = asyncio.Lock()

    async def watch(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(COMPARE_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Compare what has been published since the last look."""
        async with self._turn:
            try:
                version = await scope.published(self._kube)
                if version == self._seen:
                    return
                difference = await scope.compare(self._kube)
            except KubeError as error:
                log.warning("the installed schema was not compared: %s", error)
                return
            self._seen = version
            if difference != self._said:
                self._said = difference
                await self._tell(difference)

    async def _tell(self, difference: tuple[str, str] | None) -> None:
        if difference is None:
            message = "the installed CRD is that of this operator"
            log.info("%s", message)
            await _tell(self._kube, self._settings, "Normal", "SchemaMatches", message)
            return
        kind, what = difference
        message = f"the installed CRD is {kind}: {what}; apply the CRD of this version"
        if kind == "newer":
            message = f"the installed CRD is newer than this operator: {what}"
        log.warning("%s", message)
        await _tell(self._kube, self._settings, "Warning", "SchemaDiffers", message)


def _provision(settings: Settings) -> workload.Provision:
    apply = settings.network_policies == "Apply"
    return workload.Provision(
        image=settings.engine_image,
        registry=settings.image_registry,
        pull_secrets=settings.engine_pull_secrets,
        admin=workload.Peer(settings.namespace, settings.pod_labels) if apply else None,
    )


async def _steer(
    kube: Kube, settings: Settings, health: telemetry.Health, found: scope.Scope
) -> bool:
    """Run the two loops on what was found.

    Returns:
        Whether the process was asked to end; else something else can be served now.
    """
    metric_names = signals.MetricNames(
        settings.metric_running, settings.metric_queued, settings.metric_tokens
    )
    notices: asyncio.Queue[Notice] = asyncio.Queue(NOTICE_BACKLOG)

    def notice(one: Notice) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            notices.put_nowait(one)

    queue: WorkQueue[Key] = WorkQueue()
    cluster = Cluster(kube, settings.identity)
    servers = PrometheusClient(
        metric_names,
        hosts=settings.prometheus_hosts,
        token_files=settings.prometheus_token_files,
    )
    async with EngineClient(metric_names) as engines, servers:
        regulator = Regulator(
            engines,
            servers,
            holder=settings.holder,
            samples_per_second=settings.samples_per_second,
            read_back_seconds=settings.read_back_seconds,
            changed=lambda key: reconciler.changed(key),  # noqa: PLW0108 - made below
            notice=notice,
        )
        reconciler = Reconciler(
            cluster,
            regulator,
            queue,
            notice,
            provision=_provision(settings),
            holder=settings.holder,
        )
        informers = list(_informers(kube, settings, found, reconciler))
        checks = ["regulation", *(f"watch of {path}" for path, _ in informers)]
        telemetry.registry.register(regulator)
        health.watch("regulation", lambda: regulator.beat, TICK_LIMIT)
        _count(informers, reconciler)
        for path, informer in informers:
            health.watch(f"watch of {path}", partial(getattr, informer, "heard"), WATCH_LIMIT)
        try:
            async with _background([i.run() for _, i in informers]) as watching:
                await _synced([i for _, i in informers], watching)
                gc.freeze()
                loops = [
                    regulator.run(),
                    _relist(kube, found, reconciler),
                    _post(notices, cluster, reconciler),
                    *(reconciler.work() for _ in range(settings.workers)),
                ]
                async with _background(loops) as working:
                    changed = scope.changed(kube, settings.watch_namespaces, found)
                    async with _background([changed]) as (moved,):
                        others = [*watching, *working]
                        return await _serve(settings, found, reconciler, others, moved)
        finally:
            gc.unfreeze()
            telemetry.registry.unregister(regulator)
            health.forget(checks)


def _informers(
    kube: Kube, settings: Settings, serve: scope.Scope, reconciler: Reconciler
) -> list[tuple[str, Informer[Any]]]:
    found: list[tuple[str, Informer[Any]]] = []
    query = {"labelSelector": names.OWNED_SELECTOR}
    watched = _WATCHED | ({} if settings.network_policies == "Ignore" else _POLICIES)
    for namespace in serve.namespaces or ("",):
        where = f"namespaces/{namespace}/" if namespace else ""
        pods = f"/api/v1/{where}pods"
        found.append((pods, Informer(kube, pods, observed.pod, reconciler.take_pod, query)))
        keys = f"/api/v1/{where}secrets"
        found.append(
            (
                keys,
                Informer(kube, keys, observed.credentials, reconciler.take_credentials, query),
            )
        )
        for kind, template in watched.items():
            path = template.format(where)
            extract = partial(observed.owned, kind)
            found.append((path, Informer(kube, path, extract, reconciler.take_owned, query)))
    return found


async def _relist(kube: Kube, found: scope.Scope, reconciler: Reconciler) -> None:
    """List all SpecServes now and then: what a watch has missed is found, its ends among it."""
    while True:
        await asyncio.sleep(RELIST_SECONDS)
        before = reconciler.keys()
        items: list[Any] = []
        try:
            for namespace in found.namespaces or ("",):
                where = f"namespaces/{namespace}/" if namespace else ""
                path = f"/apis/{names.API_VERSION}/{where}{names.PLURAL}"
                async for page in kube.pages(path):
                    items += page.get("items") or ()
        except KubeError as error:
            log.warning("SpecServes were not listed anew: %s", error)
            continue
        reconciler.relist(items, before)


def _count(informers: list[tuple[str, Informer[Any]]], reconciler: Reconciler) -> None:
    """Show how much is watched, over all namespaces."""
    alike: dict[str, list[Informer[Any]]] = defaultdict(list)
    for path, informer in informers:
        alike[path.rpartition("/")[2]].append(informer)
    for collection, of in alike.items():
        telemetry.watched.labels(collection).set_function(partial(_objects, of))
    telemetry.watched.labels(names.PLURAL).set_function(lambda: reconciler.known)
    telemetry.foreign.set_function(lambda: reconciler.foreign)


def _objects(informers: list[Informer[Any]]) -> int:
    return sum(len(informer.values) for informer in informers)


@contextlib.asynccontextmanager
async def _background(
    work: list[Coroutine[Any, Any, None]],
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run coroutines as tasks for the length of a `with` block."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _synced(informers: list[Informer[Any]], watching: list[asyncio.Task[None]]) -> None:
    """Wait until everything is listed: deciding on half the facts would create what is there."""

    async def all_listed() -> None:
        for informer in informers:
            await informer.synced.wait()

    async with _background([all_listed()]) as (waiting,):
        await asyncio.wait({waiting, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await _first_failure(watching)


async def _serve(
    settings: Settings,
    serve: scope.Scope,
    reconciler: Reconciler,
    others: list[asyncio.Task[None]],
    moved: asyncio.Task[None],
) -> bool:
    """Run kopf until it ends, or until something else can be served.

    None of our own tasks may end before it.

    Returns:
        Whether it ended because it was asked to.
    """

    async def stop() -> None:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    # By itself kopf asks for the name of the process's user, which a numeric one does not have.
    identity: Any = settings.identity
    where: dict[str, Any] = (
        {"namespaces": list(serve.namespaces)} if serve.namespaces else {"clusterwide": True}
    )
    watch = asyncio.create_task(
        kopf.operator(
            registry=handlers.registry,
            settings=handlers.settings(),
            memo=kopf.Memo(reconciler=reconciler, stop=stop),
            standalone=True,
            identity=identity,
            **where,
        )
    )
    try:
        await asyncio.wait({watch, moved, *others}, return_when=asyncio.FIRST_COMPLETED)
        if moved.done():
            await moved
            return False
        await _first_failure(others)
        # None has failed: kopf is ending, and has cancelled them in its clean-up.
        return await _ended(watch)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _ended(watch: asyncio.Task[None]) -> bool:
    """Whether kopf ended because it was asked to; not if what it watched is gone."""
    try:
        await watch
    except Exception as error:
        if getattr(error, "status", None) in {403, 404}:
            log.warning("the watch of %s ended: %s", names.PLURAL, error)
            return False
        raise
    return True


async def _first_failure(tasks: list[asyncio.Task[None]]) -> None:
    """Raise what ended a task that should have gone on for ever."""
    for task in tasks:
        if task.done() and not task.cancelled():
            await task
            raise RuntimeError("a loop of the operator ended by itself")


async def _post(notices: asyncio.Queue[Notice], cluster: Cluster, reconciler: Reconciler) -> None:
    """Post notices as events, those of one kind about one SpecServe as one."""
    while True:
        batch = [await notices.get()]
        await asyncio.sleep(NOTICE_GATHER)
        while not notices.empty():
            batch.append(notices.get_nowait())
        alike: dict[tuple[Key, str, str], list[str]] = defaultdict(list)
        for one in batch:
            alike[one.key, one.kind, one.reason].append(one.message)
        for (key, kind, reason), messages in alike.items():
            reference = reconciler.reference(key)
            if reference is None:
                continue
            more = f" (and {len(messages) - 1} more)" if len(messages) > 1 else ""
            try:
                await cluster.event(reference, kind, reason, messages[-1] + more, reason)
            except KubeError as error:
                log.warning("event %s of %s/%s not posted: %s", reason, *key, error)
