"""The curves that the operator ships are those of the measured profiles."""

import pytest

from specserve import api, curves
from specserve_sim.profile import load_profile, profile_names
from tests.golden.curves import FOLDER, curve

SEEN = curves.Seen(sglang=frozenset({"0.5.23"}), plugin=frozenset({"0.1.0"}))
MODEL, DRAFT = "hf://example-org/model-a", "hf://example-org/draft-a"


def spec(tensor_parallel: int = 1, **break_even: str) -> api.SpecServeSpec:
    return api.SpecServeSpec.model_validate(
        {
            "model": {"source": MODEL},
            "draft": {"method": "EAGLE3", "source": DRAFT},
            "policy": {"strategy": "BreakEven", "breakEven": break_even},
            "engine": {"tensorParallel": tensor_parallel},
        }
    )


def document(**provenance: object) -> curves.ConfigMapText:
    shown = curves.shipped("h200-b").document
    changed = shown.model_copy(
        update={"provenance": shown.provenance.model_copy(update=provenance)}
    )
    return curves.ConfigMapText("measured", changed.model_dump_json(by_alias=True))


@pytest.mark.parametrize("name", profile_names())
def test_shipped_curves_are_made_of_the_profiles(name: str):
    text = (FOLDER / f"{name}.json").read_text()
    assert text == curve(load_profile(name)).to_json(), "run python -m tests.golden.curves"
    assert curves.shipped(name).provenance.source


def test_all_profiles_are_shipped_and_no_more():
    assert curves.shipped_names() == profile_names()


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_curve_breaks_even_where_the_profile_does(name: str):
    profile, shipped = load_profile(name), curves.shipped(name)
    for batch in profile.plain.sizes:
        expected = profile.t_on(batch, 3) / profile.t_on(batch, 0)
        assert shipped.ratio(batch, 3) == pytest.approx(expected, abs=0.001)


def test_the_parallel_size_is_that_of_the_users_arguments():
    given = spec(profile="h200x2-nvlink")
    assert curves.find(given, None).reason == "Stale"
    engine = given.engine.model_copy(update={"args": ["--tp-size", "2"]})
    found = curves.find(given.model_copy(update={"engine": engine}), None)
    assert found.reason == "Profile"


def test_nothing_named_is_nothing_found():
    found = curves.find(spec(), None)
    assert (found.curve, found.reason) == (None, "NoCurve")


def test_a_profile_by_name():
    found = curves.find(spec(profile="h200-b"), None)
    assert (found.curve, found.reason) == (curves.shipped("h200-b"), "Profile")
    assert "host B" in found.message


def test_an_unknown_profile_names_those_there_are():
    found = curves.find(spec(profile="h300"), None)
    assert (found.curve, found.reason) == (None, "Unreadable")
    assert "h200x2-nvlink" in found.message


def test_a_profile_of_another_parallel_size_does_not_fit():
    found = curves.find(spec(tensor_parallel=2, profile="h200-b"), None)
    assert (found.curve, found.reason) == (None, "Stale")
    assert "tensorParallel 1, and here it is 2" in found.message


def test_a_calibrated_curve_takes_precedence():
    found = curves.find(
        spec(curveConfigMap="measured", profile="h200-b"),
        document(model=MODEL, draft=DRAFT, sglang="0.5.23", date="2026-11-29"),
        SEEN,
    )
    assert found.reason == "Calibrated"
    assert found.curve is not None
    assert found.curve.kind == "Calibrated"
    assert "2026-11-29" in found.message


@pytest.mark.parametrize(
    ("provenance", "said"),
    [
        ({"model": "hf://other/model"}, "model hf://other/model, and here it is " + MODEL),
        ({"draft": "hf://other/draft"}, "draft hf://other/draft"),
        ({"sglang": "0.5.16"}, "sglang 0.5.16, and here it is 0.5.23"),
        ({"plugin": "0.0.9"}, "plugin 0.0.9, and here it is 0.1.0"),
        ({"tensor_parallel": 8}, "tensorParallel 8, and here it is 1"),
    ],
)
def test_a_curve_of_something_else_is_stale(provenance: dict, said: str):
    text = document(**{"sglang": None, **provenance})
    found = curves.find(spec(curveConfigMap="measured"), text, SEEN)
    assert (found.curve, found.reason) == (None, "Stale")
    assert said in found.message
    # Without a profile nothing stands in for it; with one, what is to be mended is still said.
    found = curves.find(spec(curveConfigMap="measured", profile="h200-b"), text, SEEN)
    assert (found.curve, found.reason) == (curves.shipped("h200-b"), "Stale")
    assert "profile h200-b" in found.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (curves.ConfigMapText("measured", None, "there is none"), "there is none"),
        (curves.ConfigMapText("measured", "{}"), "cells"),
        (curves.ConfigMapText("measured", "nonsense"), "curve.json"),
    ],
)
def test_what_cannot_be_read_says_why(text: curves.ConfigMapText, said: str):
    found = curves.find(spec(curveConfigMap="measured"), text)
    assert (found.curve, found.reason) == (None, "Unreadable")
    assert said in found.message
    assert "ConfigMap measured" in found.message
