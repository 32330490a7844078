"""`specserve explain` and `specserve replay`: the operator's decisions, offline."""

import json
from pathlib import Path

import pytest

from specserve import cli
from specserve.replay import command, plot, trace
from specserve.replay.engine import survival

CR = """\
apiVersion: specserve.dev/v1alpha1
kind: SpecServe
metadata: {name: chat}
spec:
  model: {source: path:///models/chat}
  draft: {method: EAGLE3, source: path:///models/draft, steps: [0, 3]}
  policy: {strategy: BreakEven}
"""


def groups(at: float, rounds: int, accepted: tuple[int, int, int], batch: int = 96) -> dict:
    def stat(steps: int, seconds: float) -> dict:
        return {
            "batchBucket": 96,
            "steps": steps,
            "rounds": 100,
            "tokens": 100,
            "medianRoundSeconds": seconds,
            "p5": seconds,
            "p95": seconds,
            "acceptLength": 1.0,
            "lastSeen": at,
        }

    return {
        "podUID": "uid",
        "bootID": "boot",
        "mode": "auto",
        "controllable": True,
        "epoch": 0,
        "availableSteps": [0, 3],
        "groups": [
            {
                "at": at,
                "tokensTotal": rounds * batch,
                "stats": [stat(0, 0.0065), stat(3, 0.0156)],
                "acceptance": [
                    {"steps": 3, "verifies": rounds * batch, "accepted": list(accepted)}
                ],
            }
        ],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cr.yaml").write_text(CR)
    lines = [
        {
            "at": float(second),
            "running": 96,
            "capacity": 256,
            "speculation": groups(
                second,
                64 * second,
                tuple(64 * 96 * second * share // 100 for share in (50, 30, 10)),
            ),
        }
        for second in range(1, 31)
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return tmp_path


def test_explain_says_why_with_the_numbers(folder, capsys):
    code = cli.main(
        ["explain", "-f", str(folder / "cr.yaml"), "--samples", str(folder / "samples.jsonl")]
    )
    said = capsys.readouterr().out
    assert code == 0
    assert said.startswith("off: acceptance 1.90 below break-even 2.40 at 96 in flight\n")
    assert "BelowBreakEven" in said
    assert "breakEven@3 2.4" in said


def test_explain_as_json(folder, capsys):
    arguments = ["-f", str(folder / "cr.yaml"), "--samples", str(folder / "samples.jsonl")]
    assert cli.main(["explain", *arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["mode"], said["code"]) == ("Off", "BelowBreakEven")
    assert said["numbers"]["accept@3"] == pytest.approx(1.9)


def test_replay_of_a_recorded_trace_prints_what_changed(folder, capsys):
    arguments = ["-f", str(folder / "cr.yaml"), "--trace", str(folder / "samples.jsonl")]
    assert cli.main(["replay", *arguments]) == 0
    said = capsys.readouterr().out
    assert "Probing" not in said
    assert "30 decisions" in said
    assert "tokens won" not in said


EPOCH = 1_796_039_115.54


@pytest.fixture
def stamped(folder: Path) -> list[str]:
    """Options for a trace as docs/policy.md records it: its times are seconds since 1970."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for line in lines:
        line["at"] += EPOCH
        for group in line["speculation"]["groups"]:
            group["at"] += EPOCH
            for stat in group["stats"]:
                stat["lastSeen"] += EPOCH
    (folder / "stamped.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return ["-f", str(folder / "cr.yaml"), str(folder / "stamped.jsonl")]


def test_explain_counts_from_the_first_reading(stamped, capsys):
    assert cli.main(["explain", *stamped[:2], "--samples", stamped[2]]) == 0
    said = capsys.readouterr().out
    assert "BelowBreakEven, since 1.00 s after the first reading\n" in said
    assert "e+09" not in said


def test_replay_counts_from_the_first_reading(stamped, folder, monkeypatch, capsys):
    monkeypatch.setattr(plot, "draw", lambda _, start, *__: print(f"drawn from {start}"))
    arguments = ["replay", *stamped[:2], "--trace", stamped[2]]
    assert cli.main([*arguments, "--plot", str(folder / "replay.png")]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"drawn from {EPOCH + 1}\n     0.00 s     96 in flight")
    assert "1796" not in said.removeprefix(f"drawn from {EPOCH + 1}")
    assert cli.main([*arguments, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["transitions"][0]
    assert first["at"] == pytest.approx(EPOCH + 1)


MADE_UP = """\
profile: h200-a
phases:
  - {seconds: 120, inFlight: 32, acceptLength: 3.0}
  - {seconds: 120, inFlight: 32, acceptLength: 1.1}
  - {seconds: 120, inFlight: [8, 250], acceptLength: [2.5, 2.0]}
"""


def test_replay_of_a_made_up_load_compares_with_what_was_possible(folder, capsys):
    (folder / "load.yaml").write_text(MADE_UP)
    arguments = ["-f", str(folder / "cr.yaml"), "--trace", str(folder / "load.yaml")]
    picture = folder / "replay.png"
    assert cli.main(["replay", *arguments, "--json", "--plot", str(picture)]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert tokens["policy"] > 0.95 * tokens["clairvoyant"]
    assert all(tokens["policy"] > won for won in tokens["always"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["replay", *arguments]) == 0
    said = capsys.readouterr().out
    assert "always off" in said
    assert "(probe)" in said


def test_the_load_of_the_help_shows_what_the_policy_is_for(tmp_path, capsys):
    lines = command.MADE_UP.splitlines()
    inner = [line for line in lines if line.startswith("  ")]
    (tmp_path / "load.yaml").write_text("\n".join(inner))
    arguments = ["-f", "examples/breakeven.yaml", "--trace", str(tmp_path / "load.yaml")]
    assert cli.main(["replay", *arguments, "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    shares = {held: won / tokens["clairvoyant"] for held, won in tokens["always"].items()}
    said = " ".join(lines)
    assert f"wins {tokens['policy'] / tokens['clairvoyant']:.2f} of" in said
    assert f"held on {shares['3']:.2f}, held off {shares['0']:.2f}" in said
    assert tokens["policy"] > 1.1 * max(tokens["always"].values())


@pytest.mark.parametrize("name", ["explain", "replay"])
def test_help_keeps_its_lines(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    said = capsys.readouterr().out
    assert (command.EXPLAIN if name == "explain" else command.REPLAY) in said
    assert max(map(len, said.splitlines())) < 100


def test_a_calibrated_curve_is_used_at_once(folder, capsys):
    (folder / "load.yaml").write_text(
        "phases: [{seconds: 20, inFlight: 250, acceptLength: 1.2}]\nprofile: h200-b"
    )
    (folder / "curve.json").write_text(
        json.dumps({"cells": [{"batch": 1, "steps": 3, "ratio": 1.3}]})
    )
    arguments = ["-f", str(folder / "cr.yaml"), "--trace", str(folder / "load.yaml")]
    assert cli.main(["replay", *arguments, "--curve", str(folder / "curve.json")]) == 0
    assert "short look at 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("cr.yaml", "kind: Pod", "cr.yaml: it holds 0 objects of kind SpecServe"),
        ("cr.yaml", CR.replace("BreakEven", "Best"), "cr.yaml: spec.policy.strategy"),
        ("cr.yaml", "a: [", "cr.yaml: no YAML"),
        ("samples.jsonl", "", "samples.jsonl: it holds no line"),
        ("samples.jsonl", '{"at": 1}', "samples.jsonl: line 1: running"),
        (
            "samples.jsonl",
            '{"at": 1, "running": 1, "speculation": {"mode": 3}}',
            "line 1: speculation: the read-back's podUID",
        ),
        (
            "samples.jsonl",
            '{"at": 2, "running": 1}\n{"at": 2, "running": 1}',
            "at 2 comes after 2: times must ascend",
        ),
        (
            "samples.jsonl",
            f'{{"at": {EPOCH}, "running": 1}}\n{{"at": {EPOCH - 0.02:.2f}, "running": 1}}',
            "at 1796039115.52 comes after 1796039115.54",
        ),
        (
            "samples.jsonl",
            '{"at": 1, "runing": 1}',
            "line 1: unknown key runing; running is missing",
        ),
        ("samples.jsonl", None, "samples.jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(folder, capsys, name, text, said):
    file = folder / name
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    code = cli.main(
        ["explain", "-f", str(folder / "cr.yaml"), "--samples", str(folder / "samples.jsonl")]
    )
    assert code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("phases: []", "phases"),
        ("phases: [{seconds: 9, inFlight: 0, acceptLength: 2}]", "inFlight is 0 in all phases"),
        ("phases: [{seconds: 1, inFlight: 1, acceptLength: 5}]", "phases.0.acceptLength"),
        (
            "phases: [{secnds: 9, inFlight: 1, acceptLength: 2}]",
            "unknown key phases.0.secnds; seconds is missing",
        ),
        (
            "capacty: 9\nphases: [{seconds: 9, inFlight: 1, acceptLength: 2}]",
            "load.yaml: unknown key capacty\n",
        ),
        ("profile: mine\nphases: [{seconds: 1, inFlight: 1, acceptLength: 2}]", "no profile mine"),
        ("[", "no YAML"),
    ],
)
def test_a_bad_load_is_named(folder, capsys, text, said):
    (folder / "load.yaml").write_text(text)
    code = cli.main(
        ["replay", "-f", str(folder / "cr.yaml"), "--trace", str(folder / "load.yaml")]
    )
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_ramp_goes_from_one_to_the_other():
    phase = trace.Phase(seconds=10, in_flight=[8, 250], accept_length=2.0)
    assert [phase.at(share) for share in (0.0, 0.5, 1.0)] == [(8, 2.0), (129, 2.0), (250, 2.0)]


def test_survival_gives_back_the_length():
    assert 1 + sum(survival(2.5, 3)) == pytest.approx(2.5)
