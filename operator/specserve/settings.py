"""Settings of the operator process, read once from the environment."""

import socket
import textwrap
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PREFIX = "SPECSERVE_OPERATOR_"


class BadSetting(Exception):
    """An environment variable cannot be used; the message names it and what it should be."""


class Settings(BaseModel):
    """What the process is told; each field is the variable `SPECSERVE_OPERATOR_<NAME>`."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    namespace: str = Field(
        default="default",
        description="Where the operator's Lease lives; in a pod its namespace unless it is set.",
    )
    lease_name: str = Field(
        default="specserve", description="Name of that Lease; with the namespace it is the holder."
    )
    identity: str = Field(
        default="",
        description="This process in the Lease; unique. One is made up if it is not set.",
    )
    watch_namespaces: tuple[str, ...] = Field(
        default=(), description="Namespaces to serve, comma-separated; none, or *, means all."
    )
    http_port: int = Field(
        default=8080, ge=0, le=65535, description="Port of /metrics, /healthz and /readyz."
    )
    samples_per_second: int = Field(
        default=800,
        ge=1,
        description="Most readings of engine load a second; above it the period is stretched.",
    )
    read_back_seconds: float = Field(
        default=10.0, ge=1, description="Longest time between two read-backs of one engine."
    )
    look_seconds: float = Field(
        default=60.0,
        ge=1,
        description="Longest time between two looks whether the kind is still installed, and "
        "whether there are still rights in each namespace that is listed and served.",
    )
    compare_seconds: float = Field(
        default=30.0, ge=1, description="Time between two looks at the installed schema."
    )
    curve_seconds: float = Field(
        default=30.0,
        ge=1,
        description="Time for which a ConfigMap with a curve is taken as read; it is looked at "
        "again as often.",
    )
    workers: int = Field(default=8, ge=1, description="SpecServes reconciled at once.")
    api_connections: int = Field(
        default=64, ge=4, description="Calls to the API server under way at once, but watches."
    )
    image: str = Field(
        default="",
        description="Image of the operator itself, which the Jobs of calibrations run; without "
        "it none is made.",
    )
    engine_image: str = Field(
        default="", description="Image of engines whose SpecServe names none."
    )
    image_registry: str = Field(
        default="", description="Registry put before engine images that name none."
    )
    engine_pull_secrets: tuple[str, ...] = Field(
        default=(),
        description="Pull secrets of engine pods whose SpecServe names none, comma-separated.",
    )
    network_policies: Literal["Ignore", "Remove", "Apply"] = Field(
        default="Ignore",
        description="Apply closes the admin port of engines to all but the operator, by a "
        "NetworkPolicy for each SpecServe; Remove takes them away; Ignore needs no right.",
    )
    pod_labels: dict[str, str] = Field(
        default={},
        description="Labels of the operator's own pods, as KEY=VALUE, comma-separated; the "
        "NetworkPolicies know it by them.",
    )
    lease_seconds: float = Field(
        default=12.0, gt=0, description="Time without renewal after which another may lead."
    )
    renew_seconds: float = Field(
        default=8.0,
        gt=0,
        validate_default=True,
        description="Time without renewal after which this leader stops.",
    )
    retry_seconds: float = Field(
        default=2.0, gt=0, validate_default=True, description="Time between two tries."
    )
    metric_running: str = Field(
        default="sglang:num_running_reqs", description="Fallback metric of running requests."
    )
    metric_queued: str = Field(
        default="sglang:num_queue_reqs", description="Fallback metric of queued requests."
    )
    metric_tokens: str = Field(
        default="sglang:generation_tokens_total", description="Fallback metric of tokens made."
    )
    prometheus_hosts: tuple[str, ...] = Field(
        default=("*",),
        description="Hosts that policy.prometheus.url may name, as patterns (*.monitoring.svc), "
        "comma-separated. An address of the operator's own machine or link is called only where "
        "its host stands here without a wildcard.",
    )
    prometheus_token_files: dict[str, str] = Field(
        default={},
        description="Files of the operator's pod with a bearer token, as HOST=PATH, "
        "comma-separated. Read anew for each query; sent over TLS where a SpecServe names the "
        "host, no credentials, and no query of its own.",
    )
    log_level: str = Field(
        default="INFO",
        pattern="^(DEBUG|INFO|WARNING|ERROR)$",
        description="Least grave messages that are logged: DEBUG, INFO, WARNING or ERROR.",
    )

    @field_validator("renew_seconds", "retry_seconds")
    @classmethod
    def _below(cls, value: float, info: ValidationInfo) -> float:
        limit = {"renew_seconds": "lease_seconds", "retry_seconds": "renew_seconds"}[
            info.field_name or ""
        ]
        # The order that keeps two processes from leading at once.
        if limit in info.data and value >= info.data[limit]:
            raise ValueError(f"must be below {PREFIX}{limit.upper()} ({info.data[limit]:g})")
        return value

    @property
    def holder(self) -> str:
        """The installation in directives: all replicas of one installation share it."""
        return f"{self.namespace}/{self.lease_name}"

    @property
    def override_name(self) -> str:
        """Name of the ConfigMap, in the operator's namespace, that overrides all policies."""
        return f"{self.lease_name}-override"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read the settings.

        Raises:
            BadSetting: A variable has a value that cannot be used.
        """
        given: dict[str, Any] = {
            name: environ[PREFIX + name.upper()]
            for name in cls.model_fields
            if environ.get(PREFIX + name.upper())
        }
        for name in ("watch_namespaces", "engine_pull_secrets", "prometheus_hosts"):
            if name in given:
                given[name] = tuple(dict.fromkeys(_parts(given[name])))
        if "*" in given.get("watch_namespaces", ()):
            given["watch_namespaces"] = ()
        for name in ("pod_labels", "prometheus_token_files"):
            if name in given:
                pairs = (part.partition("=") for part in _parts(given[name]))
                given[name] = {key: value for key, _, value in pairs}
        if _NAMESPACE_FILE.exists():
            given.setdefault("namespace", _NAMESPACE_FILE.read_text().strip())
        given.setdefault("identity", f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
        try:
            settings = cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = PREFIX + str(first["loc"][0]).upper()
            raise BadSetting(f"{name}={str(first['input'])!r}: {first['msg']}") from None
        if settings.network_policies == "Apply" and not settings.pod_labels:
            raise BadSetting(f"{PREFIX}NETWORK_POLICIES=Apply needs {PREFIX}POD_LABELS")
        return settings


def described() -> str:
    """All variables with what they mean and what holds where one is not set, for people."""
    lines = []
    for name, field in Settings.model_fields.items():
        lines.append(f"  {PREFIX}{name.upper()}")
        shown = _shown(field.default)
        said = f"{field.description} (default: {shown})" if shown else str(field.description)
        lines += textwrap.wrap(
            said, 95, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
        )
    return "\n".join(lines)


def _shown(default: object) -> str:
    """A default as the variable would have it; empty if there is none."""
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, dict):
        return ",".join(f"{key}={value}" for key, value in default.items())
    return f"{default:g}" if isinstance(default, float) else str(default)


def _parts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]
