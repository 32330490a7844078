"""Builds the binaries from Go modules where no release can be downloaded."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.errors import ClusterError

if TYPE_CHECKING:
    from tests.cluster.progress import Progress
    from tests.cluster.versions import Versions

MODULE = Path(__file__).with_name("gomod")

LINKS = (
    "etcd",
    "helm",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
"""What the multi-call binary `kube` acts as."""

OWN = ("containerd", "containerd-shim-runc-v2", "ctr")
"""Binaries of their own: the shim's plugins share a registry with the daemon's."""

_STEP = "building the Kubernetes binaries"
_GO = "Install Go {want} or newer from https://go.dev/dl/ and put its bin folder on PATH."


def flags(versions: Versions) -> list[str]:
    """The flags of `go build` and `go list`.

    Debug data is left out when compiling: the linker drops it anyway, and without it the build
    cache is a quarter smaller.
    """
    version = versions.of["kubernetes"]
    major, minor, _ = version.split(".", 2)
    stamps = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    # Without these the components call themselves v0.0.0-master.
    linked = " ".join(
        f"-X {package}.{name}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for name, value in stamps.items()
    )
    return [
        "-trimpath",
        "-buildvcs=false",
        "-mod=readonly",
        "-gcflags=all=-dwarf=false",
        f"-ldflags=-s -w {linked}",
    ]


def fingerprint(versions: Versions) -> str:
    """Changes with whatever changes the binaries: versions, flags and sources."""
    said = [*flags(versions), *(f"{name} {of}" for name, of in sorted(versions.of.items()))]
    digest = hashlib.sha256("\0".join(said).encode())
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update((MODULE / name).read_bytes())
    return digest.hexdigest()[:12]


def build(versions: Versions, into: Path, progress: Progress) -> None:
    """Builds everything and puts it into a folder, each file by one rename.

    What was compiled stays in Go's own build cache, so a build that was interrupted goes on where
    it stopped.

    Raises:
        ClusterError: no suitable Go, modules that cannot be fetched, or a failed build.
    """
    environment = _environment()
    _require_go(environment)
    total = _stale(versions, environment, progress)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=into) as folder:
        _compile(versions, environment, Path(folder), total, progress)
        for name in ("kube", *OWN):
            (Path(folder) / name).replace(into / name)
        for name in LINKS:
            link = Path(folder) / f"link-{name}"
            link.symlink_to("kube")
            link.replace(into / name)


def _environment() -> dict[str, str]:
    # The user's own flags and workspace have no say; more garbage is cheaper than collecting it.
    return os.environ | {"CGO_ENABLED": "0", "GOGC": "400", "GOFLAGS": "", "GOWORK": "off"}


def _require_go(environment: dict[str, str]) -> None:
    match = re.search(r"^go (\S+)$", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert match is not None
    want = match[1]
    if shutil.which("go") is None:
        raise ClusterError(_STEP, "there is no Go toolchain", _GO.format(want=want))
    # Run outside the module: there, an old toolchain would already look for a newer one.
    local = subprocess.run(
        ["go", "env", "GOVERSION", "GOTOOLCHAIN"],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    have, _, toolchain = local.stdout.strip().partition("\n")
    if _release(have) >= _release(want):
        return
    # From 1.21 on Go fetches the toolchain that a module wants, unless told not to.
    if _release(have) >= (1, 21) and toolchain != "local":
        fetched = subprocess.run(
            ["go", "version"], cwd=MODULE, env=environment, capture_output=True, check=False
        )
        if fetched.returncode == 0:
            return
    raise ClusterError(
        _STEP, f"Go {want} is needed, this is {have or 'unknown'}", _GO.format(want=want)
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _stale(versions: Versions, environment: dict[str, str], progress: Progress) -> int:
    # Fetches the modules as a side effect, and tells how many packages are left to compile.
    progress.start("Fetching Go modules", "about half a minute when none is there")
    listed = subprocess.run(
        ["go", "list", *flags(versions), "-deps", "-f", "{{if .Stale}}x{{end}}", ".", "tool"],
        cwd=MODULE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        raise ClusterError(
            "fetching the Go modules of Kubernetes",
            listed.stderr.strip()[-2000:],
            "A Go module proxy must be reachable; set GOPROXY to one that is.",
        )
    progress.finish()
    return listed.stdout.count("x")


def _compile(
    versions: Versions, environment: dict[str, str], out: Path, total: int, progress: Progress
) -> None:
    # About 3,500 packages take 8 to 12 minutes on two cores.
    minutes = max(1, round(total / 350 * 2 / (os.cpu_count() or 1)))
    progress.start(
        f"Building the Kubernetes binaries, {total} packages",
        f"about {minutes} min; what is built is kept, also when interrupted",
    )
    tail: list[str] = []
    done = 0
    with subprocess.Popen(
        ["go", "build", "-v", *flags(versions), "-o", f"{out}/", ".", "tool"],
        cwd=MODULE,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if re.fullmatch(r"[\w./~-]+\n", line):
                    done += 1
                    progress.update(done, total, "packages")
                else:
                    tail = [*tail[-30:], line]
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise ClusterError(
            _STEP,
            f"go build ended with status {process.returncode}",
            "".join(tail).strip() or "It was killed: the linker needs 2.3 GB of memory.",
        )
    kube = out / "kube"
    if not kube.exists():
        raise ClusterError(_STEP, f"go build made no {kube.name}")
    progress.finish()
