"""What the images must not become: built over a network, or run as root."""

from __future__ import annotations

import pytest

from tests.chart.generate import ROOT

DOCKERFILES = sorted((ROOT / "images").glob("*/Dockerfile"))
ENGINE = ROOT / "images/engine/Dockerfile"


def instructions(file):
    """Instruction and rest of each, continuation lines joined."""
    text = file.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.parent.name)
def test_two_stages_from_one_base_that_can_be_chosen(file):
    stages = [rest for word, rest in instructions(file) if word == "FROM"]
    assert stages == ["${BASE} AS build", "${BASE}"]
    # SGLang's image has no default: a version must be chosen, and it is tens of gigabytes.
    base = "BASE" if file == ENGINE else "BASE=docker.io/library/python:3.11-slim-bookworm"
    assert ("ARG", base) in instructions(file)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.parent.name)
def test_nothing_is_fetched_and_no_shell_needed(file):
    for word, rest in instructions(file):
        assert word not in {"ADD", "SHELL"}
        if word == "RUN":
            assert rest.startswith("["), rest
            assert "install" not in rest or "--no-index" in rest or "shutil" in rest
        if word == "COPY":
            assert rest.startswith(("wheels/", "--from=build")), rest


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.parent.name)
def test_numeric_user_and_labels(file):
    # SGLang's image has caches of compiled kernels that belong to the user it chose.
    users = [rest for word, rest in instructions(file) if word == "USER"]
    assert users == ([] if file == ENGINE else ["65532:65532"])
    (labels,) = [rest for word, rest in instructions(file) if word == "LABEL"]
    for label in ("title", "description", "licenses", "vendor", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels
