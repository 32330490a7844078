"""Puts the process together: leader election around kopf, informers and the two loops."""

import asyncio
import contextlib
import logging
import resource
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any

import kopf

from specserve import handlers, names, observed, signals, telemetry
from specserve.cluster import Cluster
from specserve.engine import EngineClient
from specserve.informer import Informer
from specserve.kube import Kube, KubeError
from specserve.leader import Elector
from specserve.observed import Key
from specserve.reconcile import Reconciler
from specserve.regulate import Regulator
from specserve.settings import Settings
from specserve.target import Notice
from specserve.workqueue import WorkQueue

log = logging.getLogger(__name__)

#: Seconds without a sign of life after which the process is to be restarted.
TICK_LIMIT = 30.0
WATCH_LIMIT = 360.0
LEASE_LIMIT = 60.0
#: Seconds in which notices of one kind about one SpecServe are gathered into one event.
NOTICE_GATHER = 1.0
NOTICE_BACKLOG = 10_000

_WATCHED = {
    "Deployment": "/apis/apps/v1/{}deployments",
    "Service": "/api/v1/{}services",
    "ServiceAccount": "/api/v1/{}serviceaccounts",
}


async def run(settings: Settings, health: telemetry.Health) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        LeadershipLost: Another process may steer now; end this one.
        kubernetes.aio.config.ConfigException: There is no way to reach an API server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    main = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # kopf takes these over while it runs; this is for the wait to become leader.
        loop.add_signal_handler(number, main.cancel if main else loop.stop)
    async with await Kube.connect() as kube:
        elector = Elector(
            kube,
            settings.namespace,
            settings.lease_name,
            settings.identity,
            lease_seconds=settings.lease_seconds,
            renew_seconds=settings.renew_seconds,
            retry_seconds=settings.retry_seconds,
        )
        health.watch("leader election", lambda: elector.tried, LEASE_LIMIT)
        health.ready = True
        with contextlib.suppress(asyncio.CancelledError):
            await elector.lead(partial(_lead, kube, settings, health))


async def _lead(kube: Kube, settings: Settings, health: telemetry.Health) -> None:
    telemetry.leader.set(1)
    metric_names = signals.MetricNames(
        settings.metric_running, settings.metric_queued, settings.metric_tokens
    )
    notices: asyncio.Queue[Notice] = asyncio.Queue(NOTICE_BACKLOG)

    def notice(one: Notice) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            notices.put_nowait(one)

    queue: WorkQueue[Key] = WorkQueue()
    cluster = Cluster(kube, settings.identity)
    async with EngineClient(metric_names) as engines:
        regulator = Regulator(
            engines,
            holder=settings.holder,
            samples_per_second=settings.samples_per_second,
            read_back_seconds=settings.read_back_seconds,
            changed=lambda key: reconciler.changed(key),  # noqa: PLW0108 - made below
            notice=notice,
        )
        reconciler = Reconciler(cluster, regulator, queue, notice)
        informers = list(_informers(kube, settings, reconciler))
        telemetry.registry.register(regulator)
        health.watch("regulation", lambda: regulator.beat, TICK_LIMIT)
        _count(informers, reconciler)
        for path, informer in informers:
            health.watch(f"watch of {path}", partial(getattr, informer, "heard"), WATCH_LIMIT)
        try:
            async with _background([i.run() for _, i in informers]) as watching:
                await _synced([i for _, i in informers], watching)
                loops = [
                    regulator.run(),
                    _post(notices, cluster, reconciler),
                    *(reconciler.work() for _ in range(settings.workers)),
                ]
                async with _background(loops) as working:
                    await _serve(settings, reconciler, [*watching, *working])
        finally:
            telemetry.registry.unregister(regulator)
            telemetry.leader.set(0)


def _informers(
    kube: Kube, settings: Settings, reconciler: Reconciler
) -> list[tuple[str, Informer[Any]]]:
    found: list[tuple[str, Informer[Any]]] = []
    query = {"labelSelector": names.OWNED_SELECTOR}
    for namespace in settings.watch_namespaces or ("",):
        scope = f"namespaces/{namespace}/" if namespace else ""
        pods = f"/api/v1/{scope}pods"
        found.append((pods, Informer(kube, pods, observed.pod, reconciler.take_pod, query)))
        keys = f"/api/v1/{scope}secrets"
        found.append(
            (
                keys,
                Informer(kube, keys, observed.credentials, reconciler.take_credentials, query),
            )
        )
        for kind, template in _WATCHED.items():
            path = template.format(scope)
            extract = partial(observed.owned, kind)
            found.append((path, Informer(kube, path, extract, reconciler.take_owned, query)))
    return found


def _count(informers: list[tuple[str, Informer[Any]]], reconciler: Reconciler) -> None:
    """Show how much is watched, over all namespaces."""
    alike: dict[str, list[Informer[Any]]] = defaultdict(list)
    for path, informer in informers:
        alike[path.rpartition("/")[2]].append(informer)
    for collection, of in alike.items():
        telemetry.watched.labels(collection).set_function(partial(_objects, of))
    telemetry.watched.labels(names.PLURAL).set_function(lambda: reconciler.known)


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
    settings: Settings, reconciler: Reconciler, others: list[asyncio.Task[None]]
) -> None:
    """Run kopf until it ends; none of our own tasks may end before it."""

    async def stop() -> None:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    scope: dict[str, Any] = (
        {"namespaces": list(settings.watch_namespaces)}
        if settings.watch_namespaces
        else {"clusterwide": True}
    )
    watch = asyncio.create_task(
        kopf.operator(
            registry=handlers.registry,
            settings=handlers.settings(),
            memo=kopf.Memo(reconciler=reconciler, stop=stop),
            standalone=True,
            **scope,
        )
    )
    try:
        await asyncio.wait({watch, *others}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            await watch
        else:
            await _first_failure(others)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


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
