"""What the demo makes of a run: summary, promises, table, picture, and what is on the screen."""

import io
import json

import pytest
from PIL import Image
from rich.console import Console

from tests.demo import plot
from tests.demo.curve import Curve
from tests.demo.install import example
from tests.demo.outcome import outcome, table
from tests.demo.plan import Arm, Plan, Pod, arm_manifest, curve_for, plan_from, slow_motion
from tests.demo.record import Happened, acceptance, new_record
from tests.demo.view import line, screen

PLAN = Plan(
    namespace="demo",
    arms=tuple(
        Arm(key, name, (Pod(f"{name}-a", "10.0.0.1"), Pod(f"{name}-b", "10.0.0.2")), "secret")
        for key, name in (
            ("specserve", "demo"),
            ("alwaysOn", "demo-always-on"),
            ("alwaysOff", "demo-always-off"),
        )
    ),
    curve=Curve(60.0, 28, 150, 1),
    off_above=92,
    on_below=76,
    slow_motion=10.0,
)
RATES = {"specserve": 1100, "alwaysOn": 1000, "alwaysOff": 900}


def ran(*, rates=RATES, flips=((20.0, False), (42.0, True)), lost=0):
    """A finished run in which both pods flipped so."""
    record = new_record(PLAN)
    record.at = 61.0
    for key, ledger in record.ledgers.items():
        for second in range(60):
            ledger.arrived(rates[key], second + 0.1)
        ledger.sent = 50
        for number in range(50):
            ledger.end("HTTP 503" if number < lost else "")
    for pod in record.pods:
        on = pod.arm != "alwaysOff"
        pod.flips.observe(0.0, on=on, epoch=1)
        if pod.arm == "specserve":
            for epoch, (at, mode) in enumerate(flips, start=2):
                pod.flips.observe(at, on=mode, epoch=epoch)
    return record


def shown(renderable, *, width=110):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()


def test_the_summary_holds_flips_requests_and_throughput():
    result = outcome(ran().to_json())
    assert result.failures == ()
    assert result.summary == {
        "pods": [
            {"name": "demo-a", "flipsOff": 1, "flipsOn": 1},
            {"name": "demo-b", "flipsOff": 1, "flipsOn": 1},
        ],
        "requests": {"sent": 150, "lost": 0},
        "throughput": {"alwaysOn": 1000.0, "alwaysOff": 900.0, "specserve": 1100.0},
        "note": "",
    }


def test_tokens_after_the_run_do_not_count():
    record = ran()
    record.ledgers["alwaysOff"].arrived(10**9, 60.2)
    assert outcome(record.to_json()).summary["throughput"]["alwaysOff"] == 900.0


@pytest.mark.parametrize(
    ("flips", "missing"),
    [
        ((), ["off", "back on", "off", "back on"]),
        (((20.0, False),), ["back on", "back on"]),
    ],
)
def test_a_pod_that_did_not_flip_both_ways_is_a_failure(flips, missing):
    result = outcome(ran(flips=flips).to_json())
    assert [
        failure.removesuffix(" not once").split("went ")[1] for failure in result.failures
    ] == (missing)


def test_each_lost_request_is_a_failure():
    result = outcome(ran(lost=2).to_json())
    assert result.summary["requests"] == {"sent": 150, "lost": 6}
    assert "2 requests lost, always off: HTTP 503" in result.failures


def test_an_unfinished_request_counts_as_lost():
    record = ran()
    record.ledgers["specserve"].sent += 1
    assert outcome(record.to_json()).summary["requests"] == {"sent": 151, "lost": 1}


def test_where_specserve_is_not_the_fastest_the_summary_says_why():
    note = outcome(ran(rates=RATES | {"specserve": 980}).to_json()).summary["note"]
    assert "98.0% of the tokens of always on" in note
    # On again from 42 s on, while the load is above 92 until 43.8 s.
    assert "wrong mode for 2.0 s each of 60 s" in note


def test_the_table_tells_the_three_apart():
    record = ran().to_json()
    text = shown(table(record, outcome(record)))
    assert "simulated engines" in text
    assert "1.22x" in text
    assert text.count("pinned") == 2
    assert "1/1, 1/1" in text


def test_a_record_survives_json():
    record = ran().to_json()
    assert json.loads(json.dumps(record)) == record


def test_the_picture_is_drawn_from_the_record(tmp_path):
    file = tmp_path / "picture.png"
    plot.draw(ran().to_json(), file)
    with Image.open(file) as image:
        assert image.format == "PNG"
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 24)) > 100


def test_a_picture_can_be_drawn_without_a_flip(tmp_path):
    plot.draw(ran(flips=()).to_json(), tmp_path / "picture.png")


def test_smoothing_keeps_level_and_length():
    assert plot.smooth([4.0] * 7, 5) == [4.0] * 7
    assert plot.smooth([0.0, 0.0, 9.0, 0.0, 0.0], 3) == [0.0, 3.0, 3.0, 3.0, 0.0]


def test_spans_cover_the_run():
    flips = [{"at": 20.0, "on": False}, {"at": 42.0, "on": True}]
    assert plot.spans(flips, 60.0) == [
        (0.0, 20.0, True),
        (20.0, 42.0, False),
        (42.0, 60.0, True),
    ]
    assert plot.spans([], 60.0) == [(0.0, 60.0, True)]


@pytest.mark.parametrize("width", [80, 104])
def test_the_screen_shows_pods_modes_and_reasons_and_says_that_engines_are_simulated(width):
    record = ran()
    record.at = 30.0
    pod = record.pods[0]
    stats = [{"steps": 3, "acceptLength": 2.04, "lastSeen": 5.0, "rounds": 9}]
    group = {"ranks": [{"activeSteps": 0}], "stats": stats, "tokensTotal": 400}
    pod.take(30.0, {"mode": "off", "epoch": 5, "groups": [group]}, on=False, load=149)
    record.events.append(
        Happened(20.0, "SpeculationDisabled", "demo", "demo-a: off: 93 in flight")
    )
    text = shown(screen(record, width), width=width)
    for expected in (
        "simulated engines",
        "30 s left",
        "149",
        "OFF",
        "2.04",
        "above 92",
        "below 76",
    ):
        assert expected in text
    assert "demo-a: off: 93 in flight" in text
    assert all(len(row) == width for row in text.splitlines())
    assert len(text.splitlines()) < 24  # what a small terminal shows
    assert "150 in flight per pod" in line(record)


def test_acceptance_is_that_of_the_newest_rounds_that_drafted():
    stats = [
        {"steps": 3, "acceptLength": 1.9, "lastSeen": 5.0},
        {"steps": 3, "acceptLength": 2.1, "lastSeen": 7.0},
        {"steps": 0, "acceptLength": 1.0, "lastSeen": 9.0},
    ]
    assert acceptance({"groups": [{"stats": stats}]}) == 2.1
    assert acceptance({"groups": [{"stats": stats[2:]}]}) is None


def test_a_plan_survives_json_and_hides_tokens_from_logs():
    assert plan_from(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    assert "secret" not in repr(PLAN)


def test_the_three_specserves_differ_in_name_and_mode_alone():
    made = {
        key: arm_manifest(example(), key, image="i:1", gpus=True)
        for key in ("specserve", "alwaysOn", "alwaysOff")
    }
    modes = {key: each["spec"]["policy"].pop("mode") for key, each in made.items()}
    assert modes == {"specserve": "Auto", "alwaysOn": "On", "alwaysOff": "Off"}
    names = [each["metadata"].pop("name") for each in made.values()]
    assert names == ["demo", "demo-always-on", "demo-always-off"]
    assert made["specserve"] == made["alwaysOn"] == made["alwaysOff"]
    assert made["specserve"]["spec"]["engine"]["resources"]["limits"]
    bare = arm_manifest(example(), "specserve", image="i:1", gpus=False)
    assert "limits" not in bare["spec"]["engine"]["resources"]


def test_the_load_passes_both_bounds_of_the_example_and_its_own_crossover():
    from specserve_sim.profile import load_profile

    arguments = dict(argument.split("=") for argument in example()["spec"]["engine"]["args"])
    bounds = example()["spec"]["policy"]["threshold"]
    profile = load_profile(arguments["--sim-profile"])
    crossover = profile.crossover(float(arguments["--sim-accept-length"]))
    curve = curve_for(110.0)
    assert curve.low < bounds["onBelow"] < crossover < bounds["offAbove"] < curve.high
    assert slow_motion(example()) == pytest.approx(1 / float(arguments["--sim-time-scale"]))
