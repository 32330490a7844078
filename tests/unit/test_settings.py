from __future__ import annotations

import pytest

from specserve.settings import PREFIX, BadSetting, Settings


def given(**variables):
    return Settings.from_environ({PREFIX + k.upper(): v for k, v in variables.items()})


def test_no_variable_is_needed():
    settings = given()
    assert settings.watch_namespaces == ()
    assert settings.network_policies == "Ignore"


@pytest.mark.parametrize(
    ("text", "namespaces"),
    [("", ()), ("*", ()), ("a,*", ()), ("a, b,,a", ("a", "b")), (" ", ())],
)
def test_namespaces(text, namespaces):
    assert given(watch_namespaces=text).watch_namespaces == namespaces


def test_labels_and_pull_secrets_are_lists():
    settings = given(network_policies="Apply", pod_labels="a/b=c, d=", engine_pull_secrets="x,y,x")
    assert settings.pod_labels == {"a/b": "c", "d": ""}
    assert settings.engine_pull_secrets == ("x", "y")


def test_hosts_and_token_files_of_prometheus_are_lists():
    settings = given(
        prometheus_hosts="*.monitoring.svc, 10.1.2.3",
        prometheus_token_files="querier.monitoring.svc=/var/run/token,other=/a=b",
    )
    assert settings.prometheus_hosts == ("*.monitoring.svc", "10.1.2.3")
    assert settings.prometheus_token_files == {
        "querier.monitoring.svc": "/var/run/token",
        "other": "/a=b",
    }
    assert given().prometheus_hosts == ("*",)


def test_policies_need_to_know_the_operator():
    with pytest.raises(BadSetting, match="POD_LABELS"):
        given(network_policies="Apply")


@pytest.mark.parametrize(
    ("name", "value"),
    [("workers", "0"), ("api_connections", "1"), ("network_policies", "Yes"), ("log_level", "x")],
)
def test_a_bad_value_names_its_variable(name, value):
    with pytest.raises(BadSetting, match=PREFIX + name.upper()):
        given(**{name: value})


def test_two_replicas_are_two_candidates_of_one_holder():
    one, two = given(namespace="n", lease_name="l"), given(namespace="n", lease_name="l")
    assert one.identity != two.identity
    assert one.holder == two.holder == "n/l"
