"""The simulated engine over HTTP: shapes as recorded from SGLang, keys, streams, faults, drain."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specserve_sim.engine import EngineConfig
from specserve_sim.launch import addresses, running_engine, running_fleet
from specserve_sim.profile import load_profile

GOLDEN = Path(__file__).parents[1] / "golden/sglang-0.5.23"
ANSWERS = json.loads((GOLDEN / "answers.json").read_text())
METRICS = json.loads((GOLDEN / "metrics.json").read_text())
FAST = 20.0
"""Engine seconds in a second: a test waits for tokens, not for a GPU."""


def shape(value):
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    names = {str: "str", bool: "bool", int: "int", float: "float", type(None): "null"}
    return names[type(value)]


def like(recorded, shown, *, free=()):
    """Compare shapes, but for keys whose value the engine that was recorded had and ours lacks."""
    if isinstance(recorded, dict) and isinstance(shown, dict):
        assert recorded.keys() == shown.keys()
        for key in recorded:
            if key not in free:
                like(recorded[key], shown[key], free=free)
    elif isinstance(recorded, list) and isinstance(shown, list):
        for left, right in zip(recorded, shown, strict=True):
            like(left, right, free=free)
    else:
        assert recorded == shown


# Only a prefix cache and a memory pool have these, and neither is simulated.
CACHE_ONLY = ("cached_tokens_details", "decode_moments")


class Client:
    def __init__(self, session, running):
        self.session = session
        self.running = running
        self.engine = running.engine

    async def send(self, method, path, *, key=None, **options):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = self.running.url + path
        async with self.session.request(method, url, headers=headers, **options) as answer:
            return answer.status, await answer.text()

    async def get(self, path, **options):
        status, text = await self.send("GET", path, **options)
        return status, json.loads(text)

    async def generate(self, **body):
        status, text = await self.send("POST", "/generate", json=request(**body))
        return status, json.loads(text)

    @contextlib.asynccontextmanager
    async def open_stream(self, **body):
        url = self.running.url + "/generate"
        async with self.session.post(url, json=request(stream=True, **body)) as answer:
            yield answer

    async def stream(self, **body):
        async with self.open_stream(**body) as answer:
            assert answer.content_type == "text/event-stream"
            text = (await answer.read()).decode()
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    async def metrics(self):
        status, text = await self.send("GET", "/metrics")
        assert status == 200
        return {family.name: family for family in text_string_to_metric_families(text)}

    async def runs(self, count):
        """Ask until so many requests run."""
        running = -1
        while running < count:
            loads = (await self.get("/v1/loads"))[1]["loads"]
            running = sum(load["num_running_reqs"] for load in loads)

    async def behave(self, **behaviour):
        status, text = await self.send("PUT", "/sim/v1/behaviour", json=behaviour)
        assert status == 200, text


def request(new=24, accept=None, **body):
    parameters = {"max_new_tokens": new}
    if accept is not None:
        parameters["custom_params"] = {"accept_length": accept}
    return {"text": "a prompt of few words", "sampling_params": parameters} | body


@contextlib.asynccontextmanager
async def client_of(config, **options):
    async with (
        running_engine(config, **options) as running,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
    ):
        yield Client(session, running)


@pytest.fixture
async def client():
    async with client_of(EngineConfig(time_scale=FAST, max_running_requests=8)) as client:
        yield client


@pytest.fixture
async def plain():
    async with client_of(EngineConfig(time_scale=FAST, algorithm=None)) as client:
        yield client


# Shapes


async def test_loads_look_as_recorded(client):
    for name, path in (
        ("loads_core", "/v1/loads?include=core"),
        ("loads_fresh", "/v1/loads"),
    ):
        like(ANSWERS[name], shape((await client.get(path))[1]))
    await client.generate()
    shown = shape((await client.get("/v1/loads"))[1])
    like(ANSWERS["loads_load4"], shown, free=CACHE_ONLY)


async def test_loads_without_a_draft_have_no_speculative_part(plain):
    await plain.generate()
    shown = shape((await plain.get("/v1/loads"))[1])
    like(ANSWERS["loads_without_draft"], shown, free=CACHE_ONLY)


async def test_an_answer_looks_as_recorded(client):
    like(ANSWERS["generate"], shape((await client.generate())[1]))
    several = await client.generate(text=["a", "b"])
    like(ANSWERS["generate_batch"], shape(several[1]), free=CACHE_ONLY)


async def test_an_answer_without_a_draft_has_no_spec_fields(plain):
    shown = shape((await plain.generate())[1])
    like(ANSWERS["generate_without_draft"], shown, free=CACHE_ONLY)


async def test_a_stream_looks_as_recorded_and_its_text_is_cumulative(client):
    chunks = await client.stream(new=200)
    sent = {"response_sent_to_client_ts"}
    for name, chunk in (("first", chunks[0]), ("between", chunks[1]), ("last", chunks[-1])):
        recorded = {
            **ANSWERS["stream"][name],
            "meta_info": {
                key: value
                for key, value in ANSWERS["stream"][name]["meta_info"].items()
                if key not in sent
            },
        }
        shown = shape(chunk)
        shown["meta_info"] = {k: v for k, v in shown["meta_info"].items() if k not in sent}
        like(recorded, shown, free=CACHE_ONLY)
    for before, after in itertools.pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert len(after["output_ids"]) == after["meta_info"]["completion_tokens"]
    assert chunks[0]["meta_info"]["completion_tokens"] >= 1
    assert chunks[-1]["meta_info"]["completion_tokens"] == 200


async def test_metrics_have_the_names_types_and_labels_recorded(client):
    await client.generate()
    await client.stream()
    families = await client.metrics()
    for name, recorded in METRICS.items():
        family = families[name]
        assert family.type == recorded["type"]
        assert {tuple(sorted(sample.labels)) for sample in family.samples} == {
            tuple(recorded["labels"])
        }


async def test_errors_look_as_recorded(client):
    for name, status, method, path, options in (
        ("err_404", 404, "GET", "/nope", {}),
        ("err_405", 405, "GET", "/generate", {}),
        ("err_generate_bad_json", 400, "POST", "/generate", {"data": "{not json"}),
        ("err_generate_no_text", 400, "POST", "/generate", {"json": {}}),
        (
            "err_generate_bad_param",
            400,
            "POST",
            "/generate",
            {"json": {"text": "x", "sampling_params": {"temperature": -1}}},
        ),
    ):
        shown_status, text = await client.send(method, path, **options)
        assert shown_status == status
        like(ANSWERS[name], shape(json.loads(text)))


async def test_a_refused_stream_is_an_event_with_status_200(client):
    chunks = await client.stream(sampling_params={"temperature": -1})
    like(ANSWERS["stream_error"], shape(chunks[0]))


@pytest.mark.parametrize(
    "body",
    [
        {"text": {"a": 1}},
        {"text": []},
        {"text": None, "input_ids": []},
        {"sampling_params": {"max_new_tokens": "x"}},
        {"rid": 7},
        {"new": -1},
        {"new": True},
        {"new": 10**9},
        {"accept": 4.5},
        {"accept": "high"},
        {"sampling_params": {"n": 2}},
        {"sampling_params": [{}, {}]},
        {"sampling_params": "none"},
        {"text": ["a", "b"], "rid": ["one"]},
    ],
)
async def test_bad_requests_are_refused_and_leave_nothing_behind(client, body):
    status, answer = await client.generate(**body)
    assert status == 400, answer
    load = (await client.get("/v1/loads"))[1]["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)


async def test_a_stream_of_several_prompts_is_refused(client):
    chunks = await client.stream(text=["a", "b"])
    assert "single prompts" in chunks[0]["error"]["message"]


async def test_a_bad_section_is_the_500_it_is_upstream(client):
    assert (await client.send("GET", "/v1/loads?include=bogus"))[0] == 500


# Keys


async def test_keys_open_what_they_open_upstream():
    config = EngineConfig(time_scale=FAST, api_key="user", admin_api_key="admin")
    async with client_of(config) as client:
        for path in ("/health", "/metrics", "/ready", "/health_generate"):
            assert (await client.send("GET", path))[0] == 200
        for key in (None, "admin", "wrong"):
            for method, path in (
                ("GET", "/v1/loads"),
                ("POST", "/generate"),
                ("GET", "/server_info"),
                ("GET", "/nope"),
            ):
                status, text = await client.send(method, path, key=key)
                assert status == 401
                like(ANSWERS["err_401_loads_none"], shape(json.loads(text)))
        assert (await client.send("GET", "/v1/loads", key="user"))[0] == 200
        assert (await client.send("GET", "/nope", key="user"))[0] == 404
        info = (await client.send("GET", "/server_info", key="user"))[1]
        assert "admin" not in json.loads(info).values()
        assert json.loads(info)["simulated"] is True


# Requests


async def test_a_prompt_sets_its_acceptance(client):
    for accept, expected in ((1.0, 1.0), (4.0, 4.0)):
        meta = (await client.generate(new=401, accept=accept))[1]["meta_info"]
        won = (meta["completion_tokens"] - 1) / meta["spec_verify_ct"]
        assert won == pytest.approx(expected, rel=0.02)


async def test_the_traffics_acceptance_can_be_changed_while_it_runs(client):
    await client.behave(acceptLength=1.0)
    assert (await client.generate(new=100))[1]["meta_info"]["spec_num_correct_drafts"] == 0
    await client.behave(acceptLength=4.0)
    meta = (await client.generate(new=101))[1]["meta_info"]
    assert meta["spec_num_correct_drafts"] == 75


async def test_more_requests_than_may_run_wait_and_all_end():
    # Slow enough to be seen amid it, however late a busy machine looks.
    config = EngineConfig(time_scale=3.0, max_running_requests=8)
    async with client_of(config) as client:
        streams = [asyncio.create_task(client.stream(new=400)) for _ in range(20)]
        seen = set()
        while not all(stream.done() for stream in streams):
            load = (await client.get("/v1/loads"))[1]["loads"][0]
            assert load["num_running_reqs"] <= 8
            seen.add((load["num_running_reqs"], load["num_waiting_reqs"] > 0))
        assert (8, True) in seen
        for stream in streams:
            assert stream.result()[-1]["meta_info"]["completion_tokens"] == 400
        families = await client.metrics()
        (sample,) = families["sglang:generation_tokens"].samples
        assert sample.value == 20 * 400


async def test_throughput_in_real_time_is_near_the_profile():
    config = EngineConfig(time_scale=2.0, max_running_requests=16, accept_length=2.5)
    async with client_of(config) as client:
        began = time.monotonic()
        answers = await asyncio.gather(*(client.generate(new=512) for _ in range(16)))
        rate = sum(a[1]["meta_info"]["completion_tokens"] for a in answers) / (
            time.monotonic() - began
        )
    expected = 2.0 * load_profile("h200-a").throughput(16, 3, 2.5)
    # The batch thins out as requests end, and the machine that runs this has other work.
    assert 0.6 * expected < rate < 1.05 * expected


async def test_generated_tokens_are_counted_when_a_request_ends(client):
    async with client.open_stream(new=4000) as answer:
        await answer.content.readuntil(b"\n\n")
        families = await client.metrics()
        assert "sglang:generation_tokens" not in families
        assert families["sglang:num_running_reqs"].samples[0].value == 1


async def test_a_client_that_leaves_frees_its_place(client):
    async with client.open_stream(new=100_000) as answer:
        await answer.content.readuntil(b"\n\n")
        assert len(client.engine.groups[0].scheduler.running) == 1
    async with asyncio.timeout(5):
        await client.engine.drained()
    assert not client.engine.groups[0].scheduler.running
    families = await client.metrics()
    assert families["sglang:num_aborted_requests"].samples[0].value == 1


async def test_a_waiting_client_that_leaves_frees_its_place_too(client):
    waiting = asyncio.create_task(client.generate(new=100_000))
    await client.runs(1)
    waiting.cancel()
    async with asyncio.timeout(5):
        await client.engine.drained()
    assert not client.engine.groups[0].scheduler.running


async def test_a_loaded_draft_caps_requests_at_48_unless_told_otherwise():
    for algorithm, limit, groups, expected in (
        ("EAGLE3", None, 1, 48),
        # As in SGLang, each data-parallel copy has the whole limit.
        ("EAGLE3", None, 8, 48),
        ("EAGLE3", 256, 1, 256),
        (None, None, 1, 2048),
    ):
        config = EngineConfig(
            algorithm=algorithm, max_running_requests=limit, data_parallel=groups
        )
        async with client_of(config) as client:
            loads = (await client.get("/v1/loads"))[1]["loads"]
        assert [load["max_running_requests"] for load in loads] == [expected] * groups


async def test_a_limit_above_what_the_cache_holds_is_lowered_and_told():
    config = EngineConfig(max_running_requests=256, max_total_tokens=100, data_parallel=2)
    async with client_of(config) as client:
        loads = (await client.get("/v1/loads"))[1]["loads"]
        info = (await client.get("/server_info"))[1]
    assert [load["max_running_requests"] for load in loads] == [50, 50]
    assert [load["max_total_num_tokens"] for load in loads] == [100, 100]
    assert info["max_running_requests"] == 256
    states = info["internal_states"]
    assert [state["effective_max_running_requests_per_dp"] for state in states] == [50, 50]


async def test_groups_share_the_requests():
    config = EngineConfig(time_scale=FAST, data_parallel=2, max_running_requests=8)
    async with client_of(config) as client:
        streams = [asyncio.create_task(client.stream(new=2000)) for _ in range(4)]
        await client.runs(4)
        loads = (await client.get("/v1/loads"))[1]["loads"]
        assert [load["num_running_reqs"] for load in loads] == [2, 2]
        families = await client.metrics()
        ranks = {s.labels["dp_rank"] for s in families["sglang:num_running_reqs"].samples}
        assert ranks == {"0", "1"}
        await asyncio.gather(*streams)


# Life


async def test_the_serving_port_opens_after_the_admin_port():
    config = EngineConfig(startup_seconds=0.3)
    began = time.monotonic()
    async with client_of(config):
        assert time.monotonic() - began >= 0.3


async def test_draining_finishes_what_runs_and_takes_what_comes(client):
    running = asyncio.create_task(client.stream(new=3000))
    await client.runs(1)
    client.engine.drain()
    assert (await client.send("GET", "/health"))[0] == 503
    assert (await client.generate())[0] == 200
    assert not running.done()
    async with asyncio.timeout(20):
        await client.engine.drained()
    assert (await running)[-1]["meta_info"]["completion_tokens"] == 3000


async def test_a_restart_cuts_streams_and_forgets_everything(client):
    boot = client.engine.boot_id
    async with client.open_stream(new=100_000) as answer:
        await answer.content.readuntil(b"\n\n")
        await client.send("POST", "/sim/v1/restart")
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    assert client.engine.boot_id != boot
    assert "sglang:num_requests" not in await client.metrics()
    assert (await client.generate())[0] == 200


# Faults


async def within(seconds, sending):
    return await asyncio.wait_for(sending, seconds)


async def test_hanging_concerns_the_paths_named(client):
    await client.behave(faults=[{"kind": "hang", "paths": ["/v1/loads"]}])
    with pytest.raises(asyncio.TimeoutError):
        await within(0.3, client.get("/v1/loads"))
    assert (await client.send("GET", "/health"))[0] == 200
    await client.behave()
    assert (await client.get("/v1/loads"))[0] == 200


@pytest.mark.parametrize("kind", ["reset", "refuse"])
async def test_connections_break(client, kind):
    await client.behave(faults=[{"kind": kind, "paths": ["/v1/loads"]}])
    with pytest.raises(aiohttp.ClientError):
        async with aiohttp.ClientSession() as fresh:
            await fresh.get(client.running.url + "/v1/loads")
    await client.behave()  # over the connection that was open before
    assert (await client.get("/v1/loads"))[0] == 200


async def test_a_slow_answer_comes(client):
    await client.behave(faults=[{"kind": "slow", "seconds": 0.3}])
    began = time.monotonic()
    assert (await client.get("/v1/loads"))[0] == 200
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize("status", [500, 503])
async def test_a_proxy_answers_in_the_engines_place(client, status):
    await client.behave(faults=[{"kind": "status", "status": status}])
    shown, text = await client.send("GET", "/v1/loads")
    assert (shown, text[:16]) == (status, "upstream connect")


async def test_metrics_can_be_nan_or_missing_or_gone(client):
    await client.behave(metrics="nan")
    value = (await client.metrics())["sglang:num_running_reqs"].samples[0].value
    assert value != value  # noqa: PLR0124 - NaN alone is not itself
    await client.behave(metrics="drop")
    families = await client.metrics()
    assert "sglang:num_queue_reqs" not in families
    assert "sglang:spec_num_steps" in families
    await client.behave(metrics="gone", loadsGone=True)
    assert (await client.send("GET", "/metrics"))[0] == 404
    assert (await client.send("GET", "/v1/loads"))[0] == 404


async def test_frozen_figures_stay_what_they_were(client):
    await client.behave(frozen=True)
    async with client.open_stream(new=100_000) as answer:
        await answer.content.readuntil(b"\n\n")
        load = (await client.get("/v1/loads"))[1]["loads"][0]
        assert load["num_running_reqs"] == 0
        value = (await client.metrics())["sglang:num_running_reqs"].samples[0].value
        assert value == 0
        await client.behave()
        assert (await client.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"] == 1


async def test_a_restart_while_frozen_or_stalled_changes_neither(client):
    await client.behave(frozen=True, stalled=True)
    await client.send("POST", "/sim/v1/restart")
    waiting = asyncio.create_task(client.generate())
    for _ in range(3):
        assert (await client.get("/v1/loads"))[1]["loads"][0]["num_waiting_reqs"] == 0
    assert not waiting.done()
    await client.behave()
    assert (await waiting)[0] == 200


async def test_a_stalled_scheduler_queues_everything_and_goes_on_where_it_was(client):
    stream = asyncio.create_task(client.stream(new=2000))
    await client.runs(1)
    await client.behave(stalled=True)
    tokens = client.engine.groups[0].scheduler.tokens_total
    load = (await client.get("/v1/loads"))[1]["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 1)
    await asyncio.sleep(0.1)
    assert client.engine.groups[0].scheduler.tokens_total == tokens
    assert not stream.done()
    await client.behave()
    assert (await stream)[-1]["meta_info"]["completion_tokens"] == 2000


async def test_a_scripted_load_is_reported_instead_of_the_real_one():
    config = EngineConfig(data_parallel=2)
    async with client_of(config) as client:
        await client.behave(load={"running": 61, "queued": 4})
        loads = (await client.get("/v1/loads"))[1]["loads"]
        assert [load["num_running_reqs"] for load in loads] == [31, 30]
        assert [load["num_waiting_reqs"] for load in loads] == [2, 2]
        samples = (await client.metrics())["sglang:num_running_reqs"].samples
        assert [sample.value for sample in samples] == [31, 30]


@pytest.mark.parametrize(
    ("behaviour", "named"),
    [
        ({"mood": "bad"}, "mood"),
        ([], "body"),
        ({"acceptLength": 9}, "acceptLength"),
        ({"acceptLength": True}, "acceptLength"),
        ({"faults": [{"kind": "explode"}]}, "faults[0].kind"),
        ({"faults": [{"kind": "hang", "side": "left"}]}, "faults[0].side"),
        ({"faults": [{"kind": "hang", "paths": ["loads"]}]}, "faults[0].paths"),
        ({"faults": [{"kind": "status", "status": 200}]}, "faults[0].status"),
        ({"faults": {}}, "faults"),
        ({"load": {"running": -1}}, "load.running"),
        ({"metrics": "odd"}, "metrics"),
        ({"stalled": "yes"}, "stalled"),
        ({"ranks": [{"silentIn": ["sleep"]}]}, "ranks[0].silentIn"),
        ({"ranks": [{"objection": 1}]}, "ranks[0].objection"),
    ],
)
async def test_a_bad_behaviour_is_refused_with_its_field(client, behaviour, named):
    status, text = await client.send("PUT", "/sim/v1/behaviour", json=behaviour)
    assert status == 400
    assert json.loads(text)["error"].startswith(named)
    assert (await client.get("/sim/v1/behaviour"))[1]["faults"] == []


async def test_a_behaviour_reads_back_as_it_was_put(client):
    document = (await client.get("/sim/v1/behaviour"))[1] | {
        "acceptLength": 1.5,
        "faults": [
            {"side": "admin", "kind": "slow", "paths": ["/v1"], "seconds": 0.5, "status": 503}
        ],
        "ranks": [{"group": 0, "rank": 1, "silentIn": ["read"], "objection": ""}],
    }
    await client.behave(**document)
    assert (await client.get("/sim/v1/behaviour"))[1] == document


# The admin side and fleets


@pytest.fixture
def credentials(tmp_path):
    (tmp_path / "plugin-token").write_text("token")
    return tmp_path


def directive(state, **fields):
    return {
        "podUID": state["podUID"],
        "bootID": state["bootID"],
        "epoch": state["epoch"] + 1,
        "holder": "test/specserve",
        "leaseSeconds": 60,
        "mode": "off",
        "fallback": {"mode": "auto"},
    } | fields


async def test_flips_under_streams_lose_no_request_and_no_token(credentials):
    config = EngineConfig(time_scale=4.0, max_running_requests=32, tensor_parallel=2)
    headers = {"Authorization": "Bearer token"}
    async with client_of(config, credentials=credentials) as client:
        url = client.running.admin_url + "/v1/speculation"
        streams = [asyncio.create_task(client.stream(new=1500)) for _ in range(8)]
        seen = set()
        for mode in ({"mode": "off"}, {"mode": "on", "steps": 3}, {"mode": "on", "steps": 1}) * 5:
            async with client.session.get(url, headers=headers) as answer:
                state = await answer.json()
            body = directive(state, **mode)
            async with client.session.put(url, headers=headers, json=body) as answer:
                assert answer.status == 200, await answer.text()
            rank = {"decodeRounds": 0}
            while rank["decodeRounds"] < 2:
                async with client.session.get(url, headers=headers) as answer:
                    rank = (await answer.json())["groups"][0]["ranks"][0]
            seen.add(rank["activeSteps"])
        done = await asyncio.gather(*streams)
    assert seen == {0, 1, 3}
    assert [chunks[-1]["meta_info"]["completion_tokens"] for chunks in done] == [1500] * 8


async def test_admin_faults_leave_the_serving_side_alone(credentials):
    async with client_of(EngineConfig(), credentials=credentials) as client:
        await client.behave(faults=[{"side": "admin", "kind": "status", "status": 503}])
        async with client.session.get(client.running.admin_url + "/health") as answer:
            assert answer.status == 503
        assert (await client.get("/v1/loads"))[0] == 200


@pytest.mark.parametrize("wildcard", [False, True])
async def test_a_fleet_is_many_engines_on_two_ports(credentials, wildcard):
    at = addresses("127.77.0.250", 12)
    assert at[5:7] == ["127.77.1.1", "127.77.1.2"]
    headers = {"Authorization": "Bearer token"}
    async with (
        running_fleet(EngineConfig(), at, credentials=credentials, wildcard=wildcard) as fleet,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        began = fleet.set_load(60, 5)
        assert set(began) == set(at)
        fleet.engines[at[3]].set_load(7, 0)
        seen, boots = {}, set()
        for address in at:
            async with session.get(f"http://{address}:{fleet.port}/v1/loads") as answer:
                seen[address] = (await answer.json())["loads"][0]["num_running_reqs"]
            url = f"http://{address}:{fleet.admin_port}/v1/speculation"
            async with session.get(url) as answer:
                state = await answer.json()
            boots.add(state["bootID"])
            assert state["groups"][0]["ranks"][0]["running"] == seen[address]
            async with session.put(url, json=directive(state)) as answer:
                assert answer.status == 200
        assert len(boots) == len(at)
        assert seen == dict.fromkeys(at, 60) | {at[3]: 7}
        for address, engine in fleet.engines.items():
            (applied,) = engine.applied
            assert (applied.epoch, applied.mode) == (1, "off")
            assert applied.at > began[address]
        async with session.get(f"http://{at[0]}:{fleet.port}/sim/v1/fleet/applied") as answer:
            assert set((await answer.json())["applied"]) == set(at)


async def test_fleet_engines_take_the_pods_they_are_told(credentials):
    at = addresses("127.77.2.1", 2)
    async with (
        running_fleet(EngineConfig(), at, credentials=credentials) as fleet,
        aiohttp.ClientSession(headers={"Authorization": "Bearer token"}) as session,
    ):
        url = f"http://{at[0]}:{fleet.port}/sim/v1/fleet/pods"
        async with session.put(url, json={at[1]: "uid-of-a-pod"}) as answer:
            assert answer.status == 200
        async with session.put(url, json={"127.9.9.9": "x"}) as answer:
            assert answer.status == 400
        admin = f"http://{at[1]}:{fleet.admin_port}/v1/speculation"
        async with session.get(admin) as answer:
            assert (await answer.json())["podUID"] == "uid-of-a-pod"
