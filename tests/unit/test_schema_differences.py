"""How the installed schema is held against the operator's own."""

from __future__ import annotations

import copy

from specserve import schema

OURS = schema.document()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def changed(edit):
    theirs = copy.deepcopy(OURS)
    edit(theirs["properties"]["spec"]["properties"])
    return theirs


def test_equal_schemas_do_not_differ():
    assert schema.differences(OURS, copy.deepcopy(OURS)) == ([], [])


def test_what_the_api_server_adds_and_rewords_is_no_difference():
    def edit(spec):
        spec["model"]["description"] = "other words"
        spec["replicas"]["maximum"] = 7

    theirs = changed(edit)
    theirs["properties"]["metadata"] = {"properties": {"name": {"type": "string"}}}
    assert schema.differences(OURS, theirs) == ([], [])


def test_a_field_that_only_one_has():
    older = changed(lambda spec: spec["policy"]["properties"].pop("tiers"))
    lacking, unknown = schema.differences(OURS, older)
    assert "spec.policy.tiers" in lacking
    assert "spec.policy.tiers[].minBatch" in lacking
    assert unknown == []

    newer = changed(lambda spec: spec.update(budget={"type": "integer"}))
    assert schema.differences(OURS, newer) == ([], ["spec.budget"])


def test_a_value_that_only_one_has():
    def edit(spec):
        spec["policy"]["properties"]["mode"]["enum"] = ["Auto", "Later", "Off", "On"]

    lacking, unknown = schema.differences(OURS, changed(edit))
    assert lacking == ["spec.policy.mode=Observe"]
    assert unknown == ["spec.policy.mode=Later"]
