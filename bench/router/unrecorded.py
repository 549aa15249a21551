"""A router whose recording can be switched off and on: each SIGUSR2 does one or the other.

    python -m bench.router.unrecorded FLAGS

Recording means everything that `console.telemetry` and the metrics learn about requests: traces,
receipts, counters, histograms, history and cache figures. `bench.router.recording` measures its
cost. Only the two fields of a trace that the dispatcher sets with each token stay on; they cost one
statement.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

from console.telemetry.caches.cache_report import CacheReport
from console.telemetry.caches.reuse import ReuseCurve
from console.telemetry.fleet_report import FleetReport
from gateway.metrics import EndpointMetrics, LatencyProbe
from process.metrics import fast_metrics
from router.requests.trace import RequestTrace
from router.requests.trace_store import TraceStore
from router_process.main import main


def _nothing(*_: Any) -> None:
    """Record nothing."""


def _forget(store: TraceStore, trace: RequestTrace, outcome: str) -> None:
    """End a trace without keeping it."""
    trace.outcome = outcome
    store._running.pop(trace.request_id, None)


SILENT: list[tuple[Any, str, Callable[..., None]]] = [
    (TraceStore, "end", _forget),
    (TraceStore, "attach_decode", _nothing),
    (TraceStore, "attach_prefill", _nothing),
    (ReuseCurve, "use", _nothing),
    (fast_metrics.LabelledCounts, "add", _nothing),
    (fast_metrics.TokenHistogram, "observe", _nothing),
    (EndpointMetrics, "ended", _nothing),
    (LatencyProbe, "observe", _nothing),
    (FleetReport, "sample", _nothing),
    (CacheReport, "sample", _nothing),
]


def switch_of_recording() -> Callable[..., None]:
    """A function that switches recording off, and at its next call on again."""
    other = {(owner, name): silent for owner, name, silent in SILENT}

    def switch(*_: Any) -> None:
        for (owner, name), new in list(other.items()):
            other[owner, name] = getattr(owner, name)
            setattr(owner, name, new)

    return switch


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, switch_of_recording())
    sys.exit(main(sys.argv[1:]))
