from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

from tests.cluster import gobuild, releases
from tests.cluster.__main__ import main as command_line
from tests.cluster.binaries import Resolver, resolve
from tests.cluster.errors import ClusterError
from tests.cluster.processes import until
from tests.cluster.progress import Progress
from tests.cluster.versions import NODE, Versions, parse, pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]

DEMO = """
[versions]
tool = "1.2.3"
[[release]]
component = "tool"
binaries = ["alpha", "beta"]
url = "{url}/v{{version}}/{{arch}}/{{name}}"
sums = "{url}/v{{version}}/{{arch}}/{{name}}.sha256"
[[release]]
component = "tool"
binaries = ["gamma", "delta"]
url = "{url}/tool-{{version}}.tar.gz"
sums = "{url}/SHA256SUMS"
member = "bin/{{name}}"
"""


class Site:
    """A release host whose files a test lays out; `cut` ones end before their length."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.silent = False
        self.released = Event()
        self.asked: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                if site.silent:
                    site.released.wait()
                data = site.files.get(self.path)
                if data is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if self.path in site.cut else data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def publish(self) -> None:
        for name in ("alpha", "beta"):
            data = f"#!/bin/sh\necho {name}\n".encode()
            self.files[f"/v1.2.3/amd64/{name}"] = data
            self.files[f"/v1.2.3/amd64/{name}.sha256"] = hashlib.sha256(data).hexdigest().encode()
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name in ("gamma", "delta"):
                entry = tarfile.TarInfo(f"bin/{name}")
                entry.size = 2
                tar.addfile(entry, io.BytesIO(b"x\n"))
        archive = buffer.getvalue()
        self.files["/tool-1.2.3.tar.gz"] = archive
        digest = hashlib.sha256(archive).hexdigest()
        self.files["/SHA256SUMS"] = (
            f"{'0' * 64}  tool-9.tar.gz\n{digest}  tool-1.2.3.tar.gz\n".encode()
        )

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "KUBEBUILDER_ASSETS"):
        monkeypatch.delenv(name, raising=False)
    host = Site()
    host.publish()
    yield host
    host.close()


def versions_at(url: str, sums: str = "") -> Versions:
    text = DEMO.format(url=url) + (f"[sha256]\n{sums}\n" if sums else "")
    # gobuild's flags ask for a Kubernetes version.
    return parse(text.replace('tool = "1.2.3"', 'tool = "1.2.3"\nkubernetes = "1.2.3"'), "amd64")


class Builds:
    """Stands for the Go build, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, versions: Versions, into: Path, _: Progress) -> None:
        self.count += 1
        for release in versions.releases:
            for name in release.binaries:
                (into / name).write_text("built")
                (into / name).chmod(0o755)


def resolver(folder: Path, url: str, builds: Builds, sums: str = "", **options: Path) -> Resolver:
    return Resolver(
        versions=versions_at(url, sums),
        folder=folder,
        build=builds,
        progress=Progress(io.StringIO()),
        **options,
    )


ALL = ("alpha", "beta", "gamma", "delta")


def test_releases_are_downloaded_checked_and_kept(site: Site, tmp_path: Path) -> None:
    builds = Builds()
    found = resolver(tmp_path, site.url, builds).resolve(ALL)
    assert subprocess.check_output([found["alpha"]], text=True) == "alpha\n"
    assert found.paths["delta"].read_bytes() == b"x\n"
    assert site.asked.count("/tool-1.2.3.tar.gz") == 1
    asked = len(site.asked)
    resolver(tmp_path, site.url, builds).resolve(ALL)
    assert len(site.asked) == asked
    assert builds.count == 0


def test_only_what_is_wanted_is_downloaded(site: Site, tmp_path: Path) -> None:
    resolver(tmp_path, site.url, Builds()).resolve(["beta"])
    assert site.asked == ["/v1.2.3/amd64/beta.sha256", "/v1.2.3/amd64/beta"]


def wrong_sum(site: Site) -> None:
    site.files["/v1.2.3/amd64/alpha"] += b"# changed on the way\n"


def wrong_archive(site: Site) -> None:
    site.files["/tool-1.2.3.tar.gz"] += b"\0"


def cut_off(site: Site) -> None:
    site.cut.add("/v1.2.3/amd64/alpha")


def not_found(site: Site) -> None:
    del site.files["/v1.2.3/amd64/alpha"]


def no_sum_found(site: Site) -> None:
    del site.files["/v1.2.3/amd64/alpha.sha256"]


def no_sum_of_this_file(site: Site) -> None:
    site.files["/SHA256SUMS"] = b"0" * 64 + b"  other.tar.gz\n"


def sum_is_a_page(site: Site) -> None:
    site.files["/v1.2.3/amd64/alpha.sha256"] = b"<html>log in first</html>"


def no_such_member(site: Site) -> None:
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode="w:gz").close()
    site.files["/tool-1.2.3.tar.gz"] = buffer.getvalue()
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    site.files["/SHA256SUMS"] = f"{digest}  tool-1.2.3.tar.gz\n".encode()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (wrong_sum, "the sha256 is"),
        (wrong_archive, "the sha256 is"),
        (cut_off, "cut off after"),
        (not_found, "HTTP 404"),
        (no_sum_found, "HTTP 404"),
        (no_sum_of_this_file, "holds no sha256"),
        (sum_is_a_page, "holds no sha256"),
        (no_such_member, "not found"),
    ],
)
def test_a_bad_download_is_refused_and_falls_through(site, tmp_path, spoil, says):  # type: ignore[no-untyped-def]
    spoil(site)
    told = io.StringIO()
    builds = Builds()
    found = Resolver(
        versions=versions_at(site.url), folder=tmp_path, build=builds, progress=Progress(told)
    ).resolve(ALL)
    assert builds.count == 1
    assert says in told.getvalue()
    assert {path.read_text() for path in found.paths.values()} == {"built"}
    assert not list(found.paths["alpha"].parent.glob(".*"))


def test_a_pinned_sum_must_agree_with_the_published_one(site: Site, tmp_path: Path) -> None:
    builds = Builds()
    pin = f'"alpha amd64" = "{"a" * 64}"'
    resolver(tmp_path, site.url, builds, sums=pin).resolve(["alpha"])
    assert builds.count == 1
    assert "/v1.2.3/amd64/alpha" not in site.asked


def test_without_network_the_first_failure_ends_all_downloads(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening: refused
        builds = Builds()
        began = time.monotonic()
        resolver(tmp_path, f"http://127.0.0.1:{taken.getsockname()[1]}", builds).resolve(ALL)
    assert builds.count == 1
    assert time.monotonic() - began < 2


def test_a_host_that_never_answers_costs_one_time_out(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.silent = True
    monkeypatch.setattr(releases, "CONNECT_SECONDS", 0.3)
    builds = Builds()
    began = time.monotonic()
    resolver(tmp_path, site.url, builds).resolve(ALL)
    assert builds.count == 1
    assert len(site.asked) == 1
    assert time.monotonic() - began < 2


def test_a_named_folder_comes_first_for_what_it_holds(site: Site, tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "alpha").write_text("own")
    (assets / "alpha").chmod(0o755)
    (assets / "beta").write_text("not executable")
    found = resolver(tmp_path / "cache", site.url, Builds(), assets=assets).resolve(ALL)
    assert found["alpha"] == str(assets / "alpha")
    assert found.paths["beta"].parent != assets
    assert found.search_path.split(os.pathsep)[0] == str(assets)


def test_what_every_make_target_prepares_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NODE:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    resolve.cache_clear()
    try:
        assert command_line(["binaries"]) == 0
        assert capsys.readouterr().out == f"{len(NODE)} Kubernetes binaries: {tmp_path}\n"
        assert command_line(["binaries", NODE[0]]) == 0
        assert capsys.readouterr().out == f"{NODE[0]}\t{tmp_path / NODE[0]}\n"
    finally:
        resolve.cache_clear()


def test_when_no_way_leads_there_every_failed_step_is_told(site: Site, tmp_path: Path) -> None:
    not_found(site)

    def build(versions: Versions, into: Path, progress: Progress) -> None:
        raise ClusterError("building", "there is no Go toolchain", "Install Go")

    tried = Resolver(
        versions=versions_at(site.url),
        folder=tmp_path,
        build=build,
        progress=Progress(io.StringIO()),
    )
    with pytest.raises(ClusterError, match=r"(?s)HTTP 404.*no Go toolchain.*Install Go"):
        tried.resolve(ALL)


WORKER = """
import io, os, sys, time
from pathlib import Path
from tests.cluster.binaries import Resolver
from tests.cluster.progress import Progress
from tests.cluster.test_binaries import Builds, versions_at

folder = Path(sys.argv[1])

class Slow(Builds):
    def __call__(self, versions, into, progress):
        (into / ".build-x").mkdir()
        with (folder / "builds").open("a") as file:
            file.write(f"{os.getpid()}\\n")
        while not (folder / "go").exists():
            time.sleep(0.02)
        super().__call__(versions, into, progress)
        (into / ".build-x").rmdir()

found = Resolver(
    versions=versions_at("http://127.0.0.1:1"), folder=folder, build=Slow(), progress=Progress()
).resolve(["alpha"])
print(found.paths["alpha"].read_text())
"""


def worker(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def builders(folder: Path) -> list[str]:
    file = folder / "builds"
    return file.read_text().split() if file.exists() else []


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    first = worker(tmp_path)
    until(lambda: builders(tmp_path), "the first build", 20)
    second = worker(tmp_path)
    assert second.stderr is not None
    assert "Another process" in second.stderr.readline()
    (tmp_path / "go").touch()
    assert [each.communicate(timeout=20)[0] for each in (first, second)] == ["built\n"] * 2
    assert len(builders(tmp_path)) == 1


def test_a_killed_build_leaves_nothing_that_counts_as_built(tmp_path: Path) -> None:
    first = worker(tmp_path)
    until(lambda: builders(tmp_path), "the first build", 20)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=20)
    (tmp_path / "go").touch()
    second = worker(tmp_path)
    assert second.communicate(timeout=20)[0] == "built\n"
    assert len(builders(tmp_path)) == 2


def fake_go(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a `go` on PATH; VERSION and TOOLCHAIN are what `go env` says."""
    go = folder / "go"
    go.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = env ]; then printf "%s\\n%s\\n" "${VERSION:-go1.99.0}" '
        '"${TOOLCHAIN:-local}"; exit; fi\n' + script
    )
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


BUILD = """
if [ "$1" = list ]; then printf 'x\\n\\nx\\nx\\n'; exit; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
for package in a.test/one a.test/two; do echo $package >&2; done
for name in kube containerd containerd-shim-runc-v2 ctr; do
  echo $name >$out/$name; chmod +x $out/$name; done
"""


def test_a_build_makes_all_binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_go(tmp_path, BUILD, monkeypatch)
    told = io.StringIO()
    out = tmp_path / "out"
    out.mkdir()
    gobuild.build(pinned(), out, Progress(told, interval=0))
    assert all((out / name).is_file() for name in NODE)
    assert (out / "kubelet").read_text() == "kube\n"
    assert "3 packages" in told.getvalue()
    assert "(2 of 3 packages)" in told.getvalue()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'proxy: dial tcp: no route' >&2; exit 1", r"fetching the Go modules.*no route"),
        (
            'if [ "$1" = list ]; then exit; fi; echo "main.go:1: broken" >&2; exit 2',
            r"status 2\s+main.go:1: broken",
        ),
    ],
)
def test_a_failed_build_says_which_step_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    fake_go(tmp_path, script, monkeypatch)
    with pytest.raises(ClusterError, match=f"(?s){says}"):
        gobuild.build(pinned(), tmp_path, Progress(io.StringIO()))


def test_an_old_toolchain_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_go(tmp_path, "exit 1", monkeypatch)
    monkeypatch.setenv("VERSION", "go1.19.8")
    with pytest.raises(ClusterError, match=r"Go 1\.\d+\.\d+ is needed, this is go1.19.8"):
        gobuild.build(pinned(), tmp_path, Progress(io.StringIO()))


def test_a_missing_toolchain_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"no Go toolchain\n.*Install Go 1\.\d+"):
        gobuild.build(pinned(), tmp_path, Progress(io.StringIO()))


def test_the_module_builds_the_pinned_versions() -> None:
    required = dict(
        re.findall(r"^\t?(\S+) v(\S+)", (gobuild.MODULE / "go.mod").read_text(), re.MULTILINE)
    )
    of = pinned().of
    assert required["k8s.io/kubernetes"] == of["kubernetes"]
    assert required["go.etcd.io/etcd/server/v3"] == of["etcd"]
    assert required["helm.sh/helm/v4"] == of["helm"]
    assert required["github.com/containerd/containerd/v2"] == of["containerd"]


def test_the_releases_provide_every_binary() -> None:
    provided = {name for release in pinned().releases for name in release.binaries}
    assert provided == set(NODE) == {*gobuild.LINKS, *gobuild.OWN}


def test_the_cache_key_follows_versions_and_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gobuild.fingerprint(pinned())
    other = Versions(of=pinned().of | {"helm": "9.9.9"}, releases=())
    assert gobuild.fingerprint(other) != before
    for name in ("go.mod", "go.sum", "main.go"):
        (tmp_path / name).write_bytes((gobuild.MODULE / name).read_bytes())
    monkeypatch.setattr(gobuild, "MODULE", tmp_path)
    assert gobuild.fingerprint(pinned()) == before
    (tmp_path / "main.go").write_text("package main")
    assert gobuild.fingerprint(pinned()) != before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a" * 64, "a" * 64),
        ("A" * 64 + "\n", "a" * 64),
        (f"{'b' * 64}  other\n{'a' * 64} *file\n", "a" * 64),
        (f"{'a' * 64}  folder/file\n", "a" * 64),
        (f"{'b' * 64}  other\n", None),
        ("a" * 63, None),
        ("", None),
    ],
)
def test_sums_are_read_in_the_forms_in_use(text: str, expected: str | None) -> None:
    assert releases.published_sum(text, "file") == expected


def test_progress_estimates_the_rest_in_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tests.cluster.progress.time.monotonic", lambda: now)
    out = io.StringIO()
    progress = Progress(out, interval=20)
    progress.start("Building", "about 10 min")
    for now in (5.0, 60.0, 61.0):
        progress.update(now * 2, 1200, "packages")
    now = 600.0
    progress.finish()
    assert out.getvalue().splitlines() == [
        "Building (about 10 min)",
        "Building:  10% (120 of 1200 packages), about 9 min 00 s left",
        "Building: done in 10 min 00 s",
    ]
