"""The operator's table of flags, held against the parsers of real wheels."""

import argparse
import re
from pathlib import Path

import pytest
import yaml

from specserve.workload.flags import FLAGS, VERSIONS, meant
from tests.engine import environment
from tests.engine.options import options
from tests.engine.wheels import SHA256, wheel

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"--[a-z][a-z0-9-]+")
#: Of the programs of this project.
OURS = {"--flip", "--json", "--levels", "--url"}


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def known(version):
    return options(wheel(version))


def test_the_table_covers_the_versions_that_are_compared():
    assert set(VERSIONS) == SHA256.keys()


def test_enough_is_read_to_be_all_of_it(known):
    assert len(known) > 400


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_flag_has_the_spellings_that_the_table_says(version, known, flag):
    real = {spelling for spelling, name in known.items() if flag.name in (name, spelling)}
    assert real == flag.spellings(version)


def test_whatever_the_parser_takes_for_a_flag_is_taken_for_it_here(version, known):
    """Each beginning of each spelling, as Python's parser resolves it among all options."""
    parser = argparse.ArgumentParser(add_help=False)
    for spelling in known:
        parser.add_argument(spelling, dest=spelling)
    for flag in FLAGS:
        spellings = flag.spellings(version)
        for spelling in spellings:
            for end in range(3, len(spelling) + 1):
                word = spelling[:end]
                exact = [word] if word in known else []
                taken = exact or [option[1] for option in parser._get_option_tuples(word)]
                if len(taken) == 1 and taken[0] in spellings:
                    assert flag.name in meant(word), (version, word)


def test_no_flag_of_another_concern_is_mistaken(known):
    concern = {spelling for flag in FLAGS for spelling in flag.all_spellings}
    assert [option for option in known if option not in concern and meant(option)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.stem)
@pytest.mark.parametrize("proved", environment.VERSIONS)
def test_an_example_has_no_argument_that_a_proved_version_lacks(path, proved):
    words = yaml.safe_load(path.read_text())["spec"]["engine"].get("args", [])
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    flags = {flag for flag in flags if not flag.startswith("--sim-")}  # of the simulated engine
    assert flags <= options(wheel(proved)).keys()


def test_communication_flags_in_the_documentation_are_real():
    named = set(FLAG.findall((ROOT / "docs/comms.md").read_text())) - OURS
    for proved in environment.VERSIONS:
        assert named <= options(wheel(proved)).keys(), proved
