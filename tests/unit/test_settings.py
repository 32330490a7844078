"""Settings come from the environment; a bad one is named."""

import pytest

from specserve import settings as module
from specserve.settings import PREFIX, BadSetting, Settings


@pytest.fixture(autouse=True)
def no_pod(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_NAMESPACE_FILE", tmp_path / "namespace")
    return tmp_path / "namespace"


def read(**variables: str) -> Settings:
    return Settings.from_environ({PREFIX + name: value for name, value in variables.items()})


def test_defaults():
    made = read()
    assert (made.namespace, made.lease_name, made.holder) == (
        "default",
        "specserve",
        "default/specserve",
    )
    assert made.watch_namespaces == ()
    assert made.retry_seconds < made.renew_seconds < made.lease_seconds


def test_two_processes_of_one_host_differ():
    assert read().identity != read().identity


def test_the_namespace_of_the_pod_is_taken_unless_another_is_given(no_pod):
    no_pod.write_text("system\n")
    assert read().namespace == "system"
    assert read(NAMESPACE="else").holder == "else/specserve"


def test_a_list_of_namespaces():
    assert read(WATCH_NAMESPACES=" a, b,,").watch_namespaces == ("a", "b")


def test_an_empty_variable_is_none():
    assert read(HTTP_PORT="").http_port == 8080


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTP_PORT", "70000"),
        ("HTTP_PORT", "eighty"),
        ("SAMPLES_PER_SECOND", "0"),
        ("WORKERS", "1.5"),
        ("LEASE_SECONDS", "inf"),
        ("LEASE_SECONDS", "nan"),
        ("LOG_LEVEL", "LOUD"),
        ("RENEW_SECONDS", "12"),
        ("RETRY_SECONDS", "8"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(name: str, value: str):
    with pytest.raises(BadSetting, match=f"{PREFIX}{name}='{value}"):
        read(**{name: value})


def test_times_that_would_let_two_lead_are_refused():
    with pytest.raises(BadSetting, match=r"RENEW_SECONDS='8.0': .*below .*LEASE_SECONDS \(5\)"):
        read(LEASE_SECONDS="5")
