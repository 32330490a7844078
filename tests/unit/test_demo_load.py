"""The demo's clients against simulated engines over loopback."""

import asyncio
from itertools import chain, repeat
from random import Random

import pytest

from specserve_sim.behaviour import Behaviour, Fault
from specserve_sim.engine import EngineConfig
from specserve_sim.launch import running_engine
from tests.demo.curve import Curve
from tests.demo.ledger import Ledger
from tests.demo.load import NEW_TOKENS, PROMPT_TOKENS, Crowd, Load, client_session

FAST = EngineConfig(time_scale=2.0, max_running_requests=64)
RISING = Curve(1.5, ((0, 2), (0.4, 2), (0.6, 12), (1.0, 12), (1.2, 2)), ((0, 2.5),))


def steady(seconds, clients, *accepted):
    """A load that stays as it is."""
    return Curve(seconds, ((0, clients),), accepted or ((0, 2.5),))


async def run(running, curve, *, ledger=None, during=None):
    ledger = ledger or Ledger()
    crowd = Crowd(running.url, ledger, Random(7))
    async with client_session() as session:
        load = Load(session, [crowd], curve)
        tasks = [load.run()] if during is None else [load.run(), during(load, ledger)]
        await asyncio.gather(*tasks)
    return ledger, crowd


async def test_the_crowd_follows_the_curve_and_no_request_is_cut_when_it_falls():
    most = 0
    async with running_engine(FAST) as running:

        async def look(load, ledger):
            nonlocal most
            while ledger.open or load.at < 1.5:
                most = max(most, ledger.open)
                assert ledger.open <= 12
                await asyncio.sleep(0.01)

        ledger, crowd = await run(running, RISING, during=look)
        answered = running.engine.counters["num_requests_total", "true"]
        made = running.engine.counters["generation_tokens_total", "true"]
    assert most == 12
    assert ledger.open == 0
    assert not ledger.lost
    assert not crowd.clients
    assert ledger.finished == ledger.sent == answered > 12
    assert sum(ledger.bins.values()) == made


class Watched(Ledger):
    """A ledger that tells when enough tokens arrived."""

    def __init__(self, enough):
        super().__init__()
        self.enough = enough
        self.reached = asyncio.Event()

    def arrived(self, tokens, at):
        super().arrived(tokens, at)
        if sum(self.bins.values()) >= self.enough:
            self.reached.set()


async def test_an_engine_that_dies_loses_the_requests_in_flight():
    # Too few tokens for any of the four to have ended.
    ledger = Watched(enough=NEW_TOKENS[0] - 8)
    async with running_engine(EngineConfig(time_scale=0.05)) as running:

        async def restart(*_):
            await ledger.reached.wait()
            running.engine.restart()

        curve = steady(0.5, 4)
        await run(running, curve, ledger=ledger, during=restart)
    assert (ledger.sent, ledger.finished) == (4, 0)
    assert ledger.lost.total() == 4
    assert all("after" in problem for problem in ledger.lost)


async def test_the_nth_request_to_a_pod_is_of_the_same_size_in_every_specserve():
    async with running_engine(FAST) as one, running_engine(FAST) as other:
        made = []
        for running in (one, other):
            curve = steady(0.4, 1)
            ledger, _ = await run(running, curve)
            made.append((ledger.sent, sum(ledger.bins.values())))
    sent = min(count for count, _ in made)
    random = Random(7)
    sizes = [(random.randint(*PROMPT_TOKENS), random.randint(*NEW_TOKENS)) for _ in range(99)]
    for count, tokens in made:
        assert tokens == sum(new for _, new in sizes[:count])
    assert 1 <= sent <= 99


@pytest.mark.parametrize(("length", "least", "most"), [(1.0, 1.0, 1.0), (4.0, 3.5, 4.0)])
async def test_prompts_decide_how_many_drafts_are_accepted(length, least, most):
    async with running_engine(FAST) as running:
        await run(running, steady(0.3, 4, (0, length)))
        (counts,) = running.engine.groups[0].stats.acceptance()
    assert least <= 1 + sum(counts.accepted) / counts.verifies <= most


@pytest.mark.parametrize(("kind", "said"), [("status", "HTTP 503"), ("reset", "after 0 tokens")])
async def test_a_refused_request_is_lost_and_not_tried_again(kind, said):
    async with running_engine(FAST) as running:
        running.engine.behave(Behaviour(faults=(Fault("serving", kind, paths=("/generate",)),)))
        # One look at the curve, then the run is over: time for one request.
        clock = chain([0.0] * 4, repeat(9.0))
        ledger = Ledger()
        async with client_session() as session:
            crowd = Crowd(running.url, ledger, Random(1))
            await Load(session, [crowd], steady(1.0, 1), clock=lambda: next(clock)).run()
    assert (ledger.sent, ledger.finished) == (1, 0)
    (problem,) = ledger.lost
    assert said in problem
