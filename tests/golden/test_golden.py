import difflib

import kubernetes_validate
import pytest

from tests.golden.render import EXPECTED, cases, manifests, rendered

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_a_case_renders_what_was_accepted(name):
    path = EXPECTED / f"{name}.yaml"
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    diff = "".join(
        difflib.unified_diff(
            expected.splitlines(keepends=True),
            rendered(CASES[name]).splitlines(keepends=True),
            fromfile=f"expected/{name}.yaml",
            tofile="rendered now",
        )
    )
    assert not diff, f"\n{diff}\nIf this is meant: python -m tests.golden.update"


def test_every_accepted_file_has_a_case():
    assert {path.stem for path in EXPECTED.glob("*.yaml")} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_valid_kubernetes(name):
    for manifest in manifests(CASES[name]):
        kubernetes_validate.validate(manifest, "1.36", strict=True)
