"""A cluster that is there already, such as kind's or minikube's."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster import builder
from tests.cluster.errors import ClusterError
from tests.cluster.handle import Cluster

if TYPE_CHECKING:
    from collections.abc import Sequence

REGISTRY = "SPECSERVE_REGISTRY"
"""Variable that names the registry which the cluster's nodes pull from, as in host:5000/path."""


class ExistingCluster(Cluster):
    """The cluster that a kubeconfig's current context points to; nothing of it is ended.

    Args:
        kubeconfig: the user's; KUBECONFIG when not given.
        registry: where images are pushed; SPECSERVE_REGISTRY when not given.

    Raises:
        ClusterError: there is no kubeconfig or no kubectl, or the cluster does not answer.
    """

    def __init__(self, kubeconfig: Path | None = None, registry: str | None = None) -> None:
        named = kubeconfig or os.environ.get("KUBECONFIG")
        if not named or not Path(named).is_file():
            raise ClusterError(
                "using an existing cluster",
                f"no kubeconfig at {named or 'KUBECONFIG'}",
                "Set KUBECONFIG to one file.",
            )
        self.kubeconfig = Path(named).absolute()
        self.registry = registry or os.environ.get(REGISTRY, "")
        self._tools = ""
        if shutil.which("kubectl") is None:
            from tests.cluster.binaries import resolve

            self._tools = resolve(("kubectl", "helm")).search_path
        self.directory = Path(tempfile.mkdtemp(prefix="specserve-cluster-"))
        try:
            self.kubectl("version", "--request-timeout=10s", timeout=30)
        except BaseException:
            self.close()
            raise

    @property
    def search_path(self) -> str:
        """Folder of kubectl and helm when the user has none."""
        return self._tools

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command itself."""
        return list(argv)

    def image(self, name: str) -> str:
        """The image's name in the user's registry."""
        if not self.registry:
            raise ClusterError(
                f"naming the image {name}",
                "no registry",
                f"Set {REGISTRY} to one that this machine can push to and the cluster pull from.",
            )
        return f"{self.registry.rstrip('/')}/{name.rsplit('/', 1)[1]}"

    def load_image(self, archive: Path) -> None:
        """Pushes the image of an archive to the user's registry."""
        name = builder.name_of(archive)
        builder.choose().push(archive, name, self.image(name))

    def close(self) -> None:
        """Removes the files of this handle; the cluster stays as it is."""
        shutil.rmtree(self.directory, ignore_errors=True)
