"""What real engines are started with, without starting one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specserve import names
from tests.engine import environment
from tests.engine.environment import FLAGS, REQUIREMENTS, Environment, hash_of, made
from tests.engine.launch import rendered
from tests.engine.matrix import CI, FULL, Cases


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specserve/engine"


def test_a_part_is_made_once(cache):
    calls = []

    def fill(folder):
        calls.append(folder)
        (folder / "content").write_text("whole")

    for _ in range(2):
        assert made("part-1", fill) == cache / "part-1"
    assert len(calls) == 1
    assert (cache / "part-1/content").read_text() == "whole"


def test_a_part_that_could_not_be_made_is_not_there(cache):
    def fill(folder):
        (folder / "content").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        made("part-1", fill)
    assert [path.name for path in cache.iterdir()] == ["part-1.lock"]
    made("part-1", lambda folder: (folder / "content").write_text("whole"))
    assert (cache / "part-1/content").read_text() == "whole"


def test_keys_tell_parts_apart():
    assert hash_of(b"ab", b"c") != hash_of(b"a", b"bc")


def test_all_packages_are_pinned():
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+", line) for line in lines)
    assert lines == sorted(lines)


def test_a_server_is_started_as_the_operator_renders_it(tmp_path):
    made = Environment("0.5.23", Path("/python"), (Path("/sglang"),), Path("/packages"), ())
    launch = rendered(made, Path("/pair"), tmp_path, ranks=2)
    words = launch.command
    assert words[:3] == ("/python", "-m", "sglang.launch_server")
    assert {*FLAGS, "--tp-size=2", "--speculative-adaptive"} <= {*words}
    assert launch.environ[names.ENV_POD_UID]
    assert launch.environ["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    for place in (names.ENGINE_CONFIG_DIR, names.ADAPTIVE_DIR, names.CREDENTIALS_DIR):
        assert not [text for text in (*words, *launch.environ.values()) if place in text]
    secrets = (launch.admin_key, launch.address.api_key, launch.address.token, str(launch.nonce))
    for secret in secrets:
        assert not [text for text in (*words, *launch.environ.values()) if secret in text]
    assert launch.admin_key in (tmp_path / names.KEY_CONFIG).read_text()


def test_a_servers_environment_keeps_bytecode_and_no_strangers(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    monkeypatch.setenv("HOME", "/home/somebody")
    made = Environment("0.5.23", Path("/python"), (Path("/a"), Path("/b")), Path("/packages"), ())
    environ = made.environ(MORE="1")
    assert environ["PYTHONPATH"] == "/a:/b"
    assert (environ["HOME"], environ["MORE"]) == ("/home/somebody", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in environ
    assert "SGLANG_PLUGINS" not in environ


def test_a_failed_case_is_named_and_the_next_one_tried(capsys):
    cases = Cases()
    with cases("first"):
        assert not "this is so"
    with cases("second"):
        pass
    assert list(cases.seconds) == ["first", "second"]
    assert list(cases.failed) == ["first"]
    assert "AssertionError" in cases.failed["first"]
    assert "FAILED" in capsys.readouterr().out


def test_every_proved_version_is_tried_with_one_rank_and_with_two():
    assert {(plan.version, plan.ranks) for plan in FULL} == {
        (version, ranks) for version in environment.VERSIONS for ranks in (1, 2)
    }
    assert {(plan.version, plan.ranks) for plan in CI} == {("0.5.23", 1), ("0.5.23", 2)}
    assert all(plan.flips >= 200 and plan.faults for plan in FULL)
