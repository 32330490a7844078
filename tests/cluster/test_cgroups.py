from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import cgroups
from tests.cluster.errors import ClusterError
from tests.cluster.node import enable_controllers

if TYPE_CHECKING:
    from pathlib import Path


def mounts(*rows: tuple[Path, str]) -> str:
    return "".join(f"cgroup {path} {kind} rw,relatime 0 0\n" for path, kind in rows)


def test_version_1_needs_a_group_in_every_hierarchy(tmp_path: Path) -> None:
    for name in ("cpuset", "memory", "unified"):
        (tmp_path / name).mkdir()
    (tmp_path / "cpuset/cpuset.cpus").write_text("0-3\n")
    rows = [(tmp_path / "cpuset", "cgroup"), (tmp_path / "memory", "cgroup")]
    tree = cgroups.plan("x", mounts(*rows, (tmp_path / "unified", "cgroup2")))
    assert {folder.parent.name for folder in tree.folders} == {"cpuset", "memory", "unified"}
    tree.create()
    assert all(folder.is_dir() for folder in tree.folders)
    assert tree.restore() == []


def test_version_2_enables_what_is_missing_and_gives_it_back(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids rdma\n")
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("cpu memory pids\n")
    tree = cgroups.plan("x", mounts((tmp_path, "cgroup2")))
    assert tree.folders == (tmp_path / "x",)
    tree.create()
    assert control.read_text() == "+cpuset +io"
    assert tree.restore() == [(control, "-cpuset -io")]


def test_what_several_nodes_need_is_enabled_before_and_given_back_after_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("memory\n")
    keeper = enable_controllers(mounts((tmp_path, "cgroup2")))
    assert control.read_text() == "+cpu +io"
    control.write_text("cpu io memory\n")  # as the kernel tells it
    node = cgroups.plan("x", mounts((tmp_path, "cgroup2")))
    assert node.restore() == []
    keeper.close()
    assert control.read_text() == "-cpu -io"


def test_an_unwritable_hierarchy_is_explained(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    tree = cgroups.plan("missing/x", mounts((tmp_path, "cgroup2")))
    with pytest.raises(ClusterError, match="--cgroupns=host"):
        tree.create()


def test_a_machine_without_control_groups_is_named() -> None:
    with pytest.raises(ClusterError, match="no cgroup file system"):
        cgroups.plan("x", "proc /proc proc rw 0 0\n")
