"""Health as the kubelet sees it."""

import json
import socket
import urllib.error
import urllib.request

import pytest

from specserve import telemetry


@pytest.fixture
def served():
    health = telemetry.Health(clock=lambda: served_now[0])
    served_now = [100.0]
    server = telemetry.serve(health, 0)
    try:
        yield health, served_now, server.server_port
    finally:
        server.shutdown()
        server.server_close()


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_turns_with_the_age_of_the_last_sign(served):
    health, clock, port = served
    beat = [100.0]
    health.watch("regulation", lambda: beat[0], 30.0)
    assert get(port, "/healthz") == (200, "ok\n")
    clock[0] = 131.0
    assert get(port, "/healthz") == (
        503,
        "regulation: last sign of life 31 s ago, limit 30 s\n",
    )
    beat[0] = 131.0
    assert get(port, "/healthz")[0] == 200


def test_what_is_no_longer_watched_does_no_harm(served):
    health, _, port = served
    health.watch("regulation", lambda: 0.0, 1.0)
    assert get(port, "/healthz")[0] == 503
    health.clear()
    assert get(port, "/healthz")[0] == 200


def test_ready_once_connected_and_well(served):
    health, _, port = served
    assert get(port, "/readyz") == (503, "not connected yet\n")
    health.ready = True
    assert get(port, "/readyz")[0] == 200
    health.watch("watch of /api/v1/pods", lambda: 0.0, 1.0)
    assert get(port, "/readyz")[0] == 503


def test_metrics_are_served_by_their_names(served):
    telemetry.reconciles.labels("ok").inc()
    status, text = get(served[2], "/metrics")
    assert status == 200
    assert 'specserve_reconcile_total{result="ok"}' in text
    assert "specserve_leader" in text


def test_other_paths_name_what_there_is(served):
    assert get(served[2], "/")[0] == 404


def test_a_connection_that_says_nothing_keeps_no_probe_waiting(served):
    port = served[2]
    with (
        socket.create_connection(("127.0.0.1", port)),
        socket.create_connection(("127.0.0.1", port)),
    ):
        assert get(port, "/healthz")[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_probes_of_both_families_are_answered(served, host: str):
    assert get(served[2], "/healthz", host)[0] == 200


def test_decisions_are_told_while_leading(served):
    health, _, port = served
    status, text = get(port, "/decisions/team/chat")
    assert status == 503
    assert "does not lead" in json.loads(text)["message"]
    asked = []
    health.decisions = lambda path: asked.append(path) or ([] if path != ["a"] else None)
    assert get(port, "/decisions") == (200, "[]\n")
    assert get(port, "/decisions/team/chat/") == (200, "[]\n")
    assert get(port, "/decisions/a")[0] == 404
    assert asked == [[], ["team", "chat"], ["a"]]
    health.decisions = lambda _: None
    status, text = get(port, "/decisions/team/chatt")
    assert status == 404
    assert "team/chatt is not served here" in json.loads(text)["message"]
    assert get(port, "/decisionsx")[0] == 404
