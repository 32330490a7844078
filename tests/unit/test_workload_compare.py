"""What replaces pods is called by the field that somebody has changed."""

import pytest

from specserve.api import SpecServeSpec
from specserve.workload import field_of, first_difference
from tests.unit.test_workload import deployment


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"draft": {"steps": [0, 5]}}, "spec.draft"),
        ({"draft": {"method": "None", "source": None}}, "spec.draft"),
        ({"engine": {"image": "registry.example/engine:2"}}, "spec.engine.image"),
        ({"engine": {"env": [{"name": "B", "value": "2"}]}}, "spec.engine.env"),
        ({"engine": {"args": ["--x"]}}, "spec.engine.args"),
        ({"engine": {"maxRunningRequests": 9}}, "spec.engine.maxRunningRequests"),
        ({"engine": {"startupBudgetSeconds": 60}}, "spec.engine.startupBudgetSeconds"),
        (
            {"engine": {"resources": {"limits": {"memory": "1Gi"}}}},
            "spec.engine.resources.limits.memory",
        ),
        ({"engine": {"apiKeySecretRef": {"name": "k"}}}, "spec.engine.apiKeySecretRef"),
        ({"model": {"revision": "v2"}}, "spec.model.revision"),
        ({"pod": {"serviceAccountName": "other"}}, "spec.pod.serviceAccountName"),
        ({"pod": {"labels": {"team": "b"}}}, "spec.pod.labels.team"),
        ({"pod": {"annotations": {"note": "b"}}}, "spec.pod.annotations.note"),
        ({"pod": {"nodeSelector": {"gpu": "b"}}}, "spec.pod.nodeSelector"),
        ({"pod": {"volumes": [{"name": "v", "emptyDir": {}}]}}, "spec.pod.volumes"),
    ],
)
def test_what_replaces_pods_is_called_by_its_field(changes, field):
    path = first_difference(deployment(), deployment(**changes))
    assert field_of(path) == field


def test_every_pass_through_field_of_a_pod_is_known_by_name():
    own = {"labels", "annotations", "volumeMounts", "serviceAccountName"}
    for name in SpecServeSpec.model_json_schema(by_alias=True)["$defs"]["Pod"]["properties"]:
        if name not in own:
            assert field_of(f"spec.{name}") == f"spec.pod.{name}"


def test_what_no_field_makes_has_no_name():
    assert field_of("spec.containers[engine].livenessProbe") is None
