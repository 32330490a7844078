"""Official release downloads, held against their published checksums."""

from __future__ import annotations

import hashlib
import http.client
import re
import shutil
import tarfile
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from tests.cluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.versions import Release

CONNECT_SECONDS = 4.0
"""Bound on the first answer of a server, name resolution included."""

STALL_SECONDS = 15.0
"""Bound on the wait for more bytes of a download that has begun."""

_CHUNK = 1 << 18

T = TypeVar("T")


class Meter(Protocol):
    """Takes how many bytes of how many are there."""

    def __call__(self, done: float, total: float, unit: str = "") -> None: ...


class DownloadError(ClusterError):
    """A release could not be downloaded, or is not what its project published."""


class Unreachable(DownloadError):
    """No server answered in time: there is no network, or it leads nowhere."""


class WrongSum(DownloadError):
    """The bytes are not those whose checksum was published or pinned."""


def published_sum(text: str, filename: str) -> str | None:
    """The sha256 of a file in a checksum file: its line of many, or the only sum there is."""
    sums = re.findall(r"^([0-9a-fA-F]{64})(?:[ \t]+\*?(\S+))?[ \t]*$", text, re.MULTILINE)
    for digest, name in sums:
        if name and name.rsplit("/", 1)[-1] == filename:
            return str(digest).lower()
    if len(sums) == 1 and not sums[0][1]:
        return str(sums[0][0]).lower()
    return None


def fetch(release: Release, into: Path, meter: Meter) -> None:
    """Downloads a release and puts its binaries into a folder, each by one rename.

    Raises:
        DownloadError: nothing of the release was put there.
    """
    step = f"downloading {release.url}"
    filename = release.url.rsplit("/", 1)[1]
    with _open(release.sums) as answer:
        expected = published_sum(answer.read(1 << 20).decode(errors="replace"), filename)
    if expected is None:
        raise WrongSum(step, f"{release.sums} holds no sha256 of {filename}")
    if release.pinned and release.pinned != expected:
        raise WrongSum(step, f"sha256 {expected} is published, {release.pinned} is pinned")

    with tempfile.TemporaryDirectory(prefix=".download-", dir=into) as folder:
        file = Path(folder) / filename
        digest = _save(release.url, file, meter)
        if digest != expected:
            raise WrongSum(step, f"the sha256 is {digest}, published is {expected}")
        unpacked = _unpack(release, file, Path(folder))
        for name, path in unpacked.items():
            path.chmod(0o755)
            path.replace(into / name)


def _save(url: str, file: Path, meter: Meter) -> str:
    step = f"downloading {url}"
    digest = hashlib.sha256()
    done = 0
    with _open(url) as answer, file.open("wb") as target:
        total = int(answer.headers.get("Content-Length") or 0)
        try:
            while chunk := answer.read(_CHUNK):
                digest.update(chunk)
                target.write(chunk)
                done += len(chunk)
                meter(done / 1e6, total / 1e6, "MB")
        except (OSError, http.client.HTTPException) as error:
            raise DownloadError(
                step, f"broke off after {done} of {total} bytes: {error}"
            ) from error
    if total and done != total:
        raise DownloadError(step, f"cut off after {done} of {total} bytes")
    return digest.hexdigest()


def _unpack(release: Release, file: Path, folder: Path) -> dict[str, Path]:
    if not release.members:
        return {release.binaries[0]: file}
    found = {}
    try:
        with tarfile.open(file) as archive:
            for name, member in release.members.items():
                source = archive.extractfile(member)
                if source is None:
                    raise DownloadError(f"unpacking {release.url}", f"{member} is no file")
                found[name] = folder / f"unpacked-{name}"
                with source, found[name].open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (KeyError, tarfile.TarError, EOFError) as error:
        raise DownloadError(f"unpacking {release.url}", str(error)) from error
    return found


def _open(url: str) -> http.client.HTTPResponse:
    def request() -> http.client.HTTPResponse:
        answer = urllib.request.urlopen(url, timeout=STALL_SECONDS)
        assert isinstance(answer, http.client.HTTPResponse)
        return answer

    step = f"downloading {url}"
    try:
        return _bounded(request, CONNECT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            raise DownloadError(step, f"HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise Unreachable(step, str(reason)) from error


def _bounded(call: Callable[[], T], seconds: float) -> T:
    # The resolver of the C library knows no deadline, so the call runs in a thread that is left
    # behind when it is late; a daemon thread, which does not hold up the end of the process.
    result: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result[0]
