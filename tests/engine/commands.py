"""The commands for a box without a cluster, as people start them, on a real engine.

What they say is compared with what is true of the engine, not with the words of a report.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.calibrate.sweep import FEWEST_ROUNDS
from specserve.policy.curve import Curve
from tests.engine.client import ranks_of
from tests.engine.launch import SERVED_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.engine.client import Engine
    from tests.engine.launch import Launch

SECONDS = 180
LEVELS = (1, 4)
ARMS = ("on", "off", "auto")
SIZES = (1, 4)
#: Answers of the plain route: enough rounds for a median, and few enough for a commit.
TOKENS = 20
#: Doctor's items that speak of GPUs.
OF_GPUS = {"cuda-graphs", "peer-access", "all-reduce"}


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    status: int | None
    out: str
    err: str


class Box:
    """The engine with the files that a user has beside it.

    Args:
        engine: The engine.
        launch: How it was started.
        folder: Takes the files.
    """

    def __init__(self, engine: Engine, launch: Launch, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self._launch = launch
        # As an editor leaves it, and as `base64 -d` does.
        (folder / "token").write_text(launch.address.token + "\n")
        (folder / "key").write_text(launch.address.api_key or "")

    async def run(self, command: str, *words: object, token: bool = True) -> Ended:
        """Run a command to its end."""
        address = self._launch.address
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specserve.cli", command),
            *("--url", address.url, "--admin-url", address.admin_url),
            *("--api-key-file", str(self.folder / "key")),
            *(("--token-file", str(self.folder / "token")) if token else ()),
            *map(str, words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), SECONDS)
        except TimeoutError:
            process.kill()  # what it ordered is leased, and runs out
            await process.wait()
            raise
        ended = Ended(process.returncode, out.decode(), err.decode())
        secrets = (address.token, address.api_key or "-", self._launch.admin_key)
        assert not any(secret in ended.out + ended.err for secret in secrets), command
        return ended


@contextlib.contextmanager
def box(engine: Engine, launch: Launch) -> Iterator[Box]:
    """Have files beside an engine for the length of a `with` block."""
    with tempfile.TemporaryDirectory() as folder:
        yield Box(engine, launch, Path(folder))


async def bench(box: Box, texts: Sequence[str]) -> dict[str, Any]:
    """Compare on, off and auto in the live engine; returns the ratios that were found."""
    before = await box.engine.read()
    file, mine = box.folder / "bench.json", box.folder / "mine.jsonl"
    mine.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    ended = await box.run(
        *("bench", "--flip", "--levels", ",".join(map(str, LEVELS)), "--rounds", 1),
        *("--max-new-tokens", TOKENS, "--prompts", mine, "--json", file),
    )
    assert ended.status == 0, ended
    report = json.loads(file.read_text())
    assert report["complete"], report
    assert [entry["inFlight"] for entry in report["levels"]] == [*LEVELS], report
    for entry in report["levels"]:
        assert set(entry["arms"]) == set(ARMS), entry
        assert set(entry["ratios"]) == {"on/off", "auto/best"}, entry
        for arm in entry["arms"].values():
            # Four requests at least in each of two visits, and every one of them whole.
            assert (arm["requests"], arm["lost"], len(arm["visits"])) == (8, 0, 2), arm
            assert arm["timeToFirstTokenSeconds"]["p50"] > 0, arm
        # By SGLang's own count: off is one token a round, and drafts can only add to it.
        assert entry["arms"]["off"]["acceptLength"] == 1, entry
        assert 1 < entry["arms"]["on"]["acceptLength"] <= 4, entry
    server = report["servers"]["server"]
    assert (server["servedModelName"], server["algorithm"]) == (SERVED_NAME, "EAGLE"), server
    assert server["engine"] == before["versions"]["sglang"], server
    after = await box.engine.read()
    assert after["mode"] == before["mode"] == "auto", (before["mode"], after["mode"])
    # Each cell of an arm is an order, but the auto cells follow each other, and one puts it back.
    assert after["epoch"] > before["epoch"] + len(LEVELS) * 4, (before["epoch"], after["epoch"])
    return {str(entry["inFlight"]): entry["ratios"] for entry in report["levels"]}


async def doctor(box: Box) -> dict[str, str]:
    """Go through the checklist with the token and without it; returns its verdicts."""
    state = await box.engine.read()
    seen = {}
    for token in (False, True):
        ended = await box.run("doctor", "--json", token=token)
        report = json.loads(ended.out)
        seen[token] = {item["check"]: item["verdict"] for item in report["findings"]}
        # This engine is as the operator starts it: whatever is called a problem is a false alarm.
        assert (ended.status, report["problems"]) == (0, 0), report
        assert report["engine"] == state["versions"]["sglang"], report
        assert {name for name, verdict in seen[token].items() if verdict == "not applicable"} == (
            OF_GPUS
        ), report
        for name in ("request-cap", "topk", "draft-attention", "metrics", "admin-key-shown"):
            assert seen[token][name] == "ok", report
    with_token = {name for name, verdict in seen[True].items() if verdict == "ok"}
    without = {name for name, verdict in seen[False].items() if verdict == "ok"}
    assert with_token - without >= {"live-control", "warm-off"}, seen
    # Only the plugin tells; without it the item is not visible, and no problem.
    for name in ("live-control", "warm-off", "acceptance"):
        assert seen[False][name] == "unknown", seen
    return seen[True]


async def calibrate(box: Box) -> dict[str, float]:
    """Measure a curve; returns its ratios."""
    file = box.folder / "curve.json"
    ended = await box.run(
        *("calibrate", "--sizes", ",".join(map(str, SIZES)), "--steps", 3),
        # A second repeat would wait until the rounds of the first have left the engine's window.
        *("--repeats", 1, "--max-new-tokens", 128, "--prompt-tokens", 16),
        *("--output", file, "--draft", "a-draft"),
    )
    state = await box.engine.read()
    assert ended.status == 0, ended
    curve = Curve.from_json(file.read_bytes())
    cells = {point.batch: point for point in curve.document.cells}
    assert [(point.batch, point.steps) for point in curve.document.cells] == [
        (size, 3) for size in SIZES
    ], cells
    for point in cells.values():
        assert point.ratio > 0, point
        assert (point.rounds or 0) >= FEWEST_ROUNDS, point
        assert f"at {point.batch} in flight it pays above {point.ratio:.2f}" in ended.out, ended
    origin = curve.provenance
    assert origin.sglang == state["versions"]["sglang"], origin
    assert origin.plugin == state["versions"]["plugin"], origin
    assert (origin.model or "").endswith("/target"), origin
    assert (origin.draft, origin.gpu) == ("a-draft", None), origin
    assert origin.tensor_parallel == len(state["groups"][0]["ranks"]), origin
    assert state["mode"] == "auto", state
    assert all(rank["epoch"] == state["epoch"] for rank in ranks_of(state)), state
    return {str(batch): point.ratio for batch, point in cells.items()}
