from __future__ import annotations

import asyncio
import logging

import pytest

from specserve_engine.control import Order
from specserve_engine.ranks import (
    GroupState,
    RankState,
    Result,
    Verdict,
    Vote,
    carry_out,
    groups_json,
    read_all,
)
from specserve_engine.wire import Mode, Setting

ORDER = Order(1, Setting(Mode.OFF))


class Scripted:
    """Ranks whose every answer is written down; a missing answer never comes."""

    def __init__(self, prepare="yy", commit="yy", layout=(2,), read=None):
        self.layout = layout
        self.answers = {"prepare": prepare, "commit": commit, "read": read}
        self.calls = []
        self.late = asyncio.Event()

    async def phase(self, name):
        self.calls.append(name)
        answer = self.answers[name]
        if answer is None:
            await self.late.wait()
            raise ConnectionError("late")
        if isinstance(answer, Exception):
            raise answer
        verdicts = {"y": Verdict.YES, "n": Verdict.NO, "s": Verdict.SILENT}
        return [Vote(0, rank, verdicts[letter]) for rank, letter in enumerate(answer)]

    async def prepare(self, _order, _deadline):
        return await self.phase("prepare")

    async def commit(self, _order, _deadline):
        return await self.phase("commit")

    async def abort(self, _order):
        self.calls.append("abort")

    async def read(self, _deadline):
        if isinstance(self.answers["read"], tuple):
            return self.answers["read"]
        return await self.phase("read")


async def outcome_of(ranks: Scripted, seconds: float = 0.2) -> Result:
    loop = asyncio.get_running_loop()
    began = loop.time()
    outcome = await carry_out(ranks, ORDER, began + seconds)
    assert loop.time() - began < seconds + 0.2
    assert len(outcome.votes) == sum(ranks.layout)
    return outcome.result


@pytest.mark.parametrize(
    ("prepare", "commit", "result", "calls"),
    [
        ("yy", "yy", Result.APPLIED, ["prepare", "commit"]),
        ("yn", "yy", Result.REFUSED, ["prepare", "abort"]),
        ("sn", "yy", Result.REFUSED, ["prepare", "abort"]),
        ("ys", "yy", Result.SILENT, ["prepare", "abort"]),
        ("y", "yy", Result.SILENT, ["prepare", "abort"]),
        (None, "yy", Result.SILENT, ["prepare", "abort"]),
        (ConnectionError("gone"), "yy", Result.SILENT, ["prepare", "abort"]),
        ("yy", "nn", Result.REFUSED, ["prepare", "commit"]),
        ("yy", "yn", Result.UNKNOWN, ["prepare", "commit"]),
        ("yy", "ys", Result.UNKNOWN, ["prepare", "commit"]),
        ("yy", "y", Result.UNKNOWN, ["prepare", "commit"]),
        ("yy", None, Result.UNKNOWN, ["prepare", "commit"]),
        ("yy", ConnectionError("gone"), Result.UNKNOWN, ["prepare", "commit"]),
    ],
    ids=str,
)
async def test_all_ranks_or_none(prepare, commit, result, calls):
    ranks = Scripted(prepare, commit)
    assert await outcome_of(ranks) is result
    assert ranks.calls == calls


async def test_an_order_nobody_is_there_to_obey_is_not_applied():
    assert await outcome_of(Scripted("", "", layout=())) is Result.SILENT


async def test_a_call_that_was_cut_off_is_not_cancelled_and_its_end_is_logged(caplog):
    ranks = Scripted("yy", None)
    assert await outcome_of(ranks) is Result.UNKNOWN
    with caplog.at_level(logging.WARNING):
        ranks.late.set()
        async with asyncio.timeout(2):
            while not caplog.records:  # noqa: ASYNC110 - the loop has it in its queue
                await asyncio.sleep(0)
    assert "late" in caplog.text


async def test_ranks_that_cannot_be_read_are_silent_not_zero():
    loop = asyncio.get_running_loop()
    for read in (None, ConnectionError("gone")):
        groups = await read_all(Scripted(read=read, layout=(2, 1)), loop.time() + 0.1)
        assert [len(group.ranks) for group in groups] == [2, 1]
        for group in groups_json(groups):
            assert group["tokensTotal"] is None
            for rank in group["ranks"]:
                assert rank["activeSteps"] is None
                assert rank["lastError"]


async def test_a_read_back_is_as_the_contract_has_it():
    state = RankState(0, 7, 3, 11, 4, 2, 4, 1, None, 12.5)
    groups = (GroupState((state,), (), 100, 20, 5.5),)
    read = await read_all(Scripted(read=groups), asyncio.get_running_loop().time() + 1)
    assert groups_json(read) == [
        {
            "ranks": [
                {
                    "rank": 0,
                    "epoch": 7,
                    "activeSteps": 3,
                    "decodeRounds": 11,
                    "lastBatch": 4,
                    "switches": 2,
                    "running": 4,
                    "queued": 1,
                    "lastError": None,
                    "obeyedAt": 12.5,
                }
            ],
            "stats": [],
            "acceptance": [],
            "tokensTotal": 100,
            "roundsTotal": 20,
            "at": 5.5,
        }
    ]
