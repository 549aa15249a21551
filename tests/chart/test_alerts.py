"""Alert rules and the Grafana dashboard: valid, tested, explained, about metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess

import yaml

from tests.chart.chart import CHART_FOLDER, objects
from tests.paths import ROOT
from tests.programs import find_program

RULES = CHART_FOLDER / "files/rules/baton.yaml"
DASHBOARD = CHART_FOLDER / "files/dashboards/baton.json"
TESTS = ROOT / "tests/chart/alerts/baton.yaml"
OBSERVABILITY = (ROOT / "docs/observability.md").read_text()


def alerts() -> list[dict]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def test_prometheus_takes_the_rules_and_their_tests_pass() -> None:
    promtool = find_program("promtool", "prometheus")
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(TESTS)]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_and_has_a_runbook() -> None:
    tested = set(re.findall(r'alertname="(\w+)"', TESTS.read_text()))
    assert tested == {each["alert"] for each in alerts()}
    for each in alerts():
        document, _, anchor = each["annotations"]["runbook"].partition("#")
        assert document == "docs/observability.md"
        assert anchor == each["alert"].lower()
        assert f"### {each['alert']}\n" in OBSERVABILITY, "a heading says what to do"
        assert each["labels"]["severity"] in ("critical", "warning")


def test_rules_and_dashboards_name_only_metrics_of_the_table() -> None:
    table = set(re.findall(r"^\| `(baton_\w+)`", OBSERVABILITY, re.MULTILINE))
    named = set(re.findall(r"\bbaton_\w+", RULES.read_text() + DASHBOARD.read_text()))
    assert len(named) > 25
    assert {re.sub(r"_(bucket|sum|count)$", "", each) for each in named} <= table


def test_panels_do_not_overlap_and_have_a_unit() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        assert panel["fieldConfig"]["defaults"]["unit"]
        taken |= cells


def test_runbooks_are_links_where_their_page_is_published() -> None:
    url = "https://docs.example/baton/observability"
    found = objects({"prometheusRule": {"enabled": True, "runbookUrl": url}})
    (rule,) = [each for each in found if each["kind"] == "PrometheusRule"]
    shown = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    assert len(shown) == len(alerts())
    for each in shown:
        assert each["annotations"]["runbook_url"] == f"{url}#{each['alert'].lower()}"
        assert "runbook" not in each["annotations"]


def test_the_chart_installs_them_if_asked() -> None:
    found = objects({"prometheusRule": {"enabled": True}, "grafana": {"enabled": True}})
    (rule,) = [each for each in found if each["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    (dashboard,) = [
        each
        for each in found
        if each["kind"] == "ConfigMap" and "baton.json" in each.get("data", {})
    ]
    assert json.loads(dashboard["data"]["baton.json"]) == json.loads(DASHBOARD.read_text())
    plain = {each["kind"] for each in objects({})}
    assert "PrometheusRule" not in plain
