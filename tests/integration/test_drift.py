"""What somebody changes in our objects is seen and can be set back, by the API server's rules."""

from __future__ import annotations

import copy
import json

from specserve import names, observed
from specserve.api import SpecServeSpec
from specserve.cluster import collection
from specserve.workload import Owner, Peer, Provision, desired
from tests.integration.api import eventually

APPLY = "application/apply-patch+yaml"
ELSE = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}
TERM = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
SELECTOR = {"matchLabels": {"a": "b"}}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
SPEC = SpecServeSpec.model_validate(
    {
        "replicas": 0,
        "model": {"source": "hf://example-org/model-a"},
        "engine": {
            "image": "engine:1",
            "env": [
                {"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
                {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}},
            ],
        },
        "pod": {
            "nodeSelector": {"gpu": "a"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": {
                "nodeAffinity": {
                    REQUIRED: {"nodeSelectorTerms": [TERM]},
                    PREFERRED: [{"weight": 1, "preference": TERM}],
                },
                "podAntiAffinity": {
                    REQUIRED: [{"topologyKey": "zone", "labelSelector": SELECTOR}]
                },
            },
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "zone",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": SELECTOR,
                }
            ],
        },
    }
)


def template(spec):
    return spec["template"]["spec"]


def affinity(spec, kind):
    return template(spec)["affinity"][kind]


def value_from(spec, name):
    env = template(spec)["containers"][0]["env"]
    return next(one["valueFrom"] for one in env if one["name"] == name)


OTHER = {"x": "y"}
ADDED = [
    ("Service", lambda spec: spec["selector"].update(OTHER)),
    ("NetworkPolicy", lambda spec: spec["podSelector"]["matchLabels"].update(OTHER)),
    ("NetworkPolicy", lambda spec: spec["ingress"].append({})),
    # From every namespace.
    ("NetworkPolicy", lambda spec: spec["ingress"][1]["from"][1].update(namespaceSelector={})),
    ("Deployment", lambda spec: template(spec)["nodeSelector"].update(OTHER)),
    ("Deployment", lambda spec: template(spec)["tolerations"][0].update(effect="NoSchedule")),
    (
        "Deployment",
        lambda spec: affinity(spec, "nodeAffinity")[REQUIRED]["nodeSelectorTerms"][0].update(ELSE),
    ),
    (
        "Deployment",
        lambda spec: affinity(spec, "nodeAffinity")[PREFERRED][0]["preference"].update(ELSE),
    ),
    (
        "Deployment",
        lambda spec: affinity(spec, "podAntiAffinity")[REQUIRED][0].update(namespaces=["x"]),
    ),
    (
        "Deployment",
        lambda spec: template(spec)["topologySpreadConstraints"][0]["labelSelector"][
            "matchLabels"
        ].update(OTHER),
    ),
    ("Deployment", lambda spec: value_from(spec, "A")["secretKeyRef"].update(optional=True)),
    ("Deployment", lambda spec: value_from(spec, "B")["configMapKeyRef"].update(optional=True)),
]


def manifests(namespace):
    """All that is made for a SpecServe, by kind; without an owner, or it would be collected."""
    provision = Provision(admin=Peer("operator", {"app": "operator"}))
    made = desired(Owner("chat", namespace, "none"), SPEC, provision)
    for manifest in made:
        del manifest["metadata"]["ownerReferences"]
    return {manifest["kind"]: manifest for manifest in made}


def holds(live, manifest):
    return observed.holds(observed.written_parts(live), manifest)


async def test_what_somebody_adds_to_what_is_one_value_is_seen_and_set_back(api, namespace):
    at = {kind: f"{collection(kind, namespace)}/chat" for kind in manifests(namespace)}

    async def apply(manifest):
        target = f"{at[manifest['kind']]}?fieldManager={names.MANAGER}&force=true"
        return await api.request("PATCH", target, manifest, APPLY)

    wanted = manifests(namespace)
    first = {kind: await apply(manifest) for kind, manifest in wanted.items()}
    for kind, manifest in wanted.items():
        assert holds(first[kind], manifest), "the server's defaults are no difference"
    for kind, add in ADDED:
        item = copy.deepcopy(first[kind])
        del item["metadata"]["resourceVersion"]
        add(item["spec"])
        changed = await api.request("PUT", at[kind], item)
        assert changed["spec"] != first[kind]["spec"]
        assert not holds(changed, wanted[kind])
        again = await apply(wanted[kind])
        assert again["spec"] == first[kind]["spec"]


GROUPS = {
    "ServiceAccount": "api/v1",
    "Service": "api/v1",
    "NetworkPolicy": "apis/networking.k8s.io/v1",
    "Deployment": "apis/apps/v1",
}


def one_value(schemas, schema, value, name):
    """Names of the fields of a value that the server replaces as a whole."""
    for part in (schema, *schema.get("allOf", ())):
        if "$ref" in part:
            schema = schemas[part["$ref"].rpartition("/")[2]] | schema
    if isinstance(value, list):
        if schema.get("x-kubernetes-list-type", "atomic") == "atomic":
            return {name} if any(isinstance(item, dict) for item in value) else set()
        below = [one_value(schemas, schema["items"], item, name) for item in value]
    elif isinstance(value, dict):
        if schema.get("x-kubernetes-map-type") == "atomic":
            return {name}
        known, other = schema.get("properties", {}), schema.get("additionalProperties", {})
        below = [
            one_value(schemas, known.get(key, other), item, key) for key, item in value.items()
        ]
    else:
        below = []
    return set().union(*below)


async def test_what_is_one_value_is_so_to_the_api_server(api):
    found = set()
    for kind, manifest in manifests("team").items():
        group = GROUPS[kind]
        schemas = (await api.get(f"/openapi/v3/{group}"))["components"]["schemas"]
        schema = next(
            schema
            for schema in schemas.values()
            for known in schema.get("x-kubernetes-group-version-kind", ())
            if known["kind"] == kind
        )
        found |= one_value(schemas, schema, manifest, kind)
    assert found == observed.ATOMIC | {"fieldRef", "items"}


async def test_a_service_that_was_changed_by_hand_serves_again(operator, stage):
    await stage.create(replicas=0)
    at = stage.at("services", "chat")
    first = await eventually(lambda: stage.api.find(at), 10)

    def ours(item):
        external = item["spec"]["type"] == "ExternalName"
        ports = [(one["name"], one["port"]) for one in item["spec"].get("ports", ())]
        return external, ports, item["spec"].get("selector")

    async def back():
        item = await stage.api.get(at)
        assert ours(item) == ours(first)
        assert item["metadata"]["uid"] == first["metadata"]["uid"]
        return item["spec"]

    def patch(**spec):
        stage.kubectl("patch", "svc", "chat", "--type=merge", "-p", json.dumps({"spec": spec}))

    patch(selector=OTHER)
    await eventually(back, 5, "the selector to be ours")
    event = await stage.event("SetBack")
    assert "Service chat set back, as somebody else had changed it" in event["message"]
    # A second port of our name, which no apply could follow, beside what may stay.
    patch(type="NodePort", ports=[{"port": 80, "name": "http", "targetPort": 30000}])
    spec = await eventually(back, 5, "the port to be ours")
    assert (spec["type"], spec["clusterIP"]) == ("NodePort", first["spec"]["clusterIP"])
    patch(type="ExternalName", externalName="example.com")
    spec = await eventually(back, 5, "the Service to have ports")
    assert (spec["type"], "externalName" in spec) == ("ClusterIP", False)
    await stage.has("Ready", "True")


async def test_a_service_that_another_tool_applies_stops_nothing_else(operator, stage):
    await stage.create(replicas=0)
    await stage.has("Ready", "True")
    at = stage.at("services", "chat")
    first = await stage.api.get(at)
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat"},
        "spec": {
            "ports": [
                {"port": port, "protocol": "TCP", "name": name}
                for port, name in ((80, "http"), (names.PORT_SERVING, "other"))
            ]
        },
    }
    await stage.api.request("PATCH", f"{at}?fieldManager=tool&force=true", theirs, APPLY)
    ready = await stage.has("Ready", "False", "ChangedByHand")
    assert "Duplicate value" in ready["message"]
    assert "kubectl delete service chat has it made anew" in ready["message"]
    await stage.edit(engine={"image": "engine-image:2"})

    async def followed():
        containers = (await stage.deployment())["spec"]["template"]["spec"]["containers"]
        return containers[0]["image"] == "engine-image:2"

    await eventually(followed, 5, "the Deployment to follow the spec")
    stage.kubectl("delete", "service", "chat")
    await stage.has("Ready", "True")
    again = await stage.api.get(at)
    assert again["metadata"]["uid"] != first["metadata"]["uid"]
    assert [one["name"] for one in again["spec"]["ports"]] == ["http"]


async def test_what_lost_its_labels_is_still_ours(operator, stage):
    await stage.create(replicas=0)
    await stage.has("Ready", "True")
    for kind, name in (("services", "chat"), ("secrets", "chat-credentials")):
        at = stage.at(kind, name)
        first = await stage.api.get(at)
        await stage.api.merge(at, {"metadata": {"labels": None}})

        async def back(at=at, first=first):
            item = await stage.api.get(at)
            assert item["metadata"].get("labels") == first["metadata"]["labels"]
            return item["metadata"]["uid"] == first["metadata"]["uid"]

        await eventually(back, 5, f"the labels of {name}")
    await stage.has("Ready", "True")
