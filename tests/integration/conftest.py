from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest

from tests.cluster.apiclient import ApiError
from tests.cluster.light import light_cluster as start_light_cluster
from tests.integration.api import Api
from tests.integration.kubelet import Kubelet
from tests.integration.operator_process import USER, OperatorProcess, install
from tests.integration.stage import Stage, make_node

CRDS = Path(__file__).resolve().parents[2] / "crds"

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def light_cluster():
    """A control plane with the project's CRDs and an audit log, for all tests of the session."""
    with start_light_cluster(crds=[CRDS], audit=True) as cluster:
        yield cluster


@pytest.fixture
def namespace(light_cluster):
    """A namespace of its own for each test, gone afterwards."""
    name = f"test-{next(_numbers)}"
    path = "/api/v1/namespaces"
    light_cluster.api.request("POST", path, {"metadata": {"name": name}})
    yield name
    with contextlib.suppress(ApiError):  # a test may have deleted it
        light_cluster.api.request("DELETE", f"{path}/{name}")


@pytest.fixture(scope="session")
def served_cluster(light_cluster):
    """The cluster with a node for engine pods."""
    make_node(light_cluster, "gpu-node", gpus=1000)
    return light_cluster


@pytest.fixture(scope="session")
def rights(served_cluster):
    """A kubeconfig of the operator's own account; in all the session nothing is refused to it."""
    yield install(served_cluster)
    # O-F5.2
    assert refused(served_cluster.audit_events(USER)) == set()


def refused(events):
    """What was forbidden, in the server's words."""
    return {
        f"{event['verb']} {event['requestURI']}: {message}"
        for event in events
        if event["responseStatus"]["code"] == 403
        # A namespace on its way out takes no new objects, whoever brings them.
        and "is being terminated" not in (message := event["responseStatus"].get("message", ""))
    }


class _Seat:
    """Where the operator that most tests share sits; free while a test runs operators itself."""

    process: OperatorProcess | None = None

    def clear(self):
        if self.process is not None and self.process.running:
            # Not killed: the next one would have to wait for the lease.
            self.process.end()
        self.process = None


@pytest.fixture(scope="session")
def _seat():
    seat = _Seat()
    yield seat
    seat.clear()


@pytest.fixture
def unserved(_seat):
    """No operator sees what the test makes."""
    _seat.clear()


@pytest.fixture
async def operator(served_cluster, rights, _seat):
    """The operator that most tests share: cluster-wide, what nobody tells of is read often."""
    if _seat.process is None or not _seat.process.running:
        often = {"read_back_seconds": "2", "curve_seconds": "2"}
        _seat.process = OperatorProcess(served_cluster, rights, **often)
    await _seat.process.leads()
    return _seat.process


@pytest.fixture
def start_operator(served_cluster, rights, _seat):
    """Start operators that are the test's own; no other one runs meanwhile."""
    _seat.clear()
    lease = f"own-{next(_numbers)}"
    started = []

    def start(kubeconfig=rights, **settings):
        process = OperatorProcess(served_cluster, kubeconfig, lease_name=lease, **settings)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture
async def api(light_cluster):
    """The API server, with an administrator's rights."""
    async with Api(light_cluster) as client:
        yield client


@pytest.fixture
async def kubelet(api, served_cluster, namespace, tmp_path):
    """Pods of the test's namespace run, their engines are simulated."""
    async with Kubelet(api, namespace, tmp_path) as played:
        yield played


@pytest.fixture
def stage(api, served_cluster, namespace, kubelet):
    """What a test acts with."""
    return Stage(api, served_cluster, namespace, kubelet)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show what the operators of a failed test said."""
    report = yield
    if report.failed:
        since = call.start - 30
        for process in OperatorProcess.started:
            if said := process.tail(since):
                report.sections.append((f"Log of {process.identity}", said))
    return report


def pytest_collection_modifyitems(items):
    """Tests with operators of their own come together, so that the shared one starts once."""
    items.sort(key=lambda item: "start_operator" not in item.fixturenames)
