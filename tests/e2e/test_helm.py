"""The life of an installation, as a user lives it: helm and kubectl on a cluster with a kubelet.

One story, told in order, because each part starts from what the one before left. Needs root, or
a cluster of your own: KUBECONFIG, SPECSERVE_EXISTING_CLUSTER=1 and SPECSERVE_REGISTRY.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from specserve import names
from tests.bench import report
from tests.chart import rendering
from tests.cluster.errors import CommandError
from tests.cluster.node import NODE_NAME, NodeCluster
from tests.cluster.processes import until

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "specserve"
SUMMARY = ROOT / "build" / "e2e" / "summary.json"
SYSTEM = "specserve-system"
TEAM = "specserve-e2e"
RELEASE = "specserve"
CRD = f"crd/{names.PLURAL}.{names.GROUP}"
TAKEOVER_SECONDS = 15.0
FIRST_TOKEN_SECONDS = 180.0
MANY, FEW = 48, 2


class Story:
    """The cluster, and what is written down of it."""

    def __init__(self, cluster, image_names, folder):
        self.cluster = cluster
        self.operator_image, self.engine_image = image_names
        self.folder = folder
        self.summary = {
            "installToFirstTokenSeconds": None,
            "flips": 0,
            "requestsSent": 0,
            "requestsLost": None,
            "stuckObjects": None,
            "secondsByStep": {},
        }
        self._began = time.monotonic()

    @contextlib.contextmanager
    def step(self, title):
        started = time.monotonic()
        yield
        took = round(time.monotonic() - started, 1)
        self.summary["secondsByStep"][title] = took
        sys.stderr.write(f"e2e: {title}: {took} s\n")

    def write(self):
        self.summary["seconds"] = round(time.monotonic() - self._began, 1)
        self.summary |= report.stamp()
        SUMMARY.parent.mkdir(parents=True, exist_ok=True)
        SUMMARY.write_text(json.dumps(self.summary, indent=1) + "\n")

    # -- helm -------------------------------------------------------------------------------

    def helm(self, *arguments, stdin=None):
        return self.cluster.run(["helm", *arguments], stdin=stdin, timeout=180).stdout

    def values(self):
        repository, _, tag = self.operator_image.rpartition(":")
        return {
            "image": {"repository": repository, "tag": tag},
            "engineDefaults": {"image": self.engine_image},
        }

    def install(self, chart=CHART, **values):
        self.helm(
            *("install", RELEASE, str(chart), "-n", SYSTEM, "--create-namespace", "--wait"),
            *("--timeout", "120s", "-f", "-"),
            stdin=yaml.safe_dump({**self.values(), **values}),
        )

    def upgrade(self, *arguments, chart=CHART):
        self.helm(
            *("upgrade", RELEASE, str(chart), "-n", SYSTEM, "--wait", "--timeout", "120s"),
            *arguments,
        )

    def uninstall(self):
        self.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--timeout", "120s")

    # -- looking ----------------------------------------------------------------------------

    def engines(self, name):
        """Uids of the ready engine pods of a SpecServe that are to stay."""
        pods = self.cluster.get("pods", "-n", TEAM, "-l", names.selector_string(name))["items"]
        return {
            pod["metadata"]["uid"]
            for pod in pods
            if not pod["metadata"].get("deletionTimestamp") and _is_true(pod, "Ready")
        }

    def status(self, name="demo"):
        return self.cluster.get(names.PLURAL, name, "-n", TEAM).get("status", {})

    def wait_ready(self, name, seconds=90):
        self.cluster.kubectl(
            *("wait", f"{names.PLURAL}/{name}", "-n", TEAM, "--for=condition=Ready"),
            f"--timeout={seconds}s",
            timeout=seconds + 10,
        )

    def leader(self):
        lease = self.cluster.get("lease", RELEASE, "-n", SYSTEM)
        return lease["spec"].get("holderIdentity", "")

    def last_switch(self):
        return self.status().get("speculation", {}).get("lastSwitchTime", "")

    def wait_flip(self, seconds=60):
        """Wait until a pod is switched after now."""
        before = self.last_switch()
        until(lambda: self.last_switch() > before, "a flip", seconds)

    def wait_gone(self, kind, name, seconds=60, namespace=TEAM):
        scope = ("-n", namespace) if namespace else ()

        def gone():
            return not self.cluster.kubectl(
                "get", kind, name, *scope, "--ignore-not-found", "-o", "name"
            ).strip()

        until(gone, f"{kind} {name} to go", seconds)

    def stuck(self):
        """Objects on their way out, of every kind that can be listed."""
        kinds = self.cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
        wanted = [k for k in kinds if "events" not in k and "metrics" not in k]
        items = self.cluster.get(",".join(wanted), "-A")["items"]
        return [
            f"{one['kind']} {one['metadata'].get('namespace', '')}/{one['metadata']['name']}"
            for one in items
            if one["metadata"].get("deletionTimestamp")
        ]

    # -- load -------------------------------------------------------------------------------

    def load_pod(self, name, many, few):
        address = self.cluster.get("service", "demo", "-n", TEAM)["spec"]["clusterIP"]
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "load"},
                "data": {"load.py": (Path(__file__).parent / "load.py").read_text()},
            },
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": {"app": "load"}},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 90,
                    "containers": [
                        {
                            "name": "load",
                            "image": self.engine_image,
                            "command": ["python3", "/load/load.py", address],
                            "args": [str(names.PORT_SERVING), str(many), str(few)],
                            "volumeMounts": [{"name": "load", "mountPath": "/load"}],
                        }
                    ],
                    "volumes": [{"name": "load", "configMap": {"name": "load"}}],
                },
            },
            namespace=TEAM,
        )

    def first_token(self):
        self.load_pod("first", 0, 0)
        self.cluster.kubectl(
            *("wait", "pod/first", "-n", TEAM, "--timeout=60s"),
            "--for=jsonpath={.status.phase}=Succeeded",
        )
        assert json.loads(self.cluster.kubectl("logs", "first", "-n", TEAM))["tokens"] == 8

    @contextlib.contextmanager
    def load(self):
        """Waves of clients for the length of a `with` block, and an account of them after."""
        self.load_pod("waves", MANY, FEW)
        self.cluster.kubectl(
            "wait", "pod/waves", "-n", TEAM, "--for=condition=Ready", "--timeout=60s"
        )
        try:
            yield
        finally:
            # Ended from inside, so that its log stays; following it would end with the kubelet.
            stop = "import os, signal; os.kill(1, signal.SIGTERM)"
            self.cluster.kubectl("exec", "waves", "-n", TEAM, "--", "python3", "-c", stop)
            self.cluster.kubectl(
                *("wait", "pod/waves", "-n", TEAM, "--timeout=100s"),
                "--for=jsonpath={.status.phase}=Succeeded",
            )
            said = self.cluster.kubectl("logs", "waves", "-n", TEAM, "--tail=1")
            account = json.loads(said)
            self.summary["requestsSent"] = account["sent"]
            self.summary["requestsLost"] = len(account["lost"])
            self.summary["lost"] = account["lost"][:20]

    @contextlib.contextmanager
    def counting_flips(self):
        """Count how often all pods went from on to off or back."""
        log = (self.folder / "summaries.log").open("w+")
        path = "jsonpath={.status.speculation.summary}{'\\n'}"
        watch = self.cluster.popen(
            ["kubectl", "get", names.PLURAL, "demo", "-n", TEAM, "--watch", "-o", path],
            stdout=log,
            stdin=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            watch.terminate()
            watch.wait(10)
            log.seek(0)
            modes = [line.split()[0] for line in log.read().splitlines() if line.strip()]
            log.close()
            settled = [mode for mode in modes if mode in {"On", "Off"}]
            self.summary["flips"] = sum(a != b for a, b in itertools.pairwise(settled))


def _is_true(item, kind):
    conditions = item.get("status", {}).get("conditions", [])
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def demo(image):
    """The example, with bounds that the load of a test can pass."""
    manifest = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    spec = manifest["spec"]
    spec["engine"]["image"] = image
    spec["engine"]["resources"] = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    # What is tried here is the installation: flips must follow the load of this test alone.
    spec["policy"] |= {
        "strategy": "Threshold",
        "threshold": {"offAbove": 12, "onBelow": 6},
        "dwellOnSeconds": 1,
        "dwellOffSeconds": 1,
        "maxFlipsPerHour": 3600,
    }
    return manifest


def plain(name="plain"):
    """A SpecServe that leaves the image to the installation."""
    manifest = yaml.safe_load((ROOT / "examples" / "minimal.yaml").read_text())
    manifest["metadata"]["name"] = name
    # Kubernetes looks at a namespace on its way out again after half of this, and not before.
    manifest["spec"]["pod"] = {"terminationGracePeriodSeconds": 10}
    del manifest["spec"]["engine"]
    return manifest


@pytest.fixture
def story(helm_cluster, image_names, tmp_path):
    # It removes all of SpecServe in the end, so nobody else's may be there.
    assert not helm_cluster.kubectl("get", CRD, "--ignore-not-found"), "SpecServe is there already"
    told = Story(helm_cluster, image_names, tmp_path)
    try:
        yield told
    finally:
        told.write()
        _show(helm_cluster)
        _clean_up(helm_cluster)


def _show(cluster):
    """What a reader of a failed run asks for first; pytest shows it for failed tests alone."""
    for command in (
        ("get", "pods", "-A", "-o", "wide"),
        ("get", names.PLURAL, "-A", "-o", "wide"),
        ("logs", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator", "--tail=60"),
        ("get", "events", "-A", "--sort-by=.lastTimestamp"),
    ):
        shown = cluster.run(["kubectl", *command], check=False)
        print(f"$ kubectl {' '.join(command)}\n{shown.stdout[-6000:]}{shown.stderr}")


def _clean_up(cluster):
    """Leave nothing behind, however far the story came."""
    for command in (
        ("helm", "uninstall", RELEASE, "-n", SYSTEM, "--ignore-not-found", "--wait"),
        ("kubectl", "delete", "namespace", TEAM, SYSTEM, "--ignore-not-found", "--timeout=90s"),
        ("kubectl", "delete", CRD, "--ignore-not-found", "--timeout=60s"),
    ):
        with contextlib.suppress(CommandError, subprocess.TimeoutExpired):
            cluster.run(command, timeout=120)


@pytest.mark.timeout(480)
def test_install_serve_upgrade_break_and_remove(story, tmp_path):
    cluster = story.cluster
    cluster.kubectl("create", "namespace", TEAM)
    older = rendering.copy(tmp_path / "older", version="0.0.9")

    started = time.monotonic()
    with story.step("helm install"):
        story.install(older)
    with story.step("kubectl apply, Ready"):
        cluster.apply(demo(story.engine_image), plain(), namespace=TEAM)
        story.wait_ready("demo")
    with story.step("first token"):
        story.first_token()
    story.summary["installToFirstTokenSeconds"] = round(time.monotonic() - started, 1)
    assert story.summary["installToFirstTokenSeconds"] < FIRST_TOKEN_SECONDS
    story.wait_ready("plain")
    engines = story.engines("demo")
    others = story.engines("plain")
    assert len(engines) == 2
    assert len(others) == 1

    with story.counting_flips(), story.load():
        with story.step("flips under load"):
            story.wait_flip()
            story.wait_flip()
        with story.step("helm upgrade: two replicas"):
            story.upgrade("--reuse-values", "--set", "replicas=2", chart=older)
            story.wait_flip()
        with story.step("helm upgrade: new chart, --reuse-values"):
            story.upgrade("--reuse-values")
            story.wait_flip()
        with story.step("leader killed"):
            _kill_leader(story)
            story.wait_flip()
        if isinstance(cluster, NodeCluster):
            with story.step("kubelet restarted"):
                _restart_kubelet(cluster)
                story.wait_flip()
        assert story.engines("demo") == engines
    assert story.summary["requestsSent"] > 0
    assert story.summary["requestsLost"] == 0, story.summary["lost"]
    assert story.summary["flips"] >= 4

    with story.step("engine pod killed"):
        _kill_engine(story)
    with story.step("helm uninstall and install again"):
        engines = story.engines("demo")
        story.uninstall()
        assert story.engines("demo") == engines, "an uninstall leaves engines serving"
        story.install(replicas=2)
        story.wait_ready("demo")
        assert story.engines("demo") == engines, "a new install adopts them as they are"
        assert story.engines("plain") == others
    with story.step("kubectl delete"):
        cluster.kubectl("delete", names.PLURAL, "demo", "-n", TEAM, "--timeout=60s")
        for kind in ("deployment", "service", "serviceaccount", "networkpolicy"):
            story.wait_gone(kind, "demo")
        story.wait_gone("secret", names.credentials_secret("demo"))
    with story.step("helm uninstall, then delete"):
        # O-F3.1, 2: with no operator there a SpecServe can go, and a namespace with living ones.
        cluster.apply(plain("second"), plain("third"), namespace=TEAM)
        story.wait_ready("second")
        story.wait_ready("third")
        story.uninstall()
        assert story.engines("plain") == others
        cluster.kubectl("delete", names.PLURAL, "plain", "-n", TEAM, "--timeout=60s")
        story.wait_gone("deployment", "plain")
        assert len(story.engines("second")) == len(story.engines("third")) == 1
        cluster.kubectl("delete", "namespace", TEAM, SYSTEM, "--timeout=120s", timeout=130)
        cluster.kubectl("delete", CRD, "--timeout=60s")
    story.summary["stuckObjects"] = len(story.stuck())
    assert story.summary["stuckObjects"] == 0, story.stuck()


def _kill_leader(story):
    holder = story.leader()
    pods = story.cluster.get("pods", "-n", SYSTEM)["items"]
    (pod,) = [p for p in pods if holder.startswith(p["metadata"]["name"])]
    name = pod["metadata"]["name"]
    killed = datetime.now(UTC)
    if isinstance(story.cluster, NodeCluster):
        (container,) = pod["status"]["containerStatuses"]
        _kill_container(story.cluster, container["containerID"].rpartition("/")[2])
    else:
        story.cluster.kubectl("delete", "pod", name, "-n", SYSTEM, "--grace-period=0", "--force")
    until(lambda: story.leader() not in {"", holder}, "another leader", TAKEOVER_SECONDS + 5)
    # By the new leader's own word: how often this test looks is not part of it.
    acquired = story.cluster.get("lease", RELEASE, "-n", SYSTEM)["spec"]["acquireTime"]
    seconds = (datetime.fromisoformat(acquired) - killed).total_seconds()
    story.summary["takeoverSeconds"] = round(seconds, 1)
    assert story.summary["takeoverSeconds"] <= TAKEOVER_SECONDS


def _kill_container(cluster, identity):
    """As the kernel does when memory runs out: no signal that could be handled."""
    ctr = ["ctr", "-a", str(cluster._socket), "-n", "k8s.io"]
    cluster.run([*ctr, "tasks", "kill", "-s", "SIGKILL", identity])


def _restart_kubelet(cluster):
    cluster.kubelet.stop()
    cluster.kubelet.start()

    def ready():
        (node,) = [n for n in cluster.get("nodes")["items"] if n["metadata"]["name"] == NODE_NAME]
        return _is_true(node, "Ready")

    until(ready, "the node", 60, alive=[cluster.kubelet])

    def known():
        # A node is Ready by its old word while the new kubelet has yet to learn of its pods.
        with contextlib.suppress(CommandError):
            raw = cluster.kubectl("get", "--raw", f"/api/v1/nodes/{NODE_NAME}/proxy/pods")
            # No pods yet is `null`, not an empty list.
            pods = json.loads(raw)["items"] or []
            return any(pod["metadata"]["name"] == "waves" for pod in pods)
        return False

    until(known, "the kubelet to know its pods", 60, alive=[cluster.kubelet])


def _kill_engine(story):
    before = story.engines("demo")
    pods = story.cluster.get("pods", "-n", TEAM, "-l", names.selector_string("demo"))["items"]
    name = pods[0]["metadata"]["name"]
    story.cluster.kubectl("delete", "pod", name, "-n", TEAM, "--grace-period=0", "--force")

    def settled():
        now, speculation = story.engines("demo"), story.status().get("speculation", {})
        read = speculation.get("on", 0) + speculation.get("off", 0)
        return len(now) == 2 and now != before and read == 2 and not speculation.get("drifted")

    until(settled, "a new engine pod under control", 90)
