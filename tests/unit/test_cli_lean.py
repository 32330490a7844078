"""Commands load what they need and nothing else: the operator's image has no plotting."""

import subprocess
import sys

import pytest

from specserve import cli

HEAVY = ("kopf", "kubernetes", "aiohttp", "rich", "matplotlib")


def loaded(code):
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_command_line_alone_loads_no_library_of_any_command():
    assert not loaded("import specserve.cli") & set(HEAVY)


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("specserve.operator", ("rich", "matplotlib", "specserve.bench.runner")),
        ("specserve.bench.runner, specserve.bench.screen", ("kopf", "kubernetes", "matplotlib")),
        ("specserve.doctor.checks, specserve.doctor.gather", ("kopf", "kubernetes", "rich")),
        ("specserve.calibrate.sweep", ("kopf", "kubernetes", "matplotlib")),
    ],
)
def test_a_command_loads_no_library_of_another(modules, absent):
    assert not loaded(f"import {modules}") & set(absent)


@pytest.mark.parametrize("command", ["bench", "calibrate", "doctor"])
def test_help_says_what_it_is_for_with_examples_and_exit_statuses(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "exit status:" in out
    assert f"specserve {command} --url" in out
