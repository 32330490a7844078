from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.cluster import builder, images, oci
from tests.cluster.errors import CommandError
from tests.cluster.node import GPU, NODE_NAME, node_cluster
from tests.cluster.processes import until
from tests.cluster.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
EXEC = [sys.executable, "-m", "tests.cluster", "node", "exec"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    extra = oci.write(
        tmp_path_factory.mktemp("images") / "extra.tar",
        "specserve.test/extra:1",
        oci.Content(files={"hello": b"#!/bin/true\n"}),
        ["/hello"],
    )
    with node_cluster(images=[extra], gpus=2) as started:
        yield started


def pod(name, command, *, gpus=0, labels=None, image=oci.BUSYBOX):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "c",
                    "image": image,
                    "imagePullPolicy": "Never",
                    "command": command,
                    "resources": {"limits": {GPU: gpus}} if gpus else {},
                }
            ],
        },
    }


WEB = ["sh", "-c", "mkdir /www; hostname >/www/index.html; echo serving; httpd -f -p 8080 -h /www"]


@pytest.fixture(scope="module")
def web(cluster):
    manifest = pod("web", WEB, labels={"app": "web"})
    manifest["spec"]["containers"][0]["readinessProbe"] = {
        "httpGet": {"path": "/", "port": 8080},
        "periodSeconds": 1,
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    cluster.apply(manifest, service)
    cluster.kubectl("wait", "pod/web", "--for=condition=Ready", "--timeout=60s")
    return cluster.get("pod", "web")


def fetch(url):
    """A command that prints what a URL serves, or waits for it: rules follow a little later."""
    return [
        sys.executable,
        "-c",
        (
            "import sys, time, urllib.request as u\n"
            "end = time.monotonic() + 20\n"
            "while True:\n"
            "    try:\n"
            "        print(u.urlopen(sys.argv[1], timeout=3).read().decode()); break\n"
            "    except OSError:\n"
            "        if time.monotonic() > end: raise\n"
            "        time.sleep(0.1)\n"
        ),
        url,
    ]


def test_the_node_is_ready_and_offers_fake_gpus(cluster):
    (node,) = cluster.get("nodes")["items"]
    assert node["metadata"]["name"] == NODE_NAME
    assert node["status"]["allocatable"][GPU] == "2"


def test_commands_beside_the_node_reach_a_pod_and_a_service(cluster, web):
    pod_ip = web["status"]["podIP"]
    assert "web" in cluster.run(fetch(f"http://{pod_ip}:8080")).stdout
    cluster_ip = cluster.get("service", "web")["spec"]["clusterIP"]
    assert "web" in cluster.run(fetch(f"http://{cluster_ip}")).stdout


def test_the_machine_itself_has_no_way_to_a_pod(cluster, web):
    address = f"{web['status']['podIP']}/32"
    routes = subprocess.check_output(["ip", "route", "show", "table", "all"], text=True)
    assert "10.244." not in routes, f"a route to {address}"
    links = subprocess.check_output(["ip", "-o", "link"], text=True)
    assert "node0" not in links
    assert "pods0" not in links


def test_a_pod_reaches_the_api_server_with_its_own_account(cluster, web):
    token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    script = f"test -s {token} && nc -w 5 $KUBERNETES_SERVICE_HOST 443 </dev/null && echo reached"
    assert "reached" in cluster.kubectl("exec", "web", "--", "sh", "-c", script)


def test_logs_exec_and_port_forward(cluster, web):
    assert cluster.kubectl("logs", "web") == "serving\n"
    assert cluster.kubectl("exec", "web", "--", "hostname") == "web\n"
    forward = cluster.popen(
        ["kubectl", "port-forward", "pod/web", "18080:8080"], stdout=subprocess.PIPE
    )
    with forward:
        assert "Forwarding" in forward.stdout.readline()
        assert "web" in cluster.run(fetch("http://127.0.0.1:18080")).stdout
        forward.terminate()
        assert forward.wait(timeout=20) in {0, 128 + signal.SIGTERM}


def test_pods_queue_for_the_fake_gpus(cluster):
    for name in ("first", "second"):
        cluster.apply(pod(name, ["sleep", "infinity"], gpus=2))
    cluster.kubectl("wait", "pod/first", "--for=condition=Ready", "--timeout=60s")
    cluster.kubectl("wait", "pod/second", "--for=condition=PodScheduled=false", "--timeout=30s")
    (condition,) = cluster.get("pod", "second")["status"]["conditions"]
    assert f"Insufficient {GPU}" in condition["message"]
    cluster.kubectl("delete", "pod", "first")
    cluster.kubectl("wait", "pod/second", "--for=condition=Ready", "--timeout=60s")
    cluster.kubectl("delete", "pod", "second")


def test_imported_images_are_there_and_others_are_not_pulled(cluster):
    extra = pod("extra", ["/hello"], image="specserve.test/extra:1")
    typo = pod("typo", ["/hello"], image="specserve.test/extar:1")
    cluster.apply(extra, typo)
    reason = "jsonpath={.status.containerStatuses[0].state.waiting.reason}=ErrImageNeverPull"
    cluster.kubectl("wait", "pod/typo", f"--for={reason}", "--timeout=60s")

    def found():
        state = cluster.get("pod", "extra")["status"].get("containerStatuses", [{}])[0]
        return "imageID" in state and "extra" in state["imageID"] + state["image"]

    until(found, "the image", 60)
    cluster.kubectl("delete", "pod", "extra", "typo")


def test_the_simulators_image_runs_as_nobody(cluster):
    archive = images.simulator(Progress())
    cluster.load_image(archive)
    name = cluster.image(builder.name_of(archive))
    manifest = pod("sim", None, image=name)
    del manifest["spec"]["containers"][0]["command"]
    manifest["spec"]["containers"][0]["args"] = ["profiles"]
    manifest["spec"]["restartPolicy"] = "Never"
    manifest["spec"]["securityContext"] = {"runAsNonRoot": True}
    cluster.apply(manifest)

    def phase():
        return cluster.get("pod", "sim")["status"]["phase"]

    until(lambda: phase() in {"Succeeded", "Failed"}, "the simulator's end", 60)
    logs = cluster.kubectl("logs", "sim")
    assert phase() == "Succeeded", logs
    assert "modelled" in logs
    cluster.kubectl("delete", "pod", "sim")


def test_helm_installs_a_chart(cluster, tmp_path):
    chart = tmp_path / "tiny"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("{apiVersion: v2, name: tiny, version: 0.1.0}")
    (chart / "templates" / "c.yaml").write_text(
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: tiny}, data: {v: {{ .Values.v }}}}"
    )
    cluster.run(["helm", "install", "tiny", str(chart), "--set", "v=seven"])
    assert cluster.get("configmap", "tiny")["data"] == {"v": "seven"}
    cluster.run(["helm", "uninstall", "tiny"])


def test_containers_outlive_their_kubelet(cluster, web):
    cluster.kubelet.kill()
    cluster.kubelet.start()
    ask = ["kubectl", "exec", "web", "--", "uname"]
    until(lambda: "Linux" in cluster.run(ask, check=False).stdout, "the kubelet", 30)
    status = cluster.get("pod", "web")["status"]["containerStatuses"][0]
    assert status["restartCount"] == 0
    assert cluster.get("node", NODE_NAME)["status"]["allocatable"][GPU] == "2"


def test_commands_keep_folder_status_input_and_signals(cluster):
    assert cluster.run(["pwd"]).stdout.strip() == str(Path.cwd())
    assert cluster.run(["cat"], stdin="text").stdout == "text"
    assert cluster.run(["sh", "-c", "exit 7"], check=False).returncode == 7
    assert cluster.run(["sh", "-c", "kill -9 $$"], check=False).returncode == 137
    assert cluster.run(["/does/not/exist"], check=False).returncode == 127
    with pytest.raises(CommandError, match="No such file"):
        cluster.run(["/does/not/exist"])
    script = "trap 'echo ended; exit 3' TERM; echo ready; while :; do sleep 0.1; done"
    with cluster.popen(["sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "ended\n"
        assert process.wait(timeout=10) == 3


def test_a_killed_command_takes_its_process_along(cluster):
    with cluster.popen(["sh", "-c", "echo $$; exec sleep 600"], stdout=subprocess.PIPE) as outer:
        inside = outer.stdout.readline().strip()
        outer.kill()
    until(
        lambda: cluster.run(["test", "-d", f"/proc/{inside}"], check=False).returncode == 1,
        "the command's end",
        10,
    )


@pytest.fixture
def folder():
    """Short, as sockets of a cluster lie in it and their paths are bounded."""
    with tempfile.TemporaryDirectory(prefix="node-") as made:
        yield Path(made)


def test_exec_passes_output_and_status_on(folder):
    script = "kubectl get nodes -o json; exit 5"
    done = subprocess.run(
        [*EXEC, "--gpus", "3", "--dir", str(folder / "state"), "--", "sh", "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 5
    (node,) = json.loads(done.stdout)["items"]
    assert node["status"]["capacity"][GPU] == "3"
    assert (folder / "state" / "log" / "kubelet.log").exists()


# What stays when a cluster's owner is killed


def command(*argv):
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def machine():
    """What of the machine a node could leave changed; other tests of the machine run meanwhile."""
    rules = command("iptables-save")
    return {
        "links": sorted(line.split(":")[1] for line in command("ip", "-o", "link").splitlines()),
        "addresses": command("ip", "-br", "address"),
        "routes": command("ip", "route", "show", "table", "all"),
        "rules": [line for line in rules.splitlines() if not line.startswith("#")],
        "settings": {
            path: Path("/proc/sys", path).read_text()
            for path in (
                "net/ipv4/ip_forward",
                "vm/overcommit_memory",
                "kernel/panic",
                "kernel/panic_on_oops",
            )
        },
        "folders": {
            folder: sorted(each.name for each in Path(folder).glob("*"))
            for folder in ("/opt", "/var/lib", "/run/netns")
        },
        "kubernetes": Path("/usr/libexec/kubernetes").exists(),
    }


def namespaces(pid):
    found = {}
    for kind in ("net", "mnt", "pid"):
        try:
            found[kind] = str(Path(f"/proc/{pid}/ns/{kind}").readlink())
        except OSError:
            return {}
    return found


def processes():
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def inhabitants(*spaces):
    """Processes in one of the namespaces."""
    return [pid for pid in processes() if set(namespaces(pid).values()) & set(spaces)]


def mentions(directory):
    """Processes that carry the cluster's folder in their command line."""
    found = []
    for pid in processes():
        try:
            line = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in line and int(pid) != os.getpid():
            found.append(pid)
    return found


def groups(owner):
    return list(Path("/sys/fs/cgroup").glob(f"**/specserve-{owner}-*"))


READY = """
kubectl run web --image=specserve.test/busybox:1 --image-pull-policy=Never >/dev/null
kubectl wait pod/web --for=condition=Ready --timeout=60s >/dev/null
echo "$KUBECONFIG"; readlink /proc/self/ns/net; readlink /proc/self/ns/pid; exec sleep 600
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_stays_when_the_owner_is_ended(end):
    before = machine()
    with subprocess.Popen(
        [*EXEC, "--", "sh", "-c", READY], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        directory = Path(owner.stdout.readline().strip()).parent
        spaces = [owner.stdout.readline().strip() for _ in range(2)]
        assert len(inhabitants(*spaces)) > 5
        assert groups(owner.pid)
        assert mentions(directory)
        began = time.monotonic()
        owner.send_signal(end)
        owner.wait(timeout=60)
        until(lambda: not directory.exists(), "the end of the cluster", 60)
    until(lambda: not inhabitants(*spaces), "the end of its processes", 30)
    assert mentions(directory) == []
    assert groups(owner.pid) == []
    assert str(directory) not in Path("/proc/self/mountinfo").read_text()
    assert machine() == before
    assert time.monotonic() - began < 30
