"""A real Prometheus scrapes a running fleet: its series exist, and every rule evaluates."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from cli.fleet import Fleet
from tests.chart.chart import CHART_FOLDER
from tests.integration.fleets import complete, running_fleet, wait_for
from tests.programs import find_program
from tests.prometheus import Prometheus, running_prometheus

RULES = CHART_FOLDER / "files/rules/baton.yaml"
DASHBOARD = CHART_FOLDER / "files/dashboards/baton.json"
OWN = {"namespace": "tests", "release": "demo"}
LAGGING = "BatonRouterLagging"
"""An alert that a busy machine raises, for minutes."""
WORKERS = ("prefill-1", "decode-1")
ADDRESS = re.compile(r"metrics and probes on http://(\S+)")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    find_program("prometheus", "prometheus")
    settings = {"prefill": 1, "decode": 1, "local_prefill_threshold_tokens": 0}
    targets = {"BATON_TTFT_TARGET_MS": "60000", "BATON_TPOT_TARGET_MS": "60000"}
    with running_fleet({"BATON_METRICS_PORT": "0", **targets}, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Has scraped every process of the fleet before and after requests."""
    addresses = {name: metrics_address(fleet.processes[name].log_path) for name in WORKERS}
    addresses["router"] = fleet.url.removeprefix("http://")
    folder = tmp_path_factory.mktemp("prometheus")
    with running_prometheus(folder, addresses, RULES, OWN) as running:
        up = dict.fromkeys(addresses, "up")
        wait_for("the first scrape of every process", lambda: running.targets() == up)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: complete(fleet, [9 + i, *range(40, 240)]), range(12)))
        moved = "rate(baton_pair_bytes_total[1m])"  # needs two scrapes after the first blocks
        wait_for("scrapes after the requests", lambda: running.query(moved))
        yield running


def metrics_address(log_path: Path) -> str:
    """Where a worker serves its metrics, by its log."""
    found = ADDRESS.search(log_path.read_text())
    assert found is not None, log_path.read_text()
    return found[1]


def panel_queries() -> list[str]:
    """What the panels ask Baton's metrics, with Grafana's variables set."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    variables = {**OWN, "__rate_interval": "1m"}
    return [
        re.sub(r"\$(\w+)", lambda found: variables[found[1]], each)
        for each in expressions
        if "kube_" not in each
    ]


def test_every_rule_evaluates_and_a_healthy_fleet_raises_no_alert(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        return all(each["health"] != "unknown" for each in prometheus.rules().values())

    wait_for("an evaluation of every rule", evaluated)
    rules = prometheus.rules()
    assert set(rules) == set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert {
        name: each.get("lastError") for name, each in rules.items() if each["health"] != "ok"
    } == {}
    wait_for("no alert but one", lambda: active(prometheus) <= {LAGGING})


def active(prometheus: Prometheus) -> set[str]:
    return {name for name, each in prometheus.rules().items() if each["state"] != "inactive"}


def test_every_metric_of_rules_and_panels_is_a_series(prometheus: Prometheus) -> None:
    text = RULES.read_text() + DASHBOARD.read_text()
    named = set(re.findall(r"\bbaton_\w+", text))
    assert_all_found(prometheus, named)


def assert_all_found(prometheus: Prometheus, queries: Collection[str]) -> None:
    """Each query has a series, at the latest after a few more scrapes."""
    missing = list(queries)

    def all_found() -> bool:
        missing[:] = [each for each in missing if not prometheus.query(each)]
        return not missing

    with suppress(AssertionError):
        wait_for("all series", all_found)
    assert missing == []


def test_every_panel_shows_numbers(prometheus: Prometheus) -> None:
    queries = panel_queries()
    assert len(queries) > 25
    assert_all_found(prometheus, queries)


def test_an_alert_is_pending_while_no_decode_worker_is_left(
    fleet: Fleet, prometheus: Prometheus
) -> None:
    def has_state(state: str) -> bool:
        return bool(prometheus.rules()["BatonNoDecodeWorker"]["state"] == state)

    worker = fleet.processes["decode-1"]
    worker.signal(signal.SIGTERM)
    assert worker.wait(60.0)
    wait_for("the alert", lambda: has_state("pending"))
    worker.start()
    wait_for("the end of the alert", lambda: has_state("inactive"))
