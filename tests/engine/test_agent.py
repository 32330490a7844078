from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_engine.control import Order
from specserve_engine.ranks import Result, Verdict, carry_out
from specserve_engine.sglang.agent import BLOCK, Agent, RanksDiffer
from specserve_engine.sglang.message import Malformed, Message, Verb, decode, encode
from specserve_engine.sglang.ranks import NOT_SENT, NoPlugin, SglangRanks
from specserve_engine.sglang.redaction import Redaction, blank, blank_log
from specserve_engine.sglang.upstream import SKIP_DRAFT_EXTEND
from specserve_engine.wire import AUTO, MAX_EPOCH, Code, DraftKv, Mode, Setting, Tier

NONCE = 99
OFF = Setting(Mode.OFF)
ON = Setting(Mode.ON, 3)


# Messages

settings = st.one_of(
    st.builds(Setting, st.sampled_from([Mode.AUTO, Mode.OFF]), draft_kv=st.sampled_from(DraftKv)),
    st.builds(Setting, st.just(Mode.ON), st.integers(1, 64), draft_kv=st.sampled_from(DraftKv)),
    st.builds(
        lambda batches, steps, kv: Setting(
            Mode.TIERS,
            tiers=tuple(Tier(batch, steps) for batch in sorted({1, *batches})),
            draft_kv=kv,
        ),
        st.sets(st.integers(2, 65_536), max_size=8),
        st.integers(0, 64),
        st.sampled_from(DraftKv),
    ),
)


@given(
    verb=st.sampled_from(Verb),
    epoch=st.integers(0, MAX_EPOCH),
    setting=settings,
    nonce=st.integers(1, 2**53 - 1),
)
def test_a_message_comes_back_as_it_was_sent(verb, epoch, setting, nonce):
    message = Message(verb, Order(epoch, setting))
    numbers = json.loads(json.dumps(encode(message, nonce)))
    assert all(type(value) is int for value in numbers.values())
    assert decode(numbers, nonce) == message


@pytest.mark.parametrize(
    "change",
    [
        {"specserve.nonce": 98},
        {"specserve.nonce": None},
        {"specserve.nonce": True},
        {"specserve.verb": 9},
        {"specserve.verb": None},
        {"specserve.epoch": -1},
        {"specserve.epoch": 1.5},
        {"specserve.mode": 7},
        {"specserve.mode": -1},
        {"specserve.mode": 1},
        {"specserve.steps": 3},
        {"specserve.tier.8": 3},
        {"specserve.tier.x": 3},
        {"specserve.other": 1},
        {"pp_max_micro_batch_size": 8},
        {"specserve.draftKv": "cold"},
    ],
    ids=repr,
)
def test_what_is_not_an_order_is_refused(change):
    numbers = encode(Message(Verb.APPLY, Order(1, OFF)), NONCE) | change
    with pytest.raises(Malformed) as refused:
        decode({name: value for name, value in numbers.items() if value is not None}, NONCE)
    assert str(NONCE) not in str(refused.value)


# One rank


class Worker:
    def __init__(self):
        self.speculative_num_steps = 3
        self.server_args = SimpleNamespace(_runtime_mutations=[])


class Controller:
    """SGLang's adaptive controller, as far as the hooks see it."""

    def __init__(self, agent):
        self.worker = Worker()
        self.params = SimpleNamespace(get_steps_for_batch=lambda batch_size: min(batch_size, 3))
        self._states = {0: "a", 1: "b", 3: "c"}
        self._agent = agent
        agent.after_controller_init(None, self, self.worker)

    def _set(self, steps):
        self.worker.speculative_num_steps = steps
        self.worker.server_args._runtime_mutations.append(("adaptive_spec.restore", steps))

    def launch(self, batch):
        steps = self.params.get_steps_for_batch(batch)
        if steps != self.worker.speculative_num_steps:
            self._agent.around_activate(lambda _, chosen: self._set(chosen), self, steps)


class Barrier:
    """The ranks of a group as threads: a gather of values, as torch.distributed does it."""

    def __init__(self, size):
        self.size = size
        self._barrier = threading.Barrier(size, timeout=10)
        self._values = [None] * size

    def of(self, rank):
        def gather(value):
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return SimpleNamespace(size=self.size, rank=rank, gather=gather)


def make_agent(*, controllable=True, nonce=NONCE, versions=("0.5.23", "0.1.0")):
    agent = Agent(
        nonce=nonce,
        versions=versions,
        reply=SimpleNamespace,
        unsupported_reason=lambda arguments: arguments.why,
    )
    agent.controller = Controller(agent) if controllable else None
    agent._scheduler = SimpleNamespace(
        tp_cpu_group=None,
        forward_ct=0,
        running_batch=SimpleNamespace(reqs=[1, 2]),
        waiting_queue=[3],
        server_args=SimpleNamespace(speculative_algorithm="NGRAM", why="NGRAM is not supported"),
        dp_rank=None,
    )
    return agent


def send(agent, verb, epoch, setting):
    return agent.receive(encode(Message(verb, Order(epoch, setting)), agent._nonce))


@pytest.fixture
def agent(monkeypatch):
    monkeypatch.setenv(SKIP_DRAFT_EXTEND, "")
    return make_agent()


def test_a_rank_obeys_from_its_next_batch_on(agent):
    assert send(agent, Verb.APPLY, 1, OFF)
    assert agent.report()["ranks"][0]["activeSteps"] == 3
    agent.controller.launch(4)
    report = agent.report()["ranks"][0]
    assert (report["activeSteps"], report["switches"], report["lastBatch"]) == (0, 1, 4)
    assert (report["running"], report["queued"], report["epoch"]) == (2, 1, 1)


def test_two_hundred_switches_leave_one_record(agent):
    for epoch in range(1, 201):
        assert send(agent, Verb.APPLY, epoch, (OFF, ON)[epoch % 2])
        agent.controller.launch(1)
    assert agent.report()["ranks"][0]["switches"] >= 199
    assert agent.report()["ranks"][0]["records"] == 1


def test_the_drafts_cache_is_told_through_the_environment(agent):
    assert os.environ[SKIP_DRAFT_EXTEND] == "1"  # cold is what auto begins with
    send(agent, Verb.APPLY, 1, Setting(Mode.OFF, draft_kv=DraftKv.WARM))
    assert os.environ[SKIP_DRAFT_EXTEND] == "0"
    send(agent, Verb.APPLY, 2, OFF)
    assert os.environ[SKIP_DRAFT_EXTEND] == "1"


def test_an_older_epoch_is_refused_and_a_repetition_is_not(agent):
    assert send(agent, Verb.APPLY, 5, OFF)
    assert send(agent, Verb.APPLY, 5, OFF)
    assert not send(agent, Verb.APPLY, 5, ON)
    assert not send(agent, Verb.APPLY, 4, ON)
    assert agent.report()["ranks"][0]["epoch"] == 5


def test_steps_that_are_not_prepared_are_refused(agent):
    assert not send(agent, Verb.APPLY, 1, Setting(Mode.ON, 5))
    assert agent.report()["vote"]["objections"] == [
        {"code": "UnknownSteps", "message": "no prepared state for steps 5"}
    ]


def test_only_what_was_prepared_is_committed(agent):
    assert not send(agent, Verb.COMMIT, 1, OFF)
    assert send(agent, Verb.PREPARE, 1, OFF)
    assert agent.report()["ranks"][0]["epoch"] == 0
    assert not send(agent, Verb.COMMIT, 1, ON)
    assert send(agent, Verb.COMMIT, 1, OFF)
    assert agent.report()["ranks"][0]["epoch"] == 1
    assert send(agent, Verb.PREPARE, 2, ON)
    assert send(agent, Verb.ABORT, 2, ON)
    assert not send(agent, Verb.COMMIT, 2, ON)


def test_a_message_without_the_nonce_is_refused_and_seen(agent):
    forged = encode(Message(Verb.APPLY, Order(1, OFF)), NONCE + 1)
    assert not agent.receive(forged)
    report = agent.report()["ranks"][0]
    assert report["epoch"] == 0
    assert "nonce" in report["lastError"]


def test_what_is_not_ours_is_left_to_sglang(agent):
    request = SimpleNamespace(server_args={"pp_max_micro_batch_size": 8})
    answer = agent.around_set_internal_state(lambda _, given: given, None, request)
    assert answer is request
    ours = SimpleNamespace(server_args=encode(Message(Verb.APPLY, Order(1, OFF)), NONCE))
    assert agent.around_set_internal_state(None, None, ours).updated is True


def test_the_internal_state_shows_our_part_and_no_keys(agent):
    state = SimpleNamespace(internal_state={"admin_api_key": "s3cret", "api_key": None, "tp": 1})
    shown = agent.after_get_internal_state(state, None, None).internal_state
    assert shown["tp"] == 1
    assert shown["api_key"] is None
    assert "s3cret" not in json.dumps(shown)
    assert shown[BLOCK]["availableSteps"] == [0, 1, 3]


def test_without_a_controller_the_reason_is_sglangs():
    agent = make_agent(controllable=False)
    report = agent.report()
    assert (report["controllable"], report["availableSteps"]) == (False, [])
    assert report["reason"] == "NGRAM is not supported"
    assert report["ranks"][0]["activeSteps"] is None
    assert not send(agent, Verb.APPLY, 1, OFF)
    agent._scheduler.server_args.speculative_algorithm = None
    assert agent.report()["reason"] == "speculative decoding is not configured"
    agent._scheduler.server_args = SimpleNamespace(speculative_algorithm="EAGLE", why=None)
    assert "--speculative-adaptive" in agent.report()["reason"]


def test_an_sglang_without_what_is_hooked_does_not_start():
    agent = make_agent()
    with pytest.raises(RanksDiffer, match="params"):
        agent.after_controller_init(None, SimpleNamespace(worker=None), None)
    with pytest.raises(RanksDiffer, match="forward_ct"):
        agent.after_scheduler_init(None, SimpleNamespace(tp_cpu_group=None))


# A group


def together(agents, call):
    """Run a call on all ranks at once; returns their results or what they raised."""
    results = [None] * len(agents)

    def run(index):
        try:
            results[index] = call(agents[index])
        except Exception as error:  # noqa: BLE001 - handed back to be looked at
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(agents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def make_group(size=2, **fields):
    barrier = Barrier(size)
    agents = [make_agent(**fields) for _ in range(size)]
    for rank, agent in enumerate(agents):
        agent._group = barrier.of(rank)
    return agents


def test_all_ranks_of_a_group_obey():
    agents = make_group()
    assert together(agents, lambda agent: send(agent, Verb.APPLY, 1, OFF)) == [True, True]
    reports = together(agents, lambda agent: agent.report())
    assert [rank["epoch"] for rank in reports[0]["ranks"]] == [1, 1]


def test_one_rank_that_objects_keeps_all_as_they_were():
    agents = make_group()
    del agents[1].controller._states[0]
    assert together(agents, lambda agent: send(agent, Verb.APPLY, 1, OFF)) == [False, False]
    report = together(agents, lambda agent: agent.report())[0]
    assert [rank["epoch"] for rank in report["ranks"]] == [0, 0]
    assert report["vote"]["objections"][0] is None
    assert report["vote"]["objections"][1]["code"] == "UnknownSteps"


@pytest.mark.parametrize(
    "other", [{"versions": ("0.5.23", "0.0.9")}, {"nonce": 98}, {"versions": ("0.5.18", "0.1.0")}]
)
def test_ranks_that_differ_do_not_start(other, monkeypatch):
    barrier = Barrier(2)
    agents = [make_agent(), make_agent(**other)]
    groups = {id(agent._scheduler): barrier.of(rank) for rank, agent in enumerate(agents)}
    for agent in agents:
        agent._scheduler.tp_cpu_group = id(agent._scheduler)
    monkeypatch.setattr("specserve_engine.sglang.agent.Group", lambda key: groups[key])
    raised = together(agents, lambda agent: agent.after_scheduler_init(None, agent._scheduler))
    assert all(isinstance(error, RanksDiffer) for error in raised)


# The way there


class Manager:
    """SGLang's tokenizer manager over groups of one rank; `stuck` holds back all answers."""

    def __init__(self, agents):
        self.agents = agents
        self.stuck = asyncio.Event()
        self.stuck.set()
        self.sent = []
        self.reads = 0
        self._news = asyncio.Condition()

    async def asked(self, sent=0, reads=0):
        async with self._news:
            await self._news.wait_for(lambda: len(self.sent) >= sent and self.reads >= reads)

    async def _tell(self):
        async with self._news:
            self._news.notify_all()

    async def set_internal_state(self, obj):
        self.sent.append(decode(obj["server_args"], NONCE))
        await self._tell()
        await self.stuck.wait()
        return [agent.receive(obj["server_args"]) for agent in self.agents]

    async def get_internal_state(self):
        self.reads += 1
        await self._tell()
        await self.stuck.wait()
        return [{BLOCK: agent.report()} for agent in reversed(self.agents)]


def request(server_args):
    return {"server_args": server_args}


def make_ranks(groups=1):
    agents = [make_agent() for _ in range(groups)]
    for rank, agent in enumerate(agents):
        agent._scheduler.dp_rank = rank
    manager = Manager(agents)
    return manager, SglangRanks(manager, request, NONCE, (1,) * groups)


def soon(seconds=1.0):
    return asyncio.get_running_loop().time() + seconds


async def test_one_group_obeys_by_one_message():
    manager, ranks = make_ranks()
    assert (await carry_out(ranks, Order(1, OFF), soon())).result is Result.APPLIED
    assert [message.verb for message in manager.sent] == [Verb.APPLY]
    (group,) = await ranks.read(soon())
    assert (group.ranks[0].epoch, group.ranks[0].running) == (1, 2)


async def test_several_groups_are_asked_before_any_obeys():
    manager, ranks = make_ranks(groups=2)
    assert (await carry_out(ranks, Order(1, OFF), soon())).result is Result.APPLIED
    assert [message.verb for message in manager.sent] == [Verb.PREPARE, Verb.COMMIT]
    del manager.agents[1].controller._states[1]
    outcome = await carry_out(ranks, Order(2, Setting(Mode.ON, 1)), soon())
    assert outcome.result is Result.REFUSED
    objections = [vote for vote in outcome.votes if vote.verdict is Verdict.NO]
    assert [(vote.group, vote.code) for vote in objections] == [(1, Code.UNKNOWN_STEPS)]
    assert [group.ranks[0].epoch for group in await ranks.read(soon())] == [1, 1]
    assert (await carry_out(ranks, Order(2, OFF), soon())).result is Result.APPLIED


async def test_groups_come_back_in_their_order():
    manager, ranks = make_ranks(groups=2)
    manager.agents[1]._scheduler.waiting_queue = [1] * 7
    assert [group.ranks[0].queued for group in await ranks.read(soon())] == [1, 7]


async def test_a_group_that_refuses_says_why():
    _, ranks = make_ranks()
    outcome = await carry_out(ranks, Order(1, Setting(Mode.ON, 5)), soon())
    assert outcome.result is Result.REFUSED
    assert outcome.votes[0].code is Code.UNKNOWN_STEPS


async def test_a_silent_scheduler_leaves_the_outcome_open_and_the_path_taken():
    manager, ranks = make_ranks()
    manager.stuck.clear()
    assert (await carry_out(ranks, Order(1, OFF), soon(0.1))).result is Result.UNKNOWN
    second = await carry_out(ranks, Order(2, ON), soon(0.1))
    assert second.result is Result.SILENT  # applied by none
    assert second.votes[0].message == NOT_SENT
    assert len(manager.sent) == 1
    manager.stuck.set()
    assert (await carry_out(ranks, Order(3, ON), soon())).result is Result.APPLIED
    assert [message.order.epoch for message in manager.sent] == [1, 3]


async def test_reads_of_a_silent_scheduler_do_not_pile_up():
    manager, ranks = make_ranks()
    manager.stuck.clear()
    for _ in range(5):
        (group,) = await ranks.read(soon(0.02))
        assert group.ranks[0].epoch is None
    assert manager.reads == 1
    manager.stuck.set()
    (group,) = await ranks.read(soon())
    assert group.ranks[0].epoch == 0


async def test_a_read_after_an_order_is_not_one_from_before_it():
    manager, ranks = make_ranks()
    manager.stuck.clear()
    before = asyncio.create_task(ranks.read(soon()))
    order = asyncio.create_task(carry_out(ranks, Order(1, OFF), soon()))
    await manager.asked(sent=1)
    after = asyncio.create_task(ranks.read(soon()))
    await manager.asked(sent=1, reads=2)
    manager.stuck.set()
    await asyncio.gather(before, order)
    assert (await after)[0].ranks[0].epoch == 1


async def test_the_capability_is_what_all_groups_can():
    manager, ranks = make_ranks(groups=2)
    del manager.agents[0].controller._states[1]
    capability = await ranks.capability(soon())
    assert (capability.controllable, capability.available_steps) == (True, (0, 3))


async def test_a_scheduler_without_the_plugin_is_found_out():
    manager, ranks = make_ranks()

    async def bare():
        return [{"tp_size": 1}]

    manager.get_internal_state = bare
    with pytest.raises(NoPlugin):
        await ranks.capability(soon())


# Keys


def test_keys_are_blanked_wherever_they_stand():
    shown = blank(
        {"api_key": None, "states": [{"admin_api_key": "k1"}], "launch": "--x k1 --y"},
        frozenset({"k1"}),
    )
    assert shown == {
        "api_key": None,
        "states": [{"admin_api_key": "***"}],
        "launch": "--x *** --y",
    }


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/server_info", b'{"admin_api_key":"k1","note":"has k1"}', b"***"),
        ("/get_server_info/", b'{"admin_api_key":"k1"}', b"***"),
        ("/server_info", b"k1 is no JSON", b"*** is no JSON"),
        ("/v1/models", b'{"admin_api_key":"k1"}', b"k1"),
    ],
)
async def test_answers_that_show_the_configuration_are_blanked(path, body, expected):
    async def application(_scope, _receive, send):
        length = (b"Content-Length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        await send({"type": "http.response.body", "body": body[5:]})

    sent = []

    async def collect(message):
        sent.append(message)

    redaction = Redaction(application, ["k1", None])
    await redaction({"type": "http", "path": path}, None, collect)
    text = b"".join(message.get("body", b"") for message in sent)
    assert expected in text
    lengths = [int(value) for name, value in sent[0]["headers"] if name.lower()[:8] == b"content-"]
    assert lengths == [len(text)]


def test_auto_is_epoch_zero():
    assert make_agent()._policy.order == Order(0, AUTO)


@pytest.mark.parametrize(
    ("logged", "shown"),
    [
        ("{'api_key': 'k1', 'admin_api_key': None}", "{'api_key': '***', 'admin_api_key': None}"),
        ("Args(admin_api_key='k1', api_key=\"it's\")", "Args(admin_api_key='***', api_key='***')"),
        ("api_key='a\\'k1' b='k1'", "api_key='***' b='k1'"),
        ("no key %s", "no key %s"),
    ],
)
def test_keys_are_blanked_in_the_log(caplog, logged, shown):
    before = logging.getLogRecordFactory()
    try:
        blank_log()
        logging.getLogger("sglang.srt.entrypoints.engine").warning(logged)
    finally:
        logging.setLogRecordFactory(before)
    assert caplog.messages == [shown]
