"""Files of engines that are started: who writes them, and which of them make another engine."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specserve import cli, document, names, workload
from specserve.bench.connection import BadOption
from specserve.local import start

FILE = """apiVersion: specserve.dev/v1alpha1
kind: SpecServe
metadata: {name: chat}
spec:
  model: {source: 'path:///models/chat'}
  draft: {method: EAGLE3, source: 'path:///models/draft', steps: [0, 3]}
"""
OPTIONS = argparse.Namespace(file=Path("cr.yaml"), entry_point="", port=30000, admin_port=9470)


def prepared(folder, *, token="plugin-token", api_key="key", text=FILE, entry_point=""):
    options = argparse.Namespace(**vars(OPTIONS) | {"entry_point": entry_point})
    [launch], _ = start.prepared(options, document.read(text), folder, {}, (token, api_key))
    return launch


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_a_pod_has_in_volumes_is_in_files_for_their_owner_alone(tmp_path):
    launch = prepared(tmp_path)
    folder = tmp_path / start.FOLDER
    assert "admin-api-key" in (folder / names.KEY_CONFIG).read_text()
    adaptive = workload.adaptive_config(document.read(FILE).spec)
    assert (folder / names.ADAPTIVE_FILE).read_text() == adaptive
    assert (folder / "credentials" / names.KEY_PLUGIN_TOKEN).read_text() == "plugin-token"
    assert all(path.stat().st_mode & 0o077 == 0 for path in contents(folder))
    assert any(str(folder / names.KEY_CONFIG) in word for word in launch.command)


@pytest.mark.parametrize("begun", [False, True])
def test_to_print_writes_nothing(tmp_path, capsys, monkeypatch, begun):
    monkeypatch.delenv("SPECSERVE_API_KEY", raising=False)
    state = tmp_path / "state"
    if begun:
        prepared(state)
    before = contents(state)
    file = tmp_path / "cr.yaml"
    file.write_text(FILE)
    assert cli.main(["local", "-f", str(file), "--state", str(state), "--print"]) == 0
    printed = capsys.readouterr().out
    assert str(state / start.FOLDER / names.KEY_CONFIG) in printed
    assert str(state / start.FOLDER / "credentials") in printed
    assert contents(state) == before
    assert state.exists() == begun


def test_an_engine_with_another_configuration_is_another_engine(tmp_path):
    digest = prepared(tmp_path).digest
    assert prepared(tmp_path).digest == digest
    assert prepared(tmp_path, api_key=None).digest != digest
    assert prepared(tmp_path, api_key="other").digest != digest
    # Read anew by the engine while it runs.
    assert prepared(tmp_path, token="another").digest == digest


def test_adaptive_settings_are_part_of_what_an_engine_is(tmp_path, monkeypatch):
    digest = prepared(tmp_path).digest
    monkeypatch.setattr(workload, "adaptive_config", lambda _: "{}")
    assert prepared(tmp_path).digest != digest


# -- what cannot start -------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path):
    """A Python without packages, whatever is installed on this machine."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


def test_without_sglang_nothing_is_started_and_what_would_help_is_said(
    tmp_path, bare, capsys, monkeypatch
):
    monkeypatch.setenv("PATH", f"{bare.parent}:{os.environ['PATH']}")
    (tmp_path / "cr.yaml").write_text(FILE)
    given = ["-f", str(tmp_path / "cr.yaml"), "--state", str(tmp_path / "state"), "--start"]
    assert cli.main(["local", *given]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith(
        "specserve: sglang and specserve_engine cannot be imported by python3, which is to run "
        "-m sglang.launch_server"
    )
    assert "--entry-point" in said.err
    assert not (tmp_path / "state" / "processes.json").exists()


def test_packages_are_looked_for_where_the_engine_would_find_them(tmp_path, bare):
    launch = prepared(tmp_path, entry_point=f"{bare} -m sglang.launch_server")
    there = {"PYTHONPATH": str(tmp_path / "lib")}
    (tmp_path / "lib" / "sglang").mkdir(parents=True)
    with pytest.raises(BadOption, match=r"^specserve_engine cannot be imported"):
        start.runnable((launch,), there)
    (tmp_path / "lib" / "specserve_engine").mkdir()
    start.runnable((launch,), there)
    other = prepared(tmp_path, entry_point=f"{bare} -m some_engine.serve")
    with pytest.raises(BadOption, match=r"^some_engine cannot be imported"):
        start.runnable((other,), there)


def test_what_does_not_answer_like_a_python_is_tried(tmp_path, monkeypatch):
    launch = prepared(tmp_path, entry_point="/bin/false -m some_engine")
    start.runnable((launch,), {})

    def late(*_, **__):
        raise subprocess.TimeoutExpired("python3", 30)

    monkeypatch.setattr(subprocess, "run", late)
    start.runnable((prepared(tmp_path, entry_point=f"{sys.executable} -m some_engine"),), {})
