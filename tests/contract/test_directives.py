"""What any engine must answer to a directive; nothing here needs more than its URL."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.engines import until

if TYPE_CHECKING:
    from tests.contract.engines import Admin

READ_BACK = {
    "podUID",
    "bootID",
    "epoch",
    "mode",
    "steps",
    "tiers",
    "draftKv",
    "fallback",
    "controllable",
    "reason",
    "availableSteps",
    "versions",
    "lease",
    "lastExpiryEpoch",
    "groups",
}
RANK = {
    "activeSteps",
    "decodeRounds",
    "lastBatch",
    "switches",
    "running",
    "queued",
    "lastError",
}
TIERS = [{"minBatch": 1, "steps": 3}, {"minBatch": 33, "steps": 0}]


def same_order(state: dict[str, Any]) -> dict[str, Any]:
    members = ("bootID", "epoch", "mode", "steps", "tiers", "draftKv", "fallback")
    return {name: state[name] for name in members}


async def some_steps(admin: Admin) -> int:
    return max((await admin.read())["availableSteps"])


async def test_read_back_has_every_member(admin):
    state = await admin.read()
    assert set(state) >= READ_BACK
    assert set(state["versions"]) == {"sglang", "plugin", "proved"}
    assert set(state["lease"]) == {"holder", "remainingSeconds", "expirations"}
    assert state["availableSteps"] == sorted(state["availableSteps"])
    assert 0 in state["availableSteps"]
    assert state["groups"]
    for group in state["groups"]:
        assert set(group) >= {
            *("ranks", "stats", "acceptance", "tokensTotal", "roundsTotal", "at")
        }
        assert group["ranks"]
        for rank in group["ranks"]:
            assert set(rank) >= RANK


async def test_off_is_applied_and_read_back(admin):
    body = await admin.directive(mode="off", leaseSeconds=45)
    reply = await admin.put(body)
    assert reply.status == 200
    for state in (reply.body, await admin.read()):
        assert state["epoch"] == body["epoch"]
        assert (state["mode"], state["steps"], state["tiers"]) == ("off", None, None)
        assert state["draftKv"] == "cold"
        assert state["fallback"] == {
            "mode": "auto",
            "steps": None,
            "tiers": None,
            "draftKv": "cold",
        }
        assert state["lease"]["holder"] == body["holder"]
        assert 30 < state["lease"]["remainingSeconds"] <= 45


async def test_every_mode_is_applied(admin):
    steps = await some_steps(admin)
    tiers = [{"minBatch": 1, "steps": steps}, {"minBatch": 33, "steps": 0}]
    for fields in (
        {"mode": "on", "steps": steps},
        {"mode": "tiers", "tiers": tiers},
        {"mode": "off", "draftKv": "warm"},
        {"mode": "auto"},
    ):
        reply = await admin.order(**fields)
        assert reply.status == 200, reply
        for name, value in fields.items():
            assert reply.body[name] == value


async def test_a_rich_fallback_is_read_back(admin):
    steps = await some_steps(admin)
    tiers = [{"minBatch": 1, "steps": steps}, {"minBatch": 65, "steps": 0}]
    fallback = {"mode": "tiers", "tiers": tiers, "draftKv": "warm"}
    reply = await admin.order(fallback=fallback)
    assert reply.status == 200
    assert reply.body["fallback"] == {**fallback, "steps": None}


async def test_what_was_read_back_can_be_sent_again(admin):
    """An operator without a memory renews from the read-back, and the engine does not change."""
    await admin.order(mode="off", reason="before the restart", leaseSeconds=30)
    state = await admin.read()
    copied = ("podUID", "bootID", "epoch", "mode", "steps", "tiers", "draftKv", "fallback")
    body = {name: state[name] for name in copied}
    body |= {"holder": state["lease"]["holder"], "leaseSeconds": 60}
    reply = await admin.put(body)
    assert reply.status == 200
    assert reply.body["lease"]["remainingSeconds"] > 50
    assert same_order(reply.body) == same_order(state)


# 400

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"podUID": None}, "podUID"),
    ({"podUID": 7}, "podUID"),
    ({"podUID": ""}, "podUID"),
    ({"bootID": None}, "bootID"),
    ({"epoch": None}, "epoch"),
    ({"epoch": 0}, "epoch"),
    ({"epoch": -1}, "epoch"),
    ({"epoch": True}, "epoch"),
    ({"epoch": "3"}, "epoch"),
    ({"epoch": 3.0}, "epoch"),
    ({"epoch": 2**53}, "epoch"),
    ({"holder": None}, "holder"),
    ({"holder": ""}, "holder"),
    ({"holder": "a\nb"}, "holder"),
    ({"leaseSeconds": None}, "leaseSeconds"),
    ({"leaseSeconds": 4}, "leaseSeconds"),
    ({"leaseSeconds": 601}, "leaseSeconds"),
    ({"mode": None}, "mode"),
    ({"mode": "OFF"}, "mode"),
    ({"mode": ["off"]}, "mode"),
    ({"mode": "on"}, "steps"),
    ({"mode": "on", "steps": 0}, "steps"),
    ({"mode": "on", "steps": True}, "steps"),
    ({"mode": "off", "steps": 3}, "steps"),
    ({"mode": "auto", "tiers": TIERS}, "tiers"),
    ({"mode": "tiers"}, "tiers"),
    ({"mode": "tiers", "tiers": []}, "tiers"),
    ({"mode": "tiers", "tiers": {"1": 3}}, "tiers"),
    ({"mode": "tiers", "tiers": [{"minBatch": 2, "steps": 3}]}, "tiers[0].minBatch"),
    ({"mode": "tiers", "tiers": [TIERS[0], TIERS[0]]}, "tiers[1].minBatch"),
    ({"mode": "tiers", "tiers": [{"minBatch": 1}]}, "tiers[0].steps"),
    ({"mode": "tiers", "tiers": [{"minBatch": 1, "steps": -1}]}, "tiers[0].steps"),
    ({"mode": "tiers", "tiers": [{"minBatch": 1, "steps": 0, "x": 1}]}, "tiers[0].x"),
    ({"mode": "tiers", "tiers": [3]}, "tiers[0]"),
    ({"draftKv": "hot"}, "draftKv"),
    ({"fallback": None}, "fallback"),
    ({"fallback": []}, "fallback"),
    ({"fallback": {}}, "fallback.mode"),
    ({"fallback": {"mode": "on"}}, "fallback.steps"),
    ({"fallback": {"mode": "auto", "draftKv": 1}}, "fallback.draftKv"),
    ({"fallback": {"mode": "auto", "holder": "x"}}, "fallback.holder"),
    (
        {
            "fallback": {
                "mode": "tiers",
                "tiers": [{"minBatch": 1, "steps": 0}, {"minBatch": "2", "steps": 0}],
            }
        },
        "fallback.tiers[1].minBatch",
    ),
    ({"deadlineMs": 99}, "deadlineMs"),
    ({"deadlineMs": 10_001}, "deadlineMs"),
    ({"deadlineMs": 1e3}, "deadlineMs"),
    ({"reason": "x" * 257}, "reason"),
    ({"reason": "two\nlines"}, "reason"),
    ({"reason": "\x1b[31m"}, "reason"),
    ({"reason": "\ud800"}, "reason"),
    ({"dryRun": True}, "dryRun"),
    ({"pod_uid": "x"}, "pod_uid"),
]


@pytest.mark.parametrize(
    ("fields", "named"),
    BAD_FIELDS,
    ids=[f"{named}-{index}" for index, (_, named) in enumerate(BAD_FIELDS)],
)
async def test_a_bad_field_is_named_and_nothing_changes(admin, fields, named):
    before = await admin.read()
    reply = await admin.order(**fields)
    assert (reply.status, reply.code) == (400, "Invalid"), reply
    assert reply.body["field"] == named
    assert named in reply.body["message"]
    assert same_order(await admin.read()) == same_order(before)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"epoch": NaN}',
        b'{"epoch": 1, "epoch": 2}',
        b"[" * 60_000,
        b'{"epoch": ' + b"9" * 5_000 + b"}",
        b" " * 70_000,
        b'{"\\ud800": 1}',
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_a_body_that_is_no_directive_is_refused(admin, body):
    before = await admin.read()
    reply = await admin.send("PUT", data=body)
    assert (reply.status, reply.code) == (400, "Invalid"), reply
    assert same_order(await admin.read()) == same_order(before)


# 401


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer pl\xe4ne"},
        {"Authorization": "Basic dXNlcjpwYXNz"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_without_a_valid_token_nobody_reads_or_orders(admin, method, header):
    body = await admin.directive()
    before = await admin.read()
    right, admin.token = admin.token, ""
    reply = await admin.send(method, json=body, headers=header)
    admin.token = right
    assert (reply.status, reply.code) == (401, "Unauthorized")
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert before["bootID"] not in json.dumps(reply.body)
    assert same_order(await admin.read()) == same_order(before)


async def test_the_bearer_scheme_is_read_in_any_case(admin):
    reply = await admin.send("GET", headers={"Authorization": f"bearer {admin.token}"})
    assert reply.status == 200


async def test_health_needs_no_token_and_tells_no_secret(admin):
    state = await admin.read()
    admin.token = ""
    reply = await admin.health()
    assert reply.status == 200
    assert reply.body["controllable"] is True
    assert state["bootID"] not in json.dumps(reply.body)


async def test_other_paths_and_methods_are_refused_in_the_same_shape(admin):
    assert (await admin.send("GET", "/v1/nothing")).status == 404
    reply = await admin.send("POST", json={})
    assert reply.status == 405
    assert set(reply.body) >= {"code", "message"}


# 409


async def test_an_older_epoch_arriving_late_is_refused(admin):
    seventh = await admin.directive(mode="off", reason="#7")
    eighth = {**seventh, "epoch": seventh["epoch"] + 1, "mode": "auto", "reason": "#8"}
    assert (await admin.put(eighth)).status == 200
    reply = await admin.put(seventh)
    assert (reply.status, reply.code) == (409, "StaleEpoch")
    assert reply.body["epoch"] == eighth["epoch"]
    assert (await admin.read())["mode"] == "auto"


async def test_the_same_directive_twice_is_one_change(admin):
    body = await admin.directive(mode="off", leaseSeconds=30)
    first = await admin.put(body)
    second = await admin.put({**body, "leaseSeconds": 90, "deadlineMs": 900, "reason": "again"})
    assert (first.status, second.status) == (200, 200)
    assert same_order(second.body) == same_order(first.body)
    assert second.body["lease"]["remainingSeconds"] > 80


async def test_a_renewal_restarts_no_count(admin):
    """`decodeRounds` counts since the change; a renewal is none."""
    body = await admin.directive(mode="off")
    first = await admin.put(body)
    second = await admin.put(body)
    for before, after in zip(first.body["groups"], second.body["groups"], strict=True):
        for rank_before, rank_after in zip(before["ranks"], after["ranks"], strict=True):
            assert rank_after["decodeRounds"] >= rank_before["decodeRounds"]
            assert rank_after["switches"] >= rank_before["switches"]


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "auto"},
        {"draftKv": "warm"},
        {"fallback": {"mode": "off"}},
        {"fallback": {"mode": "auto", "draftKv": "warm"}},
    ],
    ids=repr,
)
async def test_the_same_epoch_with_another_body_is_refused(admin, change):
    body = await admin.directive(mode="off")
    before = (await admin.put(body)).body
    reply = await admin.put({**body, **change})
    assert (reply.status, reply.code) == (409, "EpochReused")
    assert reply.body["epoch"] == body["epoch"]
    assert same_order(await admin.read()) == same_order(before)


async def test_another_installation_waits_for_the_lease(admin):
    body = await admin.directive(mode="off")
    await admin.put(body)
    reply = await admin.put(
        {**body, "epoch": body["epoch"] + 1, "holder": "other/specserve", "mode": "auto"}
    )
    assert (reply.status, reply.code) == (409, "LeaseHeld")
    assert reply.body["holder"] == body["holder"]
    assert reply.body["epoch"] == body["epoch"]
    assert 0 < reply.body["remainingSeconds"] <= body["leaseSeconds"]
    assert (await admin.read())["lease"]["holder"] == body["holder"]


@pytest.mark.parametrize("where", ["steps", "tiers", "fallback"])
async def test_steps_that_are_not_prepared_are_refused(admin, where):
    before = await admin.read()
    unknown = next(steps for steps in range(1, 64) if steps not in before["availableSteps"])
    tiers = [{"minBatch": 1, "steps": 0}, {"minBatch": 9, "steps": unknown}]
    fields: dict[str, Any] = {
        "steps": {"mode": "on", "steps": unknown},
        "tiers": {"mode": "tiers", "tiers": tiers},
        "fallback": {"fallback": {"mode": "tiers", "tiers": tiers}},
    }[where]
    reply = await admin.order(**fields)
    assert (reply.status, reply.code) == (409, "UnknownSteps")
    assert reply.body["availableSteps"] == before["availableSteps"]
    assert str(unknown) in reply.body["reason"]
    assert same_order(await admin.read()) == same_order(before)


# 412


@pytest.mark.parametrize(("field", "code"), [("podUID", "WrongPod"), ("bootID", "Rebooted")])
async def test_a_directive_for_somebody_else_changes_nothing(admin, field, code):
    before = await admin.read()
    reply = await admin.order(**{field: "somebody-else"})
    assert (reply.status, reply.code) == (412, code)
    assert same_order(await admin.read()) == same_order(before)


# Order of the checks: each of these is wrong in two ways.


async def test_a_bad_field_is_told_before_a_wrong_address(admin):
    reply = await admin.order(podUID="somebody-else", leaseSeconds=1)
    assert reply.code == "Invalid"


async def test_a_wrong_address_is_told_before_all_conflicts(admin):
    body = await admin.directive()
    await admin.put(body)
    reply = await admin.put(
        {**body, "holder": "other/specserve", "bootID": "old", "podUID": "somebody-else"}
    )
    assert reply.code == "WrongPod"
    reply = await admin.put({**body, "holder": "other/specserve", "bootID": "old"})
    assert reply.code == "Rebooted"


async def test_a_held_lease_is_told_before_a_stale_epoch(admin):
    body = await admin.directive()
    await admin.put(body)
    reply = await admin.put({**body, "holder": "other/specserve"})
    assert reply.code == "LeaseHeld"


async def test_a_stale_epoch_is_told_before_unknown_steps(admin):
    body = await admin.directive()
    await admin.put(body)
    reply = await admin.put({**body, "mode": "on", "steps": 63})
    assert reply.code == "EpochReused"


# Many at once


async def test_of_many_directives_at_once_the_highest_epoch_wins(admin):
    first = await admin.directive()
    bodies = [
        {**first, "epoch": first["epoch"] + n, "mode": ("off", "auto")[n % 2]} for n in range(8)
    ]
    replies = await asyncio.gather(*(admin.put(body) for body in bodies))
    assert {reply.status for reply in replies} <= {200, 409}
    assert replies[-1].status == 200
    assert {reply.code for reply in replies if reply.status == 409} <= {"StaleEpoch"}
    state = await admin.read()
    assert (state["epoch"], state["mode"]) == (bodies[-1]["epoch"], bodies[-1]["mode"])


async def test_replicas_that_reuse_an_epoch_fence_each_other(admin):
    body = await admin.directive()
    replies = await asyncio.gather(
        *(admin.put({**body, "mode": mode}) for mode in ("off", "auto", "off", "auto"))
    )
    assert sorted(reply.status for reply in replies) == [200, 200, 409, 409]
    assert {reply.code for reply in replies if reply.status == 409} == {"EpochReused"}


async def test_a_lost_answer_is_found_out_by_reading(admin):
    """The connection goes away after the body was sent; the order holds, and again is harmless."""
    body = await admin.directive(mode="off")
    raw = json.dumps(body).encode()
    address = admin.engine.url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(address[0].strip("[]"), int(address[1]))
    writer.write(
        b"PUT /v1/speculation HTTP/1.1\r\nHost: engine\r\nAuthorization: Bearer "
        + admin.token.encode()
        + b"\r\nContent-Length: %d\r\n\r\n" % len(raw)
        + raw
    )
    await writer.drain()
    await reader.read(1)  # the answer is on its way: it is dropped unread
    writer.transport.abort()
    state = await admin.read()
    assert state["epoch"] == body["epoch"]
    again = await admin.put(body)
    assert again.status == 200
    assert same_order(again.body) == same_order(state)


# Leases


async def test_an_expired_lease_leaves_the_fallback_and_fences_its_holder(admin):
    body = await admin.directive(mode="auto", leaseSeconds=5, fallback={"mode": "off"})
    before = (await admin.put(body)).body
    expirations = before["lease"]["expirations"]
    state = await until(admin, lambda state: state["epoch"] != body["epoch"])
    assert (state["epoch"], state["mode"]) == (body["epoch"] + 1, "off")
    assert state["lastExpiryEpoch"] == state["epoch"]
    assert state["lease"] == {
        "holder": None,
        "remainingSeconds": None,
        "expirations": expirations + 1,
    }
    late = await admin.put(body)
    assert (late.status, late.code) == (409, "StaleEpoch")
    assert late.body["epoch"] == state["epoch"]
    reused = await admin.put({**body, "epoch": state["epoch"], "mode": "off"})
    assert (reused.status, reused.code) == (409, "EpochReused")
    other = await admin.put(
        {**body, "epoch": state["epoch"] + 1, "holder": "other/specserve", "leaseSeconds": 5}
    )
    assert other.status == 200
    assert other.body["lease"]["holder"] == "other/specserve"
    back = await admin.put({**body, "epoch": state["epoch"] + 2})
    assert back.code == "LeaseHeld"
    await until(admin, lambda state: state["lease"]["holder"] is None)
