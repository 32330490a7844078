"""Small values out of Kubernetes objects."""

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve import names, observed


def pod(name: str = "p", **changes: Any) -> dict[str, Any]:
    """A ready pod; `changes` replace or, if None, drop parts of it."""
    meta = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-{name}",
        "labels": names.labels("chat"),
    }
    if "deletionTimestamp" in changes:
        meta["deletionTimestamp"] = changes.pop("deletionTimestamp")
    ready = "True" if changes.pop("ready", True) else "False"
    status = {
        "phase": "Running",
        "podIP": "10.0.0.5",
        "conditions": [{"type": "Ready", "status": ready}],
        "containerStatuses": [container()],
    } | changes
    return {"metadata": meta, "status": {k: v for k, v in status.items() if v is not None}}


def container(name: str = names.ENGINE_CONTAINER, **changes: Any) -> dict[str, Any]:
    running = {"startedAt": "2030-01-01T00:00:00Z"}
    return {
        "name": name,
        "ready": True,
        "restartCount": 0,
        "containerID": "containerd://1",
        "image": "engine:1",
        "state": {"running": running},
    } | changes


def waiting(reason: str, message: str = "", **changes: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return container(ready=False, state=state, **changes)


def ended(reason: str, code: int, message: str = "") -> dict[str, Any]:
    return {"terminated": {"reason": reason, "exitCode": code, "message": message}}


# -- pods -----------------------------------------------------------------------------------

LIST = [
    pod("p-ok"),
    pod("p-term", podIP="10.0.0.6", deletionTimestamp="2030-01-01T00:00:00Z"),
    pod("p-evict", phase="Failed", reason="Evicted"),
    pod("p-done", phase="Succeeded", podIP="10.0.0.8"),
    pod("p-pend", phase="Pending", podIP=None, ready=False),
    pod("p-load", podIP="10.0.0.9", ready=False),
    pod("p-lost", podIP="10.0.0.10", ready=False, reason="NodeLost"),
]


def test_of_pods_that_look_usable_one_is():
    found = [observed.pod(item) for item in LIST]
    assert [one.name for one in found if one.usable] == ["p-ok"]
    assert [one.name for one in found if one.alive] == ["p-ok", "p-pend", "p-load", "p-lost"]
    assert [one.name for one in found if one.leaving] == ["p-term"]


def test_the_primary_address_counts():
    both = [{"ip": "fd00:10:1::2a"}, {"ip": "10.1.0.42"}]
    assert observed.pod(pod(podIP="fd00:10:1::2a", podIPs=both)).ip == "fd00:10:1::2a"


@pytest.mark.parametrize("ip", ["", None])
def test_a_pod_without_an_address_is_not_usable(ip):
    one = observed.pod(pod(podIP=ip))
    assert (one.ip, one.usable) == (None, False)


def test_a_pod_of_nothing_but_its_name():
    item = pod()
    item["status"] = None
    one = observed.pod(item)
    assert (one.usable, one.alive, one.trouble, one.key) == (False, True, None, ("team", "chat"))


@pytest.mark.parametrize("change", [{"restartCount": 1}, {"containerID": "containerd://2"}])
def test_each_start_of_the_engine_is_another_boot(change):
    sidecar = container("sidecar", restartCount=5)
    first = observed.pod(pod(containerStatuses=[sidecar, container()]))
    again = observed.pod(pod(containerStatuses=[sidecar, container(**change)]))
    aside = observed.pod(pod(containerStatuses=[container("sidecar"), container()]))
    assert first.boot != again.boot
    assert first.boot == aside.boot


# -- trouble --------------------------------------------------------------------------------

UNSCHEDULABLE = [
    {"type": "PodScheduled", "status": "False", "message": "0/4 nodes: no nvidia.com/gpu"}
]
MORE_MEMORY = "raise its limit; that of the engine is spec.engine.resources.limits.memory"
TROUBLE = {
    "ready": (pod(), None),
    "just made": (pod(phase="Pending", ready=False, containerStatuses=None), None),
    "creating": (
        pod(phase="Pending", ready=False, containerStatuses=[waiting("ContainerCreating")]),
        None,
    ),
    "loading": (pod(ready=False), ("Loading", "not ready yet")),
    "unschedulable": (
        pod(phase="Pending", conditions=UNSCHEDULABLE, containerStatuses=None),
        ("Unschedulable", "no nvidia.com/gpu"),
    ),
    "crash loop": (
        pod(
            ready=False,
            containerStatuses=[
                waiting("CrashLoopBackOff", lastState=ended("Error", 1, "a\nno such model\n"))
            ],
        ),
        ("CrashLooping", "container engine ended with Error, exit code 1: no such model"),
    ),
    "crash loop without a last state": (
        pod(ready=False, containerStatuses=[waiting("CrashLoopBackOff")]),
        ("CrashLooping", "exit code ?"),
    ),
    "out of memory": (
        pod(ready=False, containerStatuses=[container(state=ended("OOMKilled", 137))]),
        ("CrashLooping", f"ended with OOMKilled, exit code 137; {MORE_MEMORY}"),
    ),
    "O-B5 out of GPU memory": (
        pod(
            ready=False,
            containerStatuses=[
                waiting(
                    "CrashLoopBackOff",
                    lastState=ended(
                        "Error", 1, "torch.OutOfMemoryError: CUDA out of memory.\nCapture failed\n"
                    ),
                )
            ],
        ),
        ("OutOfGpuMemory", "exit code 1: Capture failed; lower engine.memFractionStatic"),
    ),
    "restarted": (
        pod(
            ready=False,
            containerStatuses=[
                container(ready=False, restartCount=2, lastState=ended("OOMKilled", 137))
            ],
        ),
        ("Restarted", "OOMKilled, exit code 137; it was restarted"),
    ),
    "ready again after a restart": (
        pod(containerStatuses=[container(restartCount=2, lastState=ended("Error", 1))]),
        None,
    ),
    "failing init container": (
        pod(
            phase="Pending",
            ready=False,
            initContainerStatuses=[
                {**waiting("CrashLoopBackOff", lastState=ended("Error", 3)), "name": "fetch"}
            ],
            containerStatuses=[waiting("PodInitializing")],
        ),
        ("CrashLooping", "container fetch ended with Error, exit code 3"),
    ),
    "finished init container": (
        pod(initContainerStatuses=[container("fetch", state=ended("Completed", 0))]),
        None,
    ),
    "failed": (pod(phase="Failed", ready=False), ("PodFailed", "Deployment replaces it")),
}


@pytest.mark.parametrize("case", TROUBLE)
def test_trouble(case: str):
    item, wanted = TROUBLE[case]
    trouble = observed.pod(item).trouble
    if wanted is None:
        assert trouble is None
    else:
        assert trouble.reason == wanted[0]
        assert wanted[1] in trouble.message


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("ErrImagePull", "ImagePullFailed"),
        ("ImagePullBackOff", "ImagePullFailed"),
        ("InvalidImageName", "ImagePullFailed"),
        ("ErrImageNeverPull", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerConfigInvalid"),
        ("CreateContainerError", "ContainerConfigInvalid"),
    ],
)
def test_what_a_container_waits_for(reason: str, told: str):
    item = pod(phase="Pending", ready=False, containerStatuses=[waiting(reason, "its words")])
    trouble = observed.pod(item).trouble
    assert trouble.reason == told
    assert trouble.message == f"container engine: {reason}: its words"


def test_a_long_last_message_is_cut():
    last = ended("Error", 1, "x" * 5000)
    item = pod(ready=False, containerStatuses=[waiting("CrashLoopBackOff", lastState=last)])
    assert len(observed.pod(item).trouble.message) < 400


# -- owned objects --------------------------------------------------------------------------

DESIRED = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "chat", "namespace": "team", "labels": {"a": "b"}},
    "spec": {
        "replicas": 2,
        "paused": False,
        "strategy": {"rollingUpdate": {"maxSurge": 0}},
        "template": {"spec": {"containers": [{"name": "engine", "args": ["--x"], "env": []}]}},
    },
}


def live(change=None) -> dict[str, Any]:
    """The Deployment as the server shows it, with its own additions."""
    item = {
        "metadata": {
            "name": "chat",
            "namespace": "team",
            "uid": "u",
            "generation": 3,
            "resourceVersion": "9",
            "labels": {"a": "b", "injected": "yes"},
            "annotations": {"deployment.kubernetes.io/revision": "1"},
            "managedFields": [{}],
        },
        "spec": {
            "replicas": 2,
            "progressDeadlineSeconds": 600,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0}},
            "template": {
                "spec": {
                    "dnsPolicy": "ClusterFirst",
                    "containers": [
                        {"name": "engine", "args": ["--x"], "terminationMessagePath": "/dev/x"}
                    ],
                }
            },
        },
        "status": {
            "observedGeneration": 3,
            "updatedReplicas": 2,
            "replicas": 2,
        },
    }
    if change is not None:
        change(item)
    return item


def engine_of(item: dict[str, Any]) -> dict[str, Any]:
    return item["spec"]["template"]["spec"]["containers"][0]


def test_what_the_server_and_others_add_is_no_difference():
    assert observed.holds(observed.written_parts(live()), DESIRED)


@pytest.mark.parametrize(
    "change",
    [
        lambda item: item["spec"].update(replicas=3),
        lambda item: item["spec"].update(paused=True),
        lambda item: item["spec"]["strategy"]["rollingUpdate"].update(maxSurge=1),
        lambda item: item["metadata"].update(labels={}),
        lambda item: item["metadata"].pop("labels"),
        lambda item: engine_of(item).update(args=["--x", "--y"]),
        lambda item: engine_of(item).update(args=["--y"]),
        lambda item: engine_of(item).update(env=[{"name": "A"}]),
        lambda item: item["spec"].update(template=None),
        lambda item: item["spec"]["template"]["spec"].update(containers=[]),
    ],
)
def test_what_was_changed_is_a_difference(change):
    assert not observed.holds(observed.written_parts(live(change)), DESIRED)


def policy(change=None) -> dict[str, Any]:
    item: dict[str, Any] = {
        "metadata": {"name": "chat", "namespace": "team"},
        "spec": {
            "podSelector": {"matchLabels": {"a": "b"}},
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"c": "d"}}}], "ports": []}],
        },
    }
    if change is not None:
        change(item["spec"])
    return item


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["podSelector"]["matchLabels"].update(x="y"),
        lambda spec: spec["podSelector"].update(matchExpressions=[{"key": "x"}]),
        lambda spec: spec["ingress"].append({}),
        lambda spec: spec["ingress"][0]["from"][0].update(namespaceSelector={}),
        lambda spec: spec["ingress"][0]["from"][0]["podSelector"]["matchLabels"].update(x="y"),
    ],
)
def test_what_is_one_value_is_changed_by_an_addition(change):
    assert not observed.holds(observed.written_parts(policy(change)), policy())


def test_what_is_one_value_holds_without_its_zero_values():
    def shown(spec: dict[str, Any]) -> None:
        del spec["ingress"][0]["ports"]

    assert observed.holds(observed.written_parts(policy(shown)), policy())


def test_a_service_with_another_label_in_its_selector_serves_other_pods():
    service = {"metadata": {}, "spec": {"selector": {"a": "b"}}}
    other = {"metadata": {}, "spec": {"selector": {"a": "b", "foo": "bar"}, "type": "ClusterIP"}}
    assert not observed.holds(observed.written_parts(other), service)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)
objects = st.fixed_dictionaries({"metadata": st.fixed_dictionaries({})}).flatmap(
    lambda base: st.dictionaries(st.sampled_from(["spec", "selector", "rules"]), json_values).map(
        lambda body: {**base, **body}
    )
)


@given(objects)
def test_an_object_holds_itself(item: dict[str, Any]):
    assert observed.holds(observed.written_parts(item), item)


def pruned(value: Any) -> Any:
    """As the API server shows it: zero values left out."""
    if isinstance(value, dict):
        kept = {name: pruned(item) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item not in (None, "", 0, [], {})}
    return value


@given(objects)
def test_an_object_holds_itself_without_its_zero_values(item: dict[str, Any]):
    shown = {**pruned(item), "metadata": {}}
    assert observed.holds(observed.written_parts(shown), item)


def test_owner_rollout_and_kind():
    def owned_by(item: dict[str, Any]) -> None:
        item["metadata"]["ownerReferences"] = [{"uid": "x"}, {"uid": "o", "controller": True}]

    one = observed.owned("Deployment", live(owned_by))
    assert not one.replaces
    assert (one.owner, one.rolled_out, one.problem, one.uid) == ("o", True, None, "u")
    assert observed.owned("Deployment", live()).owner == ""


@pytest.mark.parametrize(
    ("change", "replaces"),
    [
        ({"observedGeneration": 2}, False),
        ({"replicas": 1, "updatedReplicas": 1}, False),
        ({"updatedReplicas": 1}, True),
        ({"replicas": 3}, True),
        ({"updatedReplicas": 0}, True),
    ],
)
def test_a_rollout_under_way(change: dict[str, int], *, replaces: bool):
    one = observed.owned("Deployment", live(lambda item: item["status"].update(change)))
    assert not one.rolled_out
    assert one.replaces is replaces


NAME_ONE = "spec.pod.serviceAccountName must name a ServiceAccount of this namespace"
NO_ACCOUNT = (
    'pods "chat-6d-" is forbidden: error looking up service account team/no: serviceaccount "no" '
    "not found"
)


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        (
            {"type": "ReplicaFailure", "status": "True", "message": "denied by webhook"},
            ("PodsRefused", "denied by webhook"),
        ),
        (
            {"type": "ReplicaFailure", "status": "True", "message": NO_ACCOUNT},
            ("PodsRefused", f"{NO_ACCOUNT}; {NAME_ONE}"),
        ),
        (
            {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate"},
            ("PodsRefused", "FailedCreate"),
        ),
        (
            {
                "type": "Progressing",
                "status": "False",
                "reason": "ProgressDeadlineExceeded",
                "message": "too long",
            },
            ("ReplicasNotReady", "too long"),
        ),
        ({"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}, None),
    ],
)
def test_what_keeps_a_deployment_from_making_pods(condition, problem):
    one = observed.owned(
        "Deployment", live(lambda item: item["status"].update(conditions=[condition]))
    )
    assert one.problem == (problem and observed.Trouble(*problem))


# -- credentials ----------------------------------------------------------------------------


def test_credentials_are_read_and_never_shown():
    values = {
        names.KEY_PLUGIN_TOKEN: "sesame",
        names.KEY_PLUGIN_TOKEN_PREVIOUS: "",
        names.KEY_ADMIN_KEY: "sesame-key",
    }
    made = observed.credentials(
        {
            "metadata": {
                "name": "chat-credentials",
                "namespace": "team",
                "uid": "u",
                "labels": names.labels("chat"),
                "annotations": {names.ANNOTATION_ROTATED: "2"},
            },
            "data": {key: base64.b64encode(v.encode()).decode() for key, v in values.items()},
        }
    )
    assert (made.tokens, made.rotated, made.key) == (("sesame",), "2", ("team", "chat"))
    assert made.data[names.KEY_ADMIN_KEY] == "sesame-key"
    assert "sesame" not in f"{made!r}{made}"


def test_a_secret_without_data_has_no_tokens():
    meta = {"name": "x", "namespace": "team", "uid": "u"}
    assert observed.credentials({"metadata": meta, "data": None}).tokens == ()


def worker_ended(code: int, message: str) -> dict[str, Any]:
    done = {"exitCode": code, "message": message, "reason": "OOMKilled"}
    return {"name": "calibrate", "state": {"terminated": done}}


# -- calibrations ---------------------------------------------------------------------------


def taken_aside(**changes: Any) -> dict[str, Any]:
    item = pod(**changes)
    item["metadata"]["labels"] |= {names.LABEL_PART_OF: names.ASIDE}
    item["metadata"]["annotations"] = {
        names.ANNOTATION_CALIBRATION: "r1",
        names.ANNOTATION_ASIDE_SINCE: "2030-01-01T00:00:00Z",
    }
    return item


def test_a_pod_that_is_aside_is_ready_and_not_usable():
    seen = observed.pod(taken_aside())
    assert (seen.usable, seen.ready, seen.alive) == (False, True, True)
    assert seen.aside == "r1"
    assert not observed.pod(taken_aside(ready=False)).ready
    assert not observed.pod(taken_aside(deletionTimestamp="2030-01-01T00:00:00Z")).ready
    serving = observed.pod(pod())
    assert (serving.usable, serving.ready, serving.aside) == (True, True, None)
    assert not serving.measured
    returned = pod()
    returned["metadata"]["annotations"] = {names.ANNOTATION_CALIBRATED: "r1"}
    assert observed.pod(returned).measured


def measuring(**status: Any) -> dict[str, Any]:
    item = pod("chat-cal-1-x")
    item["metadata"]["labels"] = {
        **names.calibration_labels("chat"),
        names.LABEL_JOB: "chat-cal-1",
    }
    item["status"] = status
    return item


def test_a_pod_that_measures_is_no_engine():
    seen = observed.either(measuring(phase="Running"))
    assert isinstance(seen, observed.Worker)
    assert (seen.key, seen.job, seen.exit_code) == (("team", "chat"), "chat-cal-1", None)
    assert seen.grace is None
    leaving = measuring(phase="Running")
    leaving["metadata"] |= {
        "deletionTimestamp": "2030-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 30,
    }
    assert observed.worker(leaving).grace == 30
    assert isinstance(observed.either(pod()), observed.Pod)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ({"containerStatuses": [worker_ended(0, "{}")]}, 0, "{}"),
        ({"containerStatuses": [worker_ended(137, "")]}, 137, "OOMKilled"),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
            -1,
            "low on memory",
        ),
        ({"phase": "Failed", "reason": "Evicted"}, -1, "Evicted"),
        ({"phase": "Pending"}, None, ""),
    ],
)
def test_its_last_words_are_read(status, code, words):
    seen = observed.worker(measuring(**status))
    assert (seen.exit_code, seen.words) == (code, words)


@pytest.mark.parametrize(
    ("status", "started", "waits"),
    [
        ({"phase": "Pending"}, False, ""),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available",
                    }
                ],
            },
            False,
            "Unschedulable: 0/3 nodes are available",
        ),
        (
            {
                "conditions": [{"type": "PodScheduled", "status": "True"}],
                "containerStatuses": [
                    {"name": "calibrate", "state": {"waiting": {"reason": "ErrImagePull"}}}
                ],
            },
            False,
            "ErrImagePull",
        ),
        ({"containerStatuses": [{"name": "calibrate", "state": {"running": {}}}]}, True, ""),
        ({"containerStatuses": [worker_ended(0, "{}")]}, True, ""),
    ],
)
def test_whether_it_has_started_and_what_it_waits_for(status, started, waits):
    seen = observed.worker(measuring(**status))
    assert (seen.started, seen.waits) == (started, waits)
