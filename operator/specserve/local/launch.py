"""An engine process in place of a pod: the operator's rendered container, made to run here. Pure.

Command line and environment are those of the pod template. What a pod has in volumes lies in
files of the state folder, and their places stand where the mounted ones stood; of several engines
each has ports of its own, and GPUs of its own where the SpecServe asks for any.
"""

import hashlib
import re
import shlex
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specserve import api, names, workload
from specserve.bench.connection import ENV_API_KEY, ENV_TOKEN, BadOption
from specserve.document import Document
from specserve.local.places import Place

#: What an image with SGLang and the plugin runs.
ENTRY_POINT: Final = ("python3", "-m", "sglang.launch_server")
#: Variables of this process that engines do not get: they hold what the files hold.
_OURS: Final = frozenset({ENV_TOKEN, ENV_API_KEY})
ENV_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
#: A reference in a container's words, or an escaped dollar sign, as the kubelet reads them.
_REFERENCE: Final = re.compile(r"\$(?:\$|\(([^()]*)\))")
_HERE: Final = ("hf", "path")


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to an engine's health, as the rendered container has it.

    Attributes:
        url: Where.
        period: Seconds between two questions.
        timeout: Seconds to answer in.
        failures: Failures in a row that count.
        grace: Seconds to end in after they did, None for those of the engine.
    """

    url: str
    period: float
    timeout: float
    failures: int
    grace: float | None = None

    @property
    def budget(self) -> float:
        """Seconds until an engine that never answers has failed."""
        return self.period * self.failures


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one engine.

    Attributes:
        place: Where it is then.
        command: Its words.
        environ: Its variables beside those of this process.
        startup: Answers once it is ready.
        readiness: Answers while it may be steered.
        liveness: Answers unless it hangs.
        grace: Seconds to end in once it is asked to.
        files: Hash of what it reads at its start and never again, empty if that is not known.
    """

    place: Place
    command: tuple[str, ...]
    environ: Mapping[str, str]
    startup: Probe
    readiness: Probe
    liveness: Probe
    grace: float
    files: str = ""

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """All variables of the process."""
        return {k: v for k, v in inherited.items() if k not in _OURS} | dict(self.environ)

    @property
    def digest(self) -> str:
        """The same for the same process: another one has to be started anew."""
        words = [*self.command, *(f"{k}={v}" for k, v in sorted(self.environ.items())), self.files]
        return hashlib.sha256("\0".join(words).encode()).hexdigest()

    def shell(self) -> str:
        """The command with its variables, for a shell."""
        lines = ["env", *(f"{name}={shlex.quote(value)}" for name, value in self.environ.items())]
        for position, word in enumerate(self.command):
            quoted = shlex.quote(word)
            if position == 0 or word.startswith("--"):
                lines.append(quoted)
            else:
                lines[-1] += f" {quoted}"
        return " \\\n    ".join(lines)


@dataclass(frozen=True, slots=True)
class Files:
    """Where the files of all engines lie.

    Attributes:
        folder: The folder they are in.
    """

    folder: Path

    @property
    def credentials(self) -> Path:
        """What is mounted at `names.CREDENTIALS_DIR`."""
        return self.folder / "credentials"

    @property
    def places(self) -> dict[str, str]:
        """Paths here by those in a pod."""
        return {
            names.CREDENTIALS_DIR: str(self.credentials),
            names.ENGINE_CONFIG: str(self.folder / names.KEY_CONFIG),
            names.ADAPTIVE_CONFIG: str(self.folder / names.ADAPTIVE_FILE),
        }

    def contents(
        self, spec: api.SpecServeSpec, credentials: Mapping[str, str], api_key: str | None
    ) -> dict[Path, str]:
        """What they hold.

        Args:
            spec: The SpecServe.
            credentials: By key of the Secret in a cluster.
            api_key: Key of the serving port, None if it is to be open.
        """
        adaptive = workload.adaptive_config(spec)
        return {
            **{self.credentials / name: value for name, value in credentials.items()},
            self.folder / names.KEY_CONFIG: workload.engine_config(
                credentials[names.KEY_ADMIN_KEY], api_key
            ),
            **({} if adaptive is None else {self.folder / names.ADAPTIVE_FILE: adaptive}),
        }


def launches(
    asked: Document,
    files: Files,
    inherited: Mapping[str, str],
    *,
    entry_point: tuple[str, ...] = ENTRY_POINT,
    port: int = names.PORT_SERVING,
    admin_port: int = names.PORT_ADMIN,
) -> tuple[Launch, ...]:
    """How to start all engines of a SpecServe.

    Args:
        asked: The SpecServe.
        files: Where the files lie.
        inherited: Variables of this process; what a Secret would give comes from here.
        entry_point: What is run unless `spec.engine.command` says.
        port: Serving port of the first engine; the others' follow it.
        admin_port: Port of its plugin's listener, likewise.

    Raises:
        BadOption: Something that only a cluster has is needed.
        UnusableSpec: No pod could be made of it either.
    """
    spec = asked.spec
    for field, source in (("model", spec.model.source), ("draft", spec.draft.source)):
        scheme = (source or "path://").partition("://")[0]
        if scheme not in _HERE:
            raise BadOption(
                f"spec.{field}.source: {source} is mounted by a cluster; here it is hf:// or "
                "path:///DIR"
            )
    pod = _template(asked)
    [container] = pod["spec"]["containers"]
    return tuple(
        _launch(asked, pod, container, number, files, inherited, entry_point, port, admin_port)
        for number in range(spec.replicas)
    )


def _template(asked: Document) -> dict[str, Any]:
    owner = workload.Owner(asked.name, asked.namespace, uid="local")
    # No image is run, so none has to be named.
    provision = workload.Provision(image="none")
    for manifest in workload.desired(owner, asked.spec, provision):
        if manifest["kind"] == "Deployment":
            template: dict[str, Any] = manifest["spec"]["template"]
            return template
    raise AssertionError("no Deployment is rendered")


def _launch(
    asked: Document,
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    number: int,
    files: Files,
    inherited: Mapping[str, str],
    entry_point: tuple[str, ...],
    port: int,
    admin_port: int,
) -> Launch:
    name = f"{asked.name}-{number}"
    ports = {
        names.PORT_NAME_SERVING: port + number,
        names.PORT_NAME_ADMIN: admin_port + number,
    }
    place = Place(
        name,
        f"http://127.0.0.1:{ports[names.PORT_NAME_SERVING]}",
        f"http://127.0.0.1:{ports[names.PORT_NAME_ADMIN]}",
    )
    fields = {
        "metadata.name": name,
        "metadata.namespace": asked.namespace,
        "metadata.uid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{files.folder}/{name}")),
        "status.podIP": "127.0.0.1",
        "status.hostIP": "127.0.0.1",
    }
    variables: dict[str, str] = {}
    for variable in container["env"]:
        value = _value(variable, fields, inherited)
        if value is not None:
            variables[variable["name"]] = expand(_here(value, files), variables)
    variables[names.ENV_ADMIN_PORT] = str(ports[names.PORT_NAME_ADMIN])
    variables |= _devices(asked.spec, container, number, {**inherited, **variables})
    rendered = [
        word.replace(str(names.PORT_SERVING), str(ports[names.PORT_NAME_SERVING]))
        if word == f"--port={names.PORT_SERVING}"
        else word
        for word in container["args"]
    ]
    words = [*(container.get("command") or entry_point), *rendered]
    grace = float(pod["spec"]["terminationGracePeriodSeconds"])
    return Launch(
        place=place,
        command=tuple(expand(_here(word, files), variables) for word in words),
        environ=variables,
        startup=_probe(container["startupProbe"], ports),
        readiness=_probe(container["readinessProbe"], ports),
        liveness=_probe(container["livenessProbe"], ports),
        grace=grace,
    )


def _value(
    variable: Mapping[str, Any], fields: Mapping[str, str], inherited: Mapping[str, str]
) -> str | None:
    """The value of a container's variable; None if this process's own is to be kept."""
    source = variable.get("valueFrom")
    if source is None:
        return str(variable.get("value") or "")
    name = str(variable["name"])
    path = str((source.get("fieldRef") or {}).get("fieldPath"))
    if path in fields:
        return fields[path]
    optional = any((each or {}).get("optional") for each in source.values())
    if name in inherited or optional:
        return None
    kind = next(iter(source), "valueFrom")
    raise BadOption(
        f"{name}: its value comes from a cluster ({kind}); set {name} in the environment of this "
        "command, and the engines inherit it"
    )


def _here(word: str, files: Files) -> str:
    for there, here in files.places.items():
        word = word.replace(there, here)
    return word


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Put variables in as the kubelet does: `$(NAME)`, where `$$` is a dollar sign.

    A name that is not known stays as it is written.
    """

    def one(found: re.Match[str]) -> str:
        if found[1] is None:
            return "$"
        return variables.get(found[1], found[0])

    return _REFERENCE.sub(one, text)


def _devices(
    spec: api.SpecServeSpec,
    container: Mapping[str, Any],
    number: int,
    variables: Mapping[str, str],
) -> dict[str, str]:
    """GPUs of its own for each of several engines, as a device plugin would give them."""
    limits = container["resources"].get("limits") or {}
    if spec.replicas < 2 or not any("/" in name for name in limits):
        return {}
    each = workload.layout_of(spec).gpus
    given = [part for part in variables.get(ENV_DEVICES, "").split(",") if part]
    known = given or [str(index) for index in range(each * spec.replicas)]
    if len(known) < each * spec.replicas:
        raise BadOption(
            f"spec.replicas: {spec.replicas} engines of {each} GPUs need {each * spec.replicas}, "
            f"and {ENV_DEVICES} names {len(known)}"
        )
    return {ENV_DEVICES: ",".join(known[number * each : (number + 1) * each])}


def _probe(rendered: Mapping[str, Any], ports: Mapping[str, int]) -> Probe:
    asked = rendered["httpGet"]
    grace = rendered.get("terminationGracePeriodSeconds")
    return Probe(
        url=f"http://127.0.0.1:{ports[asked['port']]}{asked['path']}",
        period=float(rendered["periodSeconds"]),
        timeout=float(rendered["timeoutSeconds"]),
        failures=int(rendered["failureThreshold"]),
        grace=None if grace is None else float(grace),
    )
