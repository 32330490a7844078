"""The chart under many values, without a cluster."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
import yaml

from specserve.settings import PREFIX, Settings
from tests.chart import generate, shapes
from tests.chart.matrix import MATRIX
from tests.chart.rendering import (
    CHART,
    NAMESPACE,
    Refused,
    container,
    copy,
    environment,
    helm,
    nulls,
    of_kind,
    only,
    render,
)

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
RELEASES = sorted((Path(__file__).parent / "releases").glob("*.yaml"))
MAPS = [
    path
    for key, value in DEFAULTS.items()
    if isinstance(value, dict)
    for path in (key, *(f"{key}.{k}" for k, v in value.items() if isinstance(v, dict)))
]
LISTS = [key for key, value in DEFAULTS.items() if isinstance(value, list)]


@pytest.mark.parametrize("name", MATRIX)
def test_lint_finds_nothing(name):
    helm("lint", "--strict", str(CHART), "-f", "-", stdin=yaml.safe_dump(MATRIX[name]))


@pytest.mark.parametrize("name", MATRIX)
def test_renders_without_null(name):
    for manifest in render(MATRIX[name]):
        assert nulls(manifest) == []


@pytest.mark.parametrize("path", [*MAPS, *LISTS, *(k for k in DEFAULTS if k not in MAPS)])
def test_any_value_may_be_null(path):
    values: object = None
    for part in reversed(path.split(".")):
        values = {part: values}
    for manifest in render(values):
        assert nulls(manifest) == []


@pytest.mark.parametrize("release", RELEASES, ids=lambda file: file.stem)
def test_renders_with_the_values_of_an_older_release_alone(tmp_path, release):
    chart = copy(tmp_path, version="9.9.9")
    (chart / "values.yaml").write_text("{}\n")
    old = render(release.read_text(), chart=chart)
    assert environment(old) == environment(render())
    assert (
        only(old, "Deployment")["spec"]["template"]
        == only(render(), "Deployment")["spec"]["template"]
    )


def test_absent_values_mean_the_defaults(tmp_path):
    chart = copy(tmp_path)
    (chart / "values.yaml").write_text("{}\n")
    bare = render(chart=chart)
    assert environment(bare) == environment(render())
    assert {m["kind"] for m in bare} == {m["kind"] for m in render()}


def test_every_release_has_its_values_recorded():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    recorded = yaml.safe_load((Path(__file__).parent / "releases" / f"{version}.yaml").read_text())
    assert recorded == DEFAULTS


def test_selectors_are_the_same_for_any_version_and_labels(tmp_path):
    newer = copy(tmp_path, version="0.2.0", appVersion="7.7.7")
    labels = {
        "commonLabels": {"team": "x", "app.kubernetes.io/component": "y"},
        "podLabels": {"app.kubernetes.io/name": "z"},
        "nameOverride": "other",
    }
    for values in ({}, labels, MATRIX["extras"]):
        old, new = render(), render(values, chart=newer)
        for kind, path in (("Deployment", "selector"), ("Service", "selector")):
            assert only(new, kind)["spec"][path] == only(old, kind)["spec"][path]
        selector = only(new, "Deployment")["spec"]["selector"]["matchLabels"]
        pod = only(new, "Deployment")["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= pod.items()


def test_objects_of_two_releases_have_different_names_and_selectors():
    one, two = render(release="one"), render(release="two")
    keep = {"CustomResourceDefinition"}

    def named(manifests):
        return {(m["kind"], m["metadata"]["name"]) for m in manifests if m["kind"] not in keep}

    assert not named(one) & named(two)
    assert only(one, "Service")["spec"]["selector"] != only(two, "Service")["spec"]["selector"]


def test_pod_is_hardened():
    pod = only(render(), "Deployment")["spec"]["template"]["spec"]
    engine = container(render())
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert engine["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert engine["resources"]["limits"]["memory"]
    assert engine["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert engine["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("name", MATRIX)
def test_operator_understands_its_environment(name):
    given = environment(render(MATRIX[name]))
    known = {PREFIX + field.upper() for field in Settings.model_fields}
    assert {key for key in given if key.startswith(PREFIX)} <= known
    settings = Settings.from_environ({"HOSTNAME": "pod", **given})
    assert settings.lease_seconds > settings.renew_seconds > settings.retry_seconds


def test_defaults_of_chart_and_operator_agree():
    settings = Settings.from_environ(environment(render()))
    for field in ("lease_seconds", "renew_seconds", "retry_seconds", "samples_per_second"):
        assert getattr(settings, field) == Settings.model_fields[field].default
    assert settings.lease_name == "specserve"


@pytest.mark.parametrize(
    ("timing", "refused"),
    [
        ({"leaseSeconds": 8}, "leaseSeconds (8) must be above renewSeconds (8)"),
        ({"renewSeconds": 2}, "that above retrySeconds (2)"),
        ({"retrySeconds": 9.5}, "that above retrySeconds (9.5)"),
        ({"leaseSeconds": 5, "renewSeconds": 6.5}, "leaseSeconds (5) must be above"),
    ],
)
def test_timings_under_which_two_could_lead_are_refused(timing, refused):
    with pytest.raises(Refused, match=re.escape(refused)):
        render({"leaderElection": timing})


# -- names ----------------------------------------------------------------------------------


def _metadata(node):
    """All names, namespaces and labels in a manifest, wherever they are."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("name", "namespace", "serviceAccountName", "priorityClassName"):
                yield value
            elif key in ("labels", "matchLabels", "annotations", "nodeSelector"):
                yield from value.values()
            else:
                yield from _metadata(value)
    elif isinstance(node, list):
        for each in node:
            yield from _metadata(each)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"fullnameOverride": "true", "serviceAccount": {"name": "789"}},
        {"watchNamespaces": ["456", "1e3"], "leaderElection": {"leaseName": "0x1"}},
        {"priorityClassName": "0", "commonLabels": {"team": "7"}, "podLabels": {"tier": "true"}},
        MATRIX["monitors"],
        {"replicas": 2},
    ],
)
@pytest.mark.parametrize("release", ["123", "1e3", "0x1"])
def test_names_that_look_like_numbers_stay_text(values, release):
    manifests = render(values, release=release, namespace="456")
    for manifest in manifests:
        if manifest["kind"] != "CustomResourceDefinition":
            assert {type(each) for each in _metadata(manifest)} == {str}
    labels = environment(manifests)["SPECSERVE_OPERATOR_POD_LABELS"]
    assert f"app.kubernetes.io/instance={release}" in labels.split(",")


@pytest.mark.parametrize("release", ["123", "1.specserve", "a.b"])
@pytest.mark.parametrize("values", [{}, {"nameOverride": "a" * 30 + "-" * 30 + "b"}])
def test_any_release_has_a_name_that_a_service_may_have(release, values):
    name = only(render(values, release=release), "Service")["metadata"]["name"]
    assert re.fullmatch(shapes.SERVICE, name)


def test_cluster_roles_of_long_names_differ():
    names = {
        role["metadata"]["name"]
        for release in ("a" * 52, "a" * 51 + "b")
        for role in of_kind(render(release=release, namespace="n" * 63), "ClusterRole")
    }
    assert len(names) == 6
    assert {len(name) for name in names} <= set(range(64, 254))


# -- rights ---------------------------------------------------------------------------------


def test_all_namespaces_take_one_cluster_role_for_the_operator():
    rights = render()
    own = [r for r in of_kind(rights, "ClusterRole") if not _aggregated(r)]
    assert [r["metadata"]["name"] for r in own] == ["specserve-system-specserve"]
    assert render({"watchNamespaces": ["*"]}) == rights


def test_listed_namespaces_take_roles_there_and_nothing_cluster_wide():
    rights = render(MATRIX["namespaces"])
    assert all(_aggregated(r) for r in of_kind(rights, "ClusterRole"))
    assert of_kind(rights, "ClusterRoleBinding") == []
    roles = {r["metadata"]["namespace"]: r for r in of_kind(rights, "Role")}
    assert set(roles) == {NAMESPACE, "team-a", "team-b"}
    everywhere = [r for r in of_kind(render(), "ClusterRole") if not _aggregated(r)]
    assert roles["team-a"]["rules"] == roles["team-b"]["rules"] == everywhere[0]["rules"]
    for binding in of_kind(rights, "RoleBinding"):
        (subject,) = binding["subjects"]
        assert subject == {
            "kind": "ServiceAccount",
            "name": "specserve",
            "namespace": NAMESPACE,
        }


def test_own_namespace_may_be_a_served_one():
    roles = of_kind(render(MATRIX["namespaces-own"]), "Role")
    assert len({r["metadata"]["name"] for r in roles}) == len(roles) == 2


def test_nothing_cluster_scoped_when_told():
    kinds = {m["kind"] for m in render(MATRIX["no-cluster-rights"])}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}


def test_all_namespaces_without_cluster_rights_are_refused():
    for namespaces in ([], ["*"]):
        with pytest.raises(Refused, match="needs watchNamespaces"):
            render({"rbac": {"clusterScoped": False}, "watchNamespaces": namespaces})


def test_rights_that_the_chart_does_not_make_need_no_namespaces():
    rights = {"create": False, "clusterScoped": False}
    kinds = {m["kind"] for m in render({"rbac": rights})}
    assert "Deployment" in kinds
    assert not {kind for kind in kinds if "Role" in kind}


def test_no_rule_has_a_wildcard():
    for role in (r for m in MATRIX.values() for r in render(m) if "rules" in r):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_rights_of_the_plain_manifests_are_the_charts():
    path = CHART.parents[1] / "examples" / "install" / "rbac.yaml"
    plain = {m["kind"]: m for m in yaml.safe_load_all(path.read_text())}
    chart = [r for r in of_kind(render(), "ClusterRole") if not _aggregated(r)]
    # The plain manifests make no NetworkPolicies, and leave the name of the Lease open.
    rules = [r for r in chart[0]["rules"] if r["resources"] != ["networkpolicies"]]
    assert plain["ClusterRole"]["rules"] == rules


def _aggregated(role):
    return any("aggregate-to" in label for label in role["metadata"]["labels"])


# -- images ---------------------------------------------------------------------------------


def test_registry_and_pull_secrets_reach_operator_and_engines():
    manifests = render(MATRIX["private-registry"])
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    given = environment(manifests)
    assert container(manifests)["image"].startswith(
        "mirror.example:5000/specserve/specserve-operator:"
    )
    assert pod["imagePullSecrets"] == [{"name": "pull-a"}, {"name": "pull-o"}]
    assert given["SPECSERVE_OPERATOR_ENGINE_PULL_SECRETS"] == "pull-a,pull-b"
    assert given["SPECSERVE_OPERATOR_IMAGE_REGISTRY"] == "mirror.example:5000"
    assert given["SPECSERVE_OPERATOR_ENGINE_IMAGE"] == "sglang-specserve:1"


def test_a_digest_wins_over_a_tag():
    image = container(render(MATRIX["digest"]))["image"]
    assert re.fullmatch(r"reg\.example/specserve/specserve-operator@sha256:0{64}", image)


def test_image_is_that_of_the_charts_version():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(render())["image"].endswith(f":{version}")


# -- Prometheus -----------------------------------------------------------------------------


def test_hosts_and_tokens_of_prometheus_reach_the_operator():
    given = environment(render(MATRIX["prometheus"]))
    settings = Settings.from_environ(given)
    assert settings.prometheus_hosts == ("*.monitoring.svc", "127.0.0.1")
    assert settings.prometheus_token_files == {
        "a.monitoring.svc": "/tokens/a",
        "b.monitoring.svc": "/tokens/b",
    }


def test_without_hosts_all_are_allowed():
    assert Settings.from_environ(environment(render())).prometheus_hosts == ("*",)


# -- the rest -------------------------------------------------------------------------------


def test_zero_is_a_value():
    zeros = {
        "replicas": 2,
        "podDisruptionBudget": {"maxUnavailable": 0},
        "terminationGracePeriodSeconds": 0,
    }
    manifests = render(zeros)
    assert only(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 0
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 0


def test_share_of_pods_that_may_be_missing():
    budget = only(
        render({"replicas": 3, "podDisruptionBudget": {"maxUnavailable": "50%"}}),
        "PodDisruptionBudget",
    )
    assert budget["spec"]["maxUnavailable"] == "50%"


def test_null_inside_a_map_renders_nothing():
    nothing = {
        "commonLabels": {"a": None},
        "podLabels": {"a": None},
        "podAnnotations": {"a": None},
        "nodeSelector": {"a": None},
        "crds": {"annotations": {"a": None}},
        "service": {"annotations": {"a": None}},
        "serviceAccount": {"annotations": {"a": None}},
        "resources": {"limits": {"cpu": None}},
        "livenessProbe": {"initialDelaySeconds": None},
        "affinity": {"nodeAffinity": None},
    }
    assert render(nothing) == render()
    monitor = {"enabled": True, "labels": {"a": None}}
    for manifest in render({"serviceMonitor": monitor}):
        assert nulls(manifest) == []


def test_package_has_what_registries_show(tmp_path):
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        names = archive.getnames()
    assert {"specserve/README.md", "specserve/values.schema.json"} <= set(names)


@pytest.mark.parametrize(("replicas", "budgets"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_disruption_budget_from_two_replicas(replicas, budgets):
    manifests = render({"replicas": replicas})
    assert len(of_kind(manifests, "PodDisruptionBudget")) == budgets
    assert only(manifests, "Deployment")["spec"]["replicas"] == replicas


@pytest.mark.parametrize(
    ("kind", "endpoints"),
    [("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")],
)
def test_scrapes_keep_the_namespace_of_a_specserve(kind, endpoints):
    (endpoint,) = only(render(MATRIX["monitors"]), kind)["spec"][endpoints]
    assert endpoint["honorLabels"] is True


def test_crd_is_kept_unless_told_otherwise():
    def annotations(values):
        return only(render(values), "CustomResourceDefinition")["metadata"].get("annotations")

    assert annotations({}) == {"helm.sh/resource-policy": "keep"}
    assert annotations({"crds": {"keep": False}}) is None
    assert annotations(MATRIX["extras"]) == {"example.com/c": "d"}
    assert of_kind(render({"crds": {"enabled": False}}), "CustomResourceDefinition") == []


def test_crd_is_the_generated_one():
    crd = only(render({"crds": {"keep": False}}), "CustomResourceDefinition")
    (source,) = (CHART.parents[1] / "crds").glob("*.yaml")
    assert crd == yaml.safe_load(source.read_text())


@pytest.mark.parametrize(
    "values",
    [
        {"watchNamespace": ["a"]},
        {"watchNamespaces": "a"},
        {"watchNamespaces": ["A b"]},
        {"operator": {"logLevel": "LOUD"}},
        {"operator": {"worker": 1}},
        {"replicas": -1},
        {"replicas": "two"},
        {"image": {"digest": "latest"}},
        {"global": {"imagePullSecrets": ["a"]}},
        {"global": {"imagePullSecrets": [{"name": 1}]}},
        {"crds": {"enabled": "yes"}},
        {"crds": {"annotations": {"a": True}}},
        {"commonLabels": {"a": 1}},
        {"podLabels": {"a": 1.5}},
        {"podAnnotations": {"a": False}},
        {"nodeSelector": {"a": 1}},
        {"service": {"annotations": {"a": 1}}},
        {"serviceAccount": {"annotations": {"a": 1}}},
        {"serviceMonitor": {"labels": {"a": 1}}},
        {"podMonitor": {"labels": {"a": 1}}},
    ],
)
def test_values_that_nobody_reads_or_understands_are_refused(values):
    with pytest.raises(Refused, match="schema"):
        render(values)


UNFIT = {
    "nameOverride": "Foo_Bar",
    "fullnameOverride": "1st",
    "commonLabels": {"team": "a b"},
    "global": {"imageRegistry": "https://mirror.example"},
    "image": {"repository": "Specserve/Operator:", "tag": "a b"},
    "imagePullSecrets": [{"name": "pull_secret"}],
    "engineDefaults": {"image": "reg.example/engine image"},
    "watchNamespaces": ["team-a", "t" * 64],
    "replicas": 11,
    "prometheus": {"tokenFiles": {"a.svc": "token"}},
    "leaderElection": {"leaseName": "a_lease"},
    "crds": {"annotations": {"note": 1}},
    "serviceAccount": {"name": "an account"},
    "networkPolicy": {
        "metricsFrom": [{"selector": {}}],
        "egress": {"apiServerPorts": [64430000]},
    },
    "service": {"port": 70000},
    "serviceMonitor": {"interval": "half a minute", "labels": {"release": "-p"}},
    "podMonitor": {"interval": "30"},
    "podDisruptionBudget": {"maxUnavailable": "half"},
    "resources": {"limits": {"memory": "lots", "cpu": -1}, "request": {}},
    "podSecurityContext": {"runAsUser": "root"},
    "securityContext": {"privileged": "no"},
    "livenessProbe": {"periodSeconds": "10s", "httpGet": {}},
    "extraEnv": [{"name": "A", "value": 5}, {"name": "A=B"}],
    "extraArgs": [5],
    "extraVolumes": [{"name": "Certificates"}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "C:"}],
    "podLabels": {"tier of pods": "ops"},
    "nodeSelector": {"zone": "a/b"},
    "tolerations": [{"effect": "NoPods"}],
    "affinity": {"nodeAffinities": {}},
    "topologySpreadConstraints": [{"maxSkew": 0, "topologyKey": "a", "whenUnsatisfiable": "Ask"}],
    "priorityClassName": "very_high",
    "terminationGracePeriodSeconds": -1,
}


def _places(node, path=""):
    """Where the values are, as Helm names them."""
    inner = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in inner:
        if isinstance(value, dict | list) and value:
            yield from _places(value, f"{path}/{key}")
        else:
            yield f"{path}/{key}", value


def test_what_the_api_server_would_refuse_is_refused_before_anything_is_written():
    """Else the release has failed with half of its objects there."""
    with pytest.raises(Refused, match="schema") as caught:
        render(UNFIT)
    message = str(caught.value)
    right = {
        ("/watchNamespaces/0", "team-a"),
        ("/extraEnv/0/name", "A"),
        ("/extraVolumeMounts/0/name", "ca"),
        ("/topologySpreadConstraints/0/topologyKey", "a"),
    }
    for place, value in _places(UNFIT):
        # A field that does not exist is told by its name.
        said = f"'{place}'" in message or f"'{place.rpartition('/')[2]}'" in message
        assert said is ((place, str(value)) not in right), f"{place} in {message}"


def test_every_value_is_explained():
    assert generate.undocumented((CHART / "values.yaml").read_text()) == []


def test_generated_files_are_up_to_date():
    text = (CHART / "values.yaml").read_text()
    assert (CHART / "templates" / "crd.yaml").read_text() == generate.crd()
    assert (CHART / "README.md").read_text() == generate.readme(text)
    assert generate.PLAIN_FILE.read_text() == generate.plain()


def test_plain_manifests_belong_together():
    plain = list(yaml.safe_load_all(generate.PLAIN_FILE.read_text()))
    rights = {
        m["kind"]: m
        for m in yaml.safe_load_all(generate.PLAIN_FILE.with_name("rbac.yaml").read_text())
    }
    deployment = only(plain, "Deployment")
    meta, pod = deployment["metadata"], deployment["spec"]["template"]["spec"]
    account = rights["ServiceAccount"]["metadata"]
    assert pod["serviceAccountName"] == account["name"]
    assert meta["namespace"] == account["namespace"] == rights["Namespace"]["metadata"]["name"]
