"""Small values out of Kubernetes objects: what the operator keeps of them. Pure.

Whole bodies are not kept: 10,000 pods of 15 kB would be most of the operator's memory.
"""

import json
import re
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve import names

Key = tuple[str, str]
"""Namespace and name of a SpecServe."""

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod is not what it should be.

    Attributes:
        reason: One word for machines, a reason of a condition.
        message: The kubelet's or scheduler's own words, with the container named.
    """

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One engine pod.

    Attributes:
        uid: Its uid; the identity that directives carry.
        key: The SpecServe it belongs to.
        name: Its name.
        ip: Primary pod address, None before there is one.
        usable: Ready, running, not on its way out and not aside: it may be read and switched.
        alive: Not finished and not on its way out: it counts as a replica.
        leaving: On its way out; it still holds its GPU.
        boot: Changes with each start of the engine container.
        trouble: What keeps it from being ready, None if nothing is known to.
        aside: For which request it was taken out of its Service to be calibrated, None if it
            serves.
        measured: Whether it was ever taken out of its Service to be calibrated.
    """

    uid: str
    key: Key
    name: str
    ip: str | None
    usable: bool
    alive: bool
    leaving: bool
    boot: str
    trouble: Trouble | None
    aside: str | None = None
    measured: bool = False

    @property
    def ready(self) -> bool:
        """Whether it is ready as Kubernetes has it, aside or not."""
        return self.usable or (self.aside is not None and self.alive and self.trouble is None)


@dataclass(frozen=True, slots=True)
class Worker:
    """A pod of a Job that measures an engine pod.

    Attributes:
        uid: Its uid.
        key: The SpecServe it belongs to.
        name: Its name.
        job: Name of its Job.
        exit_code: Of its container, None before it has ended; -1 if the pod failed without one.
        words: What the container left, or why there is nothing.
        grace: Seconds that it has to end, counted from its deletion; None unless it is being
            deleted.
        started: Whether its container runs, or has.
        waits: What a container that has not started waits for, in the kubelet's or scheduler's own
            words; empty if they say nothing.
    """

    uid: str
    key: Key
    name: str
    job: str
    exit_code: int | None
    words: str
    grace: float | None = None
    started: bool = False
    waits: str = ""


def either(item: Object) -> Pod | Worker:
    """Read a v1 Pod, of whichever kind it is."""
    labels = item["metadata"].get("labels") or {}
    calibrates = labels.get(names.LABEL_COMPONENT) == names.COMPONENT_CALIBRATION
    return worker(item) if calibrates else pod(item)


def worker(item: Object) -> Worker:
    """Read a v1 Pod of a calibration."""
    meta, status = item["metadata"], item.get("status") or {}
    ended = next(
        (done for c in _containers(status) if (done := (c.get("state") or {}).get("terminated"))),
        None,
    )
    exit_code, words = None, ""
    if ended is not None:
        exit_code, words = int(ended.get("exitCode", -1)), ended.get("message") or ""
        if exit_code and not words:
            words = str(ended.get("reason") or "")
    elif status.get("phase") in {"Failed", "Succeeded"}:
        exit_code, words = -1, str(status.get("message") or status.get("reason") or "")
    return Worker(
        uid=meta["uid"],
        key=_key(meta),
        name=meta["name"],
        job=(meta.get("labels") or {}).get(names.LABEL_JOB, ""),
        exit_code=exit_code,
        words=words,
        grace=float(meta.get("deletionGracePeriodSeconds") or 0)
        if meta.get("deletionTimestamp")
        else None,
        started=exit_code is not None
        or any("running" in (c.get("state") or {}) for c in _containers(status)),
        waits=_waits(status),
    )


def _waits(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _reason_and_message(condition)
    waiting = ((c.get("state") or {}).get("waiting") for c in _containers(status))
    return next((_reason_and_message(each) for each in waiting if each), "")


def _reason_and_message(said: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (said.get("reason"), said.get("message"))))


def pod(item: Object) -> Pod:
    """Read a v1 Pod of an engine."""
    meta, status = item["metadata"], item.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    phase = status.get("phase")
    leaving = bool(meta.get("deletionTimestamp"))
    ip = status.get("podIP") or None
    containers = [*(status.get("initContainerStatuses") or ()), *_containers(status)]
    engine: Object = next((c for c in containers if c["name"] == names.ENGINE_CONTAINER), {})
    aside, annotations = None, meta.get("annotations") or {}
    if (meta.get("labels") or {}).get(names.LABEL_PART_OF) == names.ASIDE:
        aside = annotations.get(names.ANNOTATION_CALIBRATION, "")
    ready = conditions.get("Ready", {}).get("status") == "True"
    return Pod(
        uid=meta["uid"],
        key=_key(meta),
        name=meta["name"],
        ip=ip,
        usable=ready and phase == "Running" and not leaving and ip is not None and aside is None,
        alive=phase not in {"Failed", "Succeeded"} and not leaving,
        leaving=leaving,
        boot=f"{engine.get('containerID', '')}#{engine.get('restartCount', 0)}",
        trouble=_trouble(phase, conditions, containers),
        aside=aside,
        measured=names.ANNOTATION_CALIBRATED in annotations,
    )


_WAITING = {
    "ErrImagePull": "ImagePullFailed",
    "ImagePullBackOff": "ImagePullFailed",
    "InvalidImageName": "ImagePullFailed",
    "ErrImageNeverPull": "ImagePullFailed",
    "CreateContainerConfigError": "ContainerConfigInvalid",
    "CreateContainerError": "ContainerConfigInvalid",
    "CrashLoopBackOff": "CrashLooping",
}


def _trouble(
    phase: str | None, conditions: Mapping[str, Any], containers: list[Any]
) -> Trouble | None:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return Trouble("Unschedulable", scheduled.get("message") or "the scheduler gave no reason")
    for container in containers:
        state = container.get("state") or {}
        last = (container.get("lastState") or {}).get("terminated") or {}
        waiting = state.get("waiting") or {}
        reason = _WAITING.get(waiting.get("reason", ""))
        if reason == "CrashLooping":
            return _ended(reason, f"container {container['name']} {_exit(last)}", last)
        if reason:
            return Trouble(
                reason,
                f"container {container['name']}: {waiting['reason']}: "
                f"{waiting.get('message') or container.get('image', '')}",
            )
        ended = state.get("terminated") or {}
        # An engine never comes to its end, and SGLang may leave with 0 after a crash.
        if ended and (ended.get("exitCode") or container["name"] == names.ENGINE_CONTAINER):
            return _ended("CrashLooping", f"container {container['name']} {_exit(ended)}", ended)
        if last and not container.get("ready") and container.get("restartCount", 0) > 0:
            return _ended(
                "Restarted",
                # Without the count: an event and a status of their own for each restart.
                f"container {container['name']} {_exit(last)}; it was restarted",
                last,
            )
    if phase == "Failed":
        return Trouble("PodFailed", "the pod failed; its Deployment replaces it")
    if phase == "Running" and conditions.get("Ready", {}).get("status") != "True":
        return Trouble("Loading", "the engine runs and is not ready yet")
    return None


#: What PyTorch says when the GPU's memory does not suffice, in its various ways.
_OUT_OF_GPU_MEMORY = re.compile(r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError")
_LOWER = (
    "lower engine.memFractionStatic, engine.maxRunningRequests (graphs are captured up to it), "
    "or the number of draft.steps (each has graphs of its own)"
)


#: Where SGLang loads the draft and captures its graphs, in the traceback of what it meets there
#: (0.5.14 to 0.5.23). What it then says differs by model, layer and version.
_MAKING_DRAFT_READY = re.compile(
    r"in maybe_init_draft_worker$|^ +self\.draft_worker\.init_cuda_graphs\(\)$", re.MULTILINE
)
_REJECTED = (
    "it ended while it made the draft ready: does draft fit model and the engine's version?"
)


_MORE_MEMORY = "raise its limit; that of the engine is spec.engine.resources.limits.memory"


def _ended(reason: str, message: str, ended: Mapping[str, Any]) -> Trouble:
    """Why a container ended; the GPU's memory is told apart from the kernel's OOMKilled."""
    words = ended.get("message") or ""
    if _OUT_OF_GPU_MEMORY.search(words):
        return Trouble("OutOfGpuMemory", f"{message}; {_LOWER}")
    if ended.get("reason") == "OOMKilled":
        return Trouble(reason, f"{message}; {_MORE_MEMORY}")
    if _MAKING_DRAFT_READY.search(words):
        return Trouble("DraftRejected", f"{message}; {_REJECTED}")
    return Trouble(reason, message)


#: The exception below a traceback; more lines may follow.
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception)\b.*", re.MULTILINE)


def _said(words: str) -> str:
    """The line that says most: the exception of a traceback, else the last one."""
    raised = _RAISED.findall(words) if "Traceback (most recent call last):" in words else []
    lines = raised or words.strip().splitlines()
    return lines[-1][:300] if lines else ""


def _exit(ended: Mapping[str, Any]) -> str:
    said = _said(ended.get("message") or "")
    return (
        f"ended with {ended.get('reason') or 'Error'}, exit code {ended.get('exitCode', '?')}"
        + (f": {said}" if said else "")
    )


def _containers(status: Mapping[str, Any]) -> list[Any]:
    return list(status.get("containerStatuses") or ())


@dataclass(frozen=True, slots=True)
class Owned:
    """One object the operator made: enough to tell whether it still is as it should be.

    Attributes:
        kind: Its kind.
        uid: Its uid.
        key: The SpecServe its labels name.
        name: Its name.
        owner: Uid of its controller, empty if it has none.
        live: The parts that the operator writes, as canonical JSON.
        problem: What keeps a Deployment from its pods, None if nothing does.
        rolled_out: Whether a Deployment has finished its rollout.
        replaces: Whether pods of an older template are left, which a Deployment replaces; where
            the number of pods is changed alone there are none.
    """

    kind: str
    uid: str
    key: Key
    name: str
    owner: str
    live: bytes
    problem: Trouble | None = None
    rolled_out: bool = True
    replaces: bool = False


def owned(kind: str, item: Object) -> Owned:
    """Read a Deployment, Service or ServiceAccount; lists leave `kind` out of their items."""
    meta, status = item["metadata"], item.get("status") or {}
    older = status.get("replicas", 0) > status.get("updatedReplicas", 0)
    return Owned(
        kind=kind,
        uid=meta["uid"],
        key=_key(meta),
        name=meta["name"],
        owner=controller(item),
        live=written_parts(item),
        problem=_problem({c["type"]: c for c in status.get("conditions") or ()}),
        rolled_out=kind != "Deployment"
        or (
            status.get("observedGeneration") == meta.get("generation")
            and status.get("updatedReplicas", 0) >= item["spec"].get("replicas", 1)
            and not older
        ),
        replaces=kind == "Deployment" and older,
    )


#: What the API server refuses a pod for, and what to change then.
_MENDS = {
    "error looking up service account": (
        "spec.pod.serviceAccountName must name a ServiceAccount of this namespace"
    ),
    "exceeded quota": "lower spec.replicas or spec.engine.resources, or have the quota raised",
}


def _problem(conditions: Mapping[str, Any]) -> Trouble | None:
    failure, progressing = conditions.get("ReplicaFailure", {}), conditions.get("Progressing", {})
    if failure.get("status") == "True":
        words = str(failure.get("message") or failure.get("reason") or "")
        mend = next((mend for said, mend in _MENDS.items() if said in words), None)
        return Trouble("PodsRefused", f"{words}; {mend}" if mend else words)
    if progressing.get("reason") == "ProgressDeadlineExceeded":
        return Trouble("ReplicasNotReady", str(progressing.get("message") or ""))
    return None


def controller(item: Object) -> str:
    """Uid of an object's controller, empty if it has none."""
    references = item["metadata"].get("ownerReferences") or ()
    return next((one["uid"] for one in references if one.get("controller")), "")


def version(item: Object) -> str:
    """What changes with the spec of an object, of one that has no generation with anything."""
    meta = item["metadata"]
    return str(meta.get("generation") or meta["resourceVersion"])


def written_parts(item: Object) -> bytes:
    """What an operator may write of an object, as canonical JSON."""
    return json.dumps(_written(item), sort_keys=True, separators=(",", ":")).encode()


def holds(live: bytes, desired: Object) -> bool:
    """Whether an object has all that is desired of it.

    What the server or others have added does not count as a difference: defaults, injected
    annotations, another manager's fields. Inside what server-side apply replaces as a whole
    (`ATOMIC`) it does.
    """
    return _within(_written(desired), json.loads(live))


def _written(item: Object) -> dict[str, Any]:
    body = {k: v for k, v in item.items() if k not in _NOT_WRITTEN}
    meta = item["metadata"]
    body["metadata"] = {
        field: meta[field]
        for field in ("labels", "annotations", "ownerReferences")
        if field in meta
    }
    return body


_NOT_WRITTEN = frozenset({"apiVersion", "kind", "metadata", "status"})

#: Fields that are one value however much is in them: one label more in a selector selects other
#: pods. So the API server's OpenAPI has them (Kubernetes 1.36): `x-kubernetes-map-type: atomic` of
#: LabelSelector, Service.spec.selector, PodSpec.nodeSelector, NodeSelector, SecretKeySelector and
#: ConfigMapKeySelector, `x-kubernetes-list-type: atomic` of the rest. The server adds no defaults
#: inside these; the other atomic fields, fieldRef among them, it does, and nothing of weight fits
#: beside what is in them.
ATOMIC = frozenset(
    {
        "selector",
        "podSelector",
        "labelSelector",
        "nodeSelector",
        "requiredDuringSchedulingIgnoredDuringExecution",
        "preferredDuringSchedulingIgnoredDuringExecution",
        "tolerations",
        "ingress",
        "secretKeyRef",
        "configMapKeyRef",
    }
)


def _within(want: Any, have: Any) -> bool:
    if isinstance(want, Mapping):
        if have is None:
            # An object of nothing but zero values and none are the same to the API server.
            have = {}
        return isinstance(have, Mapping) and all(
            _within(value, have.get(name))
            and (name not in ATOMIC or _no_more(value, have.get(name)))
            for name, value in want.items()
        )
    if isinstance(want, list):
        if have is None:
            return not want
        return (
            isinstance(have, list)
            and len(want) == len(have)
            and all(_within(w, h) for w, h in zip(want, have, strict=True))
        )
    if want is None or want == "" or want is False or want == 0:
        # The API server leaves zero values out of its answers.
        return not have
    return bool(want == have)


def _no_more(want: Any, have: Any) -> bool:
    """Whether there is no field but those wanted. An empty selector is one: it selects all."""
    if isinstance(want, Mapping) and isinstance(have, Mapping):
        return all(name in want and _no_more(want[name], value) for name, value in have.items())
    if isinstance(want, list) and isinstance(have, list):
        return all(_no_more(w, h) for w, h in zip(want, have, strict=True))
    return True


@dataclass(frozen=True, slots=True)
class Credentials:
    """The engine credentials of one SpecServe; never shown.

    Attributes:
        uid: Uid of the Secret.
        key: The SpecServe its labels name.
        name: Name of the Secret.
        tokens: Plugin tokens, the current one first.
        rotated: The rotation request that was honoured last.
        holder: The installation that serves the SpecServe, empty if none is on record.
        data: All keys, decoded.
    """

    uid: str
    key: Key
    name: str
    tokens: tuple[str, ...]
    rotated: str
    holder: str
    data: Mapping[str, str]

    def __repr__(self) -> str:
        """Keep the values out of logs and tracebacks."""
        return f"Credentials({self.key[0]}/{self.name})"


def credentials(item: Object) -> Credentials:
    """Read a v1 Secret of engine credentials."""
    meta = item["metadata"]
    data = {name: decode(value) for name, value in (item.get("data") or {}).items()}
    annotations = meta.get("annotations") or {}
    tokens = (data.get(names.KEY_PLUGIN_TOKEN), data.get(names.KEY_PLUGIN_TOKEN_PREVIOUS))
    return Credentials(
        uid=meta["uid"],
        key=_key(meta),
        name=meta["name"],
        tokens=tuple(token for token in tokens if token),
        rotated=annotations.get(names.ANNOTATION_ROTATED, ""),
        holder=annotations.get(names.ANNOTATION_OPERATOR, ""),
        data=data,
    )


def decode(value: str) -> str:
    """Decode a value of a Secret's data."""
    return b64decode(value).decode(errors="replace")


def _key(meta: Mapping[str, Any]) -> Key:
    return meta["namespace"], (meta.get("labels") or {}).get(names.LABEL_INSTANCE, "")
