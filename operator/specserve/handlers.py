"""The part of kopf: watch SpecServes and hand each event on. Decorators and settings only.

Event handlers, because they need no finalizer and write nothing: a SpecServe and its CRD can be
deleted with no operator there. Coroutines, because kopf runs plain functions in threads.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

# An argument of kopf.operator, but of no public name.
from kopf._cogs.structs.references import Insights, NamespaceName

from specserve import names
from specserve.kube import Kube

registry = kopf.OperatorRegistry()


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings; each value that differs from its default was measured."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.posting.reporting_component = names.MANAGER
    chosen.networking.request_timeout = 30
    chosen.networking.connect_timeout = 5
    # Back within seconds of an API server's return, not within its own growing pauses.
    chosen.networking.error_backoffs = [1, 1, 2, 3] + [3] * 200
    # Keeps a worker per object alive for this long: the default holds 500 MB at 11,000 objects.
    chosen.queueing.idle_timeout = 0.2
    chosen.queueing.exit_timeout = 0.5
    chosen.watching.chunk_size = 500
    # Scanning takes rights on kinds and namespaces of the whole cluster; `specserve.scope` looks
    # with none whether there is anything to watch, before kopf starts and while it runs.
    chosen.scanning.disabled = True
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return chosen


class Watch:
    """The watch of SpecServes: where it is, and who is told.

    Args:
        kube: Connection to the API server; kopf asks through it.
        take: Told each SpecServe that is there, changes or goes, and whether it is gone.
        everywhere: Watch all namespaces; else those that are added.
    """

    def __init__(
        self, kube: Kube, take: Callable[[dict[str, Any], bool], None], *, everywhere: bool
    ) -> None:
        self._kube = kube
        self._take = take
        self._everywhere = everywhere
        self._insights = Insights()
        #: The namespaces that are watched, unless all are.
        self.namespaces: frozenset[str] = frozenset()

    async def add(self, namespace: str) -> None:
        """Watch a namespace, too."""
        await self._set(self.namespaces | {namespace})

    async def drop(self, namespace: str) -> None:
        """Watch a namespace no more; nothing more is told of it."""
        await self._set(self.namespaces - {namespace})

    async def _set(self, namespaces: frozenset[str]) -> None:
        self.namespaces = namespaces
        async with self._insights.revised:
            # Its own watches begin and end with this; the others go on.
            self._insights.namespaces.clear()
            self._insights.namespaces.update(map(NamespaceName, namespaces))
            self._insights.revised.notify_all()

    def tell(self, item: dict[str, Any], *, deleted: bool) -> None:
        """Hand on what happened to a SpecServe."""
        if self._everywhere or item["metadata"]["namespace"] in self.namespaces:
            self._take(item, deleted)

    def session(self) -> kopf.AiohttpSession:
        """How kopf reaches the API server; a new one each time, for it drops one that failed."""
        return kopf.AiohttpSession(server=self._kube.server, aiohttp_session=self._kube.session())

    async def run(self, identity: str, stop: Callable[[], Awaitable[None]]) -> None:
        """Watch until SIGTERM or SIGINT, which kopf takes over.

        Args:
            identity: Name of this process.
            stop: Ends our own tasks, before kopf waits for every task of the process.
        """
        where: dict[str, Any] = (
            {"clusterwide": True} if self._everywhere else {"namespaces": list(self.namespaces)}
        )
        # By itself kopf asks for the name of the process's user, and a numeric one has none.
        known_as: Any = identity
        await kopf.operator(
            registry=registry,
            settings=settings(),
            memo=kopf.Memo(watch=self, stop=stop),
            standalone=True,
            identity=known_as,
            insights=self._insights,
            **where,
        )


@kopf.on.login(registry=registry)
async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Log in as everything else in this process does, and be counted with it."""
    watch: Watch = memo.watch
    return watch.session()


@kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
async def specserve(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Hand on what happened to a SpecServe."""
    watch: Watch = memo.watch
    watch.tell(dict(event["object"]), deleted=event["type"] == "DELETED")


@kopf.on.cleanup(registry=registry)
async def cleanup(memo: kopf.Memo, **_: Any) -> None:
    """End our own loops before kopf waits for every task of the process."""
    await memo.stop()
