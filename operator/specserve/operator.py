"""Puts the process together: leader election around kopf, informers and the two loops."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from specserve import (
    decisions,
    handlers,
    moments,
    names,
    observed,
    scope,
    signals,
    telemetry,
    workload,
)
from specserve.cluster import Cluster
from specserve.engine import EngineClient
from specserve.informer import Informer, Informers
from specserve.kube import Kube, KubeError
from specserve.leader import Elector
from specserve.observed import Key
from specserve.override import OverrideReader
from specserve.prometheus import PrometheusClient
from specserve.reconcile import Reconciler
from specserve.regulate import Regulator
from specserve.settings import Settings
from specserve.target import Notice, Told
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
#: Seconds in which namespaces are waited for to begin with all of them together.
TOGETHER = 5.0
#: Seconds after which an ended watch of SpecServes is begun again.
AGAIN = 1.0


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
                telemetry.namespaces.labels("served").set(0)
                telemetry.namespaces.labels("waiting").set(len(settings.watch_namespaces))
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
            await asyncio.sleep(self._settings.compare_seconds)
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
        calibrator=settings.image,
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
    async with EngineClient(metric_names, telemetry.call_took) as engines, servers:
        regulator = Regulator(
            engines,
            servers,
            holder=settings.holder,
            samples_per_second=settings.samples_per_second,
            read_back_seconds=settings.read_back_seconds,
            changed=lambda key: reconciler.changed(key),  # noqa: PLW0108 - made below
            notice=notice,
            switched=lambda mode, code: telemetry.switches.labels(mode, code).inc(),
            stretched=telemetry.sample_period.set,
        )
        reconciler = Reconciler(
            cluster,
            regulator,
            queue,
            notice,
            provision=_provision(settings),
            holder=settings.holder,
            curve_seconds=settings.curve_seconds,
        )
        override = OverrideReader(
            cluster, settings.namespace, settings.override_name, regulator.override
        )
        ground = _Ground(kube, settings, health, reconciler)
        telemetry.registry.register(regulator)
        health.watch("regulation", lambda: regulator.beat, TICK_LIMIT)
        telemetry.foreign.set_function(lambda: reconciler.foreign)
        health.decisions = partial(_decisions, regulator)
        begun = [ground.ready.wait(), ground.informers.run(), ground.follow(found)]
        try:
            async with _background(begun) as tasks:
                _, informing, following = tasks
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                await _first_failure([informing])
                if following.done():
                    await following
                    return False
                await override.first()
                gc.freeze()
                loops = [
                    regulator.run(),
                    override.run(),
                    _relist(kube, ground, reconciler),
                    _post(notices, cluster, reconciler),
                    *(reconciler.work() for _ in range(settings.workers)),
                ]
                async with _background(loops) as working:
                    others = [informing, *working]
                    return await _serve(settings, ground.watch, others, following)
        finally:
            gc.unfreeze()
            health.decisions = None
            telemetry.registry.unregister(regulator)
            health.forget(["regulation"])


def _decisions(regulator: Regulator, path: Sequence[str]) -> Any:
    """What the endpoint /decisions tells; None if there is no such thing."""
    if not path:
        return [
            {"namespace": namespace, "name": name, "decisions": count}
            for (namespace, name), count in sorted(regulator.logs().items())
        ]
    if len(path) != 2:
        return None
    kept = regulator.log((path[0], path[1]))
    return None if kept is None else decisions.to_json(kept, moments.exact)


class _Ground:
    """Where the operator works: namespaces come and go, and those that stay notice nothing.

    Attributes:
        informers: of what lies there.
        watch: of the SpecServes there.
        ready: Set once there is something to work on.
    """

    def __init__(
        self, kube: Kube, settings: Settings, health: telemetry.Health, reconciler: Reconciler
    ) -> None:
        self._kube = kube
        self._settings = settings
        self._health = health
        self._reconciler = reconciler
        self._wanted = settings.watch_namespaces
        self._arriving: dict[str, asyncio.Task[None]] = {}
        self._checks: dict[str, list[str]] = {}
        self._barred: tuple[str, ...] = ()
        self._said = ""
        self._opened = False
        self.informers = Informers(self._make)
        self.watch = handlers.Watch(
            kube,
            lambda item, deleted: reconciler.take_resource(item, deleted=deleted),
            everywhere=not self._wanted,
        )
        self.ready = asyncio.Event()
        self._count()

    @property
    def served(self) -> tuple[str, ...]:
        """The namespaces in which all is known; an empty one stands for all of them."""
        return tuple(sorted(self.watch.namespaces)) if self._wanted else ("",)

    async def follow(self, found: scope.Scope) -> None:
        """Serve what was found, and what else comes; return when nothing of it is left."""
        now: scope.Scope | None = found
        async with asyncio.TaskGroup() as arrivals:
            try:
                while now is not None:
                    here, there = set(self._arriving), set(now.namespaces) or {""}
                    self._barred = now.waiting
                    for namespace in here - there:
                        await self._leave(namespace)
                    for namespace in there - here:
                        arrival = arrivals.create_task(self._enter(namespace))
                        self._arriving[namespace] = arrival
                    await asyncio.wait(self._arriving.values(), timeout=TOGETHER)
                    await self._open()
                    now = await scope.changed(
                        self._kube, self._wanted, now, self._settings.look_seconds
                    )
            finally:
                for namespace in list(self._arriving):
                    self._forget(namespace)

    async def _enter(self, namespace: str) -> None:
        """Watch SpecServes once the rest is listed: half the facts would make what is there."""
        self.informers.begin(namespace)
        await self.informers.synced(namespace)
        if namespace:
            await self.watch.add(namespace)
        if self._opened:
            await self._open()

    async def _leave(self, namespace: str) -> None:
        self._forget(namespace)
        await self.watch.drop(namespace)
        self._reconciler.leave(namespace)
        await self.informers.end(namespace)

    def _forget(self, namespace: str) -> None:
        self._arriving.pop(namespace).cancel()
        self._health.forget(self._checks.pop(namespace, ()))

    async def _open(self) -> None:
        """Begin with what has arrived, and say what has not."""
        self._opened = True
        if self.watch.namespaces or not self._wanted:
            self.ready.set()
        if not self._wanted:
            return
        telemetry.namespaces.labels("served").set(len(self.served))
        telemetry.namespaces.labels("waiting").set(len(self._wanted) - len(self.served))
        barred = [name for name in self._wanted if name in self._barred]
        closed = [n for n in self._wanted if n not in self._barred and n not in self.served]
        parts = []
        if barred:
            parts.append(f"no rights in {', '.join(barred)}; do they exist?")
        if closed:
            parts.append(f"not everything can be read in {', '.join(closed)}; see the log")
        message = "; ".join(parts)
        if message == self._said:
            return
        self._said = message
        if message:
            log.warning("namespaces that are not served yet: %s", message)
            await _tell(self._kube, self._settings, "Warning", "NamespacesWaiting", message)
        else:
            message = "all namespaces of the list are served"
            log.info("%s", message)
            await _tell(self._kube, self._settings, "Normal", "NamespacesServed", message)

    def _make(self, namespace: str) -> list[Informer[Any]]:
        where = f"namespaces/{namespace}/" if namespace else ""
        query = {"labelSelector": names.OWNED_SELECTOR}
        watched = _WATCHED | ({} if self._settings.network_policies == "Ignore" else _POLICIES)
        taken: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
            "/api/v1/{}pods": (observed.either, self._reconciler.take_pod),
            "/api/v1/{}secrets": (observed.credentials, self._reconciler.take_credentials),
            **{
                template: (partial(observed.owned, kind), self._reconciler.take_owned)
                for kind, template in watched.items()
            },
        }
        made = [
            Informer(self._kube, template.format(where), extract, take, query)
            for template, (extract, take) in taken.items()
        ]
        checks = self._checks[namespace] = []
        for informer in made:
            checks.append(f"watch of {informer.path}")
            self._health.watch(checks[-1], partial(getattr, informer, "heard"), WATCH_LIMIT)
        return made

    def _count(self) -> None:
        """Show how much is watched, over all namespaces."""
        for template in ("pods", "secrets", *_WATCHED.values(), *_POLICIES.values()):
            collection = template.rpartition("}")[2]
            telemetry.watched.labels(collection).set_function(partial(self._objects, collection))
        telemetry.watched.labels(names.PLURAL).set_function(lambda: self._reconciler.known)

    def _objects(self, collection: str) -> int:
        ours = (one for one in self.informers if one.path.endswith(f"/{collection}"))
        return sum(len(one.values) for one in ours)


async def _relist(kube: Kube, ground: _Ground, reconciler: Reconciler) -> None:
    """List all SpecServes now and then: what a watch has missed is found, its ends among it."""
    while True:
        await asyncio.sleep(RELIST_SECONDS)
        for namespace in ground.served:
            before = reconciler.keys(namespace)
            where = f"namespaces/{namespace}/" if namespace else ""
            items: list[Any] = []
            try:
                async for page in kube.pages(f"/apis/{names.API_VERSION}/{where}{names.PLURAL}"):
                    items += page.get("items") or ()
            except KubeError as error:
                log.warning("SpecServes were not listed anew: %s", error)
                continue
            if namespace in ground.served:
                reconciler.relist(items, before)


@contextlib.asynccontextmanager
async def _background(
    work: Sequence[Coroutine[Any, Any, Any]],
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run coroutines as tasks for the length of a `with` block."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(
    settings: Settings,
    watch: handlers.Watch,
    others: list[asyncio.Task[Any]],
    following: asyncio.Task[None],
) -> bool:
    """Watch SpecServes until the process is asked to end, or until nothing is left to serve.

    None of our own tasks may end before that.

    Returns:
        Whether it was asked to end.
    """

    async def stop() -> None:
        for task in (*others, following):
            task.cancel()
        await asyncio.gather(*others, following, return_exceptions=True)

    watching = asyncio.create_task(watch.run(settings.identity, stop))
    try:
        await asyncio.wait({watching, following, *others}, return_when=asyncio.FIRST_COMPLETED)
        if following.done() and not following.cancelled():
            await following
            return False
        await _first_failure(others)
        # None has failed: kopf is ending, and has cancelled them in its clean-up.
        return await _ended(watching)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


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
    told, loop = Told(), asyncio.get_running_loop()
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
            notice = Notice(key, kind, reason, messages[-1] + more)
            if told.lately(reference["uid"], notice, loop.time()):
                continue
            try:
                await cluster.event(reference, kind, reason, notice.message, reason)
            except KubeError as error:
                log.warning("event %s of %s/%s not posted: %s", reason, *key, error)
            else:
                told.tell(reference["uid"], notice, loop.time())
