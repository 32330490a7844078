"""What the values schema lets pass is what a real API server takes.

Tried is what the oldest and the newest Kubernetes agree upon: the newest takes more names.
"""

from __future__ import annotations

import re

import pytest

from tests.chart import shapes
from tests.cluster.apiclient import ApiError

WORDS = ["a-b", "a_b", "a.b", "A", "a/b", "-a", "a-", "a b", "a..b"]
LONG = ["a" * 63, "a" * 64]
KEYS = ["a_b", "a b", *LONG, "x.io/A.b", "X.io/a", "x_y/a", "x.io/", "/a", "a/b/c"]
QUANTITIES = [
    *("1", "0", "+1", "0.5", ".5", "1.", "100m", "512Mi", "2Ei", "1E", "1e3", "1E-2", "5n", "3k"),
    *("lots", "1GB", "1mi", "1 Gi", "1e", "-1", "", "1,5", "1Ki3"),
]


def _object(kind, name="a", version="v1", **more):
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **more}


def _labelled(**labels):
    made = _object("ConfigMap")
    made["metadata"] |= labels
    return made


def _pod(env=(), **resources):
    container = {"name": "a", "image": "a", "env": list(env), "resources": resources}
    return _object("Pod", spec={"containers": [container]})


CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
PODS = "/api/v1/namespaces/default/pods"
SERVICES = "/api/v1/namespaces/default/services"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"

TRIED = {
    "NAME": (CONFIG_MAPS, WORDS, lambda one: _object("ConfigMap", one)),
    "NAMESPACE": ("/api/v1/namespaces", WORDS + LONG, lambda one: _object("Namespace", one)),
    "SERVICE": (
        SERVICES,
        WORDS + LONG,
        lambda one: _object("Service", one, spec={"ports": [{"port": 80}]}),
    ),
    "LABEL_KEY": (CONFIG_MAPS, KEYS, lambda one: _labelled(labels={one: "a"})),
    "LABEL_VALUE": (CONFIG_MAPS, WORDS + LONG, lambda one: _labelled(labels={"a": one})),
    "ANNOTATION_KEY": (CONFIG_MAPS, KEYS, lambda one: _labelled(annotations={one: "a"})),
    "QUANTITY": (PODS, QUANTITIES, lambda one: _pod(limits={"memory": one})),
    "VARIABLE": (
        PODS,
        ["A", "a.b", "_", "-a", "A=B", ""],
        lambda one: _pod(env=[{"name": one, "value": "a"}]),
    ),
    "PERCENTAGE": (
        BUDGETS,
        ["0%", "100%", "101%", "-1%", "half", "1.5%"],
        lambda one: _object(
            "PodDisruptionBudget",
            version="policy/v1",
            spec={"maxUnavailable": one, "selector": {"matchLabels": {"a": "b"}}},
        ),
    ),
}


@pytest.mark.parametrize("shape", TRIED)
def test_schema_and_api_server_agree(api_server, shape):
    path, candidates, made = TRIED[shape]

    def taken(one):
        try:
            api_server.api.request("POST", f"{path}?dryRun=All", made(one))
        except ApiError as error:
            if error.status not in (400, 422):
                raise
            return False
        return True

    pattern = getattr(shapes, shape)
    passed = [one for one in candidates if re.fullmatch(pattern, one)]
    assert passed == [one for one in candidates if taken(one)]


@pytest.mark.parametrize(
    "image",
    [
        "specserve-sim",
        "specserve/specserve-operator:0.1.0",
        "localhost:5000/team_a/engine:v0.5.16-cu124",
        "[::1]:5000/engine",
        f"Registry.example/a/b/c:1@sha256:{'0' * 64}",
    ],
)
def test_images_that_a_runtime_pulls_are_taken(image):
    assert re.fullmatch(shapes.IMAGE, image)


@pytest.mark.parametrize(
    "image", ["https://reg.example/a", "a b", "a:", "Engine", "a@sha256:1", "a//b", "/a", "a/"]
)
def test_images_that_no_runtime_understands_are_refused(image):
    assert not re.fullmatch(shapes.IMAGE, image)
