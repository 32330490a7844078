"""Certificates and kubeconfigs of a cluster, made with the openssl command."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.cluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_DAYS = "365"


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in a folder."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """Certificate that clients trust."""
        return self.folder / "ca.crt"

    @property
    def key(self) -> Path:
        """Key that certificates are signed with."""
        return self.folder / "ca.key"

    def issue(
        self, name: str, common_name: str, *, organization: str = "", alternatives: str = ""
    ) -> tuple[Path, Path]:
        """Issues a certificate for clients and servers.

        Args:
            name: of the files.
            common_name: user name of a client.
            organization: group of a client.
            alternatives: subject alternative names as openssl takes them.

        Returns:
            The certificate and its key.
        """
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        _key(key)
        subject = (f"/O={organization}" if organization else "") + f"/CN={common_name}"
        extensions = ["extendedKeyUsage=clientAuth,serverAuth"]
        if alternatives:
            extensions.append(f"subjectAltName={alternatives}")
        _self_made(key, certificate, subject, extensions, authority=self)
        return certificate, key


def authority(folder: Path) -> Authority:
    """Makes a new authority, and the key pair `sa` that service-account tokens are signed with."""
    if shutil.which("openssl") is None:
        raise ClusterError("making certificates", "no openssl", "Install the package openssl.")
    made = Authority(folder)
    _key(made.key)
    # Strict verification (Python's default from 3.13 on) wants both extensions.
    extensions = [
        "basicConstraints=critical,CA:TRUE",
        "keyUsage=critical,keyCertSign,cRLSign",
    ]
    _self_made(made.key, made.certificate, "/CN=specserve-test-ca", extensions)
    _key(folder / "sa.key")
    _openssl("pkey", "-in", str(folder / "sa.key"), "-pubout", "-out", str(folder / "sa.pub"))
    return made


def kubeconfig(
    file: Path, server: str, ca: Path, user: dict[str, Any], namespace: str = "default"
) -> Path:
    """Writes a kubeconfig with one cluster and one user; JSON, which is YAML too."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "test", "cluster": {"server": server, "certificate-authority": str(ca)}}
        ],
        "users": [{"name": "user", "user": user}],
        "contexts": [
            {
                "name": "test",
                "context": {"cluster": "test", "user": "user", "namespace": namespace},
            }
        ],
        "current-context": "test",
    }
    file.touch(mode=0o600)
    file.write_text(json.dumps(config, indent=1))
    return file


def _key(file: Path) -> None:
    file.touch(mode=0o600)
    curve = ["-pkeyopt", "ec_paramgen_curve:P-256"]
    _openssl("genpkey", "-algorithm", "EC", *curve, "-out", str(file))


def _self_made(
    key: Path,
    certificate: Path,
    subject: str,
    extensions: Sequence[str],
    authority: Authority | None = None,
) -> None:
    # An empty section instead of the system's configuration, which adds CA:TRUE to every leaf.
    config = certificate.with_name("openssl.cnf")
    config.write_text("[req]\ndistinguished_name = empty\n[empty]\n")
    signer = ["-CA", str(authority.certificate), "-CAkey", str(authority.key)] if authority else []
    _openssl(
        *("req", "-x509", "-config", str(config), "-key", str(key), "-subj", subject),
        *("-days", _DAYS, "-out", str(certificate), *signer),
        *(part for extension in extensions for part in ("-addext", extension)),
    )


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(
            f"making certificates: openssl {arguments[0]}",
            done.stderr.strip(),
            "OpenSSL 3.0 or newer is needed.",
        )
