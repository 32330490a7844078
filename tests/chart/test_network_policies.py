"""Who may connect to whom, by the rendered NetworkPolicies of chart and operator together."""

from __future__ import annotations

import pytest

from specserve import names
from specserve.api import SpecServeSpec
from specserve.operator import _provision
from specserve.settings import Settings
from specserve.workload import Owner, desired
from tests.chart.matrix import MATRIX
from tests.chart.netpol import Pod, allowed
from tests.chart.rendering import NAMESPACE, environment, of_kind, only, render

METRICS = 8080
CLIENT = Pod("web", {"app": "front"})
NEIGHBOUR = Pod("team", {"app": "notebook"})
PROMETHEUS = Pod("mon", {"app.kubernetes.io/name": "prometheus"})
IMPOSTOR = Pod(
    "team",
    {
        f"app.kubernetes.io/{k}": v
        for k, v in (("name", "specserve"), ("instance", "specserve"), ("component", "operator"))
    },
)
HOUSEMATE = Pod(NAMESPACE, {"app": "other"})
ENGINE = Pod("team", names.labels("chat"))
OTHER_ENGINE = Pod("team", names.labels("code"))
CALIBRATION = Pod("team", names.calibration_labels("chat"))


def world(values=None):
    """The operator's pod, and all policies: the chart's and those the operator makes then."""
    manifests = render(values)
    labels = only(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    settings = Settings.from_environ(
        {"SPECSERVE_OPERATOR_NAMESPACE": NAMESPACE, **environment(manifests)}
    )
    spec = SpecServeSpec.model_validate(
        {"model": {"source": "hf://o/m"}, "engine": {"image": "x"}}
    )
    made = [
        manifest
        for name in ("chat", "code")
        for manifest in desired(Owner(name, "team", "0"), spec, _provision(settings))
    ]
    return Pod(NAMESPACE, labels), of_kind(manifests + made, "NetworkPolicy")


@pytest.mark.parametrize("values", [{}, MATRIX["extras"], MATRIX["closed"]], ids=str)
def test_only_the_operator_reaches_the_admin_port(values):
    operator, policies = world(values)
    assert allowed(policies, operator, ENGINE, names.PORT_ADMIN)
    for other in (CLIENT, NEIGHBOUR, PROMETHEUS, IMPOSTOR, HOUSEMATE, OTHER_ENGINE, ENGINE):
        assert not allowed(policies, other, ENGINE, names.PORT_ADMIN)


def test_what_measures_an_engine_reaches_its_admin_port_and_no_other_ones():
    _, policies = world()
    for port in (names.PORT_ADMIN, names.PORT_SERVING):
        assert allowed(policies, CALIBRATION, ENGINE, port)
    others = (
        Pod("team", names.calibration_labels("code")),
        Pod("elsewhere", names.calibration_labels("chat")),
    )
    for other in others:
        assert not allowed(policies, other, ENGINE, names.PORT_ADMIN)
    assert not allowed(policies, CALIBRATION, OTHER_ENGINE, names.PORT_ADMIN)


def test_serving_and_metrics_stay_as_open_as_they_were():
    operator, policies = world()
    for peer in (operator, CLIENT, NEIGHBOUR, PROMETHEUS, OTHER_ENGINE):
        for port in (1, names.PORT_SERVING, names.PORT_ADMIN - 1, names.PORT_ADMIN + 1, 65535):
            assert allowed(policies, peer, ENGINE, port)
        for protocol in ("UDP", "SCTP"):
            assert allowed(policies, peer, ENGINE, names.PORT_ADMIN, protocol)


def test_the_operator_takes_connections_on_its_metrics_alone():
    operator, policies = world()
    assert allowed(policies, PROMETHEUS, operator, METRICS)
    assert not allowed(policies, PROMETHEUS, operator, METRICS + 1)
    operator, policies = world(MATRIX["closed"])
    assert allowed(policies, PROMETHEUS, operator, METRICS)
    assert not allowed(policies, CLIENT, operator, METRICS)


def test_closed_egress_still_lets_the_operator_work():
    operator, policies = world({"networkPolicy": {"egress": {"enabled": True}}})
    for port in (443, 6443):
        assert allowed(policies, operator, Pod("kube-system"), port)
    assert allowed(policies, operator, Pod("kube-system"), 53, "UDP")
    for port in (names.PORT_SERVING, names.PORT_ADMIN):
        assert allowed(policies, operator, ENGINE, port)
        assert not allowed(policies, operator, NEIGHBOUR, port)
    assert not allowed(policies, operator, NEIGHBOUR, 8000)


def test_switched_off_there_is_no_policy():
    _, policies = world(MATRIX["open"])
    assert policies == []


def test_other_labels_of_a_pod_do_not_make_it_another_installation():
    operator, _ = world()
    other = Pod(NAMESPACE, {**operator.labels, "app.kubernetes.io/instance": "second"})
    _, policies = world()
    assert not allowed(policies, other, ENGINE, names.PORT_ADMIN)
