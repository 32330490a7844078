"""Images made of files, written as OCI archives that containerd imports."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.cluster.errors import ClusterError
from tests.cluster.versions import architecture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

BUSYBOX = "specserve.test/busybox:1"
"""Name of the image with busybox; it also serves as the sandbox of every pod."""

_TYPE = "application/vnd.oci.image"


@dataclass(frozen=True, slots=True)
class Content:
    """What an image holds.

    Attributes:
        files: content by path; every file can be executed.
        links: targets of symbolic links by path.
        folders: empty folders, writable by everybody.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    folders: Sequence[str] = ()


def write(out: Path, name: str, content: Content, entrypoint: Sequence[str]) -> Path:
    """Writes an image of one layer; the same input gives the same bytes.

    Args:
        out: the archive.
        name: repository and tag that the image is imported under.
        content: the layer.
        entrypoint: command of its containers.
    """
    plain = _layer(content)
    layer = gzip.compress(plain, mtime=0)
    config = {
        "architecture": architecture(),
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Entrypoint": list(entrypoint),
        },
        "rootfs": {"type": "layers", "diff_ids": [_digest(plain)]},
    }
    with tarfile.open(out, "w") as archive:
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_TYPE}.manifest.v1+json",
            "config": _blob(archive, "config.v1+json", _json(config)),
            "layers": [_blob(archive, "layer.v1.tar+gzip", layer)],
        }
        listed = _blob(archive, "manifest.v1+json", _json(manifest))
        # The one annotation that containerd takes the name from.
        listed["annotations"] = {"io.containerd.image.name": name}
        _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": [listed]}))
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    return out


def busybox(out: Path) -> Path:
    """Writes the image `BUSYBOX` from the machine's static busybox; it sleeps by itself."""
    program = shutil.which("busybox", path="/bin:/usr/bin:/usr/local/bin")
    if program is None:
        raise ClusterError(
            "making the sandbox image", "no busybox", "Install the package busybox-static."
        )
    applets = subprocess.run(
        [program, "--list"], capture_output=True, text=True, check=True
    ).stdout.split()
    with open(program, "rb") as file:  # noqa: PTH123 - a str from which()
        data = file.read()
    content = Content(
        files={"bin/busybox": data},
        links={f"bin/{applet}": "busybox" for applet in applets if applet != "busybox"},
        folders=("tmp", "var/tmp", "run"),
    )
    return write(out, BUSYBOX, content, ["/bin/sleep", "infinity"])


def _layer(content: Content) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in content.folders:
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        for path, data in sorted(content.files.items()):
            _add(tar, path, data)
        for path, target in sorted(content.links.items()):
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
            tar.addfile(entry)
    return buffer.getvalue()


def _blob(archive: tarfile.TarFile, kind: str, data: bytes) -> dict[str, Any]:
    digest = _digest(data)
    _add(archive, f"blobs/{digest.replace(':', '/')}", data)
    return {"mediaType": f"{_TYPE}.{kind}", "digest": digest, "size": len(data)}


def _add(archive: tarfile.TarFile, path: str, data: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(data), 0o755
    archive.addfile(entry, io.BytesIO(data))


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
