"""The engine model in virtual time: held to its profile, and exact about every request."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specserve_sim.model import Request, Round, Scheduler, accept_length_at, upstream_default
from specserve_sim.profile import load_profile, profile_names

PROMPT, NEW = 128, 256


def closed_loop(profile, batch, steps, accept_length, *, seconds=20.0, draft_kv="cold"):
    """Tokens per second of finished requests with `batch` clients that never pause."""
    scheduler = Scheduler(
        load_profile(profile),
        max_running=batch,
        rng=Random(7),
        accept_length=accept_length,
        steps=steps,
    )
    scheduler.draft_kv = draft_kv
    rng = Random(11)
    for _ in range(batch):  # spread over their length, as clients are after a while
        scheduler.submit(Request(PROMPT, rng.randint(1, NEW)), 0.0)
    now = 0.0
    while now < seconds:
        for _ in scheduler.advance(now):
            scheduler.submit(Request(PROMPT, NEW), now)
        now = max(now, scheduler.next_event)
    return scheduler.tokens_total / scheduler.clock


@pytest.mark.parametrize("name", profile_names())
def test_throughput_without_a_draft_is_the_measured_one(name):
    profile = load_profile(name)
    for size in profile.plain.sizes:
        measured = size / profile.plain.values[profile.plain.sizes.index(size)]
        assert closed_loop(name, size, None, 1.0) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("accept_length", [1.0, 2.5, 3.5])
def test_throughput_with_three_steps_is_acceptance_over_break_even(name, accept_length):
    profile = load_profile(name)
    for size, even in zip(profile.plain.sizes, profile.break_even.middle.values, strict=True):
        expected = accept_length / even * size / profile.t_off(size)
        assert closed_loop(name, size, 3, accept_length) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("profile", "batch", "measured"),
    [  # the founding measurement's table, one column each
        ("h200-a", 1, 410),
        ("h200-a", 32, 9569),
        ("h200-a", 250, 16510),
        ("h200x2-nvlink", 70, 15417),
        ("h200x2-hostmem", 1, 217),
        ("h200x2-hostmem", 32, 6294),
        ("h200x2-hostmem", 250, 10963),
    ],
)
def test_a_profile_of_one_column_gives_that_column(profile, batch, measured):
    assert closed_loop(profile, batch, 3, 2.5) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("batch", "draft_kv", "share", "plain"),
    [
        (1, "warm", 0.67, 204),
        (1, "cold", 0.98, 204),
        (32, "warm", 0.84, 5415),
        (32, "cold", 0.97, 5415),
        (250, "warm", 0.90, 17295),
        (250, "cold", 0.99, 17295),
    ],
)
def test_off_keeps_the_share_of_the_plain_server_that_was_measured(batch, draft_kv, share, plain):
    measured = closed_loop("h200-b", batch, 0, 2.5, draft_kv=draft_kv)
    assert measured == pytest.approx(share * plain, rel=0.02)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("batch", [3, 48, 128])
def test_other_steps_and_batches_follow_the_stated_formulas(steps, batch):
    expected = load_profile("h200-a").throughput(batch, steps, 2.0)
    assert closed_loop("h200-a", batch, steps, 2.0) == pytest.approx(expected, rel=0.05)


@given(
    accept_length=st.floats(1, 4),
    batch=st.integers(1, 64),
    steps=st.sampled_from([1, 3]),
)
@settings(max_examples=25)
def test_acceptance_is_the_requests(accept_length, batch, steps):
    scheduler = Scheduler(
        load_profile("h200-a"), max_running=batch, rng=Random(3), accept_length=4.0, steps=steps
    )
    for _ in range(batch):
        scheduler.submit(Request(8, 1 + 8000 // batch, accept_length), 0.0)
    scheduler.advance(1e6)
    won = scheduler.won_total / scheduler.verifies_total
    assert won == pytest.approx(accept_length_at(accept_length, steps), abs=0.12)


def test_a_changed_step_count_holds_from_the_next_round_and_an_idle_engine_keeps_its_own():
    rounds: list[Round] = []
    scheduler = Scheduler(
        load_profile("h200-a"), max_running=8, rng=Random(1), on_round=rounds.append
    )
    scheduler.choose_steps = lambda _: 0
    scheduler.advance(5.0)
    assert scheduler.active_steps == 3
    scheduler.submit(Request(8, 64), 5.0)
    scheduler.advance(5.1)
    assert [done.steps for done in rounds[:3]] == [3, 0, 0]  # the first one is the prefill
    assert scheduler.switches == 1


def test_long_prompts_take_engine_time():
    def first_token(prompt):
        scheduler = Scheduler(load_profile("h200-a"), max_running=8, rng=Random(1))
        request = Request(prompt, 2)
        scheduler.submit(request, 0.0)
        scheduler.advance(60.0)
        return request.first_token

    assert first_token(128) == first_token(1)
    assert first_token(10_128) - first_token(128) == pytest.approx(0.33, rel=0.01)


def test_after_a_cold_off_acceptance_recovers_over_the_rounds_asked_for():
    def tokens_after(recovery):
        scheduler = Scheduler(
            load_profile("h200-a"),
            max_running=1,
            rng=Random(5),
            accept_length=4.0,
            recovery_rounds=recovery,
        )
        scheduler.choose_steps = lambda _: 0
        request = Request(8, 10_000)
        scheduler.submit(request, 0.0)
        scheduler.advance(1.0)
        scheduler.choose_steps = lambda _: 3
        before = request.tokens
        scheduler.advance(1.5)
        return request.tokens - before

    assert tokens_after(0) > tokens_after(50) > tokens_after(1000)


def test_the_engines_own_policy_drafts_in_small_batches_only():
    choose = upstream_default((0, 1, 3))
    assert [choose(batch) for batch in (1, 63, 64, 250)] == [3, 3, 0, 0]


class Machine(RuleBasedStateMachine):
    """Whatever is submitted, flipped, aborted or stalled: nothing is lost, nothing is made up."""

    def __init__(self):
        super().__init__()
        self.tokens = 0
        self.scheduler = Scheduler(
            load_profile("h200x2-hostmem"),
            max_running=5,
            rng=Random(0),
            recovery_rounds=3,
            on_round=self.count,
        )
        self.now = 0.0
        self.requests: list[Request] = []
        self.finished: list[Request] = []

    def count(self, done):
        assert done.ended > done.started
        assert done.tokens <= done.won + done.batch - done.decoding
        self.tokens += done.tokens

    @rule(prompt=st.integers(1, 5000), new=st.integers(0, 40), accept=st.none() | st.floats(1, 4))
    def submit(self, prompt, new, accept):
        request = Request(prompt, new, accept)
        self.requests.append(request)
        self.scheduler.submit(request, self.now)

    @rule(steps=st.sampled_from([0, 1, 3]), draft_kv=st.sampled_from(["warm", "cold"]))
    def flip(self, steps, draft_kv):
        self.scheduler.draft_kv = draft_kv
        self.scheduler.choose_steps = lambda _: steps

    @rule(seconds=st.floats(0, 0.3))
    def wait(self, seconds):
        self.now += seconds
        self.finished += self.scheduler.advance(self.now)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        alive = request.state in ("queued", "running")
        assert self.scheduler.abort(request, self.now) is alive

    @rule()
    def stall(self):
        self.scheduler.hold()
        assert self.scheduler.next_event is None

    @rule()
    def go_on(self):
        self.scheduler.release(self.now)

    @invariant()
    def every_request_is_in_one_place(self):
        places = {
            "queued": list(self.scheduler.queue),
            "running": self.scheduler.running,
            "finished": self.finished,
        }
        for request in self.requests:
            holders = [name for name, place in places.items() if request in place]
            assert holders == ([] if request.state == "aborted" else [request.state])
        assert len(self.scheduler.running) <= self.scheduler.max_running

    @invariant()
    def tokens_add_up(self):
        assert self.tokens == sum(request.tokens for request in self.requests)
        for request in self.finished:
            assert request.tokens == request.max_new_tokens
            assert sum(request.histogram) == request.verifies
            assert request.arrived <= request.admitted <= request.ended

    def teardown(self):
        self.scheduler.release(self.now)
        self.finished += self.scheduler.advance(self.now + 1e6)
        assert all(request.state in ("finished", "aborted") for request in self.requests)
        self.tokens_add_up()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestMachine = Machine.TestCase
