"""`specserve explain` and `specserve replay`: read files, play the policy, print."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from specserve.bench import plot as pictures
from specserve.bench.command import fail
from specserve.curves import find, shipped
from specserve.policy import Curve, CurveError
from specserve.replay import play, plot, trace
from specserve.replay.engine import MeanEngine
from specserve.replay.trace import BadTrace

T = TypeVar("T")

EXPLAIN = """\
Play the policy of a SpecServe over recorded readings of one pod, and explain the last decision
with the numbers it rests on. The code is the operator's; no cluster and no engine is needed."""

REPLAY = """\
Play the policy of a SpecServe over a whole trace, and print each decision that changed something.
Over a made-up load the engine obeys, and the tokens won are compared with those of each step count
held and of the best at each moment."""

SAMPLES = """\
A recorded trace is one JSON object a line, times in seconds, ascending:
  {"at": 12.5, "running": 32, "queued": 0, "capacity": 256, "speculation": {...}}
where speculation is what GET /v1/speculation of the engine answered then; it may be left out where
only the load was read. Record one with curl and jq, as docs/policy.md shows. What is printed
counts from the first reading; --json has the times of the trace."""

MADE_UP = """\
A made-up load is YAML, its engine the mean values of a curve that comes with the operator:
  profile: h200-a
  phases:
    - {seconds: 300, inFlight: 32, acceptLength: 2.8}                 # easy to draft
    - {seconds: 60, inFlight: [32, 250], acceptLength: [2.8, 2.0]}    # from one to the other
    - {seconds: 240, inFlight: 250, acceptLength: 2.0}                # too many for this draft
    - {seconds: 300, inFlight: 32, acceptLength: 1.2}                 # few, but hard to draft
Under examples/breakeven.yaml its policy wins 0.99 of the most there is, speculation held on 0.82,
held off 0.89."""


def add_parsers(commands: Any) -> None:
    """Add both subcommands."""
    explain = commands.add_parser(
        "explain",
        help="say what the policy decides on recorded readings, and why",
        description=EXPLAIN,
        epilog=SAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _common(explain)
    explain.add_argument(
        "--samples", type=Path, required=True, metavar="FILE", help="the recorded trace"
    )
    explain.set_defaults(run=_explain)
    replay = commands.add_parser(
        "replay",
        help="play the policy over a recorded or a made-up load",
        description=REPLAY,
        epilog=f"{SAMPLES}\n\n{MADE_UP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _common(replay)
    replay.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="the trace, of either kind"
    )
    replay.add_argument("--plot", type=Path, metavar="PNG", help="also draw it")
    replay.set_defaults(run=_replay)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--file", type=Path, required=True, metavar="CR", help="YAML of the SpecServe"
    )
    parser.add_argument(
        "--curve",
        type=Path,
        metavar="FILE",
        help="a calibrated curve, in place of policy.breakEven.curveConfigMap",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _explain(options: argparse.Namespace) -> int:
    try:
        spec = _read(options.file, trace.spec_of)
        recorded = _read(options.samples, trace.recorded)
        curve = _curve(options, spec)
    except BadTrace as error:
        return fail(error)
    steps = tuple(sorted(spec.draft.steps))
    moments = play.over_recorded(spec.policy, recorded, steps, curve)
    last = moments[-1]
    if options.json:
        _print(json.dumps(_json(last), indent=2))
        return 0
    changed = play.transitions(moments)[-1]
    _print(f"{last.verdict.reason}\n")
    _print(f"  decision   {last.verdict.code}, since {_since(changed.at - recorded.start)}")
    _print(f"  in flight  {last.load}")
    for name, value in last.verdict.numbers:
        _print(f"  {name:<10} {value:g}")
    if last.verdict.setting is not None:
        _print(f"  order      {_order(last)}")
    return 0


def _replay(options: argparse.Namespace) -> int:
    outcome, start = None, 0.0
    if options.plot is not None and not pictures.available():
        return fail(BadTrace(pictures.MISSING))
    try:
        spec = _read(options.file, trace.spec_of)
        curve = _curve(options, spec)
        text = _text(options.trace)
        if trace.is_recorded(text):
            recorded = _read(options.trace, trace.recorded)
            steps = tuple(sorted(spec.draft.steps))
            moments = play.over_recorded(spec.policy, recorded, steps, curve)
            start = recorded.start
        else:
            load = _read(options.trace, trace.made_up)
            engine = MeanEngine(shipped(load.profile))
            moments, outcome = play.over_made_up(spec.policy, load, engine, curve)
    except (BadTrace, CurveError) as error:
        return fail(error)
    if options.plot is not None:
        title = f"{spec.policy.strategy} over {options.trace.name}"
        plot.draw(moments, start, title, options.plot)
    changes = play.transitions(moments)
    if options.json:
        document: dict[str, Any] = {"transitions": [_json(moment) for moment in changes]}
        if outcome is not None:
            document["tokens"] = {
                "policy": outcome.policy,
                "always": {str(steps): won for steps, won in outcome.always.items()},
                "clairvoyant": outcome.clairvoyant,
            }
        _print(json.dumps(document, indent=2))
        return 0
    for moment in changes:
        probe = "  (probe)" if moment.verdict.probe else ""
        at = f"{moment.at - start:9.2f} s"
        _print(f"{at}  {moment.load:5d} in flight  {moment.verdict.reason}{probe}")
    flips = sum(moment.verdict.flip for moment in moments)
    probes = sum(moment.verdict.code == "Probing" for moment in changes)
    _print(f"\n{len(moments)} decisions, {flips} flips, {probes} probes")
    if outcome is not None:
        _print("tokens won, over those of the best step count at each moment:")
        _print(f"  {spec.policy.strategy:<12} {outcome.policy / outcome.clairvoyant:.3f}")
        for held, won in sorted(outcome.always.items()):
            name = f"always {held} steps" if held else "always off"
            _print(f"  {name:<14} {won / outcome.clairvoyant:.3f}")
    return 0


def _curve(options: argparse.Namespace, spec: Any) -> Curve | None:
    """The curve that the operator would use."""
    if options.curve is not None:
        try:
            return Curve.from_json(_text(options.curve))
        except CurveError as error:
            raise BadTrace(f"{options.curve}: {error}") from None
    # A ConfigMap is out of reach here; its file is what --curve is for.
    return find(spec, None).curve


def _json(moment: play.Moment) -> dict[str, Any]:
    verdict = moment.verdict
    return {
        "at": moment.at,
        "inFlight": moment.load,
        "acceptLength": moment.accept,
        "mode": verdict.mode,
        "code": verdict.code,
        "reason": verdict.reason,
        "flip": verdict.flip,
        "probe": verdict.probe,
        "tiers": None if verdict.setting is None else [list(t) for t in verdict.setting.tiers],
        "numbers": dict(verdict.numbers),
    }


def _since(seconds: float) -> str:
    return f"{seconds:.2f} s after the first reading" if seconds else "the first reading"


def _order(moment: play.Moment) -> str:
    setting = moment.verdict.setting
    if setting is None:
        return "none"
    if len(setting.tiers) == 1:
        steps = setting.tiers[0][1]
        return f"{steps} steps" if steps else f"off ({setting.draft_kv.lower()})"
    return ", ".join(f"from {least}: {steps} steps" for least, steps in setting.tiers)


def _read(file: Path, parse: Callable[[str], T]) -> T:
    """Parse a file; what is wrong with it is said with its name."""
    try:
        return parse(_text(file))
    except BadTrace as error:
        raise BadTrace(f"{file}: {error}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"{file}: {error}") from None


def _print(line: str) -> None:
    print(line)  # noqa: T201 - a command line prints
