from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_engine.wire import (
    MAX_BATCH,
    MAX_EPOCH,
    MAX_STEPS,
    MAX_TIERS,
    STATUS,
    Code,
    Directive,
    DraftKv,
    Invalid,
    Mode,
    Setting,
    Tier,
    decode,
    directive_json,
    parse_directive,
    setting_json,
)

names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
draft_kvs = st.sampled_from(DraftKv)
tier_lists = st.dictionaries(
    st.integers(2, MAX_BATCH), st.integers(0, MAX_STEPS), max_size=MAX_TIERS - 1
).map(lambda tiers: tuple(Tier(batch, steps) for batch, steps in sorted(tiers.items())))
settings = st.one_of(
    st.builds(Setting, st.just(Mode.AUTO), draft_kv=draft_kvs),
    st.builds(Setting, st.just(Mode.OFF), draft_kv=draft_kvs),
    st.builds(Setting, st.just(Mode.ON), st.integers(1, MAX_STEPS), draft_kv=draft_kvs),
    st.builds(
        Setting,
        st.just(Mode.TIERS),
        tiers=tier_lists.map(lambda tiers: (Tier(1, 3), *tiers)),
        draft_kv=draft_kvs,
    ),
)
directives = st.builds(
    Directive,
    pod_uid=names,
    boot_id=names,
    epoch=st.integers(1, MAX_EPOCH),
    holder=names,
    lease_seconds=st.integers(5, 600),
    setting=settings,
    fallback=settings,
    deadline_ms=st.integers(100, 10_000),
    reason=names,
)
MINIMAL = {
    "podUID": "p",
    "bootID": "b",
    "epoch": 1,
    "holder": "h",
    "leaseSeconds": 60,
    "mode": "off",
    "fallback": {"mode": "auto"},
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(directives)
def test_a_directive_survives_the_wire(directive):
    body = json.dumps(directive_json(directive)).encode()
    assert parse_directive(decode(body)) == directive


@given(directives)
def test_a_setting_as_read_back_is_one_that_can_be_sent(directive):
    body = directive_json(directive)
    body |= setting_json(directive.setting)
    body["fallback"] = setting_json(directive.fallback)
    assert parse_directive(body) == directive


def test_what_is_left_out_has_its_default():
    directive = parse_directive(MINIMAL)
    assert directive.deadline_ms == 2_000
    assert directive.reason == ""
    assert directive.setting == Setting(Mode.OFF, draft_kv=DraftKv.COLD)


def fault_of(body: object) -> Invalid | None:
    try:
        parse_directive(decode(body) if isinstance(body, bytes) else body)
    except Invalid as error:
        return error
    return None


@given(st.sampled_from(sorted({*MINIMAL, "steps", "tiers", "draftKv", "reason"})), json_values)
def test_any_value_in_any_field_is_read_or_refused_by_name(field, value):
    fault = fault_of({**MINIMAL, field: value})
    if fault:
        # Modes on and tiers need another field, which is then the one at fault.
        assert fault.field.split(".")[0].split("[")[0] in {field, "steps", "tiers"}
        assert str(fault).isprintable()


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_read_or_refused(body):
    fault = fault_of(body)
    assert fault
    assert str(fault).isprintable()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"a": 1, "a": 1}', "a"),
        (b'{"fallback": {"mode": "on", "mode": "off"}}', "mode"),
        (b"Infinity", ""),
        (b"[" * 100_000, ""),
        (b"9" * 10_000, ""),
    ],
)
def test_json_that_readers_disagree_about_is_refused(body, field):
    with pytest.raises(Invalid) as caught:
        decode(body)
    assert caught.value.field == field


@pytest.mark.parametrize("size", [MAX_TIERS, MAX_TIERS + 1])
def test_tiers_are_bounded(size):
    tiers = [{"minBatch": index + 1, "steps": 0} for index in range(size)]
    body = {**MINIMAL, "mode": "tiers", "tiers": tiers}
    if size <= MAX_TIERS:
        assert len(parse_directive(body).setting.tiers) == size
    else:
        with pytest.raises(Invalid, match="tiers"):
            parse_directive(body)


def test_steps_by_batch():
    tiers = Setting(Mode.TIERS, tiers=(Tier(1, 3), Tier(8, 1), Tier(64, 0)))
    assert [tiers.steps_for(batch) for batch in (1, 7, 8, 63, 64, 999)] == [3, 3, 1, 1, 0, 0]
    assert tiers.needed_steps() == {0, 1, 3}
    assert Setting(Mode.OFF).steps_for(5) == 0
    assert Setting(Mode.OFF).needed_steps() == {0}
    assert Setting(Mode.ON, 3).steps_for(5) == 3
    assert Setting(Mode.ON, 3).needed_steps() == {3}
    assert Setting(Mode.AUTO).steps_for(5) is None
    assert Setting(Mode.AUTO).needed_steps() == frozenset()


def test_a_setting_is_logged_as_a_directive_has_it():
    assert str(Setting(Mode.OFF)) == '{"mode": "off", "draftKv": "cold"}'
    tiers = Setting(Mode.TIERS, tiers=(Tier(1, 3), Tier(33, 0)), draft_kv=DraftKv.WARM)
    assert f"{tiers}" == (
        '{"mode": "tiers", "tiers": [{"minBatch": 1, "steps": 3}, {"minBatch": 33, "steps": 0}], '
        '"draftKv": "warm"}'
    )


def test_every_code_has_a_status():
    assert set(STATUS) == set(Code)
