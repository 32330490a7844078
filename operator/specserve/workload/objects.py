"""The objects made for a SpecServe, as manifests for server-side apply."""

import base64
from dataclasses import dataclass
from typing import Any

import yaml

from specserve import names
from specserve.api import SpecServeSpec
from specserve.workload.pod import template
from specserve.workload.provision import NONE_PROVIDED, Peer, Provision

Manifest = dict[str, Any]

#: Time in seconds that a pod may take to be scheduled and to pull its image, beside its start.
BEFORE_START_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Owner:
    """The SpecServe that objects are made for.

    Attributes:
        name: its name, which most of the objects share.
        namespace: its namespace and theirs.
        uid: its UID; the garbage collector removes them with it.
    """

    name: str
    namespace: str
    uid: str


def owner_reference(owner: Owner) -> Manifest:
    """The reference by which the garbage collector and prune know an object of `owner`."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def desired(
    owner: Owner, spec: SpecServeSpec, provision: Provision = NONE_PROVIDED
) -> list[Manifest]:
    """Everything the SpecServe needs except its credentials, in the order of creation.

    Args:
        owner: the SpecServe.
        spec: its spec.
        provision: what the installation adds to all.

    Raises:
        UnusableSpec: no pod can be made of the spec; the message names the field to change.
    """
    deployment = _deployment(owner, spec, provision)
    accounts = [] if spec.pod.service_account_name else [_service_account(owner)]
    policies = [_network_policy(owner, provision.admin)] if provision.admin else []
    return [*accounts, *policies, _service(owner), deployment]


def credentials(
    owner: Owner,
    *,
    plugin_token: str,
    plugin_token_previous: str,
    admin_key: str,
    nonce: str,
    config_yaml: str,
    rotated: str | None = None,
    holder: str = "",
) -> Manifest:
    """The Secret of engine credentials.

    Args:
        owner: the SpecServe.
        plugin_token: token of the admin listener.
        plugin_token_previous: the one before, which engines take until they have read the new
            one; empty before the first rotation.
        admin_key: SGLang's admin key.
        nonce: whole number that orders on SGLang's own route must carry.
        config_yaml: what `engine_config` made of the keys.
        rotated: the last value of the rotation annotation that was honoured.
        holder: the installation that serves the SpecServe. As the Secret is created and not
            applied, of two that try at once only one is named in it.
    """
    values = {
        names.KEY_PLUGIN_TOKEN: plugin_token,
        names.KEY_PLUGIN_TOKEN_PREVIOUS: plugin_token_previous,
        names.KEY_ADMIN_KEY: admin_key,
        names.KEY_NONCE: nonce,
        names.KEY_CONFIG: config_yaml,
    }
    secret = object_of(owner, "v1", "Secret", names.credentials_secret(owner.name))
    annotations = {}
    if rotated is not None:
        annotations[names.ANNOTATION_ROTATED] = rotated
    if holder:
        annotations[names.ANNOTATION_OPERATOR] = holder
    if annotations:
        secret["metadata"]["annotations"] = annotations
    secret["type"] = "Opaque"
    secret["data"] = {
        key: base64.b64encode(value.encode()).decode() for key, value in values.items()
    }
    return secret


def engine_config(admin_key: str, api_key: str | None = None) -> str:
    """SGLang's configuration file: the keys that must not show in arguments or environment.

    Args:
        admin_key: closes SGLang's admin routes, some of which are open without one.
        api_key: the key that the user's clients send, if there is one.
    """
    keys = {"admin-api-key": admin_key}
    if api_key is not None:
        keys["api-key"] = api_key
    return yaml.safe_dump(keys, allow_unicode=True, width=2**20)


def object_of(owner: Owner, api_version: str, kind: str, name: str) -> Manifest:
    """The beginning of an object that is made for `owner`, and goes with it."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": names.labels(owner.name),
            "ownerReferences": [owner_reference(owner)],
        },
    }


def _service_account(owner: Owner) -> Manifest:
    account = object_of(owner, "v1", "ServiceAccount", owner.name)
    account["automountServiceAccountToken"] = False
    return account


def _service(owner: Owner) -> Manifest:
    service = object_of(owner, "v1", "Service", owner.name)
    service["spec"] = {
        "selector": names.served(owner.name),
        "ipFamilyPolicy": "PreferDualStack",
        "ports": [
            {
                "name": names.PORT_NAME_SERVING,
                "port": names.PORT_SERVING,
                "protocol": "TCP",
                "targetPort": names.PORT_NAME_SERVING,
            }
        ],
    }
    return service


def _network_policy(owner: Owner, admin: Peer) -> Manifest:
    """Closes the admin port to all but the operator and its calibrations.

    Every other port stays as open as it was.
    """
    policy = object_of(owner, "networking.k8s.io/v1", "NetworkPolicy", owner.name)
    others = [(1, names.PORT_ADMIN - 1), (names.PORT_ADMIN + 1, 65_535)]
    policy["spec"] = {
        "podSelector": {"matchLabels": names.selector(owner.name)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "ports": [
                    *({"protocol": "TCP", "port": low, "endPort": high} for low, high in others),
                    {"protocol": "UDP"},
                    {"protocol": "SCTP"},
                ]
            },
            {
                "from": [
                    {
                        "namespaceSelector": {
                            "matchLabels": {names.LABEL_NAMESPACE: admin.namespace}
                        },
                        "podSelector": {"matchLabels": dict(admin.labels)},
                    },
                    # Of this namespace.
                    {"podSelector": {"matchLabels": names.calibration_labels(owner.name)}},
                ],
                "ports": [{"protocol": "TCP", "port": names.PORT_ADMIN}],
            },
        ],
    }
    return policy


def _deployment(owner: Owner, spec: SpecServeSpec, provision: Provision) -> Manifest:
    deployment = object_of(owner, "apps/v1", "Deployment", owner.name)
    deployment["spec"] = {
        "replicas": spec.replicas,
        "selector": {"matchLabels": names.selector(owner.name)},
        "strategy": _strategy(spec),
        # Outside the pod template. Below the start-up budget a rollout would be called failed
        # while its pod still loads.
        "progressDeadlineSeconds": spec.engine.startup_budget_seconds + BEFORE_START_SECONDS,
        "revisionHistoryLimit": 3,
        "template": template(owner.name, spec, provision),
    }
    return deployment


def _strategy(spec: SpecServeSpec) -> Manifest:
    rollout = spec.rollout
    if rollout.type == "Recreate":
        return {"type": "Recreate"}
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {
            "maxSurge": rollout.max_surge,
            "maxUnavailable": rollout.max_unavailable,
        },
    }
