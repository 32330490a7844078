"""The GPU host: what the bundle is unpacked to, and how a server is started there.

    python3 -m tests.gpu.host [--bundle .gpu] [--home /tmp/specserve-gpu]

unpacks, and prints what belongs on PYTHONPATH for programs that need packages of the bundle. A
host that has been set up with the same bundle is left as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.engine.install import (
    REPOSITORY,
    distribution,
    entry_point,
    install,
    mount_credentials,
)

VERSION = "0.5.16"
PORT, ADMIN_PORT = 30_000, 9_470
TOKEN = "gpu-token"
HOME = Path("/tmp/specserve-gpu")
BUNDLE = REPOSITORY / ".gpu"
PLUGINS = Path(__file__).parent / "plugins"
ACCEPTANCE = "simulated_acceptance"


class Host:
    """One folder on the GPU host.

    Attributes:
        bundle: What `tests.gpu.bundle` made.
        home: What all servers of one fleet write to.
        unpacked: What the bundle is unpacked to, which several fleets may share.
    """

    def __init__(
        self, bundle: Path = BUNDLE, home: Path = HOME, unpacked: Path | None = None
    ) -> None:
        self.bundle = bundle.resolve()
        self.home = home
        self.unpacked = unpacked or home
        self.site = self.unpacked / "site"
        self.credentials = home / "credentials"

    def set_up(self) -> None:
        """Unpack the bundle and compile it: three processes import it at each start."""
        archive = self.bundle / "site.tar.xz"
        stamp, now = self.unpacked / "unpacked", f"{archive.stat().st_size}"
        if not stamp.exists() or stamp.read_text() != now:
            self.unpacked.mkdir(parents=True, exist_ok=True)
            subprocess.run(["tar", "-C", str(self.unpacked), "-xJf", str(archive)], check=True)
            subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "compileall", "-q", "-j", "0", "site"],
                cwd=self.unpacked,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            stamp.write_text(now)
        self.kernels("tvm")
        install(self.home / "plugin")
        entry_point(self.home / "acceptance-plugin", ACCEPTANCE, f"{ACCEPTANCE}:register")
        distribution(self.home / "operator", REPOSITORY)
        mount_credentials(self.credentials, TOKEN)

    def kernels(self, name: str) -> Path:
        """Return a cache of compiled kernels with those of the bundle in it.

        SGLang does not lock the file of a kernel against others that load it while it is written,
        so servers that start together have one each. One that exists is left as it is: a server
        may run that has its kernels mapped, and ends by a segmentation fault if they are written.
        """
        cache, compiled = self.home / "cache" / name, self.bundle / "kernels"
        cache.mkdir(parents=True, exist_ok=True)
        if compiled.is_dir() and not any(cache.iterdir()):
            shutil.copytree(compiled, cache, dirs_exist_ok=True)
        return cache

    def path(self) -> list[Path]:
        """Return what a program beside the servers has on its PYTHONPATH."""
        return [REPOSITORY, REPOSITORY / "operator", self.home / "operator", self.site]

    def environ(self, *, live: bool, acceptance: bool = False, **more: str) -> dict[str, str]:
        """Return a server's environment.

        Args:
            live: With the engine plugin.
            acceptance: With the plugin that changes the simulated acceptance.
            more: Further variables.
        """
        compiler = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
        environ = dict(os.environ)
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        path = [self.site]
        path += install(self.home / "plugin") if live else []
        path += [PLUGINS, self.home / "acceptance-plugin"] if acceptance else []
        return {
            **environ,
            "CUDA_HOME": str(compiler.parents[1]),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "TVM_FFI_CACHE_DIR": str(self.kernels("tvm")),
            "TRITON_CACHE_DIR": str(self.home / "cache/triton"),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
            "SPECSERVE_POD_UID": "gpu-host",
            "SPECSERVE_ADMIN_PORT": str(ADMIN_PORT),
            "SPECSERVE_CREDENTIALS_DIR": str(self.credentials),
            **more,
        }


def accelerators() -> str:
    """Return the GPUs and their driver, as the driver names them; empty without any."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--bundle", type=Path, default=BUNDLE)
    cli.add_argument("--home", type=Path, default=HOME)
    options = cli.parse_args()
    host = Host(options.bundle, options.home)
    host.set_up()
    print(os.pathsep.join(map(str, host.path())))


if __name__ == "__main__":
    main()
