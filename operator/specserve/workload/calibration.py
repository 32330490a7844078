"""The Job that measures one engine pod's break-even curve, and the ConfigMap that keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from specserve import names
from specserve.api import SpecServeSpec
from specserve.workload.objects import Manifest, Owner, object_of
from specserve.workload.provision import Provision

#: Key of the curve's ConfigMap that tells why the last calibration failed.
KEY_FAILURE: Final = "failure"
#: Key that tells how far its curve is from the one before.
KEY_COMPARED: Final = "compared"
#: Seconds that a finished Job is kept, for its log.
KEPT_SECONDS: Final = 3600
_API_KEY_DIR: Final = "/etc/specserve/api-key"
_VOLUME_API_KEY: Final = "api-key"
_VOLUME_TOKEN: Final = "token"  # noqa: S105 - the name of a volume


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be measured.

    Attributes:
        request: For which value of the annotation.
        pod_uid: Uid of the engine pod.
        address: Its address.
        model: The model as the curve is to name it.
        draft: Likewise the draft, None if it has no source.
        gpu: Likewise the GPU.
        holder: Who steers the pod otherwise, as its directives say.
    """

    request: str
    pod_uid: str
    address: str
    model: str
    draft: str | None
    gpu: str
    holder: str


def calibration_job(
    owner: Owner, spec: SpecServeSpec, provision: Provision, subject: Subject
) -> Manifest:
    """The Job: `specserve calibrate` against the pod, its curve in the container's last words.

    It needs no right on the cluster, and is admitted under the Pod Security level `restricted`.
    """
    job = object_of(
        owner,
        "batch/v1",
        "Job",
        names.calibration_job(owner.name, owner.uid, subject.request),
    )
    labels = names.calibration_labels(owner.name)
    job["metadata"]["labels"] = labels
    job["metadata"]["annotations"] = {
        names.ANNOTATION_CALIBRATION: subject.request,
        names.ANNOTATION_ASIDE_POD: subject.pod_uid,
    }
    pull_secrets = spec.pod.image_pull_secrets or [
        {"name": each} for each in provision.pull_secrets
    ]
    volumes, mounts = _files(owner, spec)
    job["spec"] = {
        # What was measured in part is no curve, and a second try would keep the pod for longer.
        "backoffLimit": 0,
        "activeDeadlineSeconds": spec.policy.break_even.calibration.deadline_seconds,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "template": {
            "metadata": {"labels": labels},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": names.CALIBRATION_CONTAINER,
                        "image": provision.calibrator,
                        "imagePullPolicy": "IfNotPresent",
                        "args": _arguments(spec, subject),
                        # Of a failure the end of the log tells.
                        "terminationMessagePath": names.LAST_WORDS,
                        "terminationMessagePolicy": "FallbackToLogsOnError",
                        "resources": {
                            "requests": {"cpu": "500m", "memory": "256Mi"},
                            "limits": {"memory": "512Mi"},
                        },
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "readOnlyRootFilesystem": True,
                            "capabilities": {"drop": ["ALL"]},
                        },
                        "volumeMounts": mounts,
                    }
                ],
                "volumes": volumes,
                # Where all nodes are tainted for their GPUs, it runs on one of them.
                **({"tolerations": spec.pod.tolerations} if spec.pod.tolerations else {}),
                **({"imagePullSecrets": pull_secrets} if pull_secrets else {}),
            },
        },
    }
    return job


def curve_config_map(owner: Owner, request: str, data: Mapping[str, str | None]) -> Manifest:
    """The ConfigMap that keeps what calibrations came to.

    Args:
        owner: The SpecServe.
        request: The last one that was dealt with.
        data: What it holds; what is None or empty is left out.
    """
    kept = object_of(owner, "v1", "ConfigMap", names.curve_config_map(owner.name))
    kept["metadata"]["annotations"] = {names.ANNOTATION_CALIBRATED: request}
    kept["data"] = {key: value for key, value in data.items() if value}
    return kept


def _arguments(spec: SpecServeSpec, subject: Subject) -> list[str]:
    sweep = spec.policy.break_even.calibration
    host = f"[{subject.address}]" if ":" in subject.address else subject.address
    arguments = [
        "calibrate",
        f"--url=http://{host}:{names.PORT_SERVING}",
        f"--admin-url=http://{host}:{names.PORT_ADMIN}",
        f"--token-file={names.CREDENTIALS_DIR}/{names.KEY_PLUGIN_TOKEN}",
    ]
    reference = spec.engine.api_key_secret_ref
    if reference is not None:
        arguments.append(f"--api-key-file={_API_KEY_DIR}/{reference.key}")
    if sweep.sizes:
        arguments.append(f"--sizes={','.join(map(str, sweep.sizes))}")
    arguments += [
        f"--repeats={sweep.repeats}",
        f"--prompt-tokens={sweep.prompt_tokens}",
        f"--max-new-tokens={sweep.max_new_tokens}",
        f"--model={subject.model}",
    ]
    if subject.draft is not None:
        arguments.append(f"--draft={subject.draft}")
    return [
        *arguments,
        f"--gpu={subject.gpu}",
        f"--holder={subject.holder}",
        f"--output={names.LAST_WORDS}",
        f"--most-bytes={names.LAST_WORDS_BYTES}",
        "--quiet",
    ]


def _files(owner: Owner, spec: SpecServeSpec) -> tuple[list[Any], list[Any]]:
    """Volumes and mounts of the keys, and of no other key than is needed."""
    wanted = [
        (
            _VOLUME_TOKEN,
            names.credentials_secret(owner.name),
            names.KEY_PLUGIN_TOKEN,
            names.CREDENTIALS_DIR,
        )
    ]
    reference = spec.engine.api_key_secret_ref
    if reference is not None:
        wanted.append((_VOLUME_API_KEY, reference.name, reference.key, _API_KEY_DIR))
    volumes = [
        {
            "name": name,
            "secret": {"secretName": secret, "items": [{"key": key, "path": key}]},
        }
        for name, secret, key, _ in wanted
    ]
    mounts = [
        {"name": name, "mountPath": directory, "readOnly": True}
        for name, _, _, directory in wanted
    ]
    return volumes, mounts
