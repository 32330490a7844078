"""One connection to the API server: JSON calls and watch streams over `kubernetes.aio`.

Raw on purpose. Typed models drop fields they do not know and cost two seconds of CPU to import;
server-side apply wants plain dicts. Every call is bounded in time, and every failure is one of two
exceptions, whatever layer it came from.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
from aiohttp.http_exceptions import LineTooLong
from kubernetes.aio import client, config

from specserve import telemetry

JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

#: Seconds for a call that is not a watch.
CALL_TIMEOUT = 15.0
#: Objects in one page of a list.
PAGE = 500
#: Seconds without a byte after which a watch counts as dead. Bookmarks come about once a minute.
WATCH_IDLE = 90.0

Object = dict[str, Any]


class KubeError(Exception):
    """A call to the API server did not succeed."""


class NoCluster(KubeError):
    """Nothing says where the API server is, or what says so cannot be read."""


class KubeUnreachable(KubeError):
    """No HTTP answer: connection refused or lost, or time ran out. The outcome is unknown."""


class KubeRefused(KubeError):
    """The API server answered with an error.

    Attributes:
        status: HTTP status code.
        reason: Machine-readable reason of the Status object, such as `NotFound`.
        message: The server's own words; they name the field for a rejected object.
        retry_after: Seconds the server asks to wait, 0 if it does not say.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class Kube:
    """A client of one API server; share it, its connection pool is its worth.

    Args:
        api: The connection.
        calls: Most calls under way at once. Watches count only until they are answered: a
            namespace takes several for as long as it is served.
    """

    def __init__(self, api: client.ApiClient, calls: int = 64) -> None:
        self._api = api
        self._calls = asyncio.Semaphore(calls)
        self._not_before: dict[str, float] = {}

    @classmethod
    async def connect(cls, calls: int = 64) -> Self:
        """Connect as the pod's service account, or by KUBECONFIG outside a cluster.

        Args:
            calls: Most calls under way at once.

        Raises:
            NoCluster: Neither is there, or it cannot be read.
        """
        settings = client.Configuration()
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
                config.load_incluster_config(client_configuration=settings)
            else:
                await config.load_kube_config(client_configuration=settings)
        except (config.ConfigException, OSError) as error:
            raise NoCluster(str(error)) from error
        settings.connection_pool_maxsize = 0
        return cls(client.ApiClient(configuration=settings), calls)

    async def close(self) -> None:
        """Close the pooled connections."""
        await self._api.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = JSON,
        timeout: float = CALL_TIMEOUT,
        urgent: bool = False,
    ) -> Object:
        """Make one call and return the decoded answer.

        Args:
            method: HTTP method.
            path: Path below the server's address, such as `/api/v1/pods`.
            query: Query parameters.
            body: Object to send.
            content_type: Media type of `body`; it decides what a PATCH means.
            timeout: Seconds for the whole call, once it is its turn.
            urgent: Do not wait for a turn.

        Raises:
            KubeRefused: The server answered with an error.
            KubeUnreachable: There was no answer.
        """
        try:
            async with contextlib.nullcontext() if urgent else self._turn():
                response = await self._request(method, path, query, body, content_type, timeout)
                async with response:
                    text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            telemetry.api_requests.labels(method, "none").inc()
            raise KubeUnreachable(f"{method} {path}: {describe(error)}") from error
        telemetry.api_requests.labels(method, str(response.status)).inc()
        if response.status >= 400:
            raise _refused(response, text)
        return _decoded(text, f"{method} {path}")

    async def pages(
        self, path: str, query: Mapping[str, str] | None = None
    ) -> AsyncIterator[Object]:
        """Yield the pages of one consistent list.

        Raises:
            KubeRefused: The server refused a page; 410 if the list took too long.
            KubeUnreachable: There was no answer.
        """
        token = ""
        while True:
            more = {"continue": token} if token else {}
            page = await self.call(
                "GET", path, query={**(query or {}), "limit": str(PAGE), **more}, timeout=30.0
            )
            yield page
            token = page["metadata"].get("continue", "")
            if not token:
                return

    async def watch(
        self, path: str, query: Mapping[str, str], idle: float = WATCH_IDLE
    ) -> AsyncIterator[Object]:
        """Yield the events of one watch until the server ends it.

        Raises:
            KubeRefused: The server refused the watch, or sent an ERROR event (410 among them).
            KubeUnreachable: The connection broke, or nothing came for `idle` seconds.
        """
        try:
            async with self._turn():
                response = await self._request(
                    "GET",
                    path,
                    {**query, "watch": "true", "allowWatchBookmarks": "true"},
                    None,
                    JSON,
                    aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=idle),
                )
            telemetry.api_requests.labels("WATCH", str(response.status)).inc()
            async with response:
                if response.status >= 400:
                    raise _refused(response, await response.read())
                while line := await _line(response.content):
                    event = _decoded(line, f"watch {path}")
                    if event["type"] == "ERROR":
                        raise _status(event["object"])
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubeUnreachable(f"watch {path}: {describe(error)}") from error

    @property
    def server(self) -> str:
        """The API server's URL."""
        return str(self._api.configuration.host)

    def session(self) -> aiohttp.ClientSession:
        """Make a session for a library that does the asking itself; whoever gets it closes it.

        What it asks for counts as ours: it takes turns with our calls, is put off as long as the
        server wishes, carries the credentials of the moment, and shows in the metrics.
        """
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._api.rest_client.ssl_context),
            proxy=self._api.configuration.proxy,
            middlewares=(self._as_ours,),
        )

    async def _as_ours(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        path, query = request.url.path, request.url.query
        watch = query.get("watch") == "true"
        verb = "WATCH" if watch else request.method
        loop = asyncio.get_running_loop()
        # Whoever asks may give up before that; then it still holds for the next time.
        await asyncio.sleep(self._not_before.get(path, 0.0) - loop.time())
        self._not_before.pop(path, None)
        headers: dict[str, str] = {}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, verb, None)
        request.headers.update(headers)
        try:
            async with self._turn():
                response = await handler(request)
                if not watch:
                    await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            telemetry.api_requests.labels(verb, "none").inc()
            raise
        telemetry.api_requests.labels(verb, str(response.status)).inc()
        if after := _retry_after(response):
            self._not_before[path] = loop.time() + after
        return response

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        with telemetry.api_waiting.track_inprogress():
            await self._calls.acquire()
        try:
            yield
        finally:
            self._calls.release()

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        content_type: str,
        timeout: float | aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": JSON, "Content-Type": content_type}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._api.configuration.host}{path}"
        if query:
            url = f"{url}?{urlencode(query)}"
        answer = await self._api.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=timeout
        )
        response: aiohttp.ClientResponse = answer.response
        return response


async def _line(stream: aiohttp.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except (ValueError, LineTooLong):  # the one or the other, by version
        raise KubeUnreachable("a watch event is too long to be one") from None


def _decoded(text: bytes, what: str) -> Object:
    """Decode an answer. What is no object was cut off, or comes from a proxy in between."""
    try:
        decoded = json.loads(text)
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        raise KubeUnreachable(f"{what}: the answer is no JSON object")
    return decoded


def describe(error: BaseException) -> str:
    """Words for a transport error; time-outs carry none of their own."""
    if isinstance(error, asyncio.TimeoutError | aiohttp.ServerTimeoutError):
        return "timed out"
    return str(error) or type(error).__name__


def _refused(response: aiohttp.ClientResponse, text: bytes) -> KubeRefused:
    try:
        status = json.loads(text)
    except ValueError:
        status = {}
    if not isinstance(status, dict) or status.get("kind") != "Status":
        status = {"message": text[:200].decode(errors="replace")}
    status = {**status, "code": response.status}
    return _status(status, _retry_after(response))


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds that the server asks to wait; API servers give no dates."""
    after = response.headers.get("Retry-After", "")
    return float(after) if after.isdigit() else 0.0


def _status(status: Object, retry_after: float = 0.0) -> KubeRefused:
    return KubeRefused(
        int(status.get("code") or 500),
        str(status.get("reason") or "Unknown"),
        str(status.get("message") or ""),
        retry_after,
    )
