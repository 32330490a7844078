"""A small client of the API server: JSON over one authenticated TLS connection per request."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Connector = Callable[[str, int, float], socket.socket]


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connects from the network namespace of this process."""
    return socket.create_connection((host, port), timeout)


class ApiError(OSError):
    """The API server refused a request."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


class ApiClient:
    """Speaks to the API server as the holder of a certificate.

    Args:
        host: address of the API server.
        port: its port.
        ca: certificate of its authority.
        certificate: of the client.
        key: of the client.
        connector: opens the TCP connection.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        ca: Path,
        certificate: Path,
        key: Path,
        connector: Connector = connect,
    ) -> None:
        self._address = (host, port)
        self._connector = connector
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._tls.load_cert_chain(certificate, key)

    def get(self, path: str, timeout: float = 5.0) -> Any:
        """Reads a path: an object for JSON, else text."""
        return self.request("GET", path, timeout=timeout)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        timeout: float = 10.0,
    ) -> Any:
        """Sends one request.

        Args:
            body: sent as JSON.
            timeout: seconds for each wait on the network.

        Raises:
            ApiError: the answer is not 2xx.
            OSError: no answer.
        """
        host, port = self._address
        connection = http.client.HTTPSConnection(host, port, timeout=timeout)
        raw = self._connector(host, port, timeout)
        try:
            connection.sock = self._tls.wrap_socket(raw, server_hostname=host)
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": content_type})
            answer = connection.getresponse()
            text = answer.read().decode()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        finally:
            raw.close()
            connection.close()
        if answer.status // 100 != 2:
            raise ApiError(answer.status, text)
        is_json = "json" in (answer.headers.get("Content-Type") or "")
        return json.loads(text) if is_json else text
