"""HTTP of the benchmark: generations, and what a server tells of itself.

Every call is bounded: a stream by the silence it may keep, all others by seconds. Certificates
are verified; proxies of the environment are not used, as they would be measured too.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from specserve.bench import dialects
from specserve.bench.dialects import Answer, Outcome, Wish
from specserve.bench.figures import Counters
from specserve.bench.prompts import Prompt

SILENCE_SECONDS = 120.0
CALL_SECONDS = 10.0
CONNECT_SECONDS = 5.0
#: Longest line of a stream: SGLang's route repeats the whole answer in each event.
LONGEST_LINE = 8 * 1024 * 1024
_TOKENS = "sglang:generation_tokens_total"
_VERIFIES = "sglang:spec_verify_calls_total"


class Unreachable(Exception):
    """A server gave no HTTP answer; the message says what happened instead."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer.

    Attributes:
        status: HTTP status.
        text: The body.
        body: The body as a JSON object, empty if it is none.
    """

    status: int
    text: str
    body: Mapping[str, Any]


class Client:
    """Calls to one server, through as many connections as requests are in flight."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS
            ),
            trust_env=False,
            read_bufsize=LONGEST_LINE,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(
        self,
        method: str,
        url: str,
        *,
        bearer: str | None = None,
        body: Mapping[str, Any] | None = None,
        seconds: float = CALL_SECONDS,
    ) -> Reply:
        """Make one short call.

        Raises:
            Unreachable: No HTTP answer within `seconds`.
        """
        try:
            async with self._session.request(
                method,
                url,
                headers=_headers(bearer),
                json=body,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS),
                allow_redirects=False,
            ) as response:
                text = (await response.read()).decode(errors="replace")
                return Reply(response.status, text, _object(text))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Not as its cause: some of aiohttp's errors show the headers that were sent.
            raise Unreachable(f"{url}: {problem_of(error)}") from None

    async def generate(
        self, url: str, wish: Wish, prompt: Prompt, *, bearer: str | None = None
    ) -> Outcome:
        """Ask for one generation and read it to its end; failures are part of the outcome."""
        began = time.perf_counter()
        answer = Answer(wish, began)
        problem = ""
        try:
            async with self._session.post(
                url + wish.api.path, json=dialects.body_of(wish, prompt), headers=_headers(bearer)
            ) as response:
                if response.status != 200:
                    problem = dialects.refusal(response.status, await response.text())
                elif wish.stream:
                    async for line in response.content:
                        answer.feed(line, time.perf_counter())
                else:
                    answer.whole(await response.read())
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = problem_of(error)
        return answer.outcome(time.perf_counter(), problem)

    async def counters(self, url: str) -> Counters | None:
        """The engine's counts of ended requests; None where it shows none."""
        try:
            reply = await self.call("GET", f"{url}/metrics")
        except Unreachable:
            return None
        if reply.status != 200:
            return None
        tokens, verifies = series_sum(reply.text, _TOKENS), series_sum(reply.text, _VERIFIES)
        return None if tokens is None or verifies is None else Counters(tokens, verifies)


def series_sum(text: str, name: str) -> float | None:
    """The sum over all series of a metric in Prometheus' text format; None without any.

    Both spellings of SGLang's separator are understood.
    """
    plain = name.replace(":", "_")
    lines = (line.replace(":", "_", 1) for line in text.splitlines())
    wanted = "\n".join(line for line in lines if line.startswith(plain))
    try:
        values = [
            sample.value
            for family in text_string_to_metric_families(wanted)
            for sample in family.samples
            if sample.name == plain
        ]
    except ValueError:
        return None
    return sum(values) if values else None


def problem_of(error: BaseException) -> str:
    """What happened to a connection, as a label to count by."""
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or type(error.os_error).__name__}"
    if isinstance(error, aiohttp.ClientError | OSError):
        return f"connection lost ({type(error).__name__})"
    if "Chunk too big" in str(error):
        return "a line of the stream is too long"
    return "a key or token has a character that no header can carry"


def _headers(bearer: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {bearer}"} if bearer else {}


def _object(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
