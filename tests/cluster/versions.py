"""The pinned versions and where their official downloads lie."""

from __future__ import annotations

import platform
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.cluster.errors import ClusterError

FILE = Path(__file__).with_name("versions.toml")

LIGHT = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = (
    *LIGHT,
    "kubelet",
    "kube-proxy",
    "helm",
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
)


@dataclass(frozen=True, slots=True)
class Release:
    """One official download.

    Attributes:
        binaries: what it holds.
        url: of the binary itself or of a tar archive.
        sums: URL of the published checksum file.
        members: path in the archive by binary; empty when the download is the binary.
        pinned: sha256 it must have beside the published one; may be empty.
    """

    binaries: tuple[str, ...]
    url: str
    sums: str
    members: dict[str, str]
    pinned: str


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of the components and the downloads that provide them."""

    of: dict[str, str]
    releases: tuple[Release, ...]


def architecture() -> str:
    """This machine's architecture as Go and the releases name it."""
    names = {"x86_64": "amd64", "aarch64": "arm64"}
    machine = platform.machine()
    if machine not in names:
        raise ClusterError(
            "choosing the Kubernetes binaries",
            f"no releases for {machine}",
            "Put binaries into a folder and name it in KUBEBUILDER_ASSETS.",
        )
    return names[machine]


def parse(text: str, arch: str) -> Versions:
    """Reads the format of versions.toml; templates are filled in."""
    data = tomllib.loads(text)
    of: dict[str, str] = data["versions"]
    sums: dict[str, str] = data.get("sha256", {})
    releases = []
    for entry in data["release"]:
        names: list[str] = entry["binaries"]
        # Without a member each binary is a download of its own.
        for group in [names] if "member" in entry else [[name] for name in names]:
            fields = {"version": of[entry["component"]], "arch": arch}
            url = entry["url"].format(name=group[0], **fields)
            releases.append(
                Release(
                    binaries=tuple(group),
                    url=url,
                    sums=entry["sums"].format(name=group[0], **fields),
                    members={
                        name: entry["member"].format(name=name, **fields)
                        for name in group
                        if "member" in entry
                    },
                    pinned=sums.get(f"{url.rsplit('/', 1)[1]} {arch}", ""),
                )
            )
    return Versions(of=of, releases=tuple(releases))


@cache
def pinned() -> Versions:
    """The versions of this checkout, for this machine."""
    return parse(FILE.read_text(), architecture())
