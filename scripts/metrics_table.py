"""The table of every metric in docs/observability.md, made from the code.

    python scripts/metrics_table.py [--write]

Prints the table, or writes it between the markers of the document. A test checks that the document
is current.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from console.metrics import FleetCollector
from console.telemetry.fleet_report import FleetReport
from console.telemetry.otlp import ExportMetrics
from console.telemetry.targets import Targets
from gateway.admission.gate import Gate
from gateway.admission.key_files import KeyFiles
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.memory import ResponseMemory, records_of
from gateway.history.answers import AnswerMetrics
from gateway.http.access import AccessRules, KeyCheck
from gateway.http.browsers import BrowserCheck, BrowserRules
from gateway.http.byte_budget import ByteBudget
from gateway.http.connection import BoundedProtocols
from gateway.http.connection_limits import ConnectionLimits
from gateway.metrics import ApiMetrics
from process.clock import wall_us
from process.store.ignored_entries import IgnoredEntries
from protocol.events import WorkerStats
from protocol.messages import Role
from protocol.registration import WorkerInfo
from router.fleet.fleet import Fleet
from router.fleet.history import FleetHistory
from router.fleet.listener import LinkCallbacks
from router.fleet.worker import Link
from router.metrics import FleetMetrics
from router.requests.trace_store import TraceStore
from router.routing.caches.cache_index import CacheIndex
from worker.counters import Count
from worker.metrics import WorkerMetrics

DOCUMENT = Path(__file__).parent.parent / "docs" / "observability.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"
_SUFFIX = {"counter": "_total"}


def table() -> str:
    """The tables of the router's and of the workers' metrics, in Markdown."""
    router, worker = _rows(router_metrics()), _rows(worker_metrics())
    return f"### Of a router\n\n{router}\n### Of a worker\n\n{worker}"


def router_metrics() -> list[Metric]:
    """Every family of a router, without those of any process."""
    registry = CollectorRegistry()
    metrics = FleetMetrics(registry)
    traces = TraceStore(1, metrics, wall_us)
    fleet = Fleet(_never_connect, CacheIndex(1.0), metrics, time.monotonic, FleetHistory(wall_us))
    registry.register(IgnoredEntries())
    registry.register(FleetCollector(FleetReport(fleet, traces, Targets(1.0, None, 1.0))))
    ApiMetrics(registry)
    ExportMetrics(registry)
    BackgroundRuns(ResponseMemory(records_of("redis://none", "none", 1), registry), registry)
    AnswerMetrics(registry)
    ByteBudget(1, registry)
    Gate(1, time.monotonic, registry=registry)
    KeyFiles(registry)
    KeyCheck(_no_app, AccessRules(), registry)
    BrowserCheck(_no_app, BrowserRules(), registry)
    BoundedProtocols(ConnectionLimits(1, 1, 1.0, 1.0), registry)
    return list(registry.collect())


def worker_metrics() -> list[Metric]:
    """Every family of a worker, without those of any process."""
    stats = WorkerStats(
        worker_id="w", incarnation="i", num_waiting=0, num_running=0, queued_tokens=0,
        blocks_total=0, blocks_used=0, blocks_cached=0,
        counters={each.value: 0 for each in Count},
        rank_busy_us=(0,), rank_wait_us=(0,),
    )  # fmt: skip
    return list(WorkerMetrics(Role.DECODE, "w", lambda: stats).collect())


def current(document: str) -> str:
    """The document with the table as it should be."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def names(families: Iterable[Metric]) -> Iterator[str]:
    """The name of each family, as Prometheus shows it."""
    for family in families:
        yield family.name + _SUFFIX.get(family.type, "")


def main() -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write it into the document")
    if not parser.parse_args().write:
        print(table())
        return 0
    DOCUMENT.write_text(current(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def _rows(families: list[Metric]) -> str:
    lines = ["| metric | type | shows |", "|---|---|---|"]
    for family in sorted(families, key=lambda each: each.name):
        text = family.documentation.replace("|", "\\|")
        (name,) = names([family])
        lines.append(f"| `{name}` | {family.type} | {text} |")
    return "\n".join(lines) + "\n"


def _never_connect(info: WorkerInfo, callbacks: LinkCallbacks) -> Link:
    raise AssertionError("no worker joins")


async def _no_app(*_: object) -> None:
    raise AssertionError("nothing is served")


if __name__ == "__main__":
    sys.exit(main())
