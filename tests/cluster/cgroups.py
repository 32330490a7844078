"""The control groups of a node cluster: the one thing that namespaces do not take along."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.cluster.errors import ClusterError

NEEDED = frozenset({"cpu", "cpuset", "hugetlb", "io", "memory", "pids"})
"""Controllers of cgroup v2 that the kubelet and runc want in their groups, where there are any."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One group with the same name in every hierarchy.

    Attributes:
        name: as the kubelet takes it for cgroupRoot.
        folders: one for each hierarchy.
        enabled: controllers that cgroup v2 has to enable at its root for this tree.
    """

    name: str
    folders: tuple[Path, ...]
    enabled: tuple[str, ...]
    root: Path | None

    def restore(self) -> list[tuple[Path, str]]:
        """What to write to which file when the tree is gone, to leave the root as it was."""
        if self.root is None or not self.enabled:
            return []
        text = " ".join(f"-{controller}" for controller in self.enabled)
        return [(self.root / "cgroup.subtree_control", text)]

    def create(self) -> None:
        """Makes the groups.

        Raises:
            ClusterError: the control groups of this machine can't be written.
        """
        try:
            if self.root is not None and self.enabled:
                text = " ".join(f"+{controller}" for controller in self.enabled)
                (self.root / "cgroup.subtree_control").write_text(text)
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
                if self.root is None:
                    _inherit_cpuset(folder)
        except OSError as error:
            raise ClusterError(
                "making control groups",
                str(error),
                "/sys/fs/cgroup must be writable, and its root free for new groups: run on the "
                "machine itself, or in a privileged container with --cgroupns=host.",
            ) from error


def plan(name: str, mounts: str) -> Tree:
    """Says what a tree of this name needs, without making it.

    Args:
        name: of the group.
        mounts: content of /proc/self/mounts.
    """
    rows = [line.split() for line in mounts.splitlines()]
    v1 = [Path(row[1]) for row in rows if row[2] == "cgroup"]
    v2 = [Path(row[1]) for row in rows if row[2] == "cgroup2"]
    if v1:
        # Hybrid: the kubelet uses the hierarchies of v1, runc makes a group in v2's as well.
        return Tree(name, tuple(dict.fromkeys(each / name for each in [*v1, *v2])), (), None)
    if not v2:
        raise ClusterError("making control groups", "no cgroup file system is mounted")
    root = v2[0]
    available = set((root / "cgroup.controllers").read_text().split())
    present = set((root / "cgroup.subtree_control").read_text().split())
    return Tree(name, (root / name,), tuple(sorted((NEEDED & available) - present)), root)


def _inherit_cpuset(folder: Path) -> None:
    # Version 1 starts a group with no processors, and then no process may join.
    for file in ("cpuset.cpus", "cpuset.mems"):
        if (folder / file).exists():
            (folder / file).write_text((folder.parent / file).read_text())
