"""Measurements for later placements: how long outputs are, how fast KV moves between workers.

Listens to traces. Times of one trace are of one worker's clock, so only their differences count.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.traces import FetchSpan, PrefillTrace, WriteSpan
from router.requests.trace import AttemptTrace, RequestTrace
from router.requests.trace_store import TraceStore
from router.routing.output_lengths import OutputLengths
from router.routing.pairs import Pairs


class Experience:
    """The average output (`outputs`), and the measured pairs of the fleet's view."""

    def __init__(self, traces: TraceStore, pairs: Pairs) -> None:
        self._pairs = pairs
        self.outputs = OutputLengths()
        traces.on_end(self._take_end)
        traces.on_moved(self._take_moved)

    def _take_end(self, trace: RequestTrace) -> None:
        if trace.outcome == "finished":
            self.outputs.observe(trace.num_output_tokens)
        for attempt in trace.attempts:
            if attempt.decode is not None and attempt.decode.fetches:
                self._take_fetches(attempt.decode.worker_id, attempt.decode.fetches)

    def _take_moved(self, attempt: AttemptTrace, trace: PrefillTrace) -> None:
        sink, blocks = attempt.placement.decode.worker_id, trace.blocks_moved
        if trace.writes and blocks:
            took_ms, num_bytes = busy_us(trace.writes) / 1000, trace.bytes_moved
            self._pairs.observe_handoff(trace.worker_id, sink, blocks, num_bytes, took_ms)
        self._take_fetches(trace.worker_id, trace.fetches)

    def _take_fetches(self, sink: str, fetches: Iterable[FetchSpan]) -> None:
        for each in fetches:
            took_ms = (each.done_us - each.sent_us) / 1000
            self._pairs.observe_fetch(each.holder, sink, each.found, took_ms)


def busy_us(writes: Iterable[WriteSpan]) -> int:
    """The time in which at least one of the writes was under way."""
    busy, until = 0, 0
    for each in sorted(writes, key=lambda span: span.post_us):
        busy += max(0, each.done_us - max(until, each.post_us))
        until = max(until, each.done_us)
    return busy
