"""The operator under exactly the chart's rights: enough, and none unused; what scopes it, too."""

from __future__ import annotations

import contextlib

import pytest
import yaml

from specserve import names
from specserve.settings import PREFIX
from specserve.workload import Owner, owner_reference
from tests.chart.generate import ROOT
from tests.chart.rendering import NAMESPACE, environment, render
from tests.cluster.light import light_cluster as start_light_cluster
from tests.integration.api import Api, eventually, path
from tests.integration.kubelet import Kubelet
from tests.integration.operator_process import OperatorProcess
from tests.integration.stage import Stage, make_node

ACCOUNT = "specserve"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
SERVED, LATE, ALIEN = "team-a", "team-b", "team-x"
RIGHTS = {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ServiceAccount"}
SPARE = {
    # No request, but what admission asks for: this cluster's refuses owner references without.
    ("specserve.dev", "specserves/finalizers", "update"),
}
MODES = {
    "cluster-wide": {},
    "namespaced": {
        "watchNamespaces": [SERVED, LATE],
        "rbac": {"clusterScoped": False},
        "crds": {"enabled": False},
    },
}


@pytest.fixture
def cluster():
    """A control plane whose admission enforces rights on owner references."""
    with start_light_cluster(
        crds=[ROOT / "crds"],
        audit=True,
        apiserver_arguments=[
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement"
        ],
    ) as started:
        make_node(started, "gpu-node", gpus=100)
        for name in (NAMESPACE, SERVED, ALIEN):
            started.kubectl("create", "namespace", name)
        yield started


@pytest.fixture
async def stage(cluster, tmp_path):
    async with Api(cluster) as api, Kubelet(api, SERVED, tmp_path) as kubelet:
        yield Stage(api, cluster, SERVED, kubelet)


class Installation:
    """The chart's rights and settings, and processes that run with them alone."""

    def __init__(self, cluster, values, stack):
        self.cluster = cluster
        self.manifests = render(values)
        self._stack = stack
        given = environment(self.manifests)
        self.settings = {
            key.removeprefix(PREFIX).lower(): value
            for key, value in given.items()
            if key.startswith(PREFIX)
        }
        del self.settings["http_port"]

    def grant(self, *, absent=()):
        wanted = [
            m
            for m in self.manifests
            if m["kind"] in RIGHTS and m["metadata"].get("namespace") not in absent
        ]
        self.cluster.apply(*wanted)

    def granted(self):
        return {
            (group, resource, verb)
            for m in self.manifests
            if m["kind"] in {"Role", "ClusterRole"} and "aggregate" not in str(m["metadata"])
            for rule in m["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    def start(self, **settings):
        process = OperatorProcess(
            self.cluster,
            self.cluster.kubeconfig_for(ACCOUNT, NAMESPACE),
            **{**self.settings, **settings},
        )
        self._stack.callback(process.kill)
        self._stack.callback(lambda: print(process.tail()))  # shown for failed tests
        return process


@pytest.fixture
def install(cluster):
    with contextlib.ExitStack() as stack:
        yield lambda values: Installation(cluster, values, stack)


def requests(cluster):
    return [e for e in cluster.audit_events(USER) if "objectRef" in e]


def used(events):
    """What was asked for and granted, as group, resource and verb."""
    found = set()
    for event in events:
        reference = event["objectRef"]
        parts = (reference["resource"], reference.get("subresource"))
        thing = (reference.get("apiGroup", ""), "/".join(filter(None, parts)))
        found.add((*thing, event["verb"]))
        if event["verb"] == "patch" and event["responseStatus"]["code"] == 201:
            found.add((*thing, "create"))
    return found


def refused(events):
    return sorted(
        f"{e['verb']} {e['requestURI']}" for e in events if e["responseStatus"]["code"] == 403
    )


async def gone(stage, *paths):
    async def all_gone():
        return not any([await stage.api.find(one) for one in paths])

    await eventually(all_gone, 20, f"{paths} to go")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
async def test_a_whole_life_uses_every_right_and_needs_no_other(cluster, install, stage, mode):
    """O-F5.1, 2, 4: `team-b` of the list comes into being while the operator runs."""
    installed = install(MODES[mode])
    installed.grant(absent={LATE})
    operator = installed.start()
    await operator.leads()
    made = await stage.create()
    await stage.kubelet.running("chat", 1)
    await stage.ready(within=60)
    policy = f"/apis/networking.k8s.io/v1/namespaces/{SERVED}/networkpolicies/chat"
    assert await stage.api.get(policy)
    await live(stage, made)

    cluster.kubectl("create", "namespace", LATE)
    installed.grant()
    await stage.api.post(path(names.PLURAL, LATE), specserve_like(made))
    await eventually(
        lambda: stage.api.find(path("deployments", LATE, "chat")), 40, "the late namespace"
    )
    assert await operator.stop() == 0

    # Switched off, the policies go, too.
    operator = installed.start(network_policies="Remove")
    await operator.leads()
    await gone(stage, policy)
    await stage.ready()

    events = requests(cluster)
    assert installed.granted() - used(events) - SPARE == set()
    # A namespace without rights is asked for once in a while, and nothing else is refused.
    waiting = f"/namespaces/{LATE}/specserves?limit=1"
    assert [r for r in refused(events) if not r.endswith(waiting)] == []
    if mode == "namespaced":
        everywhere = [
            e["requestURI"]
            for e in events
            if e["objectRef"].get("namespace") not in {SERVED, LATE, NAMESPACE}
        ]
        assert everywhere == []


def specserve_like(made):
    return {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "metadata": {"name": made["metadata"]["name"]},
        "spec": made["spec"],
    }


async def live(stage, made):
    """All that happens to a SpecServe: edits, keys, a rotation, left-overs."""
    left = {
        "metadata": {
            "name": "left",
            "labels": names.labels("chat"),
            "ownerReferences": [owner_reference(Owner("chat", SERVED, made["metadata"]["uid"]))],
        }
    }
    # One is calibrated, which takes a while; the edits below replace the pod that is measured.
    stage.kubelet.works = False
    calibrate = {"metadata": {"annotations": {names.ANNOTATION_CALIBRATE: "1"}}}
    await stage.edit(policy={"breakEven": {"calibration": {"lastPod": "Take"}}})
    await stage.api.merge(stage.at(names.PLURAL, "chat"), calibrate)
    spec = (await stage.deployment())["spec"]
    await stage.api.post(path("services", SERVED), {**left, "spec": {"ports": [{"port": 80}]}})
    await stage.api.post(path("deployments", SERVED), {**left, "spec": {**spec, "replicas": 0}})
    hub = {"metadata": {"name": "hub"}, "stringData": {"token": "x"}}
    await stage.api.post(path("secrets", SERVED), hub)
    await eventually(lambda: stage.api.items("jobs", SERVED), 15, "the Job of a calibration")
    await stage.edit(replicas=2, model={"tokenSecretRef": {"name": "hub", "key": "token"}})
    rotate = {"metadata": {"annotations": {names.ANNOTATION_ROTATE: "1"}}}
    await stage.api.merge(stage.at(names.PLURAL, "chat"), rotate)
    await stage.event("CredentialsRotated")
    await stage.edit(pod={"serviceAccountName": "default"})
    await gone(
        stage,
        stage.at("serviceaccounts", "chat"),
        stage.at("services", "left"),
        stage.at("deployments", "left"),
    )
    await stage.kubelet.running("chat", 2)
    await stage.has("Calibrated", "False", "Failed")
    await stage.ready()


async def test_a_second_release_keeps_off_what_the_first_serves(cluster, install, stage):
    """O-D2.3: reported, not fought; handed over when the user says so."""
    first = install({})
    first.grant()
    one = first.start()
    await one.leads()
    pods = await stage.up()
    before = [await stage.api.get(stage.at(kind, "chat")) for kind in ("deployments", "services")]
    orders = [len(pod.engine.orders) for pod in pods]

    cluster.apply(
        *yaml.safe_load_all(
            f"""
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: second, namespace: {NAMESPACE}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: admin}}
subjects: [{{kind: ServiceAccount, name: {ACCOUNT}, namespace: {NAMESPACE}}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: leases, namespace: {NAMESPACE}}}
rules: [{{apiGroups: [coordination.k8s.io], resources: [leases], verbs: ["*"]}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: leases, namespace: {NAMESPACE}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: leases}}
subjects: [{{kind: ServiceAccount, name: {ACCOUNT}, namespace: {NAMESPACE}}}]
"""
        )
    )
    two = first.start(lease_name="second", engine_image="other:1", pod_labels="a=b")
    await two.leads()
    event = await stage.event("OtherOperator")
    assert f"{NAMESPACE}/specserve" in event["message"]
    assert await two.value("specserve_foreign_specserves") == 1
    assert await two.value("specserve_speculation_switches_total") == 0
    after = [await stage.api.get(stage.at(kind, "chat")) for kind in ("deployments", "services")]
    assert [o["metadata"]["generation"] for o in after[:1]] == [
        o["metadata"]["generation"] for o in before[:1]
    ]
    assert [len(pod.engine.orders) for pod in pods] == orders

    hand_over = {"metadata": {"annotations": {names.ANNOTATION_OPERATOR: f"{NAMESPACE}/second"}}}
    await stage.api.merge(stage.at(names.PLURAL, "chat"), hand_over)

    async def handed_over():
        return (
            await two.value("specserve_foreign_specserves") == 0
            and await one.value("specserve_foreign_specserves") == 1
        )

    await eventually(handed_over, 20, "the hand-over")


async def test_an_older_crd_is_told_in_one_line_a_metric_and_an_event(cluster, install, stage):
    """O-F1.2."""
    installed = install({})
    installed.grant()
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/specserves.specserve.dev"
    item = await stage.api.get(crd)
    policy = item["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]["policy"]
    del policy["properties"]["maxFlipsPerHour"]
    del policy["default"]["maxFlipsPerHour"]
    item["metadata"].pop("managedFields", None)
    cluster.api.request("PUT", crd, item)

    def published():
        text = str(cluster.api.get("/openapi/v3/apis/specserve.dev/v1alpha1"))
        return "maxFlipsPerHour" not in text

    await eventually(published, 30, "the older schema to be published")
    operator = installed.start()
    await operator.leads()

    async def told():
        return await operator.value("specserve_schema_differences", kind="lacking") == 1

    await eventually(told, 10, "the metric")
    lines = [line for line in operator.lines("WARNING") if "spec.policy.maxFlipsPerHour" in line]
    assert len(lines) == 1
    events = cluster.get("events", "-n", NAMESPACE)["items"]
    assert any(e["reason"] == "SchemaDiffers" for e in events)
    await stage.up()
    assert await operator.value("specserve_reconcile_total", result="bug") == 0
