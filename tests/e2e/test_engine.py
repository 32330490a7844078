"""Real SGLang under the operator, on a node with a kubelet; see engine.yaml. Needs root.

One story, told in order: start, prompts that flip, a scheduler killed, under control again. The
load is the same all along, so only what the draft wins can flip: see engine.yaml.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from specserve import names
from tests.bench import report
from tests.cluster.namespaces import connector
from tests.cluster.node import node_cluster
from tests.cluster.processes import until
from tests.cluster.progress import Progress
from tests.demo.install import NAMESPACE, ROOT, Installation
from tests.e2e import real_engine
from tests.engine import environment, trained

SGLANG = "0.5.23"
RECORD = ROOT / "build" / "e2e" / "engine.json"
READY_SECONDS = 300
FLIP_SECONDS = 60
LOOK_SECONDS = 150
"""For an engine that is off to see that drafts win again; the first probe comes after a minute."""
RESTART_SECONDS = 240
"""For an engine whose process does not end by itself: the liveness probe takes three minutes."""
ROUNDS = 300
"""Decode rounds of each engine that a phase lasts."""

ROUND = ("batchBucket", "steps", "rounds", "medianRoundSeconds", "acceptLength")
"""What is recorded of each kind of round that an engine tells."""

CLIENTS = 2
"""Clients of each engine, whatever they ask."""

PROMPTS = {"On": "easy", "Off": "hard"}
"""By the mode that is right for them: the draft has learnt how the former go on."""

JUDGED = {"On": {"AboveBreakEven"}, "Off": {"BelowBreakEven", "DraftIneffective"}}
"""Why: where other work on the machine blurs what a round takes, a draft that is never right still
tells hard prompts."""

STEPS = 3
NUMBERS = {
    "inFlight": "batch",
    "acceptLength": f"accept@{STEPS}",
    "breakEven": f"breakEven@{STEPS}",
    "value": f"value@{STEPS}",
}
"""What is recorded of a verdict, by the name that the operator gives it."""


@pytest.fixture(scope="module")
def pair():
    return trained.prepare()


@pytest.fixture
def cluster(tmp_path):
    archive = real_engine.image(tmp_path / "machine.tar")
    with node_cluster(images=[archive], gpus=0) as started:
        yield started


class Story:
    """The cluster, and what is written down of it."""

    def __init__(self, cluster, folder, manifest, operator):
        self.cluster = cluster
        self.operator = operator
        self.name = manifest["metadata"]["name"]
        self.replicas = manifest["spec"]["replicas"]
        self.watched = folder / "speculation.jsonl"
        self.record = {
            "sglang": None,
            "flips": 0,
            "requestsSent": 0,
            "requestsLost": None,
            "device": "cpu",
            "replicas": self.replicas,
            "strategy": manifest["spec"]["policy"]["strategy"],
            "breakEven": {},
            "secondsByStep": {},
        }
        self._began = time.monotonic()

    @contextlib.contextmanager
    def step(self, title):
        started = time.monotonic()
        try:
            yield
        finally:
            took = round(time.monotonic() - started, 1)
            self.record["secondsByStep"][title] = took
            sys.stderr.write(f"e2e-engine: {title}: {took} s\n")

    def write(self):
        self.record["seconds"] = round(time.monotonic() - self._began, 1)
        self.record |= report.stamp()
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(self.record, indent=1) + "\n")

    # -- looking ----------------------------------------------------------------------------

    def pods(self):
        selector = names.selector_string(self.name)
        items = self.cluster.get("pods", "-n", NAMESPACE, "-l", selector)["items"]
        return {pod["metadata"]["name"]: pod for pod in items}

    def wait(self, what, condition, seconds):
        """Wait for a condition by a watch; to ask all the time would take the engines' cores."""
        self.cluster.kubectl(
            *("wait", what, "-n", NAMESPACE, f"--for={condition}", f"--timeout={seconds}s"),
            timeout=seconds + 10,
        )

    def wait_ready(self):
        self.wait(f"{names.PLURAL}/{self.name}", "condition=Ready", READY_SECONDS)

    def wait_learnt(self):
        """Wait until the engines' own rounds have told what a round with drafts costs."""
        known = "jsonpath={.status.conditions[?(@.type=='CurveKnown')].reason}=Live"
        self.wait(f"{names.PLURAL}/{self.name}", known, FLIP_SECONDS)

    def wait_mode(self, mode):
        """Wait until all engines say that they obey an order of this mode."""
        summary = (
            f"jsonpath={{.status.speculation.summary}}={mode} {self.replicas}/{self.replicas}"
        )
        self.wait(f"{names.PLURAL}/{self.name}", summary, LOOK_SECONDS)

    def wait_flip(self, load, mode, pods, title):
        """Bring the prompts for which this mode is right, and see that engines follow."""
        load.order("", PROMPTS[mode], CLIENTS, pods)
        self.wait_learnt()
        self.wait_mode(mode)
        load.order(mode, PROMPTS[mode], CLIENTS, pods)
        self.wait_rounds(mode, pods)
        until(
            lambda: all(each["code"] in JUDGED[mode] for each in self.judged().values()),
            f"engines to be {mode} by what their drafts win",
            LOOK_SECONDS,
        )
        self.record["breakEven"][title] = self.judged()

    def wait_rounds(self, mode, pods):
        """Wait until all engines have gone on in this mode for a while."""

        def rounds(pod):
            ranks = self.read_back(pod)["groups"][0]["ranks"]
            return all(
                (rank["decodeRounds"] or 0) >= ROUNDS
                and (rank["activeSteps"] > 0) is (mode == "On")
                for rank in ranks
            )

        until(lambda: all(map(rounds, pods)), f"rounds of engines that are {mode}", LOOK_SECONDS)

    @contextlib.contextmanager
    def watching(self):
        """Write down every state of speculation that the resource had."""
        with self.watched.open("w") as output:
            watch = self.cluster.popen(
                [
                    *("kubectl", "get", names.PLURAL, self.name, "-n", NAMESPACE, "--watch"),
                    *("-o", "jsonpath={.status.speculation}{'\\n'}"),
                ],
                stdout=output,
                stdin=subprocess.DEVNULL,
            )
            try:
                yield
            finally:
                watch.terminate()
                watch.wait(10)
                self._count_flips()

    def _count_flips(self):
        lines = self.watched.read_text().splitlines()
        seen = [json.loads(line) for line in lines if line.strip()]
        settled = [each["mode"] for each in seen if each["mode"] in {"On", "Off"}]
        reasons = [each.get("lastSwitchReason", "") for each in seen]
        self.record["flips"] = sum(a != b for a, b in itertools.pairwise(settled))
        self.record["switchReasons"] = [
            after for before, after in itertools.pairwise(["", *reasons]) if after != before
        ]

    @functools.cached_property
    def token(self):
        """The key to the engines' admin listeners, the same for all of a SpecServe."""
        secret = self.cluster.get("secret", names.credentials_secret(self.name), "-n", NAMESPACE)
        return base64.b64decode(secret["data"][names.KEY_PLUGIN_TOKEN]).decode().strip()

    def read_back(self, pod):
        """What an engine says of itself, asked as the operator does."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return self._ask(pod["status"]["podIP"], names.PORT_ADMIN, names.PATH_SPECULATION, headers)

    def decisions(self):
        """What was decided for the engines and why, the newest last."""
        return self._ask("127.0.0.1", self.operator, f"/decisions/{NAMESPACE}/{self.name}", {})

    def judged(self):
        """By pod, the verdict that holds, and by what numbers it was reached."""
        return {
            each["pod"]: {"code": each["code"]}
            | {
                name: each["numbers"][number]
                for name, number in NUMBERS.items()
                if number in each["numbers"]
            }
            for each in self.decisions()
        }

    def _ask(self, host, port, path, headers):
        connection = http.client.HTTPConnection(host, port)
        connection.sock = connector(self.cluster._namespace)(host, port, 10)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            return json.load(connection.getresponse())


class Load:
    """The clients' process, told what to do by the story."""

    def __init__(self, process):
        self._process = process
        self.account = None

    def order(self, phase, kind, clients, pods):
        """Let so many clients ask each of the engines, and none any other."""
        urls = {life(pod): f"http://{pod['status']['podIP']}:{names.PORT_SERVING}" for pod in pods}
        line = json.dumps({"phase": phase, "kind": kind, "clients": clients, "pods": urls})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end(self):
        """Wait for all answers under way, and take the account."""
        said, _ = self._process.communicate(timeout=120)
        self.account = json.loads(said)


@contextlib.contextmanager
def load_on(cluster, prompts):
    process = cluster.popen(
        [sys.executable, "-m", "tests.e2e.real_engine_load", str(prompts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield Load(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def life(pod):
    """A name of the engine process in a pod: another one after a restart."""
    (container,) = pod["status"]["containerStatuses"]
    return f"{pod['metadata']['name']}#{container['restartCount']}"


@pytest.fixture
def story(cluster, pair, tmp_path):
    manifest = real_engine.manifest(environment.prepare(SGLANG), pair)
    installation = Installation(cluster, Progress(), ours=True)
    log = tmp_path / "operator.log"
    told = Story(cluster, tmp_path, manifest, installation.port)
    with installation.rights(), installation.operator(log):
        cluster.apply(manifest, namespace=NAMESPACE)
        try:
            yield told
        finally:
            told.write()
            _show(told, log)


def _show(story, log):
    """What a reader of a failed run asks for first; pytest shows it for failed tests alone."""
    scope = ("-n", NAMESPACE)
    for command in (
        ("get", "pods", *scope, "-o", "wide"),
        ("get", names.PLURAL, *scope, "-o", "yaml"),
        ("logs", *scope, "-l", names.selector_string(story.name), "--tail=25", "--prefix"),
        ("get", "events", *scope, "--sort-by=.lastTimestamp"),
    ):
        shown = story.cluster.run(["kubectl", *command], check=False)
        print(f"$ kubectl {' '.join(command)}\n{shown.stdout[-8000:]}{shown.stderr}")
    print("decisions:", *map(json.dumps, story.decisions()[-40:]), sep="\n")
    print("the operator's log:", *log.read_text().splitlines()[-25:], sep="\n")


@pytest.mark.timeout(900)
def test_real_engines_are_started_switched_and_taken_back_after_a_crash(story, pair):
    with story.step("kubectl apply, Ready"):
        story.wait_ready()
    pods = story.pods()
    assert len(pods) == story.replicas
    for pod in pods.values():
        (container,) = pod["spec"]["containers"]
        title = " ".join(container["command"])
        (main,) = real_engine.processes(pod["metadata"]["uid"], title)
        assert real_engine.command_line(main) == container["command"] + container["args"]
        story.record["sglang"] = story.read_back(pod)["versions"]["sglang"]
        assert story.record["sglang"] == SGLANG

    with story.watching(), load_on(story.cluster, pair / "prompts.json") as load:
        for title, mode in (("easy", "On"), ("hard", "Off"), ("easy again", "On")):
            with story.step(f"{title}: {mode}"):
                story.wait_flip(load, mode, pods.values(), title)

        victim, *others = pods.values()
        before = story.read_back(victim)
        story.record["rounds"] = [
            {key: stat[key] for key in ROUND} for stat in before["groups"][0]["stats"]
        ]
        (scheduler,) = real_engine.processes(victim["metadata"]["uid"], "sglang::scheduler")
        with story.step("scheduler killed, Ready again"):
            os.kill(scheduler, signal.SIGKILL)
            load.order("", PROMPTS["On"], CLIENTS, others)
            name = victim["metadata"]["name"]
            restarted = "jsonpath={.status.containerStatuses[0].restartCount}=1"
            story.wait(f"pod/{name}", restarted, RESTART_SECONDS)
            story.wait(f"pod/{name}", "condition=Ready", READY_SECONDS)
        again = story.pods()
        assert again.keys() == pods.keys()
        assert story.read_back(again[name])["bootID"] != before["bootID"]
        with story.step("under control again"):
            story.wait_ready()
            for title, mode in (("easy, restarted", "On"), ("hard, restarted", "Off")):
                story.wait_flip(load, mode, again.values(), title)
        load.end()

    _account(story, load.account, life(victim))
    assert story.record["requestsLost"] == 0, story.record["lost"]
    assert story.record["requestsLostWithKilledEngine"] > 0
    assert story.record["flips"] >= 3
    won = story.record["tokensPerVerify"]
    assert won["On"] > 2
    assert won["Off"] < 1.1


def _account(story, account, killed):
    lost = {engine: each["lost"] for engine, each in account.items() if each["lost"]}
    story.record |= {
        "requestsSent": sum(each["sent"] for each in account.values()),
        "requestsLost": sum(sum(each.values()) for e, each in lost.items() if e != killed),
        "requestsLostWithKilledEngine": sum(lost.get(killed, {}).values()),
        "lost": lost,
        "tokensPerVerify": {
            mode: round(_sum(account, mode, "tokens") / _sum(account, mode, "rounds"), 2)
            for mode in PROMPTS
        },
    }


def _sum(account, phase, what):
    return sum(each["phases"].get(phase, {}).get(what, 0) for each in account.values())
