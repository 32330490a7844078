"""Real SGLang in pods: an empty image, the machine's own /usr and an environment mounted into it.

What runs on the machine runs in the pod then, by the same interpreter and the same libraries, and
no image of gigabytes has to be made and imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.cluster import oci

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.engine.environment import Environment

EXAMPLE = Path(__file__).with_name("engine.yaml")
PAIR = "/pair"
"""Where the example looks for the folders of target and draft."""

_SYSTEM = Path("/usr")
_ONE_CORE = "SGLANG_CPU_OMP_THREADS_BIND"
"""Variable of an engine that has a core for itself; two that are given the same only wait."""


def manifest(environment: Environment, pair: Path) -> dict[str, Any]:
    """The example, with the machine's parts filled in.

    Args:
        environment: that SGLang runs in on this machine.
        pair: folder with `target` and `draft`.
    """
    made: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    engine, pod = made["spec"]["engine"], made["spec"]["pod"]
    engine["command"] = [str(environment.python), "-m", "sglang.launch_server"]
    engine["env"] += [
        {"name": name, "value": value}
        for name, value in environment.variables().items()
        if name != _ONE_CORE
    ]
    mounts = {str(path): str(path) for path in outermost({_SYSTEM, *environment.roots})}
    mounts[PAIR] = str(pair)
    pod["volumes"] = [
        {"name": f"machine-{number}", "hostPath": {"path": path, "type": "Directory"}}
        for number, path in enumerate(mounts.values())
    ]
    pod["volumeMounts"] = [
        {"name": f"machine-{number}", "mountPath": where, "readOnly": True}
        for number, where in enumerate(mounts)
    ]
    return made


def outermost(folders: Iterable[Path]) -> list[Path]:
    """Those that lie in no other one, in order."""
    wanted = set(folders)
    return sorted(path for path in wanted if not wanted.intersection(path.parents))


def image(out: Path) -> Path:
    """Write the archive of the example's image: the names of users, and links into /usr."""
    name = yaml.safe_load(EXAMPLE.read_text())["spec"]["engine"]["image"]
    content = oci.Content(
        files={
            "etc/passwd": b"root:x:0:0:root:/tmp:/bin/sh\n",
            "etc/group": b"root:x:0:\n",
        },
        links={part: f"usr/{part}" for part in ("bin", "lib", "lib64", "sbin")},
        folders=("tmp",),
    )
    return oci.write(out, name, content, ["/bin/false"])


def processes(pod_uid: str, title: str) -> list[int]:
    """Ids, on the machine, of a pod's processes whose command line begins with `title`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            group = (entry / "cgroup").read_text()
            line = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue  # it ended meanwhile
        if f"pod{pod_uid}" in group and line.startswith(title):
            found.append(int(entry.name))
    return sorted(found)


def command_line(pid: int) -> list[str]:
    """The words by which a process was started."""
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
