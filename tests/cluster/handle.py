"""What every kind of cluster offers to tests and the demo."""

from __future__ import annotations

import json
import os
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from tests.cluster.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMAND_SECONDS = 120.0
"""Default bound on one command."""


class Cluster(ABC):
    """A running cluster.

    Attributes:
        directory: state, logs and kubeconfigs of this cluster.
        kubeconfig: of an administrator.
    """

    directory: Path
    kubeconfig: Path

    @property
    @abstractmethod
    def search_path(self) -> str:
        """Folders of kubectl and helm for the front of PATH; may be empty."""

    @abstractmethod
    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs another one where the cluster's addresses are reachable."""

    @abstractmethod
    def load_image(self, archive: Path) -> None:
        """Makes the image of an OCI or docker archive available to pods under its own name."""

    @abstractmethod
    def image(self, name: str) -> str:
        """The reference by which pods of this cluster find a loaded image, from its own name."""

    @abstractmethod
    def close(self) -> None:
        """Ends what was started for this cluster and removes what it left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self, kubeconfig: Path | None = None) -> dict[str, str]:
        """The environment of commands: KUBECONFIG, PATH, caches that leave nothing at home."""
        env = dict(os.environ)
        env["KUBECONFIG"] = str(kubeconfig or self.kubeconfig)
        env["KUBECACHEDIR"] = str(self.directory / "cache" / "kubectl")
        for name in ("CACHE", "CONFIG", "DATA"):
            env[f"HELM_{name}_HOME"] = str(self.directory / "cache" / f"helm-{name.lower()}")
        env["PATH"] = os.pathsep.join(filter(None, (self.search_path, env.get("PATH", ""))))
        # The cluster's addresses are this machine's: no proxy knows them.
        env["NO_PROXY"] = env["no_proxy"] = ",".join(
            filter(None, (env.get("NO_PROXY", ""), "127.0.0.0/8,10.0.0.0/8"))
        )
        return env

    def popen(
        self,
        argv: Sequence[str],
        *,
        kubeconfig: Path | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Starts a command where the cluster is reachable.

        Args:
            kubeconfig: whose rights it gets; the administrator's when not given.
            env: set beside `environment()`.
            options: further ones of subprocess.Popen.
        """
        return subprocess.Popen(
            self.enter(argv),
            env=self.environment(kubeconfig) | dict(env or {}),
            text=True,
            **options,
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        kubeconfig: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout: float = COMMAND_SECONDS,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command where the cluster is reachable and captures its output.

        Args:
            kubeconfig: whose rights it gets; the administrator's when not given.
            env: set beside `environment()`.
            stdin: text for its standard input; empty when not given.
            timeout: seconds until it is killed and subprocess.TimeoutExpired raised.
            check: whether an exit status other than 0 is an error.

        Raises:
            CommandError: it failed, with `check`; carries status and output.
        """
        done = subprocess.run(
            self.enter(argv),
            env=self.environment(kubeconfig) | dict(env or {}),
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise CommandError(list(argv), done.returncode, done.stdout, done.stderr)
        return done

    def kubectl(
        self,
        *arguments: str,
        stdin: str | None = None,
        kubeconfig: Path | None = None,
        timeout: float = COMMAND_SECONDS,
    ) -> str:
        """Runs kubectl and returns what it printed; CommandError when it fails."""
        return self.run(
            ["kubectl", *arguments], stdin=stdin, kubeconfig=kubeconfig, timeout=timeout
        ).stdout

    def get(self, *arguments: str) -> Any:
        """What `kubectl get ARGUMENTS -o json` says, parsed."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *manifests: Path | Mapping[str, Any], namespace: str = "") -> None:
        """Applies files, folders and objects, in one request to kubectl for all objects."""
        scope = ["--namespace", namespace] if namespace else []
        objects = [m for m in manifests if not isinstance(m, Path)]
        for path in manifests:
            if isinstance(path, Path):
                self.kubectl("apply", *scope, "-f", str(path))
        if objects:
            text = yaml.safe_dump_all([dict(each) for each in objects])
            self.kubectl("apply", *scope, "-f", "-", stdin=text)

    def kubeconfig_for(
        self, service_account: str, namespace: str = "default", duration: str = "24h"
    ) -> Path:
        """A kubeconfig with a token of a ServiceAccount, and so with its rights alone.

        Args:
            service_account: name of an existing one.
            namespace: where it is; also the kubeconfig's default namespace.
            duration: life of the token.
        """
        token = self.kubectl(
            "create", "token", service_account, "-n", namespace, f"--duration={duration}"
        ).strip()
        file = self.directory / f"{namespace}.{service_account}.kubeconfig"
        return self._write_kubeconfig(file, {"token": token}, namespace)

    def _write_kubeconfig(self, file: Path, user: dict[str, Any], namespace: str) -> Path:
        view = json.loads(
            self.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json")
        )
        view["users"][0]["user"] = user
        view["contexts"][0]["context"]["namespace"] = namespace
        file.touch(mode=0o600)
        file.write_text(json.dumps(view, indent=1))
        return file
