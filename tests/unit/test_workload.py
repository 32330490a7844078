"""Properties of the rendered workload that no accepted file shows."""

import base64
import copy
import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specserve import names
from specserve.api import Policy, SpecServeSpec
from specserve.schema import structural
from specserve.workload import (
    Owner,
    UnusableArgument,
    UnusableSpec,
    credentials,
    desired,
    engine_config,
    first_difference,
    owner_reference,
    template_hash,
)

OWNER = Owner("chat", "team", "0d6b2f9e-0000-4000-8000-000000000000")
BASE: dict[str, Any] = {
    "model": {"source": "hf://example-org/chat-8b", "tokenSecretRef": {"name": "hub"}},
    "draft": {"method": "EAGLE3", "source": "hf://example-org/draft", "steps": [0, 1, 3]},
    "engine": {
        "image": "registry.example/engine:1",
        "env": [{"name": "A", "value": "1"}],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
    },
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = copy.deepcopy(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if nested else value
    return out


def parsed(**changes: Any) -> SpecServeSpec:
    return SpecServeSpec.model_validate(merged(BASE, changes))


def deployment(**changes: Any) -> dict[str, Any]:
    return desired(OWNER, parsed(**changes))[-1]


def pod(**changes: Any) -> dict[str, Any]:
    return deployment(**changes)["spec"]["template"]["spec"]


def engine(**changes: Any) -> dict[str, Any]:
    return pod(**changes)["containers"][0]


def args(*words: str, **changes: Any) -> list[str]:
    return engine(**merged(changes, {"engine": {"args": list(words)}}))["args"]


# What must not replace a pod.


def valid(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Any value that the schema of a node allows, CEL rules aside."""
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if node["type"] == "integer":
        return st.integers(node["minimum"], node["maximum"])
    if node["type"] == "boolean":
        return st.booleans()
    if node["type"] == "string":
        if node.get("format") == "date-time":
            return st.sampled_from(["2030-01-01T00:00:00Z", "2030-01-01T12:30:00+02:00"])
        longest = node.get("maxLength", 64)
        if "pattern" in node:
            plain = st.characters(min_codepoint=33, max_codepoint=126)
            fitting = st.from_regex(node["pattern"], fullmatch=True, alphabet=plain)
            return fitting.filter(lambda text: len(text) <= longest)
        return st.text("abc", min_size=node.get("minLength", 0), max_size=longest)
    if node["type"] == "array":
        return st.lists(valid(node["items"]), max_size=node["maxItems"])
    assert node["type"] == "object", node
    if "additionalProperties" in node:
        keys = st.text("abc", min_size=1, max_size=8)
        return st.dictionaries(keys, valid(node["additionalProperties"]), max_size=3)
    if "properties" not in node:
        return st.just({})
    fields = {key: valid(child) for key, child in node["properties"].items()}
    required = {key: fields.pop(key) for key in node.get("required", ())}
    return st.fixed_dictionaries(required, optional=fields)


def as_bytes(value: Any) -> bytes:
    # Not sorted: the very same text, in the very same order.
    return json.dumps(value).encode()


@given(policy=valid(structural(Policy)), replicas=st.integers(0, 10_000))
def test_policy_and_replicas_leave_the_pod_template_as_it_is(policy, replicas):
    before, after = deployment(), deployment(policy=policy, replicas=replicas)
    assert as_bytes(after["spec"]["template"]) == as_bytes(before["spec"]["template"])
    assert template_hash(after) == template_hash(before)
    assert after["spec"].pop("replicas") == replicas
    before["spec"].pop("replicas")
    assert as_bytes(after) == as_bytes(before)


@given(data=st.data())
def test_the_order_of_keys_changes_nothing(data):
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            keys = data.draw(st.permutations(list(value)))
            return {key: shuffled(value[key]) for key in keys}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    spec = merged(
        BASE,
        {
            "pod": {
                "labels": {"b": "1", "a": "2"},
                "nodeSelector": {"y": "1", "x": "2"},
                "tolerations": [{"key": "k", "operator": "Exists"}],
            },
            "engine": {"resources": {"limits": {"memory": "1Gi", "cpu": 2}}},
        },
    )
    first = desired(OWNER, SpecServeSpec.model_validate(spec))
    second = desired(OWNER, SpecServeSpec.model_validate(shuffled(spec)))
    assert yaml.safe_dump(first) == yaml.safe_dump(second)
    assert template_hash(first[-1]) == template_hash(second[-1])


def test_the_operator_s_version_is_nowhere(monkeypatch):
    from importlib import metadata

    version = metadata.version("specserve")
    rendered = yaml.safe_dump_all(desired(OWNER, parsed()))
    assert version not in rendered
    assert "app.kubernetes.io/version" not in rendered


def test_the_input_is_left_alone():
    spec = parsed(pod={"initContainers": [{"name": "fetch", "image": "i", "env": []}]})
    before = spec.model_dump()
    manifests = desired(OWNER, spec)
    manifests[-1]["spec"]["template"]["spec"]["initContainers"][0]["env"].append({"name": "X"})
    assert spec.model_dump() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"source": "hf://example-org/other"}},
        {"pod": {"labels": {"team": "b", names.LABEL_INSTANCE: "other"}}},
        {"engine": {"image": "registry.example/engine:2"}},
    ],
)
def test_the_selector_depends_on_the_name_alone(changes):
    manifest = deployment(**changes)
    selector = manifest["spec"]["selector"]["matchLabels"]
    assert selector == names.selector("chat")
    assert selector.items() <= manifest["spec"]["template"]["metadata"]["labels"].items()


# Arguments.


def test_a_users_cap_replaces_ours_in_either_spelling():
    ours = "--max-running-requests=256"
    assert ours in args()
    for words in (("--max-running-requests", "512"), ("--max-running-requests=512",)):
        rendered = args(*words)
        assert ours not in rendered
        assert rendered[-len(words) :] == list(words)


@pytest.mark.parametrize(
    ("word", "ours", "rendered"),
    [
        ("--tensor-parallel-size=2", "--tp-size=1", "--tp-size=2"),
        ("--tp=2", "--tp-size=1", "--tp-size=2"),
        ("--max-running=9", "--max-running-requests=256", "--max-running-requests=9"),
        ("--max_running_requests=9", "--max-running-requests=256", "--max-running-requests=9"),
        ("--decode-log-interval=1", "--decode-log-interval=5", "--decode-log-interval=1"),
        (
            "--cuda-graph-max-bs=300",
            "--cuda-graph-max-bs-decode=256",
            "--cuda-graph-max-bs-decode=300",
        ),
        ("--host=::", "--host=", "--host=::"),
    ],
)
def test_known_flags_are_written_as_every_version_takes_them(word, ours, rendered):
    gpus = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
    assert ours in args()
    assert ours not in args(word, engine=gpus)
    assert args(word, engine=gpus).count(rendered) == 1
    flag, _, value = word.partition("=")
    assert args(flag, value, engine=gpus)[-2:] == rendered.split("=")


def test_the_last_of_a_repeated_flag_wins_and_unknown_flags_may_repeat():
    rendered = args("--tp", "1", "--lora=a", "--tp-size=1", "--lora=b", "--skip-server-warmup")
    assert rendered[-4:] == ["--tp-size=1", "--lora=a", "--lora=b", "--skip-server-warmup"]
    assert "--tp" not in rendered


def test_values_that_look_like_flags_or_are_many_stay_with_their_flag():
    words = ["--cuda-graph-bs-decode", "1", "64", "256", "--temperature-offset", "-1"]
    assert args(*words)[-6:] == words


def test_words_before_the_first_flag_lead():
    assert args("serve", "--log-level=info")[0] == "serve"


@pytest.mark.parametrize(
    ("words", "flag", "place"),
    [
        (["--model-path", "x"], "--model-path", "spec.model.source"),
        (["--model=x"], "--model", "spec.model.source"),
        (["--served-model-name=x"], "--served-model-name", "spec.model.servedName"),
        (["--port", "8000"], "--port", "the serving port is fixed"),
        (["--host=127.0.0.1"], "--host", "0.0.0.0 or ::"),
        (["--config", "x.yaml"], "--config", "spec.engine.args for each of its lines"),
        (["--config", names.ENGINE_CONFIG], "--config", "spec.engine.args"),
        (["--api-key=k"], "--api-key", "use spec.engine.apiKeySecretRef"),
        (["--admin-api-key=k"], "--admin-api-key", "leave it out: the operator makes"),
        (["--speculative-algorithm=NGRAM"], "--speculative-algorithm", "spec.draft.method"),
        (["--speculative-algo=NGRAM"], "--speculative-algo", "spec.draft.method"),
        (["--api_key", "k"], "--api_key", "--api-key"),
        (["--admin_api_key=k"], "--admin_api_key", "--admin-api-key"),
        (["--speculative_num_steps=5"], "--speculative_num_steps", "--speculative-num-steps"),
        (["--speculative-ada"], "--speculative-ada", "--speculative-adaptive-config"),
        (["--grpc-port=9"], "--grpc-port", "does not start with it and a key"),
        (["--ssl-cert", "x.pem"], "--ssl-cert", "plain HTTP"),
        (["--speculative-draft-model", "x"], "--speculative-draft-model", "spec.draft.source"),
        (["--speculative-num-steps=5"], "--speculative-num-steps", "spec.draft.steps"),
        (["--speculative-num-draft-tokens=5"], "--speculative-num-draft-tokens", "draft.steps"),
        (["--speculative-eagle-topk=4"], "--speculative-eagle-topk", "only 1 can be switched"),
        (["--speculative-adaptive-config=x"], "--speculative-adaptive-config", "draft.steps"),
        (["--tokenizer-worker-num=4"], "--tokenizer-worker-num", "without its control"),
        (["--use-ray"], "--use-ray", "without its control"),
    ],
)
def test_a_flag_that_carries_control_is_refused_with_the_field_to_use(words, flag, place):
    with pytest.raises(UnusableArgument, match=r"^spec\.engine\.args: ") as caught:
        args(*words)
    assert caught.value.flag == flag
    assert caught.value.field == "spec.engine.args"
    assert flag in str(caught.value)
    assert place in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "30000"],
        ["--port=30000"],
        ["--enable-metrics"],
        ["--speculative-adaptive"],
        ["--speculative-eagle-topk=1"],
        ["--speculative-num-steps", "3"],
    ],
)
def test_saying_what_the_operator_says_anyway_is_fine(words):
    assert args(*words) == args()


def test_steps_are_the_users_where_nothing_is_switched():
    rendered = args("--speculative-num-steps=5", draft={"method": "STANDALONE"})
    assert [word for word in rendered if "num-steps" in word] == ["--speculative-num-steps=5"]
    assert "--speculative-adaptive" not in rendered


def test_a_flag_with_its_value_in_one_word_is_refused():
    with pytest.raises(UnusableArgument, match="write --tp and its value as two"):
        args("--tp 2")


def test_our_values_are_not_expanded_by_the_kubelet():
    assert "--served-model-name=$$(HOME)" in args(model={"servedName": "$(HOME)"})


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ({"method": "None"}, []),
        (
            {"method": "NEXTN", "source": None},
            [
                "--speculative-algorithm=NEXTN",
                "--speculative-num-steps=3",
                "--speculative-eagle-topk=1",
                "--speculative-adaptive",
                "--speculative-adaptive-config=/etc/specserve/adaptive/adaptive.json",
            ],
        ),
        ({"method": "NGRAM", "source": None}, ["--speculative-algorithm=NGRAM"]),
        (
            {"revision": "v2", "steps": [4, 0, 2]},
            [
                "--speculative-algorithm=EAGLE3",
                "--speculative-draft-model-path=example-org/draft",
                "--speculative-draft-model-revision=v2",
                "--speculative-num-steps=4",
                "--speculative-eagle-topk=1",
                "--speculative-adaptive",
                "--speculative-adaptive-config=/etc/specserve/adaptive/adaptive.json",
            ],
        ),
    ],
)
def test_each_method_has_its_flags(draft, words):
    assert [word for word in args(draft=draft) if "speculative" in word] == words


@pytest.mark.parametrize("method", ["EAGLE", "EAGLE3", "NEXTN"])
def test_live_methods_demand_control(method):
    environment = {
        item["name"]: item.get("value") for item in engine(draft={"method": method})["env"]
    }
    assert environment[names.ENV_REQUIRE_LIVE] == "1"
    assert environment[names.ENV_STEPS] == "0,1,3"


def test_every_step_is_prepared_at_every_batch_size():
    template = deployment(
        draft={"steps": [4, 0, 2]}, pod={"annotations": {names.ANNOTATION_ADAPTIVE: "mine"}}
    )["spec"]["template"]
    config = json.loads(template["metadata"]["annotations"][names.ANNOTATION_ADAPTIVE])
    assert config.pop("update_interval") == 100
    assert config == {size: {"candidate_steps": [0, 2, 4]} for size in ("1", "8", "32", "128")}


def test_the_adaptive_configuration_is_shown_as_the_file_that_the_engine_is_told():
    shape = pod()
    [volume] = [item for item in shape["volumes"] if "downwardAPI" in item]
    [item] = volume["downwardAPI"]["items"]
    assert names.ANNOTATION_ADAPTIVE in item["fieldRef"]["fieldPath"]
    mounts = {m["name"]: m for m in shape["containers"][0]["volumeMounts"]}
    mount = mounts[volume["name"]]
    assert f"{mount['mountPath']}/{item['path']}" == names.ADAPTIVE_CONFIG
    assert mount["readOnly"]


@pytest.mark.parametrize("method", ["NGRAM", "None"])
def test_nothing_is_prepared_where_nothing_is_switched(method):
    template = deployment(draft={"method": method, "source": None})["spec"]["template"]
    assert names.ANNOTATION_ADAPTIVE not in template["metadata"]["annotations"]
    assert not any("downwardAPI" in item for item in template["spec"]["volumes"])


def test_config_is_two_words():
    """SGLang looks for the bare flag, and takes the next word for the file."""
    words = args()
    assert words[words.index("--config") + 1] == names.ENGINE_CONFIG


# Weights, volumes, memory.


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("hf://example-org/chat", "example-org/chat"),
        ("hf://gpt2", "gpt2"),
        ("path:///models//chat/", "/models/chat"),
        ("pvc://models", "/specserve/model"),
        ("pvc://models/a/b", "/specserve/model/a/b"),
        ("pvc://models/../../etc", "/specserve/model/etc"),
        ("oci://registry.example:5000/models/chat:1", "/specserve/model"),
    ],
)
def test_a_source_becomes_a_path(source, path):
    assert f"--model-path={path}" in args(model={"source": source})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"source": "hf://example-org/chat"}, "example-org/chat"),
        ({"source": "oci://registry.example:5000/chat:1"}, "registry.example-5000/chat-1"),
        ({"source": "oci://registry.example/chat:1", "servedName": "chat 1"}, "chat 1"),
    ],
)
def test_a_model_is_called_what_sglang_takes_for_a_name(model, name):
    """It refuses a colon (0.5.14 to 0.5.23), and takes a space."""
    assert f"--served-model-name={name}" in args(model=model)


def test_a_claim_is_mounted_once_and_read_only():
    shape = pod(model={"source": "pvc://w/chat"}, draft={"source": "pvc://w/draft"})
    claims = [v for v in shape["volumes"] if "persistentVolumeClaim" in v]
    assert [v["persistentVolumeClaim"]["claimName"] for v in claims] == ["w"]
    mounts = [m for m in shape["containers"][0]["volumeMounts"] if m["name"] == claims[0]["name"]]
    assert mounts == [
        {"name": "specserve-model", "mountPath": "/specserve/model", "readOnly": True}
    ]
    words = shape["containers"][0]["args"]
    assert "--speculative-draft-model-path=/specserve/model/draft" in words


def test_two_claims_are_two_mounts():
    shape = pod(model={"source": "pvc://a/chat"}, draft={"source": "oci://registry.example/d:1"})
    assert {v["name"]: v for v in shape["volumes"]}["specserve-draft"]["image"] == {
        "reference": "registry.example/d:1"
    }
    assert "--speculative-draft-model-path=/specserve/draft" in shape["containers"][0]["args"]


def shared_memory(**changes: Any) -> list[Any]:
    return [v["emptyDir"] for v in pod(**changes)["volumes"] if "emptyDir" in v]


GPUS = {"resources": {"limits": {"nvidia.com/gpu": 4}}}


@pytest.mark.parametrize(
    ("engine_changes", "size"),
    [
        ({}, None),
        ({"tensorParallel": 2}, "8Gi"),
        ({"dataParallel": 2}, "8Gi"),
        ({"args": ["--tp", "2"]}, "8Gi"),
        ({"args": ["--dp=4"]}, "8Gi"),
        ({"tensorParallel": 2, "args": ["--tp-size=1"]}, None),
        ({"sharedMemory": "20Gi"}, "20Gi"),
        ({"sharedMemory": 1073741824}, "1073741824"),
    ],
)
def test_shared_memory_follows_the_gpus_in_force(engine_changes, size):
    expected = [{"medium": "Memory", "sizeLimit": size}] if size else []
    assert shared_memory(engine={**GPUS, **engine_changes}) == expected


def test_the_nodes_shared_memory_is_not_hidden():
    changes = {**GPUS, "tensorParallel": 2}
    assert shared_memory(engine=changes, pod={"hostIPC": True}) == []


@pytest.mark.parametrize("words", [["--tp"], ["--tp=two"], ["--tp=0"]])
def test_a_size_must_be_a_number(words):
    with pytest.raises(UnusableSpec, match="--tp-size needs a whole number above 0"):
        args(*words)


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        ({}, False),
        ({"memory": "64Gi", "cpu": 8}, False),
        ({"nvidia.com/gpu": 2}, False),
        ({"amd.com/gpu": "2"}, False),
        ({"vendor.example/gpu": 1}, True),
        ({"vendor.example/gpu": 2, "vendor.example/gpumem": 3000}, False),
        ({"hugepages-2Mi": "1Gi", "nvidia.com/gpu": 1}, True),
    ],
)
def test_tensor_parallelism_needs_devices_of_whatever_name(limits, refused):
    spec = SpecServeSpec.model_validate(
        {
            "model": {"source": "hf://a/b"},
            "engine": {"image": "i", "tensorParallel": 2, "resources": {"limits": limits}},
        }
    )
    if not refused:
        assert desired(OWNER, spec)
        return
    with pytest.raises(UnusableSpec, match="needs as many devices") as caught:
        desired(OWNER, spec)
    assert caught.value.field == "spec.engine.resources.limits"


@pytest.mark.parametrize(
    ("pod_changes", "field"),
    [
        ({"volumes": [{"name": "specserve-model", "emptyDir": {}}]}, "spec.pod.volumes[0].name"),
        (
            {"volumeMounts": [{"name": "x", "mountPath": "/etc/specserve/credentials/"}]},
            "spec.pod.volumeMounts",
        ),
    ],
)
def test_the_operators_volumes_are_its_own(pod_changes, field):
    with pytest.raises(UnusableSpec) as caught:
        pod(pod=pod_changes)
    assert caught.value.field == field


def test_no_secret_is_mounted_by_sub_path():
    """The kubelet never refreshes such a file, and a rotated token would lock us out."""
    shape = pod(engine={"apiKeySecretRef": {"name": "clients"}})
    secrets = {v["name"] for v in shape["volumes"] if "secret" in v}
    mounts = [m for m in shape["containers"][0]["volumeMounts"] if m["name"] in secrets]
    assert len(mounts) == 2
    assert all("subPath" not in mount and mount["readOnly"] for mount in mounts)
    assert all(v["secret"]["optional"] is False for v in shape["volumes"] if "secret" in v)


# Environment, accounts, security, stopping.


def test_the_hub_token_reaches_every_container_and_the_user_s_own_wins():
    init = [
        {"name": "fetch", "image": "i"},
        {"name": "own", "image": "i", "env": [{"name": "HF_TOKEN", "value": "x"}]},
    ]
    first, second = pod(pod={"initContainers": init})["initContainers"]
    token = {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
    }
    assert first["env"] == [token]
    assert second == init[1]
    assert token in engine()["env"]
    own = engine(engine={"env": [{"name": "HF_TOKEN", "value": "x"}]})["env"]
    assert [item for item in own if item["name"] == "HF_TOKEN"] == [
        {"name": "HF_TOKEN", "value": "x"}
    ]


def test_an_account_without_rights_is_made_unless_one_is_named():
    made = desired(OWNER, parsed())
    assert [manifest["kind"] for manifest in made] == ["ServiceAccount", "Service", "Deployment"]
    assert pod()["automountServiceAccountToken"] is False
    named = desired(OWNER, parsed(pod={"serviceAccountName": "mine"}))
    assert [manifest["kind"] for manifest in named] == ["Service", "Deployment"]
    assert named[-1]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert "automountServiceAccountToken" not in named[-1]["spec"]["template"]["spec"]


def test_a_users_security_context_is_kept_and_wins():
    given = {"runAsUser": 1000, "seccompProfile": {"type": "Unconfined"}}
    assert pod(pod={"securityContext": given})["securityContext"] == given
    assert pod(pod={"securityContext": {"fsGroup": 5}})["securityContext"] == {
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": 5,
    }


@pytest.mark.parametrize(
    ("grace", "pause"), [(330, 5), (6, 5), (5, 4), (2, 1), (1, None), (0, None)]
)
def test_the_pause_before_the_stop_ends_within_the_grace_period(grace, pause):
    container = engine(pod={"terminationGracePeriodSeconds": grace})
    assert container.get("lifecycle") == (
        {"preStop": {"sleep": {"seconds": pause}}} if pause else None
    )


@pytest.mark.parametrize("budget", [30, 31, 900, 86_400])
def test_the_start_up_budget_is_granted_and_the_rollout_waits_longer(budget):
    manifest = deployment(engine={"startupBudgetSeconds": budget})
    probe = manifest["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    granted = probe["periodSeconds"] * probe["failureThreshold"]
    assert budget <= granted < budget + probe["periodSeconds"]
    assert manifest["spec"]["progressDeadlineSeconds"] > granted


def test_the_engine_may_take_its_time_to_answer_the_liveness_probe():
    assert engine()["livenessProbe"]["timeoutSeconds"] >= 25


def test_every_object_is_owned():
    for manifest in desired(OWNER, parsed()):
        assert manifest["metadata"]["ownerReferences"] == [owner_reference(OWNER)]
        assert manifest["metadata"]["namespace"] == "team"
        assert manifest["metadata"]["labels"] == names.labels("chat")
    reference = owner_reference(OWNER)
    assert reference["controller"] is True
    assert reference["blockOwnerDeletion"] is True


# Credentials.


def test_credentials_carry_each_key_and_nothing_else():
    secret = credentials(
        OWNER,
        plugin_token="tok-1",
        plugin_token_previous="",
        admin_key="adm",
        nonce="42",
        config_yaml=engine_config("adm", "client"),
        rotated="r1",
    )
    data = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert yaml.safe_load(data.pop("config.yaml")) == {"admin-api-key": "adm", "api-key": "client"}
    assert data == {
        "plugin-token": "tok-1",
        "plugin-token-previous": "",
        "admin-key": "adm",
        "nonce": "42",
    }
    assert secret["metadata"]["name"] == "chat-credentials"
    assert secret["metadata"]["annotations"] == {names.ANNOTATION_ROTATED: "r1"}
    assert secret["metadata"]["ownerReferences"] == [owner_reference(OWNER)]


@pytest.mark.parametrize("key", ["0123456789", "yes", "a: b # c", "ünï" * 400, "null"])
def test_a_key_stays_a_text_in_the_engines_file(key):
    assert yaml.safe_load(engine_config(key, key)) == {"admin-api-key": key, "api-key": key}
    assert "api-key: null" not in engine_config("k")
    assert yaml.safe_load(engine_config("k")) == {"admin-api-key": "k"}


# Why did we restart?


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, None),
        ({"replicas": 9, "policy": {"mode": "Off"}}, None),
        ({"engine": {"image": "registry.example/engine:2"}}, "spec.containers[engine].image"),
        (
            {"engine": {"env": [{"name": "A", "value": "2"}]}},
            "spec.containers[engine].env[A].value",
        ),
        ({"engine": {"env": []}}, "spec.containers[engine].env[A]"),
        ({"engine": {"args": ["--x"]}}, "spec.containers[engine].args[--x]"),
        (
            {"engine": {"memFractionStatic": "0.7"}},
            "spec.containers[engine].args[--mem-fraction-static]",
        ),
        ({"model": {"revision": "v2"}}, "spec.containers[engine].args[--revision]"),
        ({"pod": {"labels": {"team": "b"}}}, "metadata.labels.team"),
        ({"pod": {"hostIPC": True}}, "spec.hostIPC"),
        (
            {"pod": {"volumes": [{"name": "v", "emptyDir": {}}]}},
            "spec.volumes[v]",
        ),
    ],
)
def test_the_first_difference_is_named(changes, path):
    old, new = deployment(), deployment(**changes)
    assert first_difference(old, new) == path
    assert first_difference(new, old) == path
    assert (template_hash(old) == template_hash(new)) == (path is None)


def test_a_difference_names_no_value():
    old = deployment(engine={"env": [{"name": "A", "value": "s3cret"}]})
    assert "s3cret" not in (first_difference(old, deployment()) or "")
    old = deployment(engine={"args": ["--header=s3cret"]})
    assert first_difference(old, deployment()) == "spec.containers[engine].args[--header]"


def test_one_is_not_true():
    old, new = deployment(), deployment()
    new["spec"]["template"]["spec"]["enableServiceLinks"] = 0
    assert first_difference(old, new) == "spec.enableServiceLinks"


# Both engines read what is rendered.


def test_the_simulated_engine_understands_the_command_line(tmp_path):
    from specserve_sim import cli

    config = tmp_path / names.KEY_CONFIG
    config.write_text(engine_config("adm", "client"))
    words = [str(config) if word == names.ENGINE_CONFIG else word for word in args()]
    known, unknown = cli.parser().parse_known_args(words)
    assert (known.host, known.port, known.tp_size, known.dp_size) == ("", 30000, 1, 1)
    assert known.model_path == known.served_model_name == "example-org/chat-8b"
    assert (known.max_running_requests, known.decode_log_interval) == (256, 5)
    assert (known.speculative_algorithm, known.speculative_num_steps) == ("EAGLE3", 3)
    assert known.enable_metrics
    # Live control is what it always has, and CUDA graphs what it never has.
    assert unknown == [
        "--speculative-adaptive",
        f"--speculative-adaptive-config={names.ADAPTIVE_CONFIG}",
        "--cuda-graph-max-bs-decode=256",
    ]
    keys = cli.parse(cli.parser(), words)
    assert (keys.admin_api_key, keys.api_key) == ("adm", "client")


@pytest.mark.parametrize("method", ["EAGLE3", "NGRAM", "None"])
def test_the_plugin_understands_its_environment(method):
    from specserve_engine.environ import settings_from

    draft = {"method": method, "steps": [3, 0, 1]}
    given = {item["name"]: item.get("value", "uid-1") for item in engine(draft=draft)["env"]}
    settings = settings_from(given)
    assert settings.pod_uid == "uid-1"
    assert settings.admin_port == names.PORT_ADMIN
    assert str(settings.credentials) == names.CREDENTIALS_DIR
    assert settings.require_live == (method == "EAGLE3")
    assert settings.steps == ((0, 1, 3) if method == "EAGLE3" else (0,))
