"""What the tests of the whole loop act with: SpecServes, their pods, what the status says."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specserve import names
from tests.integration.api import Api, condition, eventually, path

if TYPE_CHECKING:
    from tests.cluster.light import ControlledCluster
    from tests.integration.kubelet import Kubelet, PlayedPod

TICK = 0.1
QUICK_POLICY = {
    "dwellOnSeconds": 0,
    "dwellOffSeconds": 0,
    "maxFlipsPerHour": 3600,
    "samplePeriodMilliseconds": int(TICK * 1000),
    "staleAfterSeconds": 1,
}
"""Decisions within a tick of 100 ms; dwell and budget are tried by the tests of the policy."""

HIGH = (60, 5)
LOW = (5, 0)


def make_node(cluster: ControlledCluster, name: str, *, gpus: int) -> None:
    """Create a node that the scheduler takes pods to; they find it by the label `node`."""
    amount = {"cpu": "1000", "memory": "4000Gi", "pods": "1000", "nvidia.com/gpu": str(gpus)}
    cluster.api.request(
        "POST",
        "/api/v1/nodes",
        {
            "metadata": {"name": name, "labels": {"node": name}},
            "status": {
                "capacity": amount,
                "allocatable": amount,
                "conditions": [{"type": "Ready", "status": "True", "reason": "Played"}],
            },
        },
    )
    # Admission gives each new node the taint of one that is not ready yet.
    cluster.api.request(
        "PATCH",
        f"/api/v1/nodes/{name}",
        {"spec": {"taints": None}},
        content_type="application/merge-patch+json",
    )


def merged(base: Any, change: Any) -> Any:
    """A JSON merge patch, applied."""
    if not isinstance(change, dict) or not isinstance(base, dict):
        return copy.deepcopy(change)
    result = dict(base)
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(base.get(key), value)
    return result


def specserve(name: str, **spec: Any) -> dict[str, Any]:
    """A SpecServe whose policy decides at each tick, on the node all tests share."""
    usual = {
        "replicas": 1,
        "model": {"source": "hf://example-org/model-a"},
        "draft": {"method": "EAGLE3", "source": "hf://example-org/draft-a", "steps": [0, 3]},
        "policy": QUICK_POLICY,
        "engine": {"image": "engine-image:1"},
        "pod": {"nodeSelector": {"node": "gpu-node"}},
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": merged(usual, spec),
    }


@dataclass
class Stage:
    """One test's namespace."""

    api: Api
    cluster: ControlledCluster
    namespace: str
    kubelet: Kubelet

    def at(self, kind: str, name: str) -> str:
        """Path of an object of the namespace."""
        return path(kind, self.namespace, name)

    async def create(self, name: str = "chat", **spec: Any) -> Any:
        """Create a SpecServe."""
        return await self.api.post(path(names.PLURAL, self.namespace), specserve(name, **spec))

    async def edit(self, name: str = "chat", **spec: Any) -> Any:
        """Merge into the spec of a SpecServe."""
        return await self.api.merge(self.at(names.PLURAL, name), {"spec": spec})

    async def get(self, name: str = "chat") -> Any:
        """Read a SpecServe."""
        return await self.api.get(self.at(names.PLURAL, name))

    async def deployment(self, name: str = "chat") -> Any:
        """Read the Deployment of a SpecServe."""
        return await self.api.get(self.at("deployments", name))

    async def has(
        self, kind: str, status: str, reason: str = "", name: str = "chat", within: float = 10.0
    ) -> dict[str, Any]:
        """Wait for a condition; returns it."""

        async def there() -> dict[str, Any]:
            item = await self.get(name)
            seen = condition(item, kind)
            assert seen.get("status") == status, seen
            assert not reason or seen["reason"] == reason, seen
            assert seen["observedGeneration"] == item["metadata"]["generation"], seen
            return seen

        found: dict[str, Any] = await eventually(there, within, f"{kind}={status} {reason}")
        return found

    async def ready(self, name: str = "chat", within: float = 15.0) -> None:
        """Wait until a SpecServe is ready and its engines do what is wanted."""
        await self.has("Ready", "True", name=name, within=within)
        await self.has("SpeculationSettled", "True", name=name, within=within)

    async def up(self, name: str = "chat", **spec: Any) -> list[PlayedPod]:
        """Create a SpecServe and wait until its engines speculate; returns its pods."""
        made = await self.create(name, **spec)
        pods = await self.kubelet.running(name, made["spec"]["replicas"])
        await self.ready(name)
        return pods

    async def speculation(self, name: str = "chat") -> dict[str, Any]:
        """What the status says of speculation."""
        found: dict[str, Any] = ((await self.get(name)).get("status") or {}).get(
            "speculation"
        ) or {}
        return found

    async def summary(self, text: str, name: str = "chat", within: float = 10.0) -> None:
        """Wait for the status to say so of the engines."""

        async def so() -> bool:
            seen = await self.speculation(name)
            assert seen.get("summary") == text, seen
            return True

        await eventually(so, within, text)

    async def events(self, name: str = "chat", reason: str = "") -> list[Any]:
        """Events about a SpecServe."""
        return [
            event
            for event in await self.api.items("events", self.namespace)
            if event["involvedObject"]["kind"] == names.KIND
            and event["involvedObject"]["name"] == name
            and reason in ("", event["reason"])
        ]

    async def event(self, reason: str, name: str = "chat", within: float = 10.0) -> Any:
        """Wait for an event; returns the last one."""

        async def posted() -> Any:
            found = await self.events(name, reason)
            return found[-1] if found else None

        return await eventually(posted, within, f"event {reason}")

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl in the namespace."""
        return self.cluster.kubectl("-n", self.namespace, *arguments)
