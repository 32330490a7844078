"""A local copy of one resource, kept by list and watch.

The list comes in pages; the watch asks for bookmarks, so that silence is noticed and a resumed
watch starts where the last one ended. Bodies are turned into small values as they arrive and are
not kept. The operator must not miss what happened while a watch was broken, so a new list also
reports what has vanished.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from specserve.kube import WATCH_IDLE, Kube, KubeError, KubeRefused, Object

log = logging.getLogger(__name__)

Value = TypeVar("Value")

#: Objects in a page of a list. A page of 500 pods is 8 MB of text and 40 MB once decoded, which
#: the process keeps from then on.
PAGE = 100
BACKOFF_FIRST = 0.5
BACKOFF_LONGEST = 10.0
#: A watch that ends sooner than this many seconds without an event has failed.
SHORT_WATCH = 1.0
#: Seconds after which the server is asked to end a watch, so that load spreads over its replicas.
WATCH_SECONDS = (300, 600)


class Informer(Generic[Value]):
    """Keeps `values` (object uid → value) equal to what the API server holds.

    Args:
        kube: Connection to the API server.
        path: Path of the collection, such as `/api/v1/pods`.
        extract: Turns an object into the value to keep. Called once for each event.
        changed: Told the old and the new value; None stands for "was not" or "is no more".
        query: Further query parameters, such as `labelSelector`.
        idle: Seconds without a byte after which the watch counts as dead.
    """

    def __init__(
        self,
        kube: Kube,
        path: str,
        extract: Callable[[Object], Value],
        changed: Callable[[Value | None, Value | None], None],
        query: Mapping[str, str] | None = None,
        idle: float = WATCH_IDLE,
    ) -> None:
        self._kube = kube
        #: Path of the collection.
        self.path = path
        self._extract = extract
        self._changed = changed
        self._query = dict(query or {})
        self._idle = idle
        self._versions: dict[str, str] = {}
        self.values: dict[str, Value] = {}
        self.synced = asyncio.Event()
        #: Monotonic time in seconds of the last word from the server.
        self.heard = time.monotonic()

    async def run(self) -> None:
        """List and watch for ever; every failure backs off and goes on."""
        version: str | None = None
        backoff = BACKOFF_FIRST
        while True:
            heard = False
            pause = 0.0
            started = time.monotonic()
            try:
                if version is None:
                    version = await self._list()
                async for event in self._kube.watch(
                    self.path,
                    {
                        **self._query,
                        "resourceVersion": version,
                        "timeoutSeconds": str(random.randint(*WATCH_SECONDS)),  # noqa: S311
                    },
                    self._idle,
                ):
                    version = self._take(event)
                    heard = True
                self.heard = time.monotonic()
            except KubeRefused as error:
                pause = self._refused(error)
                if error.status not in {429, 503}:
                    # The version may be what is refused, as after a restore of etcd.
                    version = None
            except KubeError as error:
                log.warning("%s", error)
                pause = backoff
            if heard or time.monotonic() - started > SHORT_WATCH:
                backoff = BACKOFF_FIRST
                if not pause:
                    continue
            # Whatever ends at once, also with success, must not be asked for in a tight loop.
            await self._pause(max(backoff, pause))
            backoff = min(backoff * 2, BACKOFF_LONGEST)

    def _refused(self, error: KubeRefused) -> float:
        """Say so; returns the seconds that the server asks to wait."""
        if error.status == 410:
            return 0.0
        log.warning("%s: %s", self.path, error)
        if error.status == 403:
            # Alive, and a restart would bring no rights; credentials it may bring.
            self.heard = time.monotonic()
        return error.retry_after

    def clear(self) -> None:
        """Forget everything, as if it had all vanished; not while `run` runs."""
        for uid in list(self.values):
            self._drop(uid)
        self._versions = {}
        self.synced.clear()

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds * (1 + random.random() / 2))  # noqa: S311

    async def _list(self) -> str:
        seen: dict[str, str] = {}
        version = ""
        async for page in self._kube.pages(self.path, self._query):
            for item in page.get("items") or ():
                meta = item["metadata"]
                seen[meta["uid"]] = meta["resourceVersion"]
                if self._versions.get(meta["uid"]) != meta["resourceVersion"]:
                    self._put(meta["uid"], item)
            version = page["metadata"]["resourceVersion"]
            # A page holds the event loop for some milliseconds; let others in.
            await asyncio.sleep(0)
        # Not by the versions: a list that broke off half-way has put values without any.
        for uid in self.values.keys() - seen.keys():
            self._drop(uid)
        self._versions = seen
        self.heard = time.monotonic()
        self.synced.set()
        return version

    def _take(self, event: Object) -> str:
        self.heard = time.monotonic()
        meta = event["object"]["metadata"]
        version: str = meta["resourceVersion"]
        if event["type"] == "BOOKMARK":
            return version
        if event["type"] == "DELETED":
            self._versions.pop(meta["uid"], None)
            self._drop(meta["uid"])
        else:
            self._versions[meta["uid"]] = version
            self._put(meta["uid"], event["object"])
        return version

    def _put(self, uid: str, item: Object) -> None:
        old = self.values.get(uid)
        new = self._extract(item)
        self.values[uid] = new
        if old != new:
            self._changed(old, new)

    def _drop(self, uid: str) -> None:
        if uid in self.values:
            self._changed(self.values.pop(uid), None)


class Informers:
    """The informers of several namespaces; those of each come and go together.

    Args:
        make: Makes the informers of a namespace.
    """

    def __init__(self, make: Callable[[str], list[Informer[Any]]]) -> None:
        self._make = make
        self._running: dict[str, list[tuple[Informer[Any], asyncio.Task[None]]]] = {}
        self._ended: asyncio.Future[asyncio.Task[None]] = asyncio.Future()

    def __iter__(self) -> Iterator[Informer[Any]]:
        """All that run."""
        return (informer for some in self._running.values() for informer, _ in some)

    def begin(self, namespace: str) -> None:
        """Start those of a namespace."""
        self._running[namespace] = [
            (informer, self._start(informer)) for informer in self._make(namespace)
        ]

    def _start(self, informer: Informer[Any]) -> asyncio.Task[None]:
        task = asyncio.create_task(informer.run())
        task.add_done_callback(self._note)
        return task

    def _note(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._ended.done():
            self._ended.set_result(task)

    async def synced(self, namespace: str) -> None:
        """Wait until everything in a namespace is listed."""
        for informer, _ in self._running[namespace]:
            await informer.synced.wait()

    async def end(self, namespace: str) -> None:
        """Stop those of a namespace, and forget what they knew."""
        running = self._running.pop(namespace)
        await self._stop([task for _, task in running])
        for informer, _ in running:
            informer.clear()

    async def run(self) -> None:
        """Wait until one ends by itself, and end all others with it.

        Raises:
            Exception: What ended it.
        """
        try:
            await (await asyncio.shield(self._ended))
        finally:
            await self._stop([task for some in self._running.values() for _, task in some])

    async def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
