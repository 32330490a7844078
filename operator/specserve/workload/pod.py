"""The pod template: one engine container, what it reads, and how it is probed and stopped."""

import math
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from specserve import names
from specserve.api import PassThrough, SpecServeSpec
from specserve.workload.arguments import (
    LIVE_METHODS,
    UnusableSpec,
    adaptive_config,
    arguments,
    layout_of,
)
from specserve.workload.provision import NONE_PROVIDED, Provision, engine_image

#: Volumes of the operator's begin so; a user's may not.
VOLUME_PREFIX: Final = "specserve-"
VOLUME_CREDENTIALS: Final = f"{VOLUME_PREFIX}credentials"
VOLUME_ENGINE_CONFIG: Final = f"{VOLUME_PREFIX}engine-config"
VOLUME_ADAPTIVE: Final = f"{VOLUME_PREFIX}adaptive"
VOLUME_SHARED_MEMORY: Final = f"{VOLUME_PREFIX}shared-memory"
SHARED_MEMORY_DIR: Final = "/dev/shm"  # noqa: S108 - a path in the container
#: Enough for the NCCL segments and the message queues of 16 GPUs.
SHARED_MEMORY_SIZE: Final = "8Gi"
WEIGHTS_DIR: Final = "/specserve"

#: Long enough for every proxy to hear that the pod leaves, as SGLang still takes requests then.
DRAIN_SECONDS: Final = 5
PROBE_PERIOD_SECONDS: Final = 5


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a container finds weights.

    Attributes:
        path: value of the engine's path argument.
        volume: volume to mount, None for a hub or a directory that is there anyway.
        mount: the mount of that volume, None if another one of the pod already shows it.
    """

    path: str
    volume: PassThrough | None = None
    mount: PassThrough | None = None


def weights(source: str, role: str, *, beside: Weights | None = None) -> Weights:
    """Resolve a source.

    Args:
        source: an `hf://`, `pvc://`, `oci://` or `path://` source.
        role: `model` or `draft`: the name of the volume and its directory.
        beside: weights of the same pod. One claim or image is mounted once.
    """
    scheme, _, rest = source.partition("://")
    if scheme == "hf":
        return Weights(rest.strip("/"))
    if scheme == "path":
        return Weights(posixpath.normpath(f"/{rest.lstrip('/')}"))
    where, _, inside = (rest, "", "") if scheme == "oci" else rest.partition("/")
    details: PassThrough = (
        {"image": {"reference": where}}
        if scheme == "oci"
        else {"persistentVolumeClaim": {"claimName": where}}
    )
    if beside and beside.volume and beside.mount and details.items() <= beside.volume.items():
        return Weights(_below(beside.mount["mountPath"], inside))
    name, directory = f"{VOLUME_PREFIX}{role}", f"{WEIGHTS_DIR}/{role}"
    return Weights(
        _below(directory, inside),
        {"name": name, **details},
        {"name": name, "mountPath": directory, "readOnly": True},
    )


def _below(directory: str, inside: str) -> str:
    # normpath of an absolute path cannot climb out of the mount.
    return posixpath.normpath(f"{directory}/{posixpath.normpath(f'/{inside}').lstrip('/')}")


def template(
    name: str, spec: SpecServeSpec, provision: Provision = NONE_PROVIDED
) -> dict[str, Any]:
    """The pod template of the SpecServe `name`.

    Raises:
        UnusableSpec: the user's parts do not go together with the operator's.
    """
    model = weights(spec.model.source, "model")
    draft = None
    if spec.draft.method != "None" and spec.draft.source:
        draft = weights(spec.draft.source, "draft", beside=model)
    found = [item for item in (model, draft) if item is not None]
    volumes, mounts = _volumes(name, spec, found)
    container = {
        "name": names.ENGINE_CONTAINER,
        "image": engine_image(spec.engine.image, provision),
        "args": arguments(spec, model.path, draft.path if draft else None),
        # SGLang writes no message of its own, and the last lines of its log tell why it ended.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "env": list(_environment(spec)),
        "ports": [
            _port(names.PORT_NAME_SERVING, names.PORT_SERVING),
            _port(names.PORT_NAME_ADMIN, names.PORT_ADMIN),
        ],
        "resources": _resources(spec),
        "volumeMounts": mounts,
        **_probes(spec),
        "securityContext": {"allowPrivilegeEscalation": False},
        **_present(
            imagePullPolicy=spec.engine.image_pull_policy,
            command=spec.engine.command,
            lifecycle=_lifecycle(spec),
        ),
    }
    pod = spec.pod
    pull_secrets = pod.image_pull_secrets or [{"name": each} for each in provision.pull_secrets]
    own_account = pod.service_account_name is None
    return {
        "metadata": {
            "labels": {**pod.labels, **names.labels(name)},
            "annotations": {
                **pod.annotations,
                "kubectl.kubernetes.io/default-container": names.ENGINE_CONTAINER,
                **_present(
                    **{
                        names.ANNOTATION_ADAPTIVE: adaptive_config(spec),
                        names.ANNOTATION_API_KEY: _api_key(spec),
                    }
                ),
            },
        },
        "spec": {
            "containers": [container],
            "volumes": volumes,
            "serviceAccountName": name if own_account else pod.service_account_name,
            "enableServiceLinks": pod.enable_service_links,
            "terminationGracePeriodSeconds": pod.termination_grace_period_seconds,
            "securityContext": {
                "seccompProfile": {"type": "RuntimeDefault"},
                **(pod.security_context or {}),
            },
            **_present(
                automountServiceAccountToken=False if own_account else None,
                initContainers=_init_containers(spec),
                hostIPC=pod.host_ipc or None,
                nodeSelector=pod.node_selector,
                tolerations=pod.tolerations,
                affinity=pod.affinity,
                topologySpreadConstraints=pod.topology_spread_constraints,
                runtimeClassName=pod.runtime_class_name,
                priorityClassName=pod.priority_class_name,
                schedulerName=pod.scheduler_name,
                imagePullSecrets=pull_secrets,
            ),
        },
    }


def _port(name: str, number: int) -> PassThrough:
    # The protocol is half of the key by which server-side apply tells ports apart.
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _present(**fields: Any) -> dict[str, Any]:
    """Without what is unset or empty, which server-side apply would otherwise claim to own."""
    return {key: value for key, value in fields.items() if value not in (None, [], {})}


def _volumes(
    name: str, spec: SpecServeSpec, found: list[Weights]
) -> tuple[list[PassThrough], list[PassThrough]]:
    secret = names.credentials_secret(name)
    volumes: list[PassThrough] = [
        # Mounted as a directory, because a file mounted by subPath would never see a rotation.
        {"name": VOLUME_CREDENTIALS, "secret": {"secretName": secret, "optional": False}},
        {
            "name": VOLUME_ENGINE_CONFIG,
            "secret": {
                "secretName": secret,
                "optional": False,
                "items": [{"key": names.KEY_CONFIG, "path": names.KEY_CONFIG}],
            },
        },
    ]
    mounts: list[PassThrough] = [
        {"name": VOLUME_CREDENTIALS, "mountPath": names.CREDENTIALS_DIR, "readOnly": True},
        {"name": VOLUME_ENGINE_CONFIG, "mountPath": names.ENGINE_CONFIG_DIR, "readOnly": True},
    ]
    if adaptive_config(spec) is not None:
        # From the pod's own annotation: a ConfigMap could change under a running pod.
        volumes.append({"name": VOLUME_ADAPTIVE, "downwardAPI": {"items": [_adaptive_file()]}})
        mounts.append({"name": VOLUME_ADAPTIVE, "mountPath": names.ADAPTIVE_DIR, "readOnly": True})
    for item in found:
        volumes += [item.volume] if item.volume else []
        mounts += [item.mount] if item.mount else []
    taken = {posixpath.normpath(str(m.get("mountPath"))) for m in spec.pod.volume_mounts}
    if SHARED_MEMORY_DIR not in taken and (size := _shared_memory(spec)):
        volumes.append(
            {"name": VOLUME_SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        )
        mounts.append({"name": VOLUME_SHARED_MEMORY, "mountPath": SHARED_MEMORY_DIR})
    for position, volume in enumerate(spec.pod.volumes):
        if str(volume.get("name", "")).startswith(VOLUME_PREFIX):
            raise UnusableSpec(
                f"spec.pod.volumes[{position}].name",
                f"names beginning with {VOLUME_PREFIX} belong to the operator",
            )
    for mount in mounts:
        if mount["mountPath"] in taken:
            raise UnusableSpec(
                "spec.pod.volumeMounts",
                f"{mount['mountPath']} belongs to the operator; mount at another path",
            )
    return [*volumes, *spec.pod.volumes], [*mounts, *spec.pod.volume_mounts]


def _adaptive_file() -> PassThrough:
    path = f"metadata.annotations['{names.ANNOTATION_ADAPTIVE}']"
    return {
        "path": names.ADAPTIVE_FILE,
        "fieldRef": {"apiVersion": "v1", "fieldPath": path},
    }


def _shared_memory(spec: SpecServeSpec) -> str | None:
    if spec.engine.shared_memory is not None:
        return str(spec.engine.shared_memory)
    # With the node's IPC namespace comes the node's /dev/shm, which a volume would hide.
    return SHARED_MEMORY_SIZE if layout_of(spec).gpus > 1 and not spec.pod.host_ipc else None


def _environment(spec: SpecServeSpec) -> Iterator[PassThrough]:
    live = spec.draft.method in LIVE_METHODS
    # A user's value may refer to these as $(NAME), so they come first.
    yield {
        "name": names.ENV_POD_UID,
        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}},
    }
    yield {"name": names.ENV_ADMIN_PORT, "value": str(names.PORT_ADMIN)}
    yield {"name": names.ENV_CREDENTIALS_DIR, "value": names.CREDENTIALS_DIR}
    yield {"name": names.ENV_REQUIRE_LIVE, "value": "1" if live else "0"}
    steps = sorted(set(spec.draft.steps)) if live else [0]
    yield {"name": names.ENV_STEPS, "value": ",".join(map(str, steps))}
    yield from _hub_token(spec, {variable.name for variable in spec.engine.env})
    for variable in spec.engine.env:
        yield variable.model_dump(by_alias=True, exclude_none=True)


def _hub_token(spec: SpecServeSpec, taken: set[str]) -> Iterator[PassThrough]:
    reference = spec.model.token_secret_ref
    if reference and names.ENV_HUB_TOKEN not in taken:
        yield {
            "name": names.ENV_HUB_TOKEN,
            "valueFrom": {"secretKeyRef": {"name": reference.name, "key": reference.key}},
        }


def _api_key(spec: SpecServeSpec) -> str | None:
    reference = spec.engine.api_key_secret_ref
    return None if reference is None else f"{reference.name}/{reference.key}"


def _init_containers(spec: SpecServeSpec) -> list[PassThrough]:
    containers = []
    for container in spec.pod.init_containers:
        own = list(container.get("env") or [])
        added = list(_hub_token(spec, {variable.get("name") for variable in own}))
        containers.append({**container, "env": [*added, *own]} if added else dict(container))
    return containers


def _resources(spec: SpecServeSpec) -> dict[str, Any]:
    limits = spec.engine.resources.limits
    devices = {key: _count(value) for key, value in limits.items() if is_extended(key)}
    gpus = layout_of(spec).gpus
    if devices and max(devices.values()) < gpus:
        given = ", ".join(f"{key}: {limits[key]}" for key in sorted(devices))
        raise UnusableSpec(
            "spec.engine.resources.limits",
            f"the model is spread over {gpus} GPUs, which needs as many devices; given {given}",
        )
    return _present(
        requests={key: str(value) for key, value in spec.engine.resources.requests.items()},
        limits={key: str(value) for key, value in limits.items()},
    )


def is_extended(resource: str) -> bool:
    """Whether a resource is a device, as a device plugin names it."""
    domain, slash, _ = resource.rpartition("/")
    return bool(slash) and not domain.endswith("kubernetes.io")


def _count(quantity: int | str) -> float:
    # The API server takes whole numbers only here; it also judges what is none.
    text = str(quantity)
    return int(text) if text.isascii() and text.isdigit() else math.inf


def _probes(spec: SpecServeSpec) -> Mapping[str, PassThrough]:
    def plugin(failures: int) -> PassThrough:
        return {
            "httpGet": {"path": names.PATH_ADMIN_HEALTH, "port": names.PORT_NAME_ADMIN},
            "periodSeconds": PROBE_PERIOD_SECONDS,
            "timeoutSeconds": 3,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": plugin(
            math.ceil(spec.engine.startup_budget_seconds / PROBE_PERIOD_SECONDS)
        ),
        "readinessProbe": plugin(3),
        # SGLang's health check generates a token and waits up to 20 s for it, so that a busy
        # engine answers late. Only minutes of silence mean that it hangs, and then no request
        # is left to wait for.
        "livenessProbe": {
            "httpGet": {"path": names.PATH_SERVING_HEALTH, "port": names.PORT_NAME_SERVING},
            "periodSeconds": 30,
            "timeoutSeconds": 30,
            "failureThreshold": 6,
            "terminationGracePeriodSeconds": 30,
        },
    }


def _lifecycle(spec: SpecServeSpec) -> PassThrough | None:
    # The API server wants the pause to end before the grace period does.
    pause = min(DRAIN_SECONDS, spec.pod.termination_grace_period_seconds - 1)
    return {"preStop": {"sleep": {"seconds": pause}}} if pause > 0 else None
