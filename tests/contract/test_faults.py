"""What an engine must do when its ranks, its process, its tokens or its phase get in the way."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.contract.engines import Admin, until


def steps_of(state: dict[str, Any]) -> set[int]:
    return {rank["activeSteps"] for group in state["groups"] for rank in group["ranks"]}


def rounds_of(state: dict[str, Any]) -> set[int]:
    return {rank["decodeRounds"] for group in state["groups"] for rank in group["ranks"]}


def order_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("epoch", "mode", "steps", "tiers", "lease")}


# Start and read-back


async def test_an_engine_starts_with_its_own_policy_and_no_lease(launch):
    state = await (await launch(layout=(2, 2))).read()
    assert (state["epoch"], state["mode"], state["fallback"]) == (0, "auto", None)
    assert state["lease"] == {"holder": None, "remainingSeconds": None, "expirations": 0}
    assert state["lastExpiryEpoch"] is None
    assert [len(group["ranks"]) for group in state["groups"]] == [2, 2]


async def test_accepted_is_not_active_until_the_next_decode_batch(launch):
    admin = await launch(layout=(2, 2))
    await admin.engine.faults.decode(rounds=5, batch=4)
    assert steps_of(await admin.read()) == {admin.engine.auto_steps}
    accepted = (await admin.order(mode="off")).body
    assert accepted["mode"] == "off"
    assert steps_of(accepted) == {admin.engine.auto_steps}
    assert rounds_of(accepted) == {0}
    await admin.engine.faults.decode(rounds=5, batch=4)
    active = await admin.read()
    assert steps_of(active) == {0}
    assert rounds_of(active) == {5}


async def test_tiers_follow_the_batch(launch):
    admin = await launch()
    tiers = [
        {"minBatch": 1, "steps": 3},
        {"minBatch": 8, "steps": 1},
        {"minBatch": 16, "steps": 0},
    ]
    await admin.order(mode="tiers", tiers=tiers)
    for batch, steps in ((1, 3), (7, 3), (8, 1), (15, 1), (16, 0), (200, 0)):
        await admin.engine.faults.decode(rounds=1, batch=batch)
        assert steps_of(await admin.read()) == {steps}


async def test_auto_gives_the_policy_back_to_the_engine(launch):
    admin = await launch()
    await admin.order(mode="off")
    await admin.engine.faults.decode(rounds=1, batch=4)
    await admin.order(mode="auto")
    await admin.engine.faults.decode(rounds=1, batch=4)
    assert steps_of(await admin.read()) == {admin.engine.auto_steps}


async def test_figures_are_kept_apart_by_steps(launch):
    admin = await launch(layout=(1, 1))
    for fields in ({"mode": "on", "steps": 3}, {"mode": "off"}):
        await admin.order(**fields)
        await admin.engine.faults.decode(rounds=40, batch=8)
    for group in (await admin.read())["groups"]:
        cells = {(cell["batchBucket"], cell["steps"]): cell for cell in group["stats"]}
        assert set(cells) == {(8, 0), (8, 3)}
        assert cells[8, 0]["acceptLength"] == 1
        assert cells[8, 3]["acceptLength"] > 1
        assert group["roundsTotal"] == sum(cell["rounds"] for cell in cells.values())
        assert group["tokensTotal"] == sum(cell["tokens"] for cell in cells.values())
        for cell in cells.values():
            assert 0 < cell["p5"] <= cell["medianRoundSeconds"] <= cell["p95"]
            assert cell["lastSeen"] <= group["at"]


async def test_acceptance_is_counted_by_position(launch):
    admin = await launch(layout=(1, 1))
    for fields in ({"mode": "on", "steps": 3}, {"mode": "off"}, {"mode": "on", "steps": 1}):
        await admin.order(**fields)
        await admin.engine.faults.decode(rounds=40, batch=8)
    for group in (await admin.read())["groups"]:
        rows = {row["steps"]: row for row in group["acceptance"]}
        assert set(rows) == {1, 3}  # rounds without drafts have none to accept
        won = sum(row["verifies"] + sum(row["accepted"]) for row in rows.values())
        assert won == sum(cell["tokens"] for cell in group["stats"] if cell["steps"])
        for steps, row in rows.items():
            assert row["verifies"] == 8 * sum(
                cell["rounds"] for cell in group["stats"] if cell["steps"] == steps
            )
            assert len(row["accepted"]) == steps
            assert row["accepted"] == sorted(row["accepted"], reverse=True)
            assert row["accepted"][0] <= row["verifies"]


# All ranks or none


async def test_one_rank_that_refuses_keeps_all_as_they_were(launch):
    admin = await launch(layout=(4, 4))
    await admin.order(mode="on", steps=3)
    before = await admin.read()
    admin.engine.faults.object(1, 1, "busy")
    reply = await admin.order(mode="off")
    assert (reply.status, reply.code) == (409, "NotControllable")
    assert "busy" in reply.body["reason"]
    assert reply.body["availableSteps"] == before["availableSteps"]
    assert [
        (vote["group"], vote["rank"]) for vote in reply.body["ranks"] if vote["verdict"] == "no"
    ] == [(1, 1)]
    assert len(reply.body["ranks"]) == 8
    await admin.engine.faults.decode(rounds=3, batch=4)
    after = await admin.read()
    assert steps_of(after) == {3}
    assert {**order_of(after), "lease": None} == {**order_of(before), "lease": None}
    admin.engine.faults.heal()
    # The epoch was not used up.
    assert (await admin.order(mode="off")).body["epoch"] == before["epoch"] + 1


async def test_a_rank_that_does_not_vote_keeps_all_as_they_were(launch):
    admin = await launch(layout=(2,))
    before = await admin.read()
    admin.engine.faults.hush(0, 1, "prepare")
    began = time.monotonic()
    reply = await admin.order(mode="off", deadlineMs=400)
    assert (reply.status, reply.code) == (504, "Timeout")
    assert time.monotonic() - began < 1.4  # the operator waits for a second longer than that
    assert [vote["rank"] for vote in reply.body["ranks"] if vote["verdict"] == "silent"] == [1]
    admin.engine.faults.heal()
    await admin.engine.faults.decode(rounds=1, batch=1)
    after = await admin.read()
    assert order_of(after) == order_of(before)
    assert steps_of(after) == {admin.engine.auto_steps}


async def test_an_order_a_rank_did_not_confirm_is_found_out_by_reading(launch):
    admin = await launch(layout=(2, 2))
    body = await admin.directive(mode="off", deadlineMs=400)
    admin.engine.faults.hush(1, 0, "commit", "read")
    reply = await admin.put(body)
    assert (reply.status, reply.code) == (504, "Timeout")
    assert "read back" in reply.body["message"]
    blind = await admin.read()
    assert blind["epoch"] == body["epoch"] - 1
    assert blind["groups"][1]["ranks"][0]["activeSteps"] is None  # absent is not zero
    assert blind["groups"][1]["ranks"][0]["lastError"]
    assert blind["groups"][0]["ranks"][0]["activeSteps"] is not None
    # It may be in force, so it fences.
    older = await admin.put({**body, "epoch": body["epoch"] - 1 or 1, "mode": "auto"})
    assert older.status == 409
    admin.engine.faults.heal()
    told = await admin.read()
    assert (told["epoch"], told["mode"]) == (body["epoch"], "off")
    assert told["lease"]["holder"] == body["holder"]
    again = await admin.put(body)
    assert again.status == 200


async def test_an_unconfirmed_order_can_be_sent_again(launch):
    admin = await launch()
    body = await admin.directive(mode="off", deadlineMs=300)
    admin.engine.faults.hush(0, 1, "commit", "read")
    assert (await admin.put(body)).status == 504
    admin.engine.faults.heal()
    reply = await admin.put(body)
    assert (reply.status, reply.body["epoch"]) == (200, body["epoch"])


async def test_an_unconfirmed_order_can_be_overtaken(launch):
    admin = await launch()
    body = await admin.directive(mode="off", deadlineMs=300)
    admin.engine.faults.hush(0, 1, "commit", "read")
    assert (await admin.put(body)).status == 504
    admin.engine.faults.heal()
    reply = await admin.put({**body, "epoch": body["epoch"] + 1, "mode": "on", "steps": 1})
    assert (reply.status, reply.body["mode"]) == (200, "on")
    await admin.engine.faults.decode(rounds=1, batch=1)
    assert steps_of(await admin.read()) == {1}


async def test_a_directive_waits_for_its_turn_no_longer_than_its_deadline(launch):
    admin = await launch()
    first = await admin.directive(mode="off", deadlineMs=2000)
    second = {**first, "epoch": first["epoch"] + 1, "mode": "auto", "deadlineMs": 200}
    admin.engine.faults.hush(0, 0, "prepare")
    slow = asyncio.create_task(admin.put(first))
    await admin.engine.faults.hushed()
    began = time.monotonic()
    reply = await admin.put(second)
    assert (reply.status, reply.code) == (504, "Timeout")
    assert time.monotonic() - began < 0.7
    assert not slow.done()
    assert (await slow).status == 504


async def test_a_waiting_directive_has_its_turn(launch):
    admin = await launch()
    first = await admin.directive(mode="off", deadlineMs=600)
    second = {**first, "epoch": first["epoch"] + 1, "mode": "on", "steps": 1, "deadlineMs": 5000}
    admin.engine.faults.hush(0, 0, "prepare")
    slow = asyncio.create_task(admin.put(first))
    await admin.engine.faults.hushed()
    admin.engine.faults.heal()  # the rank answers the next one; the first is lost on it
    reply = await admin.put(second)
    assert (reply.status, reply.body["mode"]) == (200, "on")
    assert (await slow).status == 504


async def test_ranks_that_disagree_are_shown_and_made_one_by_the_next_order(launch):
    admin = await launch(layout=(2, 2))
    body = await admin.directive(mode="off", deadlineMs=400)
    admin.engine.faults.hush(1, 1, "lost")
    assert (await admin.put(body)).status == 504
    admin.engine.faults.heal()
    mixed = await admin.read()
    assert [[rank["epoch"] for rank in group["ranks"]] for group in mixed["groups"]] == [
        [1, 1],
        [1, 0],
    ]
    assert (mixed["epoch"], mixed["unresolvedEpoch"]) == (0, 1)
    healed = await admin.put({**body, "epoch": 2})
    assert (healed.status, healed.body["epoch"]) == (200, 2)
    assert healed.body["unresolvedEpoch"] is None
    await admin.engine.faults.decode(rounds=1, batch=1)
    assert steps_of(await admin.read()) == {0}


async def test_reading_does_not_wait_for_an_order_under_way(launch):
    admin = await launch()
    body = await admin.directive(mode="off", deadlineMs=3000)
    admin.engine.faults.hush(0, 0, "prepare")
    slow = asyncio.create_task(admin.put(body))
    await admin.engine.faults.hushed()
    began = time.monotonic()
    assert (await admin.read())["epoch"] == body["epoch"] - 1
    assert time.monotonic() - began < 0.5
    assert not slow.done()
    await slow


async def test_a_fallback_is_repeated_until_the_ranks_obey(launch):
    admin = await launch()
    body = await admin.directive(mode="on", steps=3, leaseSeconds=5, fallback={"mode": "off"})
    assert (await admin.put(body)).status == 200
    admin.engine.faults.object(0, 1, "busy")
    state = await until(admin, lambda state: state["lease"]["expirations"] == 1)
    # Nothing is claimed that the ranks do not do, and the late holder is fenced all the same.
    assert (state["epoch"], state["mode"]) == (body["epoch"], "on")
    assert state["lastExpiryEpoch"] == body["epoch"] + 1
    assert (await admin.put(body)).code == "StaleEpoch"
    admin.engine.faults.heal()
    state = await until(admin, lambda state: state["mode"] == "off")
    assert (state["epoch"], state["lease"]["expirations"]) == (body["epoch"] + 1, 1)
    await admin.engine.faults.decode(rounds=1, batch=1)
    assert steps_of(await admin.read()) == {0}


# Process and phases


async def test_a_new_process_has_forgotten_and_refuses_what_was_meant_for_the_old(launch):
    admin = await launch()
    body = await admin.directive(mode="off")
    before = (await admin.put(body)).body
    await admin.engine.faults.boot()
    reply = await admin.put({**body, "epoch": body["epoch"] + 1})
    assert (reply.status, reply.code) == (412, "Rebooted")
    after = await admin.read()
    assert after["bootID"] != before["bootID"]
    assert reply.body["bootID"] == after["bootID"]
    assert (after["podUID"], after["epoch"], after["mode"]) == (before["podUID"], 0, "auto")
    assert (await admin.order(mode="off", epoch=body["epoch"] + 1)).status == 200


async def test_a_loading_engine_is_read_but_not_ordered(launch):
    admin = await launch(loaded=False)
    state = await admin.read()
    assert state["bootID"]
    assert (state["controllable"], state["availableSteps"]) == (False, [])
    reply = await admin.order(mode="off")
    assert (reply.status, reply.code) == (503, "Loading")
    health = await admin.health()
    assert (health.status, health.body["status"]) == (503, "loading")
    admin.engine.faults.load()
    assert (await admin.health()).status == 200
    assert (await admin.order(mode="off")).status == 200


async def test_a_draining_engine_keeps_its_order_and_refuses_others(launch):
    admin = await launch()
    body = await admin.directive(mode="off")
    before = (await admin.put(body)).body
    admin.engine.faults.drain()
    for directive in (body, {**body, "epoch": body["epoch"] + 1, "mode": "auto"}):
        reply = await admin.put(directive)
        assert (reply.status, reply.code) == (503, "Draining")
    health = await admin.health()
    assert (health.status, health.body["status"]) == (503, "draining")
    after = await admin.read()
    assert (after["epoch"], after["mode"]) == (before["epoch"], "off")
    await admin.engine.faults.decode(rounds=1, batch=1)
    assert steps_of(await admin.read()) == {0}


async def test_a_wrong_address_is_told_before_the_phase(launch):
    admin = await launch()
    admin.engine.faults.drain()
    assert (await admin.order(podUID="somebody-else")).code == "WrongPod"


async def test_an_engine_without_its_scheduler_is_not_healthy(launch):
    admin = await launch()
    admin.engine.faults.die()
    assert (await admin.health()).status == 503
    assert (await admin.order(mode="off")).status == 503
    state = await admin.read()
    assert state["controllable"] is False
    assert steps_of(state) == {None}


@pytest.mark.parametrize(("require_live", "status"), [(False, 200), (True, 503)])
async def test_a_pod_without_live_control_is_ready_unless_it_is_demanded(
    launch, require_live, status
):
    admin = await launch(controllable=False, require_live=require_live)
    health = await admin.health()
    assert health.status == status
    assert health.body["controllable"] is False
    assert health.body["reason"]


async def test_an_engine_without_live_control_says_so(launch):
    admin = await launch(controllable=False)
    for mode in ("auto", "off"):
        reply = await admin.order(mode=mode)
        assert (reply.status, reply.code) == (409, "NotControllable")
        assert reply.body["availableSteps"] == []
        assert reply.body["reason"] == (await admin.read())["reason"] != ""
    assert (await admin.read())["epoch"] == 0


async def test_off_needs_a_zero_that_was_prepared(launch):
    admin = await launch(available_steps=(1, 3))
    reply = await admin.order(mode="off")
    assert (reply.status, reply.code) == (409, "UnknownSteps")
    assert reply.body["availableSteps"] == [1, 3]


# Tokens


async def authorised(admin: Admin, token: str) -> bool:
    admin.token = token
    return (await admin.send("GET")).status == 200


async def test_tokens_rotate_without_a_gap(launch):
    admin = await launch(token="one")
    assert await authorised(admin, "one")
    admin.engine.faults.mount_tokens("two", previous="one")
    assert await authorised(admin, "one")
    assert await authorised(admin, "two")
    admin.engine.faults.mount_tokens("two")
    assert not await authorised(admin, "one")
    assert await authorised(admin, "two")


async def test_an_empty_token_file_lets_nobody_in(launch):
    admin = await launch(token="one")
    admin.engine.faults.mount_tokens("", previous="\n")
    for token in ("one", "", " "):
        assert not await authorised(admin, token)
