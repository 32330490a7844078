from __future__ import annotations

import os

import pytest

from specserve_engine.auth import TokenFile


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plugin-token").write_text("current\n")
    return tmp_path


@pytest.mark.parametrize(
    ("header", "valid"),
    [
        ("Bearer current", True),
        ("bearer current", True),
        ("Bearer  current ", True),
        ("Bearer current x", False),
        ("Bearer CURRENT", False),
        ("Bearer curren", False),
        ("Bearer currentt", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("Basic current", False),
        ("current", False),
        ("", False),
        (None, False),
        ("Bearer \udcff", False),
        ("Bearer ключ", False),
    ],
)
def test_headers(folder, header, valid):
    assert TokenFile(folder).authorises(header) is valid


def test_a_token_beyond_ascii_is_compared_byte_by_byte(folder):
    (folder / "plugin-token").write_text("schlüssel", encoding="utf-8")
    as_decoded_by_the_server = "schlüssel".encode().decode("latin-1")
    assert TokenFile(folder).authorises(f"Bearer {as_decoded_by_the_server}")


def test_both_tokens_are_valid_during_a_rotation(folder):
    tokens = TokenFile(folder)
    (folder / "plugin-token-previous").write_text("former")
    assert tokens.authorises("Bearer current")
    assert tokens.authorises("Bearer former")
    (folder / "plugin-token-previous").unlink()
    assert not tokens.authorises("Bearer former")


def test_a_file_changed_in_place_is_read_again(folder):
    tokens = TokenFile(folder)
    assert tokens.authorises("Bearer current")
    before = (folder / "plugin-token").stat()
    (folder / "plugin-token").write_text("another")
    os.utime(folder / "plugin-token", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert not tokens.authorises("Bearer current")
    assert tokens.authorises("Bearer another")


def test_a_swapped_link_is_read_again_though_size_and_time_are_the_same(folder):
    for version, token in (("v1", "first-"), ("v2", "second")):
        (folder / version).mkdir()
        (folder / version / "plugin-token").write_text(token)
        os.utime(folder / version / "plugin-token", ns=(1, 1))
    (folder / "plugin-token").unlink()
    (folder / "plugin-token").symlink_to("..data/plugin-token")
    (folder / "..data").symlink_to("v1")
    tokens = TokenFile(folder)
    assert tokens.authorises("Bearer first-")
    (folder / "..data_tmp").symlink_to("v2")
    (folder / "..data_tmp").rename(folder / "..data")
    assert not tokens.authorises("Bearer first-")
    assert tokens.authorises("Bearer second")


def test_an_unchanged_file_is_not_read_again(folder):
    tokens = TokenFile(folder)
    assert tokens.authorises("Bearer current")
    path = folder / "plugin-token"
    before = path.stat()
    with path.open("r+") as file:
        file.write("CURRENT")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tokens.authorises("Bearer current")


@pytest.mark.parametrize("content", ["", "\n", "   "])
def test_an_empty_file_authorises_nobody(folder, content):
    (folder / "plugin-token").write_text(content)
    tokens = TokenFile(folder)
    for header in ("Bearer ", "Bearer", f"Bearer {content}", "Bearer current"):
        assert not tokens.authorises(header)


def test_a_missing_folder_authorises_nobody_until_it_is_there(tmp_path):
    tokens = TokenFile(tmp_path / "later")
    assert not tokens.authorises("Bearer current")
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "plugin-token").write_text("current")
    assert tokens.authorises("Bearer current")


def test_a_folder_in_the_files_place_authorises_nobody(tmp_path):
    (tmp_path / "plugin-token").mkdir()
    assert not TokenFile(tmp_path).authorises("Bearer current")


def test_tokens_show_in_no_repr(folder):
    tokens = TokenFile(folder)
    assert tokens.authorises("Bearer current")
    assert "current" not in repr(tokens)
    assert "current" not in repr(tokens._files)
