"""The command line: what it says and how it ends."""

import logging
import os
import signal
import socket
import subprocess
import sys

import pytest

from specserve import cli, operator
from specserve.leader import LeadershipLost
from specserve.settings import PREFIX, Settings


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setenv(PREFIX + "HTTP_PORT", "0")
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))


def test_a_bad_setting_ends_it_with_2_and_is_named(monkeypatch, capsys):
    monkeypatch.setenv(PREFIX + "WORKERS", "none")
    assert cli.main(["run"]) == 2
    assert "SPECSERVE_OPERATOR_WORKERS='none'" in capsys.readouterr().err


def test_a_port_in_use_ends_it_with_2_and_is_named(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv(PREFIX + "HTTP_PORT", str(taken.getsockname()[1]))
        assert cli.main(["run"]) == 2
    assert "SPECSERVE_OPERATOR_HTTP_PORT=" in capsys.readouterr().err


@pytest.mark.parametrize(("end", "code"), [(None, 0), (LeadershipLost("gone"), 1)])
def test_the_exit_code_tells_how_it_ended(monkeypatch, end, code):
    async def run(settings: Settings, health) -> None:
        if end is not None:
            raise end

    monkeypatch.setattr(operator, "run", run)
    assert cli.main(["run"]) == code


def test_help_names_every_variable(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--help"])
    assert caught.value.code == 0
    out = "".join(capsys.readouterr().out.split())
    assert all(PREFIX + name.upper() in out for name in Settings.model_fields)


def test_help_says_what_each_variable_means_and_what_holds_without_it(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    said = capsys.readouterr().out
    assert "_WORKERS\n      SpecServes reconciled at once. (default: 8)\n" in said
    assert "SPECSERVE_OPERATOR_LEASE_SECONDS\n      Time without renewal" in said
    assert "(default: 12)" in said
    assert "(default: *)" in said
    assert "None" not in said
    assert all(field.description for field in Settings.model_fields.values())


def unread(argv, unbuffered):
    """Run a command that nobody reads; returns its exit code and errors."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "specserve.cli", *argv],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writes)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--help"],
        ["replay", "-f", "examples/breakeven.yaml", "--trace", "load.yaml"],
        ["local", "-f", "examples/breakeven.yaml", "--print", "--state", "state"],
    ],
)
def test_a_reader_that_has_gone_is_no_error(argv, tmp_path):
    (tmp_path / "load.yaml").write_text("phases: [{seconds: 9, inFlight: 1, acceptLength: 2}]")
    places = {"load.yaml", "state"}
    argv = [str(tmp_path / word) if word in places else word for word in argv]
    # All was computed, and is lost at the end: the exit code is the command's own.
    assert unread(argv, "") == (0, "")
    if argv[0] != "run":
        assert unread(argv, "1") == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("argv", [[], ["fly"], ["run", "--fast"]])
def test_what_it_does_not_know_ends_it_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip()


def test_without_an_api_server_it_says_what_to_set(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    assert cli.main(["run"]) == 2
    assert "KUBECONFIG" in capsys.readouterr().err
