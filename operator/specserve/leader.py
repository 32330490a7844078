"""Leader election on a Lease: at most one operator of an installation steers.

The rules are those of client-go: a leader stops by itself when it could not renew for
`renew_seconds`; a rival waits `lease_seconds` after the last change that it saw itself, on its own
monotonic clock, so that skewed wall clocks do no harm. Every call is bounded, and any error counts
as a renewal that failed. The library's own elector is not used: its calls are unbounded, and an
unreachable server leaves the work running (kubernetes 37.0.2).
"""

import asyncio
import datetime
import logging
import time
from collections.abc import Awaitable, Callable

from specserve.kube import Kube, KubeError, KubeRefused, Object

log = logging.getLogger(__name__)


class LeadershipLost(Exception):
    """The lease could not be renewed in time; the work has been stopped."""


class Elector:
    """One candidate for a Lease.

    Args:
        kube: Connection to the API server.
        namespace: Where the Lease is.
        name: Its name.
        identity: This process; no two candidates may share it.
        lease_seconds: A rival may take over after so long without a renewal.
        renew_seconds: This leader stops after so long without a renewal; less than the lease.
        retry_seconds: Time between two tries.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        lease_seconds: float = 12.0,
        renew_seconds: float = 8.0,
        retry_seconds: float = 2.0,
    ) -> None:
        self._kube = kube
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self._name = name
        self._identity = identity
        self._lease = lease_seconds
        self._renew = renew_seconds
        self._retry = retry_seconds
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0
        #: Monotonic time in seconds of the last answer about the Lease, held or not.
        self.heard = time.monotonic()

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for the lease, run `work` while holding it, release it when `work` ends.

        Raises:
            LeadershipLost: The lease was lost; `work` has been cancelled and awaited.
        """
        while True:
            renewed = time.monotonic()
            if await self._try(self._retry):
                break
            # Twice as often as a leader renews: a lease that was handed back is taken at once.
            await asyncio.sleep(self._retry / 2)
        log.info("leading as %s", self._identity)
        task = asyncio.ensure_future(work())
        try:
            while True:
                await asyncio.wait({task}, timeout=self._retry)
                if task.done():
                    await task
                    return
                started = time.monotonic()
                left = renewed + self._renew - started
                if left > 0 and await self._try(min(self._retry, left)):
                    renewed = started
                    continue
                if self._seen is not None and self._seen[0] not in ("", self._identity):
                    raise LeadershipLost(f"{self._seen[0]} holds the lease")
                silent = time.monotonic() - renewed
                if silent > self._renew - self._retry:
                    # The next try would begin too late: stop while the lease still is ours.
                    raise LeadershipLost(f"no renewal for {silent:.1f} s")
        finally:
            try:
                if not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            finally:
                await self._release()

    async def _try(self, limit: float) -> bool:
        try:
            async with asyncio.timeout(limit):
                held = await self._step()
        except (KubeError, TimeoutError) as error:
            log.warning("lease %s: %s", self._name, str(error) or "timed out")
            return False
        self.heard = time.monotonic()
        return held

    async def _step(self) -> bool:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        try:
            lease = await self._kube.call("GET", self._path, timeout=self._retry, urgent=True)
        except KubeRefused as error:
            if error.status != 404:
                raise
            await self._kube.call(
                "POST",
                self._collection,
                body=self._lease_object(now),
                timeout=self._retry,
                urgent=True,
            )
            return True
        spec = lease["spec"] = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        mark = (holder, spec.get("renewTime") or "")
        if mark != self._seen:
            self._seen, self._seen_at = mark, time.monotonic()
        if holder not in ("", self._identity):
            lasts = float(spec.get("leaseDurationSeconds") or self._lease)
            if time.monotonic() < self._seen_at + lasts:
                return False
        if holder != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec["holderIdentity"] = self._identity
        spec["renewTime"] = now
        spec["leaseDurationSeconds"] = max(1, round(self._lease))
        # The resourceVersion in the body makes this a compare-and-swap.
        await self._kube.call("PUT", self._path, body=lease, timeout=self._retry, urgent=True)
        # What was read before is another's; it must not be taken for the holder later.
        self._seen, self._seen_at = (self._identity, now), time.monotonic()
        return True

    def _lease_object(self, now: str) -> Object:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(1, round(self._lease)),
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(self._retry):
                lease = await self._kube.call("GET", self._path, timeout=self._retry, urgent=True)
                spec = lease.get("spec") or {}
                if spec.get("holderIdentity") != self._identity:
                    return
                lease["spec"] = {**spec, "holderIdentity": "", "leaseDurationSeconds": 1}
                await self._kube.call(
                    "PUT", self._path, body=lease, timeout=self._retry, urgent=True
                )
        except (KubeError, TimeoutError) as error:
            log.warning("lease %s not released: %s", self._name, str(error) or "timed out")
