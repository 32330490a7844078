"""The load of pods from Prometheus servers. The only user of prometheus_api_client.

The client is synchronous, so its calls run in threads of their own: the event loop's are for name
look-ups, and a server that hangs must not hold those up.

Where it calls is written by whoever may write a SpecServe, so the answer is not trusted: the host
has to be allowed, addresses of the operator's own machine only by name, redirects are not
followed, no proxy or netrc of the environment is used, size and time are bounded, and of what was
answered only Prometheus's own error text is handed on.
"""

import asyncio
import contextlib
import fnmatch
import io
import ipaddress
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import requests
import urllib3
from prometheus_api_client import PrometheusConnect
from requests.adapters import HTTPAdapter
from requests.exceptions import InvalidHeader, InvalidURL, JSONDecodeError
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NewConnectionError

from specserve import api, conditions, queries, telemetry
from specserve.observed import Key
from specserve.queries import Gap, PrometheusError, Query
from specserve.signals import MetricNames, Reading
from specserve.target import Access, Target

log = logging.getLogger(__name__)

#: Seconds a query may take from the first packet to the last.
DEADLINE = 5.0
#: Seconds until a connection stands, and between two packets of an answer.
PATIENCE = (2.0, 4.0)
#: Seconds for which a pod waits for an answer that is under way.
WAIT = 0.25
#: Queries under way at once, of all SpecServes and of those of one namespace.
AT_ONCE = 16
AT_ONCE_IN_NAMESPACE = 8
#: A pod with 8 tensor-parallel copies, scraped twice, has 30 kB of series.
LONGEST_ANSWER = 4 * 1024 * 1024
#: Part of a period after which an answer is renewed: pods do not come to the millisecond.
RENEWED = 0.9
#: Characters of a server's own words that are handed on.
LONGEST_WORDS = 200
#: Characters of a message.
LONGEST = 900
#: Reasons that may be of the way to a server and not of the server.
_ON_THE_WAY = frozenset({"PrometheusTimeout", "PrometheusUnreachable"})
_LATE = (TimeoutError, requests.Timeout, urllib3.exceptions.TimeoutError)


class PrometheusClient:
    """Readings from any number of servers, each asked once in a period for all pods.

    Args:
        metric_names: Series to look for.
        hosts: Patterns of the hosts that may be called (`*.monitoring.svc`, `10.1.2.3`). One
            without a wildcard also allows an address of this machine or of its link.
        token_files: Token files of this process by host. Sent over TLS where a SpecServe has no
            credentials and no query of its own.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        metric_names: MetricNames,
        *,
        hosts: tuple[str, ...] = ("*",),
        token_files: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = metric_names
        self._hosts = hosts
        self._token_files = dict(token_files or {})
        self._clock = clock
        self._servers: dict[Key, _Server] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="prometheus")
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(AT_ONCE_IN_NAMESPACE)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all connections and threads."""
        asking = [s.asking for s in self._servers.values() if s.asking is not None]
        for key in list(self._servers):
            self.forget(key)
        for task in asking:
            # Not waited for: a name look-up cannot be cut short.
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def load(self, target: Target, pod: str) -> Reading:
        """The load of a pod, by an answer that is at most a period old.

        Raises:
            PrometheusError: There is no reading of it.
        """
        server = self._server(target)
        due = server.asked + target.policy.sample_period_milliseconds / 1000 * RENEWED
        if server.asking is None and self._clock() >= due:
            server.asked = self._clock()
            server.asking = asyncio.create_task(self._ask(server))
        if server.asking is not None:
            # A slow server must not hold up what else there is to do for a pod: the answer before
            # is as good, and its age tells.
            await asyncio.wait({server.asking}, timeout=WAIT)
        reading = server.reading(pod)
        return replace(reading, age=reading.age + self._clock() - server.answered)

    def forget(self, key: Key) -> None:
        """Let go of a SpecServe and of its connections."""
        server = self._servers.pop(key, None)
        if server is not None:
            server.close()
        if not any(namespace == key[0] for namespace, _ in self._servers):
            self._turns.pop(key[0], None)

    def _server(self, target: Target) -> "_Server":
        spec = target.policy.prometheus
        if spec is None:
            raise PrometheusError("SpecRejected", "policy.prometheus is missing")
        if target.access.missing:
            raise PrometheusError(conditions.SECRET_MISSING, target.access.missing)
        asked_for = _asked_for(target)
        server = self._servers.get(target.key)
        if server is None or server.asked_for != asked_for:
            self.forget(target.key)
            host = _host(spec.url)
            allowed = [one for one in self._hosts if fnmatch.fnmatchcase(host, one)]
            if not allowed:
                raise PrometheusError(
                    "HostForbidden",
                    f"policy.prometheus.url: this installation does not allow the host {host}",
                )
            server = self._servers[target.key] = _Server(
                spec,
                target,
                self._names,
                anywhere=host in allowed,
                token_file=self._token_files.get(host),
            )
        return server

    async def _ask(self, server: "_Server") -> None:
        try:
            async with self._turns[server.key[0]], self._turn:
                if server.closed:
                    return
                began = self._clock()
                call = asyncio.get_running_loop().run_in_executor(self._threads, server.ask)
                done, _ = await asyncio.wait({call}, timeout=DEADLINE)
                if not done:
                    server.line.cut()
                server.answer = await call
                server.answered = began
        finally:
            server.asking = None
            if server.closed:
                server.close()


def _asked_for(target: Target) -> tuple[object, ...]:
    """What a server is asked with; another one needs a new connection."""
    policy = target.policy
    return (policy.prometheus, target.access, target.model, policy.stale_after_seconds)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        raise PrometheusError("UrlUnusable", "policy.prometheus.url is no address") from None


class _Server:
    """The server of one SpecServe: how to ask it, and what it answered last."""

    def __init__(
        self,
        spec: api.Prometheus,
        target: Target,
        metric_names: MetricNames,
        *,
        anywhere: bool,
        token_file: str | None,
    ) -> None:
        self.key = target.key
        self.asked_for = _asked_for(target)
        self.asked = float("-inf")
        self.asking: asyncio.Task[None] | None = None
        self.answered = 0.0
        self.answer: dict[str, Reading | Gap] | Gap = Gap(
            "PrometheusTimeout", "Prometheus has not answered yet"
        )
        self.closed = False
        self.line = _Line(anywhere=anywhere)
        self._spec = spec
        self._target = target
        self._query: Query = queries.query(spec, target.key, metric_names)
        # With the operator's rights nobody but the operator asks, and never in the open.
        ours = not spec.running_query and not spec.queued_query
        plain = (spec.namespace_label, spec.pod_label) == ("namespace", "pod")
        secured = spec.url.startswith("https://")
        self._token_file = token_file if ours and plain and secured else None
        self._connect: PrometheusConnect | None = None

    def reading(self, pod: str) -> Reading:
        """What is known of a pod.

        Raises:
            PrometheusError: Nothing is.
        """
        found = self.answer
        if isinstance(found, dict):
            one = found.get(pod)
            if isinstance(one, Reading):
                return one
            asked = f"{self._query.running} and {self._query.queued}"
            found = one or Gap(
                conditions.NO_SAMPLES, f"Prometheus: no series of pod {pod}; query: {asked}"
            )
        raise PrometheusError(found.code, found.message, answered=found.code not in _ON_THE_WAY)

    def ask(self) -> dict[str, Reading | Gap] | Gap:
        """Ask the server; runs in a thread and raises nothing."""
        began = time.perf_counter()
        code = "200"
        try:
            result = self._result()
            return queries.readings(
                result,
                self._query,
                self._spec,
                self.key,
                self._target.model,
                self._target.policy.stale_after_seconds,
            )
        except PrometheusError as error:
            # However a query ends that is cut, the reason is that it took too long.
            said = _late() if self.line.was_cut else error
            code = said.code
            return Gap(code, f"{self._spec.url}: {said}; query: {self._query.running}"[:LONGEST])
        except Exception as error:  # noqa: BLE001 - a tick must not fail by it
            # Its text may quote what was sent.
            code = "none"
            log.error("%s/%s: asking Prometheus failed: %s", *self.key, type(error).__name__)  # noqa: TRY400
            return Gap("PrometheusFailed", f"{self._spec.url}: {type(error).__name__}")
        finally:
            telemetry.admin_seconds.labels("prometheus", code).observe(time.perf_counter() - began)

    def _result(self) -> Any:
        self.line.lay()
        connect = self._connect = self._connect or self._connected()
        connect.headers = self._headers()
        params = {"timeout": f"{DEADLINE:g}s", **self._spec.query_params}
        # Not as causes, and not in their own words: those of requests quote headers.
        try:
            return connect.custom_query(self._query.text, params)
        except (InvalidHeader, UnicodeError):
            raise PrometheusError(
                "KeyUnusable", "the token or password has a character that no header can carry"
            ) from None
        except InvalidURL:
            raise PrometheusError("UrlUnusable", "policy.prometheus.url is no address") from None
        except (JSONDecodeError, KeyError, TypeError, RecursionError):
            raise PrometheusError("Unreadable", "the answer is none of Prometheus") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._failure(error) from None
        except ValueError:
            raise PrometheusError("UrlUnusable", "no call can be made of these settings") from None

    def _connected(self) -> PrometheusConnect:
        access = self._target.access
        session = requests.Session()
        session.trust_env = False
        session.hooks["response"].append(_taken_in)
        url = self._spec.url.rstrip("/")
        basic = access.basic
        connect = PrometheusConnect(
            url=url,
            session=session,
            timeout=PATIENCE,
            retry=urllib3.Retry(0),
            auth=basic and tuple(part.encode() for part in basic),
        )
        # The only way out: without the adapters that the session and the client have made.
        session.adapters.clear()
        session.mount(url, _Adapter(_authorities(access, self._spec), self.line))
        return connect

    def _headers(self) -> dict[str, str]:
        access = self._target.access
        headers = {one.name: one.value for one in self._spec.headers}
        # Nothing has to be unpacked then, so that no small answer becomes a large one.
        headers |= {"Accept-Encoding": "identity", "User-Agent": "specserve"}
        token = access.token
        if token is None and access.basic is None and self._token_file is not None:
            try:
                token = Path(self._token_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeError):
                raise PrometheusError(
                    "KeyUnusable", "the operator's token file for this host cannot be read"
                ) from None
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _failure(self, error: Exception) -> PrometheusError:
        """Tell apart what keeps an answer from coming."""
        causes = list(_causes(error))
        for cause in causes:
            if isinstance(cause, PrometheusError):
                return cause
            if isinstance(cause, ssl.SSLCertVerificationError):
                ref = self._spec.ca_secret_ref
                used = f"Secret {ref.name}, key {ref.key}" if ref else "the public authorities"
                return PrometheusError(
                    "CertificateRejected",
                    f"the server's certificate does not stand up to {used} "
                    f"(policy.prometheus.caSecretRef): {cause.verify_message}",
                )
        if any(isinstance(c, _LATE) and not isinstance(c, NewConnectionError) for c in causes):
            return _late()
        why = next((c.strerror for c in causes if isinstance(c, OSError) and c.strerror), None)
        return PrometheusError(
            "PrometheusUnreachable", why or "connection lost before the answer", answered=False
        )

    def close(self) -> None:
        """End its connections; the query that is under way ends by that."""
        self.closed = True
        self.line.cut()
        if self._connect is not None:
            self._connect.close()


def _late() -> PrometheusError:
    return PrometheusError("PrometheusTimeout", "no answer in time", answered=False)


class _Line:
    """The connection of a server's query that is under way, to be cut from another thread.

    Time-outs of sockets begin anew with each packet; a server that sends a byte now and then would
    hold its thread for ever.
    """

    def __init__(self, *, anywhere: bool) -> None:
        self._anywhere = anywhere
        self._turn = threading.Lock()
        self._end: socket.socket | None = None
        self.was_cut = False

    def lay(self) -> None:
        """Begin a query."""
        self.was_cut = False

    def guard(self, connection: socket.socket) -> None:
        """Take a new connection, before anything is sent over it.

        Raises:
            PrometheusError: Nothing may be sent to its other end, or it comes too late.
        """
        address = ipaddress.ip_address(connection.getpeername()[0].partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        local = address.is_loopback or address.is_link_local or address.is_unspecified
        if local and not self._anywhere:
            raise PrometheusError(
                "HostForbidden",
                f"{address} is an address of the operator's own machine or link; this "
                "installation does not name it among its hosts",
            )
        with self._turn:
            self._drop()
            if self.was_cut:
                raise _late()
            # Another descriptor of the connection: TLS takes this one away from its socket.
            self._end = socket.socket(fileno=os.dup(connection.fileno()))

    def cut(self) -> None:
        """End what is under way."""
        with self._turn:
            self.was_cut = True
            if self._end is not None:
                with contextlib.suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)
            self._drop()

    def _drop(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None


class _Adapter(HTTPAdapter):
    """Connections with authorities of their own, guarded by a line."""

    def __init__(self, authorities: ssl.SSLContext, line: _Line) -> None:
        self._authorities = authorities
        self._line = line
        super().__init__(max_retries=urllib3.Retry(0))

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        line = self._line

        class Plain(HTTPConnection):
            def _new_conn(self) -> socket.socket:
                return _guarded(super()._new_conn(), line)

        class Secure(HTTPSConnection):
            def _new_conn(self) -> socket.socket:
                return _guarded(super()._new_conn(), line)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        self.poolmanager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}

    def build_connection_pool_key_attributes(self, *args: Any, **kwargs: Any) -> Any:
        host, _ = super().build_connection_pool_key_attributes(*args, **kwargs)
        return host, {"ssl_context": self._authorities}

    def cert_verify(self, *_: Any, **__: Any) -> None:
        """Leave the context as it is: it verifies, and by no other authorities."""


def _guarded(connection: socket.socket, line: _Line) -> socket.socket:
    try:
        line.guard(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _authorities(access: Access, spec: api.Prometheus) -> ssl.SSLContext:
    if access.authorities is None:
        return _public_authorities()
    try:
        return ssl.create_default_context(cadata=access.authorities)
    except (ssl.SSLError, ValueError):
        ref = spec.ca_secret_ref
        raise PrometheusError(
            "CertificateRejected",
            f"Secret {ref.name if ref else ''}, key {ref.key if ref else ''}, holds no "
            "certificates in PEM (policy.prometheus.caSecretRef)",
        ) from None


@cache
def _public_authorities() -> ssl.SSLContext:
    # A megabyte and more: one for all.
    return ssl.create_default_context(cafile=requests.utils.DEFAULT_CA_BUNDLE_PATH)


def _taken_in(response: requests.Response, **_: Any) -> requests.Response:
    """Read an answer within bounds, and turn those that are none into their reason."""
    body = bytearray()
    with contextlib.closing(response.raw) as raw:
        while chunk := raw.read(65_536, decode_content=False):
            body += chunk
            if len(body) > LONGEST_ANSWER:
                raise PrometheusError("Unreadable", "the answer is too long")
    response.raw = io.BytesIO(body)
    status = response.status_code
    if status == 200:
        return response
    if status in {401, 403}:
        raise PrometheusError("Unauthorized", f"{status}: the server refuses these credentials")
    if 300 <= status < 400:
        raise PrometheusError(
            "PrometheusRedirects",
            f"{status}: the server sends elsewhere, which is not followed; name the right url",
        )
    words = _words(body)
    if words is not None:
        raise PrometheusError("QueryRefused", f"{status} {words}")
    raise PrometheusError(f"PrometheusHTTP{status}", f"the server answers {status}")


def _words(body: bytes | bytearray) -> str | None:
    """Prometheus's own words about a query; nobody else's are shown to who writes a SpecServe."""
    try:
        error = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(error, dict) or error.get("status") != "error":
        return None
    return " ".join(f"{error.get('errorType')}: {error.get('error')}"[:LONGEST_WORDS].split())


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that led to it; urllib3 and requests put causes into arguments, too."""
    seen: list[BaseException] = []
    found = [error]
    while found:
        one = found.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        yield one
        inner = [*one.args, getattr(one, "reason", None), one.__cause__, one.__context__]
        found += [cause for cause in inner if isinstance(cause, BaseException)]
