"""Files of engines that are started: who writes them, and which of them make another engine."""

import argparse
from pathlib import Path

import pytest

from specserve import cli, document, names, workload
from specserve.local import start

FILE = """kind: SpecServe
metadata: {name: chat}
spec:
  model: {source: 'path:///models/chat'}
  draft: {method: EAGLE3, source: 'path:///models/draft', steps: [0, 3]}
"""
OPTIONS = argparse.Namespace(file=Path("cr.yaml"), entry_point="", port=30000, admin_port=9470)


def prepared(folder, *, token="plugin-token", api_key="key", text=FILE):
    [launch], _ = start.prepared(OPTIONS, document.read(text), folder, {}, (token, api_key))
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
