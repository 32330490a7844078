"""Makes the break-even curves that the operator ships of the profiles that were measured.

`python -m tests.golden.curves` writes operator/specserve/curves/*.json; git tells whether they
differ. What the profiles model is left out but for the unit: a curve is told in rounds of a live
pod whose draft is off and cold, a profile in rounds of a server without a draft.
"""

from pathlib import Path

from specserve.policy.curve import Curve, CurveDocument, Point, Provenance
from specserve_sim.profile import REFERENCE_STEPS, Profile, load_profile, profile_names

FOLDER = Path(__file__).parents[2] / "operator" / "specserve" / "curves"
INTERCONNECTS = {
    "h200-a": None,
    "h200-b": None,
    "h200x2-nvlink": "NVLink, custom all-reduce",
    "h200x2-nccl": "NVLink, NCCL all-reduce",
    "h200x2-hostmem": "host memory",
}


def curve(profile: Profile) -> Curve:
    """The curve of a profile."""
    origin = profile.provenance
    engine, _, version = origin.engine.partition(" ")
    assert engine == "SGLang"
    modelled = "off.cold" in profile.modelled
    return Curve(
        CurveDocument(
            provenance=Provenance(
                source=f"{profile.title}: {origin.source}",
                sglang=version,
                gpu=origin.accelerator,
                tensor_parallel=profile.tensor_parallel,
                interconnect=INTERCONNECTS[profile.name],
                settings=f"{origin.model}; {origin.settings}; {origin.prompt_tokens} tokens in, "
                f"{origin.new_tokens} out; cost of a cold off "
                + ("modelled" if modelled else "measured"),
            ),
            cells=[_point(profile, batch) for batch in profile.plain.sizes],
        ),
        "Profile",
    )


def _point(profile: Profile, batch: int) -> Point:
    off = profile.r(batch, 0)
    known = profile.break_even
    half = (known.highest.logarithmic(batch) - known.lowest.logarithmic(batch)) / 2
    return Point(
        batch=batch,
        steps=REFERENCE_STEPS,
        ratio=round(profile.r(batch, REFERENCE_STEPS) / off, 3),
        spread=round(half / off, 3) if known.columns > 1 else None,
    )


def main() -> None:
    """Write the files."""
    for name in profile_names():
        (FOLDER / f"{name}.json").write_text(curve(load_profile(name)).to_json())


if __name__ == "__main__":
    main()
