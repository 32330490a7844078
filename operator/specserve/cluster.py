"""Writes to the cluster: apply, create, prune, status, events. Nothing else writes."""

import datetime
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from specserve import names
from specserve.kube import APPLY, MERGE, Kube, KubeRefused, Object

log = logging.getLogger(__name__)

_COLLECTIONS = {
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Event": "/apis/events.k8s.io/v1/namespaces/{}/events",
    names.KIND: f"/apis/{names.API_VERSION}/namespaces/{{}}/{names.PLURAL}",
}


def collection(kind: str, namespace: str) -> str:
    """Path of the collection of a kind in a namespace."""
    return _COLLECTIONS[kind].format(namespace)


class Cluster:
    """The operator's writes, all under the field manager `specserve`."""

    def __init__(self, kube: Kube, identity: str) -> None:
        self._kube = kube
        self._identity = identity

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Read one object; None if it is not there.

        Raises:
            KubeError: It could not be read.
        """
        try:
            return await self._kube.call("GET", f"{collection(kind, namespace)}/{name}")
        except KubeRefused as error:
            if error.status == 404:
                return None
            raise

    async def apply(self, manifest: Mapping[str, Any]) -> Object:
        """Apply the fields that the operator owns; takes them over from whoever has them.

        Raises:
            KubeRefused: The server does not accept the object; the message names the field.
            KubeUnreachable: No answer.
        """
        meta = manifest["metadata"]
        return await self._kube.call(
            "PATCH",
            f"{collection(manifest['kind'], meta['namespace'])}/{meta['name']}",
            query={"fieldManager": names.MANAGER, "force": "true"},
            body=dict(manifest),
            content_type=APPLY,
        )

    async def create(self, manifest: Mapping[str, Any]) -> Object | None:
        """Create an object; None if one of that name is there already, which stays as it is.

        Raises:
            KubeError: It could not be created.
        """
        try:
            return await self._kube.call(
                "POST",
                collection(manifest["kind"], manifest["metadata"]["namespace"]),
                query={"fieldManager": names.MANAGER},
                body=dict(manifest),
            )
        except KubeRefused as error:
            if error.reason == "AlreadyExists":
                return None
            raise

    async def merge(
        self, kind: str, namespace: str, name: str, patch: Mapping[str, Any]
    ) -> Object:
        """Merge a patch into an object; the uid inside the patch guards against a namesake.

        Raises:
            KubeError: It was not taken.
        """
        return await self._kube.call(
            "PATCH",
            f"{collection(kind, namespace)}/{name}",
            query={"fieldManager": names.MANAGER},
            body=dict(patch),
            content_type=MERGE,
        )

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete this very object; one that is gone or replaced is left alone.

        Raises:
            KubeError: It could not be deleted.
        """
        try:
            await self._kube.call(
                "DELETE",
                f"{collection(kind, namespace)}/{name}",
                body={
                    "apiVersion": "v1",
                    "kind": "DeleteOptions",
                    "preconditions": {"uid": uid},
                    "propagationPolicy": "Background",
                },
            )
        except KubeRefused as error:
            if error.status not in (404, 409):
                raise

    async def status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Apply a status.

        An older CRD may lack a field of it. Server-side apply refuses the whole then (as a 500),
        so it is merged instead: the server drops what it does not know and keeps the rest.

        Raises:
            KubeRefused: 404 if the SpecServe is gone; it is never created by this.
            KubeUnreachable: No answer.
        """
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": name, "namespace": namespace},
            "status": dict(status),
        }
        path = f"{collection(names.KIND, namespace)}/{name}/status"
        query = {"fieldManager": names.MANAGER}
        try:
            await self._kube.call(
                "PATCH",
                path,
                query={**query, "force": "true"},
                body=body,
                content_type=APPLY,
            )
        except KubeRefused as error:
            if error.status != 500 or "not declared in schema" not in error.message:
                raise
            await self._kube.call("PATCH", path, query=query, body=body, content_type=MERGE)

    async def event(
        self, regarding: Mapping[str, Any], kind: str, reason: str, message: str, action: str
    ) -> None:
        """Post an event about an object.

        Args:
            regarding: Reference with apiVersion, kind, namespace, name and uid.
            kind: `Normal` or `Warning`.
            reason: One word for machines, at most 128 characters.
            message: One line for people, cut to the 1024 characters the server takes.
            action: What was done or tried.

        Raises:
            KubeError: It was not taken.
        """
        now = datetime.datetime.now(datetime.UTC)
        await self._kube.call(
            "POST",
            collection("Event", regarding["namespace"]),
            body={
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {
                    # Not generateName: the server takes none that ends with a dot.
                    "name": f"{regarding['name']}.{uuid.uuid4().hex[:16]}",
                    "namespace": regarding["namespace"],
                },
                "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "reportingController": names.MANAGER,
                "reportingInstance": self._identity[:128],
                "regarding": dict(regarding),
                "type": kind,
                "reason": reason,
                "note": message[:1024],
                "action": action,
            },
        )
