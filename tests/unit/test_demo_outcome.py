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
from tests.demo.plan import (
    STEPS,
    STORY,
    Arm,
    Plan,
    Pod,
    arm_manifest,
    plan_from,
    profile,
    slow_motion,
)
from tests.demo.record import Happened, Weighed, acceptance, new_record, probes, speculates
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
    curve=Curve(
        60.0,
        ((0, 28), (8, 28), (10, 150), (20, 150), (22, 28), (60, 28)),
        ((0, 2.0), (28, 1.2), (46, 2.0)),
    ),
    profile="h200-b",
    operator_port=8080,
    slow_motion=10.0,
)
FLIPS = ((10.0, False), (21.0, True), (30.0, False), (50.0, True))
DROP = Happened(30.0, "BelowBreakEven", "demo-a", "demo-a: off: acceptance 1.20 below break-even")
LOOK = Happened(49.0, "Probing", "demo-a", "demo-a: on: short look at 3 steps")
RATES = {"specserve": 1100, "alwaysOn": 1000, "alwaysOff": 900}


def ran(*, rates=RATES, flips=FLIPS, events=(DROP, LOOK), lost=0):
    """A finished run in which both pods flipped so."""
    record = new_record(PLAN)
    record.at = 61.0
    record.events += events
    record.weighed += [Weighed(5.0, 2.0, 1.65), Weighed(30.0, 1.2, 1.65)]
    for key, ledger in record.ledgers.items():
        for second in range(60):
            ledger.arrived(rates[key], second + 0.1)
        ledger.sent = 50
        for number in range(50):
            ledger.end("HTTP 503" if number < lost else "")
    for pod in record.pods:
        on = pod.arm != "alwaysOff"
        pod.flips.observe(0.0, on=on)
        if pod.arm == "specserve":
            for at, mode in flips:
                pod.flips.observe(at, on=mode)
                pod.flips.observe(at + 0.5, on=mode)
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
            {"name": "demo-a", "flipsOff": 2, "flipsOn": 2, "probes": 1},
            {"name": "demo-b", "flipsOff": 2, "flipsOn": 2, "probes": 0},
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
        ((), ["off 0", "back on 0"] * 2),
        (FLIPS[:2], ["off 1", "back on 1"] * 2),
        (FLIPS[:3], ["back on 1"] * 2),
    ],
)
def test_a_pod_that_did_not_answer_both_load_and_drop_is_a_failure(flips, missing):
    result = outcome(ran(flips=flips).to_json())
    assert [
        failure.partition("went ")[2].partition(" times")[0] for failure in result.failures
    ] == missing


def test_a_drop_that_no_decision_names_and_no_probe_follows_is_a_failure():
    early = Happened(12.0, "BelowBreakEven", "demo-a", "off: acceptance 2.00 below break-even")
    assert outcome(ran(events=(early,)).to_json()).failures == (
        "no decision named the acceptance that fell below break-even",
        "no probe looked whether the acceptance is back",
    )


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
    # Too high between 9 and 21 s, so late by 1 s and early by half a one; then 2 s after the
    # drop has begun and 4 s after it has ended.
    assert "wrong mode for 7.5 s each of 60 s" in note


def test_the_table_tells_the_three_apart():
    record = ran().to_json()
    text = shown(table(record, outcome(record)))
    assert "simulated engines" in text
    assert "1.22x" in text
    assert text.count("pinned") == 2
    assert "2/2, 2/2" in text
    assert "1, 0" in text


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
    plot.draw(ran(flips=(), events=()).to_json(), tmp_path / "picture.png")


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


OFF = {"mode": "off", "steps": None, "tiers": None, "draftKv": "cold"}
ON = {"mode": "on", "steps": 3, "tiers": None, "draftKv": "cold"}
TABLE = ON | {
    "mode": "tiers",
    "steps": None,
    "tiers": [{"minBatch": 1, "steps": 3}, {"minBatch": 97, "steps": 0}],
}


def order(setting, *, fallback=None, groups=()):
    """A read-back under an order."""
    return {"epoch": 5, **setting, "fallback": fallback or setting, "groups": list(groups)}


def test_under_a_table_an_engine_does_what_its_ranks_ran():
    def ran(steps, rounds=7):
        return order(TABLE, groups=[{"ranks": [{"activeSteps": steps, "decodeRounds": rounds}]}])

    assert speculates(ran(3)) is True
    assert speculates(ran(0)) is False
    assert speculates(ran(3, rounds=0)) is None
    assert speculates(order(OFF, groups=ran(3)["groups"])) is False


def test_a_short_look_has_another_order_to_fall_back_to():
    assert probes(order(ON, fallback=TABLE))
    assert probes(order(OFF, fallback=ON))
    assert not probes(order(TABLE))
    assert not probes(order(ON))


def test_a_short_look_is_no_flip():
    record = new_record(PLAN)
    pod = record.pods[0]
    for at, back in ((0.0, order(ON)), (1.0, order(OFF, fallback=ON)), (2.0, order(ON))):
        for late in (0.0, 0.5):
            pod.take(at + late, back, load=28)
    assert pod.flips.seen == []


@pytest.mark.parametrize("width", [80, 104])
def test_the_screen_shows_pods_modes_and_reasons_and_says_that_engines_are_simulated(width):
    record = ran()
    record.at = 30.0
    pod = record.pods[0]
    stats = [{"steps": 3, "acceptLength": 2.04, "lastSeen": 5.0, "rounds": 9}]
    group = {"ranks": [{"activeSteps": 0}], "stats": stats, "tokensTotal": 400}
    pod.take(30.0, order(OFF, groups=[group]), load=149)
    record.pods[1].take(30.0, order(ON, fallback=OFF), load=148)
    record.verdict = "demo-a: off: acceptance 1.20 below break-even 1.65"
    text = shown(screen(record, width), width=width)
    for expected in (
        "simulated engines",
        "30 s left",
        "149",
        "OFF",
        "2.04",
        "PROBE",
        "acceptance 1.20 to break-even 1.65",
    ):
        assert expected in text
    assert text.count("demo-a: off: acceptance 1.20 below break-even") == 2
    assert all(len(row) == width for row in text.splitlines())
    assert len(text.splitlines()) < 24  # what a small terminal shows
    assert "28 in flight per pod" in line(record)
    assert "acceptance 1.20 to break-even 1.65" in line(record)


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


def test_the_story_crosses_the_measured_break_even_by_load_and_by_acceptance():
    from specserve_sim.profile import load_profile

    arguments = dict(argument.split("=") for argument in example()["spec"]["engine"]["args"])
    assert profile(example()) == arguments["--sim-profile"]
    assert slow_motion(example()) == pytest.approx(1 / float(arguments["--sim-time-scale"]))
    needed = load_profile(profile(example())).r
    usual = STORY.accepted(0)
    begin, end = STORY.drop
    assert usual == float(arguments["--sim-accept-length"])
    assert STORY.accepted(begin) < needed(STORY.low, STEPS) < usual < needed(STORY.high, STEPS)
    assert STORY.at(begin) == STORY.at(end) == STORY.low
    # The look that is due a minute after the switch finds the requests of the drop gone.
    assert end + 8 < begin + 60 < STORY.seconds - 20
