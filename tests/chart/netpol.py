"""Evaluates NetworkPolicies as the API defines them, for the test clusters enforce none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Pod:
    """A pod as a policy sees it."""

    namespace: str
    labels: dict[str, str] = field(default_factory=dict)
    namespace_labels: dict[str, str] = field(default_factory=dict)


def allowed(
    policies: list[dict[str, Any]], source: Pod, target: Pod, port: int, protocol: str = "TCP"
) -> bool:
    """Whether a connection is let through, in and out."""
    return _one_way(policies, "Ingress", target, source, port, protocol) and _one_way(
        policies, "Egress", source, target, port, protocol
    )


def _one_way(policies, direction, subject, peer, port, protocol):
    selecting = [
        p
        for p in policies
        if p["metadata"]["namespace"] == subject.namespace
        and direction in p["spec"]["policyTypes"]
        and _matches(p["spec"]["podSelector"], subject.labels)
    ]
    # A pod that no policy selects is open; one that several select, to what any of them lets in.
    if not selecting:
        return True
    rules = [rule for p in selecting for rule in p["spec"].get(direction.lower(), [])]
    key = "from" if direction == "Ingress" else "to"
    return any(
        _ports(rule.get("ports"), port, protocol) and _peers(p, rule.get(key), peer)
        for p in selecting
        for rule in rules
    )


def _ports(ports, port, protocol):
    # Without a list all are meant; without a number all of the protocol.
    return not ports or any(
        entry.get("protocol", "TCP") == protocol
        and ("port" not in entry or entry["port"] <= port <= entry.get("endPort", entry["port"]))
        for entry in ports
    )


def _peers(policy, peers, pod):
    if not peers:
        return True
    for peer in peers:
        assert "ipBlock" not in peer, "no address is known here"
        if "namespaceSelector" in peer:
            labels = {NAMESPACE_LABEL: pod.namespace, **pod.namespace_labels}
            near = _matches(peer["namespaceSelector"], labels)
        else:
            near = pod.namespace == policy["metadata"]["namespace"]
        if near and _matches(peer.get("podSelector", {}), pod.labels):
            return True
    return False


def _matches(selector, labels):
    assert not selector.get("matchExpressions"), "not used here"
    return selector.get("matchLabels", {}).items() <= labels.items()
