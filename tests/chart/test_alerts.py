"""Alert rules and the Grafana dashboard: valid, tested, explained, about metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.chart.chart import CHART_FOLDER, NAMESPACE, RELEASE, Object, objects, parsed, render
from tests.paths import ROOT
from tests.programs import find_program

RULES = CHART_FOLDER / "files/rules/baton.yaml"
DASHBOARD = CHART_FOLDER / "files/dashboards/baton.json"
TESTS = ROOT / "tests/chart/alerts/baton.yaml"
TWO_RELEASES = ROOT / "tests/chart/alerts/two_releases.yaml"
OBSERVABILITY = (ROOT / "docs/observability.md").read_text()


def alerts() -> list[dict]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def promtool(*command: str) -> None:
    program = find_program("promtool", "prometheus")
    done = subprocess.run([program, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules_and_their_tests_pass() -> None:
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(TESTS))


def test_two_releases_in_one_namespace_do_not_mask_each_other(tmp_path: Path) -> None:
    """As the chart installs them: each has its own rules, and none raises the other's alerts."""
    for name in ("blue", "green"):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(installed("PrometheusRule", name=name)))
    test = yaml.safe_load(TWO_RELEASES.read_text())
    test["rule_files"] = [str(tmp_path / f"{name}.yaml") for name in ("blue", "green")]
    (tmp_path / "test.yaml").write_text(json.dumps(test))
    promtool("test", "rules", str(tmp_path / "test.yaml"))


def test_every_alert_is_tested_and_has_a_runbook() -> None:
    tested = set(re.findall(r'alertname="(\w+)"', TESTS.read_text()))
    assert tested == {each["alert"] for each in alerts()}
    for each in alerts():
        document, _, anchor = each["annotations"]["runbook"].partition("#")
        assert document == "docs/observability.md"
        assert anchor == each["alert"].lower()
        assert f"### {each['alert']}\n" in OBSERVABILITY, "a heading says what to do"
        assert each["labels"]["severity"] in ("critical", "warning", "info")


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


def installed(kind: str, name: str = RELEASE, **values: Any) -> Object:
    """The rules or the dashboard of a release; the dashboard as its object."""
    wanted = {"prometheusRule": {"enabled": True}, "grafana": {"enabled": True}} | values
    found = parsed(render(wanted, name=name))
    if kind == "PrometheusRule":
        (rule,) = [each for each in found if each["kind"] == kind]
        return dict(rule["spec"])
    (board,) = [
        each["data"]["baton.json"] for each in found if "baton.json" in each.get("data", {})
    ]
    return dict(json.loads(board))


def test_the_chart_installs_the_rules_for_its_own_release() -> None:
    own = f'namespace="{NAMESPACE}",release="{RELEASE}"'
    expected = RULES.read_text().replace('release=~".*"', own)
    assert installed("PrometheusRule") == yaml.safe_load(expected)
    assert "PrometheusRule" not in {each["kind"] for each in objects({})}


def test_every_selector_of_rules_and_panels_names_the_release() -> None:
    panels = [t["expr"] for p in json.loads(DASHBOARD.read_text())["panels"] for t in p["targets"]]
    assert_scoped(panels, 'namespace="$namespace",release="$release"')
    assert_scoped([each["expr"] for each in alerts()], 'release=~".*"')
    for each in alerts():
        groups = re.findall(r"by \(([^)]*)\)", each["expr"])
        assert groups, each["alert"]
        assert all("release" in group or group == "le" for group in groups), each["alert"]


def assert_scoped(expressions: list[str], matcher: str) -> None:
    for expression in expressions:
        for name, selector in re.findall(r"\b(baton_\w+|up)\b(\{[^}]*\})?", expression):
            assert matcher in selector, (name, expression)


def test_a_dashboard_is_its_release_s_and_leads_to_the_page() -> None:
    plain = json.loads(DASHBOARD.read_text())
    shown = installed("ConfigMap")
    assert [each["title"] for each in shown["panels"]] == [e["title"] for e in plain["panels"]]
    assert shown["links"] == []
    current = {each["name"]: each.get("current") for each in shown["templating"]["list"]}
    assert current["namespace"]["value"] == NAMESPACE
    assert current["release"]["value"] == RELEASE
    (desired,) = [
        target["expr"]
        for panel in shown["panels"]
        for target in panel["targets"]
        if "kube_" in target["expr"]
    ]
    assert f'deployment=~"{RELEASE}-baton-(decode|prefill)"' in desired
    boards = [shown, installed("ConfigMap", name="green"), plain]
    assert len({each["uid"] for each in boards}) == 3
    assert all(len(each["uid"]) <= 40 for each in boards)
    tls = {"tlsSecretName": "tls"}
    ingress = {
        "enabled": True,
        "host": "baton.example",
        "path": "/llm",
        "controller": "nginx",
    } | tls
    given = {"enabled": True, "pageUrl": "https://ops.example/baton/dashboard/"}
    for values, url in (
        ({"ingress": ingress}, "https://baton.example/llm/dashboard/"),
        ({"ingress": ingress, "grafana": given}, given["pageUrl"]),
    ):
        assert [each["url"] for each in installed("ConfigMap", **values)["links"]] == [url]
