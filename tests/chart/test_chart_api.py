"""What the API server itself makes of the rendered chart."""

from __future__ import annotations

import pytest
import yaml

from tests.chart import generate
from tests.chart.matrix import MATRIX
from tests.chart.rendering import CHART, NAMESPACE, of_kind, only, render


@pytest.mark.parametrize("name", MATRIX)
def test_api_server_takes_the_manifests(api_server, name):
    text = yaml.safe_dump_all(render(MATRIX[name]))
    api_server.kubectl(*("apply", "--dry-run=server", "--validate=strict", "-f", "-"), stdin=text)


def test_pod_is_admitted_where_pods_are_restricted(api_server):
    template = only(render(), "Deployment")["spec"]["template"]
    template["spec"]["serviceAccountName"] = "default"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", "namespace": NAMESPACE, **template["metadata"]},
        "spec": template["spec"],
    }
    api_server.kubectl("create", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(pod))


def test_namespace_of_the_release_is_served_before_it_is_there(api_server):
    values = {"watchNamespaces": ["team-a", "fresh", "absent"], "crds": {"enabled": False}}
    rendered = api_server.run(
        [
            "helm",
            "template",
            "specserve",
            str(CHART),
            "-n",
            "fresh",
            "--dry-run=server",
            "-f",
            "-",
        ],
        stdin=yaml.safe_dump(values),
    ).stdout
    roles = of_kind([one for one in yaml.safe_load_all(rendered) if one], "Role")
    served = {r["metadata"]["namespace"] for r in roles if r["metadata"]["name"] != "specserve"}
    assert served == {"team-a", "fresh"}


def test_folder_of_plain_manifests_is_applied_and_deleted_as_one(api_server, tmp_path):
    """In kubectl's own order, on a cluster that lacks the namespace; docs/install.md says so."""
    for file in generate.PLAIN_FILE.parent.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace(NAMESPACE, "plain-system"))
    assert "created" in api_server.kubectl("apply", "-f", str(tmp_path))
    assert "unchanged" in api_server.kubectl("apply", "-f", str(tmp_path))
    api_server.kubectl(*("delete", "--ignore-not-found", "--wait=false", "-f", str(tmp_path)))
