"""The plugin's check and SGLang's hook registry, on the names and parameters of real wheels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from specserve_engine.sglang import upstream
from tests.engine import skeleton
from tests.engine.install import ENGINE
from tests.engine.wheels import SHA256, wheel

NEWEST = max(SHA256, key=lambda version: [int(part) for part in version.split(".")])
HOOKS = [*upstream.RANK_HOOKS, *upstream.HTTP_HOOKS]
NEEDED = [
    *HOOKS,
    upstream.SET_REQUEST,
    upstream.UNSUPPORTED_REASON,
    upstream.HOOK_REGISTRY,
    upstream.HTTP_APP,
]
REGISTER = """
import json
from specserve_engine.sglang.plugin import register
register()
from sglang.srt.plugins.hook_registry import HookRegistry
print(json.dumps(sorted(HookRegistry._patched)))
"""


@pytest.fixture(params=sorted(SHA256))
def version(request):
    return request.param


@pytest.fixture
def tree(tmp_path, version):
    skeleton.write(wheel(version), version, tmp_path)
    return tmp_path


def registered(tree):
    """Load the plugin beside a skeleton, in a process of its own."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(ENGINE)]),
        "SPECSERVE_POD_UID": "pod",
        "SPECSERVE_CREDENTIALS_DIR": str(tree),
    }
    return subprocess.run(
        [sys.executable, "-c", REGISTER], env=environ, capture_output=True, text=True, check=False
    )


def edited(tree, target, pattern, replacement):
    """Change a target's definition in a skeleton, as a release of SGLang might."""
    path = skeleton.module_file(tree, target.module)
    text = path.read_text()
    changed = re.sub(pattern, replacement, text, count=1)
    assert changed != text
    path.write_text(changed)


def test_every_stated_version_is_compared():
    assert SHA256.keys() == upstream.PROVED | upstream.CHECKED
    assert not upstream.PROVED & upstream.CHECKED


def test_all_hooks_hold(tree, version):
    child = registered(tree)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == sorted(target.path for target in HOOKS)
    proof = "proved" if version in upstream.PROVED else "not proved by running"
    assert f"hooked SGLang {version}" in child.stderr
    assert proof in child.stderr


@pytest.mark.parametrize("version", [NEWEST], indirect=True)
@pytest.mark.parametrize("target", NEEDED, ids=lambda target: target.path)
def test_a_target_that_is_gone_is_named(tree, target, version):
    # Every class has a constructor, so for one of these the class itself must go.
    name = target.name.removesuffix(".__init__").rpartition(".")[2]
    edited(tree, target, rf"(?m)^( *(?:async )?(?:def |class )?){name}\b(?=[:(]| =)", r"\1gone")
    child = registered(tree)
    assert child.returncode == 1
    # A class is missed at the first of its names.
    [named] = re.findall(r"this SGLang is not supported: (\S+) is missing", child.stderr)[-1:]
    assert named.startswith(f"{target.module}.{target.name.partition('.')[0]}")


@pytest.mark.parametrize("version", [NEWEST], indirect=True)
@pytest.mark.parametrize(
    "target",
    [target for target in HOOKS if len(target.parameters or ()) > 1],
    ids=lambda target: target.path,
)
def test_a_target_that_takes_other_parameters_is_named(tree, target, version):
    name = target.name.rpartition(".")[2]
    first, second = target.parameters[:2]
    edited(tree, target, rf"(def {name}\({first}, ){second}", r"\1renamed")
    child = registered(tree)
    assert child.returncode == 1
    assert f"{target.path} takes ({first}, renamed" in child.stderr


def test_a_wheel_that_cannot_be_had_says_what_to_do(tmp_path, monkeypatch):
    from tests.engine.wheels import NoWheel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NoWheel, match="copy the file there from another machine") as caught:
        wheel(NEWEST)
    assert SHA256[NEWEST] in str(caught.value)
