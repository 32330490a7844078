"""The chart under Helm 3: what it renders is what Helm 4 renders."""

from __future__ import annotations

import pytest
import yaml

from tests.chart.matrix import MATRIX
from tests.chart.rendering import CHART, Refused, helm, render
from tests.cluster import helm3


@pytest.fixture(scope="session")
def older():
    """Path of Helm 3."""
    binary = helm3.resolve()
    assert helm("version", "--short", binary=binary).startswith(f"v{helm3.version()}")
    return binary


@pytest.mark.parametrize("name", MATRIX)
def test_both_render_the_same(older, name):
    assert render(MATRIX[name], binary=older) == render(MATRIX[name])


@pytest.mark.parametrize("name", MATRIX)
def test_lint_finds_nothing(older, name):
    given = yaml.safe_dump(MATRIX[name])
    helm("lint", "--strict", str(CHART), "-f", "-", stdin=given, binary=older)


def test_an_unknown_value_is_refused(older):
    with pytest.raises(Refused, match="watchNamespace"):
        render({"watchNamespace": ["a"]}, binary=older)
