"""The demo as a user runs it: a node cluster, the operator, simulated engines in real pods."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from PIL import Image

from tests.demo.install import ROOT

MARK = "SPECSERVE_TEST_RUN"


class Demo:
    """One run of the demo's command, and what it leaves."""

    def __init__(self, folder):
        self.out = folder / "out"
        # Short, as sockets of a cluster lie in it and their paths are bounded.
        self.temporary = Path(tempfile.mkdtemp(prefix="demo-"))
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.demo", "--out", str(self.out)],
            cwd=ROOT,
            env=os.environ | {MARK: self.mark, "TMPDIR": str(self.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def read_until(self, text):
        """Reads the output up to a line with this text."""
        read = []
        for row in self.process.stdout:
            read.append(row)
            if text in row:
                return
        pytest.fail(f"ended without {text!r}:\n{''.join(read)}")

    def end(self):
        """Waits for the end; returns exit status and the rest of the output."""
        rest = self.process.stdout.read()
        return self.process.wait(), rest

    def left(self):
        """Processes, files and control groups that it left behind."""
        marked = f"{MARK}={self.mark}".encode()
        found = [str(path) for path in self.temporary.iterdir()]
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if marked in environ.read_bytes().split(b"\0"):
                    found.append((environ.parent / "comm").read_text().strip())
            except OSError:
                continue  # it ended meanwhile
        groups = f"specserve-{self.process.pid}-*"
        return found + [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{groups}")]


@pytest.fixture
def demo(tmp_path):
    run = Demo(tmp_path)
    yield run
    if run.process.poll() is None:
        run.process.kill()
        run.process.wait()
    shutil.rmtree(run.temporary)


@pytest.mark.timeout(420)
def test_every_pod_answers_load_and_acceptance_and_no_request_is_lost(demo):
    status, output = demo.end()
    assert status == 0, output
    summary = json.loads((demo.out / "summary.json").read_text())
    assert len(summary["pods"]) == 2
    for pod in summary["pods"]:
        assert pod["name"].startswith("demo-")
        # For the load, for the acceptance, and no more than a doubtful moment beside these.
        assert 2 <= pod["flipsOff"] == pod["flipsOn"] <= 3
    assert sum(pod["probes"] for pod in summary["pods"]) >= 1
    assert summary["requests"]["sent"] > 1000
    assert summary["requests"]["lost"] == 0
    rates = summary["throughput"]
    assert set(rates) == {"alwaysOn", "alwaysOff", "specserve"}
    assert rates["specserve"] >= max(rates["alwaysOn"], rates["alwaysOff"]) or summary["note"]
    with Image.open(demo.out / "throughput.png") as picture:
        assert picture.format == "PNG"
    for said in (
        "Simulated engines",
        "off: acceptance 1.",
        "below break-even",
        "short look at 3 steps: acceptance was last seen",
        "on: acceptance ",
        "above break-even",
        "s left",
    ):
        assert said in output
    assert demo.left() == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(demo, number):
    demo.read_until("Waiting for their pods")
    os.killpg(demo.process.pid, number)
    os.killpg(demo.process.pid, number)  # who is impatient gets no half-done clean-up
    status, output = demo.end()
    assert status == 128 + signal.SIGINT
    assert "all that the demo started is gone" in output
    assert not (demo.out / "summary.json").exists()
    assert demo.left() == []
