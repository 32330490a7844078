from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.apiclient import ApiError
from tests.cluster.errors import ClusterError, CommandError
from tests.cluster.light import LightCluster, light_cluster
from tests.cluster.processes import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]

CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "gadgets.light.test"},
    "spec": {
        "group": "light.test",
        "scope": "Namespaced",
        "names": {"plural": "gadgets", "singular": "gadget", "kind": "Gadget"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {
                                    "low": {"type": "integer", "default": 1},
                                    "high": {"type": "integer"},
                                },
                                "x-kubernetes-validations": [
                                    {
                                        "rule": "self.low < self.high",
                                        "message": "low must be below high",
                                    }
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}


def gadget(name: str, high: int) -> dict[str, Any]:
    return {
        "apiVersion": "light.test/v1",
        "kind": "Gadget",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"high": high},
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightCluster]:
    crd = tmp_path_factory.mktemp("crds") / "crd.yaml"
    crd.write_text(json.dumps(CRD))
    with light_cluster(crds=[crd.parent], audit=True) as started:
        yield started


def test_custom_resources_are_served_with_defaults_and_rules(cluster: LightCluster) -> None:
    cluster.apply(gadget("good", high=2))
    assert cluster.get("gadget", "good")["spec"] == {"low": 1, "high": 2}
    with pytest.raises(CommandError, match="low must be below high"):
        cluster.apply(gadget("bad", high=1))


def test_dependents_of_custom_resources_are_collected(cluster: LightCluster) -> None:
    cluster.apply(gadget("owner", high=2))
    owner = {
        "apiVersion": "light.test/v1",
        "kind": "Gadget",
        "name": "owner",
        "uid": cluster.get("gadget", "owner")["metadata"]["uid"],
    }
    path = "/api/v1/namespaces/default/configmaps"
    body = {"metadata": {"name": "owned", "ownerReferences": [owner]}}
    cluster.api.request("POST", path, body)
    cluster.kubectl("delete", "gadget", "owner")

    def gone() -> bool:
        try:
            cluster.api.get(f"{path}/owned")
        except ApiError as error:
            return error.status == 404
        return False

    until(gone, "the garbage collector", 20)


def test_a_service_account_has_its_own_rights_alone(cluster: LightCluster) -> None:
    cluster.kubectl("create", "serviceaccount", "reader")
    cluster.kubectl("create", "role", "reader", "--verb=get,list", "--resource=configmaps")
    cluster.kubectl(
        "create", "rolebinding", "reader", "--role=reader", "--serviceaccount=default:reader"
    )
    own = cluster.kubeconfig_for("reader")
    assert own.stat().st_mode & 0o077 == 0
    who = "system:serviceaccount:default:reader"
    assert who in cluster.kubectl("auth", "whoami", kubeconfig=own)
    cluster.kubectl("get", "configmaps", kubeconfig=own)
    with pytest.raises(CommandError, match="Forbidden"):
        cluster.kubectl("get", "secrets", kubeconfig=own)
    asked = [
        (event["verb"], event["objectRef"]["resource"], event["responseStatus"]["code"])
        for event in cluster.audit_events(who)
        if event.get("objectRef", {}).get("namespace") == "default"
    ]
    assert ("list", "configmaps", 200) in asked
    assert ("list", "secrets", 403) in asked


def test_pods_are_bound_to_nodes_that_a_test_makes(cluster: LightCluster) -> None:
    amount = {"nvidia.com/gpu": "1", "pods": "10", "cpu": "4", "memory": "4Gi"}
    cluster.api.request("POST", "/api/v1/nodes", {"metadata": {"name": "made"}})
    cluster.api.request(
        "PATCH",
        "/api/v1/nodes/made/status",
        {"status": {"capacity": amount, "allocatable": amount}},
        content_type="application/merge-patch+json",
    )
    pods = "/api/v1/namespaces/default/pods"
    for name in ("fits", "waits"):
        spec = {
            "containers": [
                {
                    "name": "c",
                    "image": "none.test/none:1",
                    "resources": {"limits": {"nvidia.com/gpu": 1}},
                }
            ],
            "tolerations": [{"operator": "Exists"}],
        }
        cluster.api.request("POST", pods, {"metadata": {"name": name}, "spec": spec})
    states = {}

    def decided() -> bool:
        for pod in cluster.api.get(pods)["items"]:
            conditions = pod["status"].get("conditions", [])
            states[pod["metadata"]["name"]] = (
                pod["spec"].get("nodeName"),
                any("Insufficient nvidia.com/gpu" in c.get("message", "") for c in conditions),
            )
        return sorted(states.values(), key=str) == [("made", False), (None, True)]

    until(decided, "the scheduler's decisions", 20)


def test_the_api_server_can_freeze_crash_and_come_back(cluster: LightCluster) -> None:
    before = cluster.server
    cluster.apiserver.pause()
    with pytest.raises(TimeoutError):
        cluster.api.get("/readyz", timeout=0.5)
    cluster.apiserver.resume()
    cluster.wait_ready()

    cluster.apiserver.kill()
    assert not cluster.apiserver.running
    with pytest.raises(ConnectionRefusedError):
        cluster.api.get("/readyz")
    cluster.apiserver.start()
    cluster.wait_ready()
    assert cluster.server == before
    assert cluster.get("namespace", "default")["status"]["phase"] == "Active"

    cluster.apiserver.stop(seconds=1)  # open watches would hold it up for long
    assert not cluster.apiserver.running
    cluster.apiserver.start()
    cluster.wait_ready()


def test_clusters_run_side_by_side(cluster: LightCluster) -> None:
    with light_cluster(controllers="", scheduler=False) as other:
        assert other.server != cluster.server
        assert not other.controller_manager.running
        other.kubectl("create", "configmap", "here")
        with pytest.raises(CommandError, match="NotFound"):
            cluster.kubectl("get", "configmap", "here")
        directory = other.directory
    assert not directory.exists()


def test_a_component_that_ends_at_once_is_shown_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"(?s)kube-apiserver ended.*unknown flag: --nonsense"):
        light_cluster(tmp_path, apiserver_arguments=["--nonsense"])


def command_line(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.cluster", *arguments],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_command_runs_beside_a_light_cluster(tmp_path: Path) -> None:
    script = "kubectl get namespace default -o name; exit 5"
    done = command_line("light", "exec", "--dir", str(tmp_path / "x"), "--", "sh", "-c", script)
    assert (done.stdout, done.returncode) == ("namespace/default\n", 5)
    again = command_line("light", "exec", "--dir", str(tmp_path / "x"), "--", "true")
    assert again.returncode == 1
    assert again.stderr.startswith("making a cluster: ")
    assert "Traceback" not in again.stderr


OWNER = """
import signal, sys
from tests.cluster.light import light_cluster
cluster = light_cluster(controllers="", scheduler=False)
pids = [cluster.etcd.pid, cluster.apiserver.pid, cluster._keeper._process.pid]
print(cluster.directory, *pids, flush=True)
signal.pause()
"""


def ended(pid: int) -> bool:
    # What waits to be reaped by somebody else has ended, too.
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@pytest.mark.parametrize("victim", ["owner", "keeper"])
def test_nothing_outlives_a_killed_owner_or_keeper(victim: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        directory, *pids = owner.stdout.readline().split()
        etcd, apiserver, keeper = map(int, pids)
        if victim == "owner":
            owner.kill()
            until(lambda: ended(keeper), "the keeper's end", 30)
            assert not Path(directory).exists()
        else:
            os.kill(keeper, signal.SIGKILL)
        until(lambda: ended(etcd) and ended(apiserver), "the end of all processes", 30)
        owner.kill()
        shutil.rmtree(directory, ignore_errors=True)  # a killed keeper can't
