"""The API server as tests see it: JSON calls, watches, and waiting for what is to come."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from specserve import names
from tests.cluster.apiclient import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.cluster.light import ControlledCluster

MERGE = "application/merge-patch+json"
JSON = "application/json"
POLL_SECONDS = 0.05
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{CRDS}/{names.PLURAL}.{names.GROUP}"
_GROUPS = {
    "pods": "/api/v1",
    "services": "/api/v1",
    "secrets": "/api/v1",
    "configmaps": "/api/v1",
    "serviceaccounts": "/api/v1",
    "events": "/api/v1",
    "deployments": "/apis/apps/v1",
    "replicasets": "/apis/apps/v1",
    "jobs": "/apis/batch/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    names.PLURAL: f"/apis/{names.API_VERSION}",
}


def path(kind: str, namespace: str, name: str = "") -> str:
    """Path of an object, or of the collection, of a kind given in its plural."""
    collection = f"{_GROUPS[kind]}/namespaces/{namespace}/{kind}"
    return f"{collection}/{name}" if name else collection


async def eventually(condition: Callable[[], Any], within: float, what: str = "") -> Any:
    """Wait until a condition, which may be a coroutine function, returns something true.

    Args:
        condition: An AssertionError of it counts as not yet, and is shown if it stays so.
        within: Seconds until the wait has failed.
        what: Names the condition in the failure.

    Returns:
        What the condition returned.
    """
    deadline = time.monotonic() + within
    while True:
        seen: Any = None
        try:
            seen = condition()
            if asyncio.iscoroutine(seen):
                seen = await seen
        except AssertionError as error:
            seen = None
            last: object = error
        else:
            if seen:
                return seen
            last = seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what or condition}: {last}")
        await asyncio.sleep(POLL_SECONDS)


async def throughout(condition: Callable[[], Any], seconds: float, what: str = "") -> None:
    """Assert that a condition holds all through a time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen = condition()
        if asyncio.iscoroutine(seen):
            seen = await seen
        assert seen, what or condition
        await asyncio.sleep(POLL_SECONDS)


class Api:
    """An administrator's client of a cluster's API server."""

    def __init__(self, cluster: ControlledCluster) -> None:
        pki = cluster.directory / "pki"
        tls = ssl.create_default_context(cafile=str(cluster.ca))
        tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._session = aiohttp.ClientSession(
            cluster.server,
            connector=aiohttp.TCPConnector(ssl=tls, limit=0),
            timeout=aiohttp.ClientTimeout(total=30),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(
        self, method: str, at: str, body: Any = None, content_type: str = JSON
    ) -> Any:
        """Make one call; ApiError for an answer that is not 2xx."""
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method, at, data=data, headers={"Content-Type": content_type}
        ) as answer:
            text = await answer.text()
        if answer.status // 100 != 2:
            raise ApiError(answer.status, text)
        return json.loads(text)

    async def get(self, at: str) -> Any:
        """Read an object or a list."""
        return await self.request("GET", at)

    async def find(self, at: str) -> Any:
        """Read an object; None if it is not there."""
        try:
            return await self.get(at)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def items(self, kind: str, namespace: str) -> list[Any]:
        """All objects of a kind in a namespace."""
        found: list[Any] = (await self.get(path(kind, namespace)))["items"]
        return found

    async def post(self, at: str, body: Any) -> Any:
        """Create an object in a collection."""
        return await self.request("POST", at, body)

    async def merge(self, at: str, patch: Any) -> Any:
        """Merge a patch into an object."""
        return await self.request("PATCH", at, patch, MERGE)

    async def delete(self, at: str, **options: Any) -> None:
        """Delete an object or a collection; nothing happens if it is not there."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        try:
            await self.request("DELETE", at, body)
        except ApiError as error:
            if error.status not in {404, 409}:
                raise

    async def follow(self, at: str) -> AsyncIterator[tuple[str, Any]]:
        """Yield ADDED for all objects of a collection, and then its events, for ever."""
        while True:
            listed = await self.get(at)
            for item in listed["items"]:
                yield "ADDED", item
            async with self._session.get(
                at,
                params={
                    "watch": "true",
                    "resourceVersion": listed["metadata"]["resourceVersion"],
                },
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=2**22,
            ) as stream:
                async for line in stream.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        break
                    yield event["type"], event["object"]


def condition(item: Any, kind: str) -> dict[str, Any]:
    """A condition of an object; an empty one if there is none."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind), {})
