"""The engine image's one layer: the plugin's wheel, installed as the Dockerfile says."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pip

from tests.engine.install import ENGINE


def install_command():
    """Return the words of the Dockerfile's installation."""
    text = (ENGINE / "Dockerfile").read_text().replace("\\\n", " ")
    [line] = [line for line in text.splitlines() if line.startswith("RUN") and "install" in line]
    return ast.literal_eval(line.removeprefix("RUN "))


def test_the_layer_is_the_plugin_and_nothing_else(tmp_path):
    wheels, layer = tmp_path / "wheels", tmp_path / "layer"
    subprocess.run(
        [
            *(os.environ.get("UV") or "uv", "build", "--wheel", "--quiet"),
            *("--out-dir", str(wheels), str(ENGINE)),
        ],
        check=True,
    )
    replaced = {
        "python3": sys.executable,
        "/wheels/pip.whl/pip": str(Path(pip.__file__).parent),
        "--find-links=/wheels": f"--find-links={wheels}",
        "--target=/opt/specserve": f"--target={layer}",
    }
    words = install_command()
    assert replaced.keys() <= set(words)
    command = [replaced.get(word, word) for word in words]
    subprocess.run(command, check=True, capture_output=True)

    [plugin] = distributions(path=[str(layer)])
    assert plugin.name == "specserve-engine"
    # Next to its metadata there is one package.
    assert {path.name for path in layer.iterdir()} == {
        "specserve_engine",
        f"specserve_engine-{plugin.version}.dist-info",
    }
    [point] = plugin.entry_points.select(group="sglang.srt.plugins")
    loaded = subprocess.run(
        [sys.executable, "-c", f"import {point.module} as m; print(m.__file__, m.{point.attr})"],
        env={**os.environ, "PYTHONPATH": str(layer)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.startswith(str(layer))
