from __future__ import annotations

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from tests.cluster import choose, oci
from tests.cluster.errors import ClusterError
from tests.cluster.existing import ExistingCluster
from tests.cluster.light import LightCluster, light_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIGMAP = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.existing.test}
spec:
  group: existing.test
  scope: Namespaced
  names: {plural: things, singular: thing, kind: Thing}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
"""


@pytest.fixture(scope="module")
def users_own() -> Iterator[LightCluster]:
    with light_cluster(scheduler=False) as cluster:
        yield cluster


class Registry(BaseHTTPRequestHandler):
    """As much of the distribution protocol as a push needs."""

    blobs: dict[str, bytes]
    manifests: dict[str, bytes]

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/v2/" else 404)

    def do_HEAD(self) -> None:
        self._answer(200 if self.path.rsplit("/", 1)[1] in self.blobs else 404)

    def do_POST(self) -> None:
        self._body()
        self._answer(202, Location="/v2/upload", Docker_Upload_UUID="1")

    def do_PATCH(self) -> None:
        data = self._body()
        self.blobs["sha256:" + hashlib.sha256(data).hexdigest()] = data
        self._answer(202, Location="/v2/upload", Range=f"0-{len(data) - 1}")

    def do_PUT(self) -> None:
        data = self._body()
        if match := re.fullmatch(r"/v2/(.+)/manifests/(.+)", self.path):
            self.manifests[f"{match[1]}:{match[2]}"] = data
        self._answer(201, Docker_Content_Digest="sha256:" + hashlib.sha256(data).hexdigest())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[tuple[str, type[Registry]]]:
    handler = type("Fresh", (Registry,), {"blobs": {}, "manifests": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}/team", handler
    server.shutdown()
    server.server_close()


def test_the_users_cluster_is_used_and_left_as_it_is(
    users_own: LightCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crd.yaml").write_text(CONFIGMAP)
    monkeypatch.setenv("KUBECONFIG", str(users_own.kubeconfig))
    monkeypatch.setenv(choose.FLAG, "1")
    with choose.cluster(crds=[tmp_path]) as cluster:
        assert isinstance(cluster, ExistingCluster)
        cluster.kubectl("get", "crd", "things.existing.test")
        own = cluster.kubeconfig_for("default")
        who = cluster.kubectl("auth", "whoami", kubeconfig=own)
        assert "system:serviceaccount:default:default" in who
        scratch = cluster.directory
    assert not scratch.exists()
    users_own.kubectl("get", "crd", "things.existing.test")


def test_images_go_to_the_users_registry(
    users_own: LightCluster, registry: tuple[str, type[Registry]], tmp_path: Path
) -> None:
    address, pushed = registry
    archive = oci.write(
        tmp_path / "image.tar",
        "specserve.test/thing:3",
        oci.Content(files={"hello": b"hello"}),
        ["/hello"],
    )
    with ExistingCluster(users_own.kubeconfig, address) as cluster:
        assert cluster.image("specserve.test/thing:3") == f"{address}/thing:3"
        cluster.load_image(archive)
    manifest = json.loads(pushed.manifests["team/thing:3"])
    assert {layer["digest"] for layer in manifest["layers"]} <= set(pushed.blobs)


def test_what_is_missing_is_named(users_own: LightCluster, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="Set KUBECONFIG"):
        ExistingCluster(tmp_path / "none")
    with (
        ExistingCluster(users_own.kubeconfig, "") as cluster,
        pytest.raises(ClusterError, match="SPECSERVE_REGISTRY"),
    ):
        cluster.image("specserve.test/thing:3")


def test_a_cluster_that_does_not_answer_is_an_error(
    users_own: LightCluster, tmp_path: Path
) -> None:
    dead = tmp_path / "dead.kubeconfig"
    text = users_own.kubeconfig.read_text()
    dead.write_text(text.replace(users_own.server, "https://127.0.0.1:1"))
    with pytest.raises(ClusterError, match="refused"):
        ExistingCluster(dead)
