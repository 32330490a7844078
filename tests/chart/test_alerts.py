"""The alerts of the chart, by Prometheus' own tool: each for its trouble, none without."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from specserve import gauges, telemetry
from specserve.conditions import DRAFT_INEFFECTIVE
from tests.chart.rendering import NAMESPACE, only, render
from tests.wire import prometheus_server

POD = f'namespace="{NAMESPACE}",pod="specserve-6b5d8c9f7d-x2x4z"'
OTHER = f'namespace="{NAMESPACE}",pod="specserve-two-6b5d8c9f7d-x2x4z"'
CHAT = 'namespace="team-a",name="chat",pod="specserve-6b5d8c9f7d-x2x4z"'
CALLS = f"specserve_admin_request_duration_seconds_count{{{POD},call="
SWITCHES = f"specserve_speculation_switches_total{{{POD},mode="
OVERRIDE = f"specserve_override{{{POD},mode="
RATIO = f"specserve_policy_arm_value_ratio{{{CHAT},steps="

#: One a minute, for three hours.
WELL = {
    f"specserve_leader{{{POD}}}": "1x180",
    # Of another release, which this one's alerts are not about.
    f"specserve_leader{{{OTHER}}}": "1x180",
    f"specserve_foreign_specserves{{{OTHER}}}": "1x180",
    f"specserve_sample_age_seconds{{{CHAT}}}": "1x180",
    f'{CALLS}"read",code="200"}}': "0+6x180",
    f'{CALLS}"switch",code="200"}}': "0+2x180",
    # Engines without that route are asked another way.
    f'{CALLS}"loads",code="404"}}': "0+60x180",
    f'{SWITCHES}"Off",reason="AboveThreshold"}}': "0+1x180",
    # More than an hour ago.
    f'{SWITCHES}"Off",reason="{DRAFT_INEFFECTIVE}"}}': "_x60 3x120",
    f"specserve_foreign_specserves{{{POD}}}": "0x180",
    f'specserve_namespaces{{{POD},state="waiting"}}': "0x180",
    f'specserve_namespaces{{{POD},state="served"}}': "2x180",
    f'{OVERRIDE}"Off"}}': "1x30 0x150",
    f"specserve_override_unreadable{{{POD}}}": "0x180",
    f'specserve_schema_differences{{{POD},kind="lacking"}}': "0x180",
    f'specserve_reconcile_total{{{POD},result="ok"}}': "0+5x180",
    f'specserve_reconcile_total{{{POD},result="bug"}}': "2x180",
}
TROUBLE = {
    "SpecServeNoLeader": {f"specserve_leader{{{POD}}}": "1x170 0x10"},
    "SpecServeLoadUnknown": {f"specserve_sample_age_seconds{{{CHAT}}}": "1x160 121+60x20"},
    "SpecServeEnginesNotControlled": {f'{CALLS}"read",code="none"}}': "0x150 0+1x30"},
    "SpecServeDraftIneffective": {f'{SWITCHES}"Off",reason="{DRAFT_INEFFECTIVE}"}}': "_x150 1x30"},
    "SpecServeOtherOperator": {f"specserve_foreign_specserves{{{POD}}}": "0x160 1x20"},
    "SpecServeNamespacesWaiting": {f'specserve_namespaces{{{POD},state="waiting"}}': "0x160 1x20"},
    "SpecServeOverridden": {f'{OVERRIDE}"Off"}}': "0x110 1x70"},
    "SpecServeOverrideUnreadable": {f"specserve_override_unreadable{{{POD}}}": "0x170 1x10"},
    "SpecServeSchemaDiffers": {
        f'specserve_schema_differences{{{POD},kind="lacking"}}': "0x160 3x20"
    },
    "SpecServeReconcileFails": {
        f'specserve_reconcile_total{{{POD},result="bug"}}': "2x160 2+1x20"
    },
}
#: One an hour, for two days.
PAYS = {
    f"specserve_leader{{{POD}}}": "1x48",
    f'{RATIO}"1"}}': "0.9x48",
    f'{RATIO}"3"}}': "0.8x40 1.1x1 0.8x6",
}
NEVER_PAYS = {"SpecServeDraftNeverPays": {f'{RATIO}"3"}}': "1.1x12 0.8x24 _x4 0.8x6"}}
WHOSE = {"SpecServeLoadUnknown", "SpecServeDraftNeverPays"}


def trial(well, trouble, interval, end):
    """Unit tests of rules: without trouble nothing fires, with one of them its alert alone."""
    cases = []
    for name, series in {"": {}, **trouble}.items():
        whose = 'namespace="team-a", name="chat"' if name in WHOSE else f'namespace="{NAMESPACE}"'
        expected = [{"labels": f'{{alertname="{name}", {whose}}}', "value": 1}] if name else []
        look = {
            "expr": 'count by (alertname, namespace, name) (ALERTS{alertstate="firing"})',
            "eval_time": end,
            "exp_samples": expected,
        }
        given = [{"series": key, "values": value} for key, value in {**well, **series}.items()]
        cases.append(
            {
                "name": name or "well",
                "interval": interval,
                "input_series": given,
                "promql_expr_test": [look],
            }
        )
    return {"rule_files": ["rules.yaml"], "evaluation_interval": interval, "tests": cases}


@pytest.fixture
def promtool(tmp_path):
    rule = only(render({"prometheusRule": {"enabled": True}}), "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))

    def run(*command):
        tool = prometheus_server.binary().with_name("promtool")
        done = subprocess.run(
            [tool, *command], cwd=tmp_path, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def rules():
    (group,) = only(render({"prometheusRule": {"enabled": True}}), "PrometheusRule")["spec"][
        "groups"
    ]
    return group["rules"]


def test_each_trouble_fires_its_alert_and_no_other(promtool, tmp_path):
    assert TROUBLE.keys() | NEVER_PAYS.keys() == {rule["alert"] for rule in rules()}
    trials = {
        "hours.yaml": trial(WELL, TROUBLE, "1m", "3h"),
        "days.yaml": trial(PAYS, NEVER_PAYS, "1h", "46h"),
    }
    for name, content in trials.items():
        (tmp_path / name).write_text(yaml.safe_dump(content))
    promtool("check", "rules", "rules.yaml")
    promtool("test", "rules", *trials)


def test_alerts_ask_for_what_the_operator_exports():
    families = [*telemetry.registry.collect(), *gauges.collect([], 0.0)]
    exported = {
        family.name + suffix
        for family in families
        for suffix in {
            "counter": ("_total",),
            "histogram": ("_bucket", "_count", "_sum"),
        }.get(family.type, ("",))
    }
    asked = {name for rule in rules() for name in re.findall("specserve_[a-z_]+", rule["expr"])}
    assert asked <= exported


def test_alerts_say_what_is_wrong_and_what_to_do():
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "description", "action"}
        # What the template has not put in.
        assert not re.search(r"OPERATOR|NAMESPACE|LEASE|NAME\b", yaml.safe_dump(rule))
