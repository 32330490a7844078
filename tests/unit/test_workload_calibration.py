"""The Job of a calibration, what it may read, and the ConfigMap that keeps the curve."""

import kubernetes_validate

from specserve import names, workload
from specserve.api import SpecServeSpec
from specserve.calibrate import command
from specserve.cli import main
from specserve.workload import Owner, Provision, Subject, calibration_job, hardware

OWNER = Owner("chat", "team", "u-1")
PROVISION = Provision(calibrator="registry/specserve-operator:1", pull_secrets=("mirror",))
SUBJECT = Subject(
    request="2026-11-30",
    pod_uid="p-1",
    address="10.0.0.7",
    model="hf://o/m@r1",
    draft="hf://o/d",
    gpu="NVIDIA H200",
    holder="system/specserve",
)


def spec(**more):
    base = {
        "model": {"source": "hf://o/m", "revision": "r1"},
        "draft": {"method": "EAGLE3", "source": "hf://o/d"},
        "engine": {"image": "engine:1", **more.pop("engine", {})},
    }
    return SpecServeSpec.model_validate({**base, **more})


def job(subject=SUBJECT, **more):
    made = calibration_job(OWNER, spec(**more), PROVISION, subject)
    kubernetes_validate.validate(made, "1.36", strict=True)
    return made


def pod_of(made):
    return made["spec"]["template"]["spec"]


def test_a_job_runs_once_and_goes_with_its_specserve():
    made = job()
    assert made["metadata"]["name"] == names.calibration_job("chat", "u-1", "2026-11-30")
    (owner,) = made["metadata"]["ownerReferences"]
    assert owner["uid"] == "u-1"
    assert (made["spec"]["backoffLimit"], pod_of(made)["restartPolicy"]) == (0, "Never")
    assert made["spec"]["activeDeadlineSeconds"] == 3600
    assert made["metadata"]["annotations"] == {
        names.ANNOTATION_CALIBRATION: "2026-11-30",
        names.ANNOTATION_ASIDE_POD: "p-1",
    }


def test_its_pod_is_no_engine_to_services_and_deployments():
    labels = job()["spec"]["template"]["metadata"]["labels"]
    assert not names.selector("chat").items() <= labels.items()
    assert labels[names.LABEL_MANAGED_BY] == names.MANAGER  # or nobody would watch it


def test_its_pod_has_no_rights_and_is_admitted_everywhere():
    pod = pod_of(job())
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["image"] == PROVISION.calibrator
    assert pod["imagePullSecrets"] == [{"name": "mirror"}]


def test_it_reads_the_token_and_no_other_key():
    pod = pod_of(job())
    (volume,) = pod["volumes"]
    assert volume["secret"]["secretName"] == "chat-credentials"
    assert [item["key"] for item in volume["secret"]["items"]] == [names.KEY_PLUGIN_TOKEN]
    keyed = job(engine={"apiKeySecretRef": {"name": "clients", "key": "key"}})
    assert [v["secret"]["secretName"] for v in pod_of(keyed)["volumes"]] == [
        "chat-credentials",
        "clients",
    ]
    assert "--api-key-file=/etc/specserve/api-key/key" in pod_of(keyed)["containers"][0]["args"]


def test_the_command_understands_what_it_is_given(monkeypatch):
    seen = {}
    monkeypatch.setattr(command, "run", lambda options: seen.update(vars(options)) or 0)
    sweep = {"sizes": [1, 8], "repeats": 2, "promptTokens": 64, "maxNewTokens": 32}
    made = job(policy={"breakEven": {"calibration": sweep}})
    assert main(pod_of(made)["containers"][0]["args"]) == 0
    assert seen["url"] == "http://10.0.0.7:30000"
    assert seen["admin_url"] == "http://10.0.0.7:9470"
    assert (seen["sizes"], seen["repeats"]) == ((1, 8), 2)
    assert (seen["prompt_tokens"], seen["max_new_tokens"]) == (64, 32)
    assert (seen["model"], seen["draft"], seen["gpu"]) == (
        "hf://o/m@r1",
        "hf://o/d",
        "NVIDIA H200",
    )
    assert (seen["holder"], seen["most_bytes"]) == ("system/specserve", 4096)
    assert str(seen["output"]) == "/dev/termination-log"


def test_an_address_of_the_newer_protocol_gets_its_brackets():
    made = job(
        Subject(
            request="r",
            pod_uid="p",
            address="fd00::7",
            model="m",
            draft=None,
            gpu="g",
            holder="h",
        )
    )
    arguments = pod_of(made)["containers"][0]["args"]
    assert "--url=http://[fd00::7]:30000" in arguments
    assert not [word for word in arguments if word.startswith(("--draft", "--sizes"))]


def test_where_all_nodes_are_tainted_it_tolerates_what_engines_do():
    taints = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod_of(job(pod={"tolerations": taints}))["tolerations"] == taints


def test_a_request_of_any_text_makes_a_name():
    odd = calibration_job(
        OWNER,
        spec(),
        PROVISION,
        Subject("2026-11-30T08:00:00+01:00 ü", "p", "1.1.1.1", "m", None, "g", "h"),
    )
    kubernetes_validate.validate(odd, "1.36", strict=True)


def test_what_is_kept_says_for_which_request():
    kept = workload.curve_config_map(OWNER, "r7", {"curve.json": "{}", "failure": "", "x": None})
    kubernetes_validate.validate(kept, "1.36", strict=True)
    assert kept["metadata"]["name"] == "chat-curve"
    assert kept["metadata"]["annotations"] == {names.ANNOTATION_CALIBRATED: "r7"}
    assert kept["data"] == {"curve.json": "{}"}


def test_what_was_asked_for_stands_for_the_gpu():
    given = spec(
        engine={"resources": {"limits": {"nvidia.com/gpu": 2, "memory": "64Gi"}}},
        pod={
            "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {
                                "matchExpressions": [
                                    {"key": "zone", "operator": "In", "values": ["a", "b"]}
                                ]
                            }
                        ]
                    }
                }
            },
        },
    )
    assert hardware(given) == (
        "asked for: 2 x nvidia.com/gpu, nvidia.com/gpu.product=NVIDIA-H200, zone In a|b"
    )
    assert hardware(spec()) == "asked for: no device"
