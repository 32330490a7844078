from __future__ import annotations

from pathlib import Path

import pytest

from specserve_engine.environ import BadEnvironment, Settings, settings_from

POD = {"SPECSERVE_POD_UID": "uid-1"}


def test_the_pod_uid_is_all_that_must_be_set():
    assert settings_from(POD) == Settings(
        pod_uid="uid-1",
        admin_port=9470,
        credentials=Path("/etc/specserve/credentials"),
        require_live=False,
        steps=(0, 1, 3),
    )


def test_everything_set():
    environ = {
        **POD,
        "SPECSERVE_ADMIN_PORT": "9999",
        "SPECSERVE_CREDENTIALS_DIR": "/secrets",
        "SPECSERVE_REQUIRE_LIVE": "1",
        "SPECSERVE_STEPS": "5, 3,0,3",
    }
    assert settings_from(environ) == Settings("uid-1", 9999, Path("/secrets"), True, (0, 3, 5))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPECSERVE_POD_UID", ""),
        ("SPECSERVE_POD_UID", " "),
        ("SPECSERVE_ADMIN_PORT", "tcp://10.1.2.3:30000"),
        ("SPECSERVE_ADMIN_PORT", "0"),
        ("SPECSERVE_ADMIN_PORT", "65536"),
        ("SPECSERVE_ADMIN_PORT", "-1"),
        ("SPECSERVE_ADMIN_PORT", "٣"),
        ("SPECSERVE_ADMIN_PORT", "9" * 5000),
        ("SPECSERVE_REQUIRE_LIVE", "yes"),
        ("SPECSERVE_STEPS", "1,3"),
        ("SPECSERVE_STEPS", "0,,3"),
        ("SPECSERVE_STEPS", "0,-1"),
        ("SPECSERVE_STEPS", "0,65"),
        ("SPECSERVE_STEPS", "3 0"),
    ],
)
def test_an_unusable_variable_is_named(name, value):
    with pytest.raises(BadEnvironment, match=name):
        settings_from({**POD, name: value})


def test_a_service_link_is_recognised():
    """Kubernetes sets this for a Service named specserve-admin in the same namespace."""
    with pytest.raises(BadEnvironment, match="enableServiceLinks: false"):
        settings_from({**POD, "SPECSERVE_ADMIN_PORT": "tcp://10.1.2.3:30000"})


def test_a_service_named_like_the_product_does_no_harm():
    links = {"SPECSERVE_PORT": "tcp://10.1.2.3:30000", "SPECSERVE_SERVICE_HOST": "10.1.2.3"}
    assert settings_from({**POD, **links}).admin_port == 9470
