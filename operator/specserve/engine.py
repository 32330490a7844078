"""One engine's HTTP endpoints: load, read-back, switch. The only user of aiohttp for engines.

Errors are classed by what they mean for control, not by the layer they came from. Calls are
bounded (2 s; a switch its own deadline and a second), so a hung engine costs its own pod a tick
and nobody else anything.
"""

import asyncio
import errno
import ipaddress
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import aiohttp

from specserve import names, signals

READ_TIMEOUT = 2.0
CONNECT_TIMEOUT = 2.0
#: Shorter than the 5 s after which common servers close an idle connection, so that a call rarely
#: meets one that is being closed.
KEEPALIVE = 3.0
#: A read-back of 16 ranks with statistics stays below 100 kB; more is not ours.
LONGEST_ANSWER = 4 * 1024 * 1024
#: Characters of an engine's own words that are handed on.
LONGEST_WORDS = 512
#: What can be the reason of a condition.
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class EngineError(Exception):
    """A call to an engine brought no usable answer.

    Attributes:
        code: Machine-readable reason, used unchanged in conditions, events and metric labels.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineUnreachable(EngineError):
    """No answer from the engine itself; whether a switch was applied is unknown."""


class EngineRefused(EngineError):
    """The engine answered, and said no.

    Attributes:
        status: HTTP status code.
        body: The decoded answer, empty if it was no JSON object.
    """

    def __init__(self, code: str, message: str, status: int, body: dict[str, Any]) -> None:
        super().__init__(code, message)
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how to talk to one engine.

    Attributes:
        ip: Pod address, IPv4 or IPv6.
        tokens: Plugin tokens to try in this order, the current one first.
        api_key: Key of the serving port, None if it is open.
        model: Served model name, None to accept any.
        reuse: Whether to keep the connection for the next call.
    """

    ip: str
    tokens: tuple[str, ...]
    api_key: str | None = None
    model: str | None = None
    reuse: bool = True

    def __repr__(self) -> str:
        """Keep tokens and keys out of logs and tracebacks."""
        return f"Endpoint({self.ip})"

    def headers(self, bearer: str | None) -> dict[str, str]:
        """Headers of a call that authenticates with `bearer`, if that is given."""
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        if not self.reuse:
            headers["Connection"] = "close"
        return headers

    def url(self, port: int, path: str) -> str:
        """URL on this pod; an IPv6 address gets its brackets."""
        host = f"[{self.ip}]" if ipaddress.ip_address(self.ip).version == 6 else self.ip
        return f"http://{host}:{port}{path}"


class EngineClient:
    """Calls to any number of engines through one connection pool.

    Args:
        metric_names: Series to read where an engine has no `/v1/loads`.
        took: Told of each call what it was, the status it was answered with, `none` without an
            answer, and the seconds it took.
    """

    def __init__(
        self,
        metric_names: signals.MetricNames,
        took: Callable[[str, str, float], None] = lambda *_: None,
    ) -> None:
        self._metric_names = metric_names
        self._took = took
        self._session = aiohttp.ClientSession(
            # No limit on connections: hung engines would fill it and starve the others. The
            # caller's rate bounds them, since every call ends within seconds.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE),
            trust_env=False,  # pods are called directly, never through a proxy
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def load(self, engine: Endpoint) -> signals.Reading:
        """Read how many requests run and wait.

        SGLang takes its API key at its start, so that an engine refuses a key that was renewed
        since. Its plugin, which has a token of its own, counts the same requests.

        Raises:
            EngineUnreachable: No answer in time.
            EngineRefused: An error answer, or one that holds no load (code `Unreadable`).
        """
        headers = engine.headers(engine.api_key)
        try:
            body = await self._call(
                "loads", "GET", engine.url(names.PORT_SERVING, names.PATH_LOADS), headers=headers
            )
        except EngineRefused as refusal:
            if refusal.status == 401:
                return await self._keyless(engine, refusal)
            if refusal.status not in (404, 405, 501):
                raise
        else:
            return _readable(lambda: signals.from_loads(body))
        text = await self._call(
            "metrics",
            "GET",
            engine.url(names.PORT_SERVING, names.PATH_METRICS),
            headers=headers,
            decode=False,
        )
        return _readable(lambda: signals.from_metrics(str(text), self._metric_names, engine.model))

    async def _keyless(self, engine: Endpoint, refusal: EngineRefused) -> signals.Reading:
        try:
            answer = await self.read_back(engine)
            reading = _readable(lambda: signals.from_read_back(answer))
        except EngineUnreachable as error:
            # Passes, or is told when it lasts, like any silence of an engine.
            raise EngineUnreachable(error.code, f"{refusal}; {error}") from None
        except EngineRefused:
            raise refusal from None
        return replace(reading, key_refused=True)

    async def read_back(self, engine: Endpoint) -> dict[str, Any]:
        """Ask the engine what it does.

        Raises:
            EngineUnreachable: No answer in time.
            EngineRefused: An error answer.
        """
        return await self._admin("read", "GET", engine, None, READ_TIMEOUT)

    async def switch(self, engine: Endpoint, directive: dict[str, Any]) -> dict[str, Any]:
        """Send a directive; returns the read-back that acknowledges it.

        Raises:
            EngineUnreachable: No answer in time: read back before deciding anything.
            EngineRefused: The engine did not take it; `code` and `body` say why.
        """
        limit = directive["deadlineMs"] / 1000 + 1.0
        return await self._admin("switch", "PUT", engine, directive, limit)

    async def healthy(self, url: str, limit: float) -> bool:
        """Whether a health route answers as the kubelet's probe wants it.

        Args:
            url: The whole URL; nothing is shown to it.
            limit: Seconds it may take.
        """
        try:
            async with self._session.get(
                url, timeout=aiohttp.ClientTimeout(total=limit), allow_redirects=False
            ) as response:
                return 200 <= response.status < 400
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _admin(
        self,
        call: str,
        method: str,
        engine: Endpoint,
        body: dict[str, Any] | None,
        limit: float,
    ) -> dict[str, Any]:
        url = engine.url(names.PORT_ADMIN, names.PATH_SPECULATION)
        for last, token in enumerate(engine.tokens, start=1 - len(engine.tokens)):
            try:
                answer = await self._call(
                    call,
                    method,
                    url,
                    headers=engine.headers(token),
                    body=body,
                    limit=limit,
                )
            except EngineRefused as refusal:
                # A pod may not have the rotated token yet, or may have it already.
                if refusal.status == 401 and last < 0:
                    continue
                raise
            try:
                return signals.checked_read_back(answer)
            except signals.Unreadable as error:
                raise EngineRefused("Unreadable", f"{url}: {error}", 200, {}) from None
        raise EngineRefused("Unauthorized", "there is no plugin token to send", 401, {})

    async def _call(
        self,
        call: str,
        method: str,
        url: str,
        *,
        headers: dict[str, str],
        body: dict[str, Any] | None = None,
        limit: float = READ_TIMEOUT,
        decode: bool = True,
    ) -> Any:
        started = time.perf_counter()
        code = "none"
        try:
            async with self._session.request(
                method,
                url,
                headers=headers,
                json=body,
                timeout=aiohttp.ClientTimeout(total=limit, sock_connect=CONNECT_TIMEOUT),
                allow_redirects=False,
            ) as response:
                code = str(response.status)
                text = bytearray()
                async for chunk in response.content.iter_any():
                    text += chunk
                    if len(text) > LONGEST_ANSWER:
                        raise EngineRefused("Unreadable", f"{url}: too long an answer", 200, {})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # Not as its cause: some of aiohttp's errors show the headers that were sent.
            raise _unreachable(url, error) from None
        except ValueError:
            # aiohttp sends no header with a line break in it, and quotes none.
            message = f"{url}: the key or token has a character that no header can carry"
            raise EngineRefused("KeyUnusable", message, 0, {}) from None
        finally:
            self._took(call, code, time.perf_counter() - started)
        if response.status != 200:
            raise _refusal(response, text, url)
        if not decode:
            return text.decode(errors="replace")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise EngineRefused("Unreadable", f"{url}: the answer is no JSON", 200, {}) from None


def _readable(read: Any) -> signals.Reading:
    try:
        reading: signals.Reading = read()
    except signals.Unreadable as error:
        raise EngineRefused("Unreadable", str(error), 200, {}) from None
    return reading


def _unreachable(url: str, error: BaseException) -> EngineUnreachable:
    """Tell time-out, refusal and reset apart: they have different causes and remedies."""
    number = getattr(error, "errno", None)
    if isinstance(error, asyncio.TimeoutError | aiohttp.ServerTimeoutError):
        return EngineUnreachable("EngineTimeout", f"{url}: no answer in time")
    if number == errno.ECONNREFUSED:
        return EngineUnreachable("EngineConnectionRefused", f"{url}: connection refused")
    if isinstance(error, aiohttp.ClientConnectorError):
        return EngineUnreachable("EngineUnreachable", f"{url}: {error.os_error.strerror or error}")
    return EngineUnreachable(
        "EngineConnectionReset",
        f"{url}: connection lost before the answer ({type(error).__name__})",
    )


def _refusal(response: aiohttp.ClientResponse, text: bytearray, url: str) -> EngineRefused:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = {}
    if not isinstance(body, dict):
        body = {}
    status = response.status
    code = body.get("code")
    if not isinstance(code, str) or not _CODE.fullmatch(code):
        proxied = response.headers.get("server", "").lower() == "envoy"
        code = {401: "Unauthorized", 403: "Unauthorized"}.get(
            status, "ProxyUnavailable" if proxied else f"EngineHTTP{status}"
        )
    said = body.get("message") or body.get("reason") or text[:200].decode(errors="replace")
    words = " ".join(str(said)[:LONGEST_WORDS].split())
    return EngineRefused(code, f"{url}: {status} {words}".strip(), status, body)
