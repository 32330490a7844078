"""Settings of the operator process, read once from the environment."""

import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PREFIX = "SPECSERVE_OPERATOR_"


class BadSetting(Exception):
    """An environment variable cannot be used; the message names it and what it should be."""


class Settings(BaseModel):
    """What the process is told; each field is the variable `SPECSERVE_OPERATOR_<NAME>`."""

    model_config = ConfigDict(frozen=True)

    namespace: str = Field(default="default", description="Where the operator's Lease lives.")
    lease_name: str = Field(
        default="specserve", description="Name of that Lease; with the namespace it is the holder."
    )
    identity: str = Field(default="", description="This process in the Lease; unique.")
    watch_namespaces: tuple[str, ...] = Field(
        default=(), description="Namespaces to serve, comma-separated; none means all."
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
    workers: int = Field(default=8, ge=1, description="SpecServes reconciled at once.")
    lease_seconds: float = Field(
        default=12.0, gt=0, description="Time without renewal after which another may lead."
    )
    renew_seconds: float = Field(
        default=8.0, gt=0, description="Time without renewal after which this leader stops."
    )
    retry_seconds: float = Field(default=2.0, gt=0, description="Time between two tries.")
    metric_running: str = Field(
        default="sglang:num_running_reqs", description="Fallback metric of running requests."
    )
    metric_queued: str = Field(
        default="sglang:num_queue_reqs", description="Fallback metric of queued requests."
    )
    metric_tokens: str = Field(
        default="sglang:generation_tokens_total", description="Fallback metric of tokens made."
    )
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")

    @property
    def holder(self) -> str:
        """The installation in directives: all replicas of one installation share it."""
        return f"{self.namespace}/{self.lease_name}"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read the settings.

        Raises:
            BadSetting: A variable has a value that cannot be used.
        """
        given: dict[str, object] = {
            name: environ[PREFIX + name.upper()]
            for name in cls.model_fields
            if environ.get(PREFIX + name.upper())
        }
        if "watch_namespaces" in given:
            given["watch_namespaces"] = tuple(
                part.strip() for part in str(given["watch_namespaces"]).split(",") if part.strip()
            )
        if _NAMESPACE_FILE.exists():
            given.setdefault("namespace", _NAMESPACE_FILE.read_text().strip())
        given.setdefault("identity", f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = PREFIX + str(first["loc"][0]).upper()
            raise BadSetting(f"{name}={environ.get(name)!r}: {first['msg']}") from None
