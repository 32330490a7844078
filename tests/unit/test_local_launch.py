"""From the rendered container to a process of this box."""

import shlex

import pytest
import yaml

from specserve import document, names
from specserve.bench.connection import BadOption
from specserve.local.launch import ENV_DEVICES, Files, expand, launches

BASE = {
    "apiVersion": "specserve.dev/v1alpha1",
    "kind": "SpecServe",
    "metadata": {"name": "chat", "namespace": "team"},
}


def asked(replicas=1, **spec):
    model = {"model": {"source": "path:///models/chat"}, "replicas": replicas}
    return document.read(yaml.safe_dump(BASE | {"spec": model | spec}))


def made(tmp_path, environ=None, **spec):
    return launches(asked(**spec), Files(tmp_path), environ or {})


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("a$(B)c", "a1c"),
        ("$$(B)", "$(B)"),
        ("$(C)", "$(C)"),
        ("$", "$"),
        ("$$", "$"),
        ("$(B", "$(B"),
        ("$B", "$B"),
        ("$$$(B)", "$1"),
        ("$(B)$(B)", "11"),
    ],
)
def test_references_are_read_as_the_kubelet_reads_them(text, expanded):
    assert expand(text, {"B": "1"}) == expanded


def test_a_dollar_sign_in_a_name_is_no_reference(tmp_path):
    [launch] = made(tmp_path, model={"source": "path:///models/$(HOME)", "servedName": "$(X)"})
    assert "--model-path=/models/$(HOME)" in launch.command
    assert "--served-model-name=$(X)" in launch.command


def test_every_engine_has_ports_an_identity_and_gpus_of_its_own(tmp_path):
    engine = {"tensorParallel": 2, "resources": {"limits": {"nvidia.com/gpu": 2}}}
    three = made(tmp_path, replicas=3, engine=engine)
    assert [launch.environ[ENV_DEVICES] for launch in three] == ["0,1", "2,3", "4,5"]
    assert len({launch.environ[names.ENV_POD_UID] for launch in three}) == 3
    assert [launch.place.serving for launch in three] == [
        f"http://127.0.0.1:{port}" for port in (30000, 30001, 30002)
    ]
    for number, launch in enumerate(three):
        assert f"--port={30000 + number}" in launch.command
        assert launch.environ[names.ENV_ADMIN_PORT] == str(9470 + number)
        assert launch.startup.url == launch.place.admin + "/health"
        assert launch.liveness.url == launch.place.serving + "/health"
    again = made(tmp_path, replicas=3, engine=engine)
    assert [one.digest for one in again] == [one.digest for one in three]


def test_gpus_are_shared_out_of_those_that_are_visible(tmp_path):
    engine = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    two = made(tmp_path, environ={ENV_DEVICES: "5,7,6"}, replicas=2, engine=engine)
    assert [launch.environ[ENV_DEVICES] for launch in two] == ["5", "7"]
    with pytest.raises(BadOption, match="2 engines of 1 GPUs need 2, and CUDA_VISIBLE_DEVICES"):
        made(tmp_path, environ={ENV_DEVICES: "5"}, replicas=2, engine=engine)
    [one] = made(tmp_path, engine=engine)
    assert ENV_DEVICES not in one.environ
    for launch in made(tmp_path, replicas=2):
        assert ENV_DEVICES not in launch.environ  # no GPU is asked for


def test_probes_and_grace_are_those_of_the_pod(tmp_path):
    pod = {"terminationGracePeriodSeconds": 45}
    [launch] = made(tmp_path, engine={"startupBudgetSeconds": 302}, pod=pod)
    assert launch.startup.budget == 305
    assert (launch.liveness.budget, launch.liveness.grace) == (180, 30)
    assert launch.grace == 45


def test_what_is_printed_is_what_is_run(tmp_path):
    env = [{"name": "A", "value": 'it\'s $(SPECSERVE_STEPS) "$"'}]
    draft = {"method": "EAGLE3", "source": "hf://a/b", "steps": [0, 1]}
    [launch] = made(tmp_path, engine={"env": env, "args": ["--log-level", "debug"]}, draft=draft)
    words = shlex.split(launch.shell().replace("\\\n", ""))
    count = len(launch.environ)
    assert words[0] == "env"
    assert dict(word.split("=", 1) for word in words[1 : count + 1]) == dict(launch.environ)
    assert tuple(words[count + 1 :]) == launch.command
    assert launch.environ["A"] == 'it\'s 0,1 "$"'


def test_what_opens_the_engines_is_in_no_variable(tmp_path):
    [launch] = made(tmp_path)
    ours = {"SPECSERVE_PLUGIN_TOKEN": "a", "SPECSERVE_API_KEY": "b", "PATH": "/bin"}
    assert launch.environment(ours) == {"PATH": "/bin", **launch.environ}


def test_a_secret_of_the_cluster_is_taken_from_this_environment(tmp_path):
    model = {"source": "hf://a/b", "tokenSecretRef": {"name": "hub"}}
    with pytest.raises(BadOption, match="HF_TOKEN: its value comes from a cluster"):
        made(tmp_path, model=model)
    [launch] = made(tmp_path, environ={"HF_TOKEN": "x"}, model=model)
    assert "HF_TOKEN" not in launch.environ
    assert launch.environment({"HF_TOKEN": "x"})["HF_TOKEN"] == "x"


@pytest.mark.parametrize("source", ["pvc://claim/chat", "oci://registry/chat:1"])
def test_what_a_cluster_mounts_is_not_there(tmp_path, source):
    with pytest.raises(BadOption, match=r"spec\.model\.source: .* is mounted by a cluster"):
        made(tmp_path, model={"source": source})
