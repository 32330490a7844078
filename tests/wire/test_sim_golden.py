"""The simulated engine's answers against those of real SGLang servers, all of them.

`golden_sglang/*.json` are digests of what SGLang 0.5.16 and 0.5.23 answered to 86 requests each
(EAGLE with 3 steps, top-k 1, 8 requests at once, a user's and an admin key): shapes, statuses,
names of metrics, and the values that gauges have while fresh, idle and off. The simulated engine
claims to answer as 0.5.23 does: it must have every member that version has. Of members that only
0.5.16 has it need not, and of those that only 0.5.23 has it may.
"""

import asyncio
import contextlib
import itertools
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from specserve_sim.engine import EngineConfig
from specserve_sim.launch import RunningEngine, running_engine
from tests.wire.golden_sglang.digest import answer as digest_of
from tests.wire.golden_sglang.digest import shape

FOLDER = Path(__file__).parent / "golden_sglang"
DIGESTS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
CLAIMED = "0.5.23"
KEYS = {"none": None, "wrong": "wrong", "user": "USER", "admin": "ADMIN"}
TOKEN = "plugin"

#: Routes of SGLang that the simulated engine does not serve, and why.
NOT_SERVED = {
    "/get_load": "0.5.23 has none; /v1/loads tells the same",
    "/model_info": "nothing here asks for the model's architecture",
    "/ping": "of another serving platform",
    "/flush_cache": "there is no prefix cache to flush",
    "/set_internal_state": "orders come to the admin port, whose contract has tests of its own",
    "/health_speculation": "of an early trial of the plugin, no route of SGLang",
    "/admin/speculation": "of an early trial of the plugin, no route of SGLang",
}
#: Answers on served routes that are not simulated, and why.
NOT_SIMULATED = {
    "generate_logprob": "tokens have no probabilities",
    "generate_eos_stop": "answers end at their length only",
}
#: Members whose value needs a prefix cache or a pool of memory.
CACHE_ONLY = frozenset({"cached_tokens_details", "decode_moments"})
#: Members that depend on when a chunk is written, not on what it is.
TIMING = frozenset({"response_sent_to_client_ts"})
#: Answers of hundreds of settings, of which the simulated engine has those that mean something to
#: it; and what it adds, so that nobody takes it for SGLang.
SETTINGS = frozenset({"/server_info", "/get_server_info"})
OWN_SETTINGS = frozenset({"simulated", "sim"})

LOADS_AS_TEXT = "/v1/loads?format=prometheus"
IDLE = ("num_running_reqs", "num_queue_reqs", "gen_throughput", "token_usage", "num_used_tokens")


def entries(version: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DIGESTS[version]["answers"]
    return found


def asked(entry: dict[str, Any]) -> bool:
    path = entry["path"].partition("?")[0]
    return path not in NOT_SERVED and entry["name"] not in NOT_SIMULATED


def spoken(value: Any) -> Any:
    """A body with its prompts written out."""
    if isinstance(value, dict):
        return {key: spoken(item) for key, item in value.items()}
    if isinstance(value, list):
        return [spoken(item) for item in value]
    length = re.fullmatch(r"a\*(\d+)", value) if isinstance(value, str) else None
    return "a" * int(length[1]) if length else value


# Comparing.


@dataclass
class Comparison:
    """What differs between a recorded answer and one of the simulated engine.

    `spare` is the same answer of the version that is claimed: members which only one of the two
    recorded answers has may be there or not.
    """

    differences: list[str] = field(default_factory=list)

    def shapes(self, real: Any, shown: Any, spare: Any, place: str = "") -> None:
        if isinstance(real, dict) and isinstance(shown, dict):
            spare = spare if isinstance(spare, dict) else real
            for key in sorted(real.keys() & spare.keys() - shown.keys() - TIMING):
                self.differences.append(f"{place}.{key} is missing")
            for key in sorted(shown.keys() - real.keys() - spare.keys() - TIMING):
                self.differences.append(f"{place}.{key} is none of SGLang's")
            for key in sorted(real.keys() & shown.keys() - CACHE_ONLY):
                self.shapes(real[key], shown[key], spare.get(key, real[key]), f"{place}.{key}")
        elif isinstance(real, list) and isinstance(shown, list):
            for item in shown:
                self._one_of(real, item, spare if isinstance(spare, list) else real, place)
        elif real != shown:
            self.differences.append(f"{place} is {shown}, not {real}")

    def _one_of(self, real: list[Any], shown: Any, spare: list[Any], place: str) -> None:
        attempts = []
        for position, candidate in enumerate(real):
            attempt = Comparison()
            other = spare[position] if position < len(spare) else candidate
            attempt.shapes(candidate, shown, other, f"{place}[]")
            attempts.append(attempt.differences)
        self.differences += min(attempts, key=len, default=[])

    def events(self, real: list[Any], shown: list[Any], spare: list[Any]) -> None:
        """A stream: its first and its last event alike, and between them none of another kind."""
        if real[-1] == "[DONE]" and shown[-1] != "[DONE]":
            self.differences.append("the stream does not end with [DONE]")
        told = [event for event in shown if event != "[DONE]"]
        kinds = [event for event in real if event != "[DONE]"]
        others = [event for event in spare if event != "[DONE]"]
        self.shapes(kinds[0], told[0], others[0], "first")
        self.shapes(kinds[-1], told[-1], others[-1], "last")
        for event in told:
            self._one_of(kinds, event, others, "event")

    def settings(self, real: dict[str, Any], shown: dict[str, Any]) -> None:
        for key in sorted(shown.keys() - real.keys() - OWN_SETTINGS):
            self.differences.append(f".{key} is no setting of SGLang's")
        # An engine may have a key or a draft, or none.
        for key in sorted(real.keys() & shown.keys()):
            if "null" not in (real[key], shown[key]) and not isinstance(real[key], list):
                self.shapes(real[key], shown[key], real[key], f".{key}")

    def metrics(self, families: dict[str, Any], shown: dict[str, Any]) -> None:
        for name, family in shown.items():
            if name not in families:
                self.differences.append(f"{name} is no metric of SGLang's")
                continue
            if family["type"] != families[name]["type"]:
                self.differences.append(f"{name} is a {family['type']}")
            labels = set(filter(None, family["labels"])) - set(families[name]["labels"])
            if labels:
                self.differences.append(f"{name} has labels {labels}")


def compare(version: str, entry: dict[str, Any], status: int, shown: dict[str, Any]) -> list[str]:
    """What differs."""
    found = Comparison()
    real = entry["answer"]
    claimed = next(each for each in entries(CLAIMED) if each["name"] == entry["name"])
    if status not in (entry["status"], claimed["status"]):
        return [f"status {status}, not {entry['status']}"]
    if status != entry["status"]:
        return []
    if real.keys() - {"lacks"} != shown.keys():
        return [f"the answer is {sorted(shown)}, not {sorted(real)}"]
    spare = claimed["answer"]
    if "events" in real:
        found.events(real["events"], shown["events"], spare["events"])
    elif "metrics" in real:
        found.metrics(
            DIGESTS[version]["families"] | DIGESTS[CLAIMED]["families"], shown["metrics"]
        )
        if entry["path"] == LOADS_AS_TEXT:
            ours = shown["metrics"].keys()
            of_loads = {
                name for name in DIGESTS[CLAIMED]["families"] if name.startswith("sglang_")
            }
            found.differences += [f"{name} is missing" for name in sorted(of_loads - ours)]
    elif "text" in real:
        return [] if real == shown else [f"text: {shown['text']}"]
    elif entry["path"] in SETTINGS and status == 200:
        whole = next(each for each in entries(version) if each["name"] == "server_info")
        found.settings(whole["answer"]["json"], shown["json"])
    else:
        found.shapes(real["json"], shown["json"], spare["json"])
    return found.differences


# Asking.


@dataclass
class Walk:
    """Asks one simulated engine what a real one was asked, in the same states."""

    running: RunningEngine
    session: aiohttp.ClientSession
    version: str
    differences: dict[str, list[str]] = field(default_factory=dict)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    statuses: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    async def send(self, entry: dict[str, Any]) -> tuple[int, str, str]:
        key = KEYS[entry["key"]]
        body = entry.get("body")
        data = None
        if body is not None:
            data = body if isinstance(body, str) else json.dumps(spoken(body))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.session.request(
            entry["method"], self.running.url + entry["path"], headers=headers, data=data
        ) as answer:
            return answer.status, answer.content_type, await answer.text()

    async def ask(self, entry: dict[str, Any]) -> None:
        status, kind, text = await self.send(entry)
        shown = digest_of(text, kind)
        self.told[entry["name"]] = shown
        if found := compare(self.version, entry, status, shown):
            self.differences[entry["name"]] = found

    async def loads(self) -> tuple[int, int]:
        _, _, text = await self.send({"method": "GET", "path": "/v1/loads", "key": "user"})
        load = json.loads(text)["loads"][0]
        return load["num_running_reqs"], load["num_waiting_reqs"]

    async def gauges(self) -> tuple[float, float]:
        _, kind, text = await self.send({"method": "GET", "path": "/metrics", "key": "none"})
        shown = digest_of(text, kind)["metrics"]
        running, queued = (shown[f"sglang:{name}"]["value"] for name in IDLE[:2])
        return running, queued

    @contextlib.asynccontextmanager
    async def under(self, requests: int, running: int):
        """Have so many requests in flight, of which `running` run, and metrics say so."""
        body = {"text": "a*24", "sampling_params": {"max_new_tokens": 900}}
        entry = {"method": "POST", "path": "/generate", "key": "user", "body": body}
        tasks = [asyncio.create_task(self.send(entry)) for _ in range(requests)]
        wanted = (running, requests - running)
        while await self.loads() != wanted or await self.gauges() != wanted:
            assert not all(task.done() for task in tasks)
        yield
        await asyncio.gather(*tasks)

    async def order(self, mode: str, epoch: int) -> None:
        """Order a mode at the admin port, and have it obeyed."""
        url = f"{self.running.admin_url}/v1/speculation"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        body = {
            "podUID": self.running.engine.pod_uid,
            "bootID": self.running.engine.boot_id,
            "epoch": epoch,
            "holder": "test",
            "leaseSeconds": 60,
            "mode": mode,
            "draftKv": "cold",
            "fallback": {"mode": "auto"},
        }
        async with self.session.put(url, headers=headers, json=body) as answer:
            assert answer.status == 200, await answer.text()


@contextlib.asynccontextmanager
async def walking(version: str, folder: Path):
    (folder / "plugin-token").write_text(TOKEN)
    config = EngineConfig(
        served_model_name="tiny",
        algorithm="EAGLE",
        steps=(0, 1, 3),
        max_running_requests=8,
        api_key=KEYS["user"],
        admin_api_key=KEYS["admin"],
        # Four characters count for a token here, and one for the servers that were recorded.
        context_length=1024,
        max_total_tokens=8192,
        decode_log_interval=5,
        time_scale=4.0,
    )
    async with (
        running_engine(config, credentials=folder) as running,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        yield Walk(running, session, version)


def states(version: str) -> dict[str, list[dict[str, Any]]]:
    """The entries by the state in which they were asked, each in the order of asking."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in filter(asked, entries(version)):
        state = re.search(r"(after_)?(load4|queue14)$|off$", entry["name"])
        found.setdefault(state[0] if state else "fresh", []).append(entry)
    return found


async def walked(version: str, folder: Path) -> Walk:
    """Walk through all states of one version."""
    by_state = states(version)
    async with walking(version, folder) as walk:
        for entry in by_state.pop("fresh"):
            await walk.ask(entry)
        for path, method in itertools.product(NOT_SERVED, ("GET", "POST")):
            status, _, _ = await walk.send({"method": method, "path": path, "key": "user"})
            walk.statuses[path].add(status)
        for state, there in by_state.items():
            if state == "off":
                await walk.order("off", 1)
                # What is generated first makes the gauges tell of it.
                there.sort(key=lambda entry: entry["method"] == "GET")
            load = {"load4": (4, 4), "queue14": (14, 8)}.get(state)
            async with walk.under(*load) if load else contextlib.nullcontext():
                for entry in there:
                    await walk.ask(entry)
    return walk


@pytest.fixture(scope="module", params=DIGESTS)
def walk(request, tmp_path_factory):
    return asyncio.run(walked(request.param, tmp_path_factory.mktemp("credentials")))


# The checks.


@pytest.mark.parametrize("version", DIGESTS)
def test_every_recorded_answer_is_asked_for_or_left_out_with_a_reason(version):
    names = [entry["name"] for entry in entries(version)]
    assert len(names) == len(set(names)) == 86
    paths = {entry["path"].partition("?")[0] for entry in entries(version)}
    assert paths >= NOT_SERVED.keys()
    assert set(names) >= NOT_SIMULATED.keys()


def test_every_answer_has_the_shape_of_a_real_one(walk):
    assert walk.differences == {}
    assert len(walk.told) == sum(map(asked, entries(walk.version)))


def test_gauges_are_fresh_idle_and_off_as_real_ones(walk):
    for entry in entries(walk.version):
        real = entry["answer"].get("metrics")
        if not real or not entry["name"].startswith("metrics_"):
            continue
        shown = walk.told[entry["name"]]["metrics"]
        values = {name: shown[name]["value"] for name in real}
        if entry["name"] in ("metrics_fresh", "metrics_off"):
            assert values == real, entry["name"]
        elif "after" in entry["name"]:
            idle = {f"sglang:{name}" for name in IDLE}
            assert {name: values[name] for name in idle} == {name: real[name] for name in idle}
            # The last window of decoding stays on show.
            assert values["sglang:spec_num_steps"] == real["sglang:spec_num_steps"] == 3
            assert values["sglang:spec_accept_length"] >= 1
        else:
            for name in IDLE[:2]:
                assert values[f"sglang:{name}"] == real[f"sglang:{name}"], entry["name"]


def test_what_is_not_served_is_not_found(walk):
    assert walk.statuses == {path: {404} for path in NOT_SERVED}


@pytest.mark.parametrize(
    ("shown", "difference"),
    [
        ({"a": "str", "b": [{"c": "int"}]}, None),
        ({"a": "str", "b": []}, None),
        ({"a": "str"}, ".b is missing"),
        ({"a": "int", "b": []}, ".a is int, not str"),
        ({"a": "str", "b": [], "z": "int"}, ".z is none of SGLang's"),
        ({"a": "str", "b": [{"c": "null"}]}, ".b[].c is null, not int"),
        # A member of the claimed version alone may be there.
        ({"a": "str", "b": [], "new": "int"}, None),
    ],
)
def test_a_difference_is_found_and_named(shown, difference):
    real = {"a": "str", "b": [{"c": "int"}], "old": "int"}
    found = Comparison()
    found.shapes(real, shown, {"a": "str", "b": [{"c": "int"}], "new": "int"})
    assert found.differences == ([difference] if difference else [])


def test_a_digest_tells_shapes_and_no_words():
    text = '{"a": "secret words", "b": [1, 2, null], "c": {"d": 1.5}, "code": 400}'
    told = digest_of(text, "application/json")["json"]
    assert told == {"a": "str", "b": ["int", "null"], "c": {"d": "float"}, "code": "=400"}
    assert shape([]) == []
    stream = 'data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'
    assert digest_of(stream, "text/event-stream") == {"events": [{"a": "int"}, "[DONE]"]}
