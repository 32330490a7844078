"""The operator's own metrics and health, served by a thread of its own.

A thread, so that a blocked event loop is seen from outside: the ages below grow and /healthz turns
to 503.
"""

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

registry = CollectorRegistry()
ProcessCollector(registry=registry)
GCCollector(registry=registry)

reconciles = Counter(
    "specserve_reconcile_total", "Reconciles by result.", ["result"], registry=registry
)
reconcile_seconds = Histogram(
    "specserve_reconcile_duration_seconds",
    "Time from taking a SpecServe to its status, in seconds.",
    registry=registry,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
queue_length = Gauge(
    "specserve_work_queue_length", "SpecServes that wait for a reconcile.", registry=registry
)
switches = Counter(
    "specserve_speculation_switches_total",
    "Acknowledged switches of a pod by mode and reason.",
    ["mode", "reason"],
    registry=registry,
)
admin_seconds = Histogram(
    "specserve_admin_request_duration_seconds",
    "Time of calls to engines by call and answer, in seconds.",
    ["call", "code"],
    registry=registry,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3),
)
sample_period = Gauge(
    "specserve_sample_period_stretch_ratio",
    "Sample period in force divided by the period asked for; 1 unless the operator is at its "
    "limit of readings a second.",
    registry=registry,
)
watched = Gauge(
    "specserve_watched_objects",
    "Objects of a resource that the operator knows of.",
    ["resource"],
    registry=registry,
)
foreign = Gauge(
    "specserve_foreign_specserves",
    "SpecServes that are left alone because another installation serves them.",
    registry=registry,
)
namespaces = Gauge(
    "specserve_namespaces",
    "Namespaces of the list to watch: served, or waiting until all in them can be read.",
    ["state"],
    registry=registry,
)
schema_fields = Gauge(
    "specserve_schema_differences",
    "Fields in which the installed schema differs from the operator's: lacking ones the operator "
    "knows, unknown ones it does not.",
    ["kind"],
    registry=registry,
)
api_requests = Counter(
    "specserve_api_requests_total",
    "Calls to the API server by verb and answer.",
    ["verb", "code"],
    registry=registry,
)
api_waiting = Gauge(
    "specserve_api_requests_waiting",
    "Calls that wait because as many as allowed are under way.",
    registry=registry,
)
override = Gauge(
    "specserve_override",
    "1 for the mode that the override of all SpecServes sets, 0 for the others.",
    ["mode"],
    registry=registry,
)
override_unreadable = Gauge(
    "specserve_override_unreadable",
    "1 while the override cannot be read; what was last known of it holds.",
    registry=registry,
)
leader = Gauge("specserve_leader", "1 while this process leads.", registry=registry)


def call_took(call: str, code: str, seconds: float) -> None:
    """Count a call to an engine."""
    admin_seconds.labels(call, code).observe(seconds)


class Health:
    """Ages that must stay below their limits while the process is well.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._checks: dict[str, tuple[Callable[[], float], float]] = {}
        self.ready = False
        #: Answers what lies under /decisions, called from another thread; None unless leading.
        self.decisions: Callable[[Sequence[str]], Any] | None = None

    def watch(self, name: str, last: Callable[[], float], limit: float) -> None:
        """Call the process unhealthy when `last()` is more than `limit` seconds ago."""
        self._checks[name] = (last, limit)

    def forget(self, names: Iterable[str]) -> None:
        """Watch these no more."""
        for name in names:
            self._checks.pop(name, None)

    def clear(self) -> None:
        """Forget all checks, as when a leader steps down."""
        self._checks.clear()

    def problems(self) -> list[str]:
        """What is overdue, in words; empty when all is well."""
        now = self._clock()
        return [
            f"{name}: last sign of life {now - last():.0f} s ago, limit {limit:.0f} s"
            for name, (last, limit) in list(self._checks.items())
            if now - last() > limit
        ]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """One thread for each connection: one that says nothing must not keep a probe waiting."""

    daemon_threads = True
    # Pods of an IPv6 cluster are probed at their IPv6 address.
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not the parent's: it asks a name server for our own name.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()


class _QuietHandler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing: probes come every few seconds."""


def _decisions(health: Health, path: Sequence[str]) -> tuple[str, str]:
    """Status line and JSON text of what lies under /decisions."""
    decisions = health.decisions  # the loop's thread may take it away meanwhile
    if decisions is None:
        message = "this process does not lead; the holder of the Lease knows the decisions"
        return "503 Service Unavailable", json.dumps({"message": message})
    found = decisions(path)
    if found is None:
        message = (
            f"SpecServe {'/'.join(path)} is not served here; /decisions lists those that are"
            if len(path) == 2
            else "there are /decisions and /decisions/NAMESPACE/NAME of SpecServes served here"
        )
        return "404 Not Found", json.dumps({"message": message})
    return "200 OK", json.dumps(found)


def serve(health: Health, port: int) -> WSGIServer:
    """Serve /metrics, /healthz, /readyz and /decisions on all addresses; port 0 takes a free one.

    Raises:
        OSError: The port cannot be had.
    """
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            answer: Iterable[bytes] = metrics(environ, start)
            return answer
        if path == "/decisions" or path.startswith("/decisions/"):
            status, text = _decisions(health, [part for part in path.split("/") if part][1:])
            start(status, [("Content-Type", "application/json")])
            return [text.encode() + b"\n"]
        if path == "/healthz":
            problems = health.problems()
        elif path == "/readyz":
            problems = health.problems() if health.ready else ["not connected yet"]
        else:
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"there are /metrics, /healthz, /readyz and /decisions/NAMESPACE/NAME\n"]
        start(
            "503 Service Unavailable" if problems else "200 OK", [("Content-Type", "text/plain")]
        )
        return [("\n".join(problems) or "ok").encode() + b"\n"]

    server = make_server("", port, app, server_class=_Server, handler_class=_QuietHandler)
    threading.Thread(target=server.serve_forever, name="telemetry", daemon=True).start()
    return server
