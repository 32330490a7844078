"""What an installation provides: images, pull secrets and the closed admin port."""

from __future__ import annotations

import pytest

from specserve import names
from specserve.api import SpecServeSpec
from specserve.workload import Owner, Peer, Provision, UnusableSpec, credentials, desired

OWNER = Owner("chat", "team", "0000")
MODEL = {"source": "hf://org/model"}


def pod(provision=None, **fields):
    spec = SpecServeSpec.model_validate({"model": MODEL, **fields})
    manifests = desired(OWNER, spec, provision or Provision())
    return manifests[-1]["spec"]["template"]["spec"]


def image(given, **provided):
    engine = {"image": given} if given else {}
    return pod(Provision(**provided), engine=engine)["containers"][0]["image"]


@pytest.mark.parametrize(
    ("given", "provided", "image_of_pod"),
    [
        ("reg.example/engine:1", {}, "reg.example/engine:1"),
        (None, {"image": "reg.example/engine:1"}, "reg.example/engine:1"),
        ("mine:2", {"image": "reg.example/engine:1"}, "mine:2"),
        ("engine:1", {"registry": "mirror.example"}, "mirror.example/engine:1"),
        ("org/engine:1", {"registry": "mirror.example/x/"}, "mirror.example/x/org/engine:1"),
        (None, {"image": "org/engine", "registry": "m:5000"}, "m:5000/org/engine"),
        # A full name is left alone, whatever tells it.
        ("reg.example/engine:1", {"registry": "mirror.example"}, "reg.example/engine:1"),
        ("reg:5000/engine", {"registry": "mirror.example"}, "reg:5000/engine"),
        ("localhost/engine", {"registry": "mirror.example"}, "localhost/engine"),
    ],
)
def test_image(given, provided, image_of_pod):
    assert image(given, **provided) == image_of_pod


def test_no_image_at_all_names_both_ways_out():
    with pytest.raises(UnusableSpec, match=r"spec\.engine\.image.*engineDefaults\.image"):
        pod()


def test_pull_secrets_of_the_installation_are_for_those_without_own_ones():
    provided = Provision(image="x", pull_secrets=("a", "b"))
    assert pod(provided)["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    own = pod(provided, pod={"imagePullSecrets": [{"name": "mine"}]})
    assert own["imagePullSecrets"] == [{"name": "mine"}]
    assert "imagePullSecrets" not in pod(Provision(image="x"))


def test_no_network_policy_unless_asked_for():
    spec = SpecServeSpec.model_validate({"model": MODEL, "engine": {"image": "x"}})
    assert "NetworkPolicy" not in {m["kind"] for m in desired(OWNER, spec)}


def test_the_secret_names_the_installation():
    secret = credentials(
        OWNER,
        plugin_token="t",
        plugin_token_previous="",
        admin_key="k",
        nonce="1",
        config_yaml="",
        holder="system/specserve",
    )
    assert secret["metadata"]["annotations"] == {names.ANNOTATION_OPERATOR: "system/specserve"}


# -- who may connect ------------------------------------------------------------------------


def policies():
    admin = Peer("specserve-system", {"app.kubernetes.io/instance": "specserve"})
    spec = SpecServeSpec.model_validate({"model": MODEL, "engine": {"image": "x"}})
    made = desired(OWNER, spec, Provision(admin=admin))
    return [m for m in made if m["kind"] == "NetworkPolicy"]


def test_the_policy_selects_the_engine_pods_alone():
    (policy,) = policies()
    assert policy["spec"]["podSelector"] == {"matchLabels": names.selector("chat")}
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["metadata"]["namespace"] == "team"
