"""The traces of running generations and of the last ended ones: the store behind `/requests`.

Accepts workers' traces whenever they arrive: a prefill worker's last one comes after its handoff
closed, often after the stream ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from http_kit.caller import CURRENT_ORIGIN
from process.trace_context import CURRENT_TRACE
from protocol.traces import DecodeTrace, PrefillTrace
from router.fleet.clock_offset import ClockOffset
from router.metrics import FleetMetrics
from router.requests.trace import AttemptTrace, Durations, RequestTrace

MAX_UNTOLD = 64
"""Generations that are accounted for at once, in about a millisecond."""
EndListener = Callable[[RequestTrace], None]
BatchListener = Callable[[Sequence[RequestTrace], Sequence[Durations]], None]
MovedListener = Callable[[AttemptTrace, PrefillTrace], None]


class TraceStore:
    """Traces by generation id: all running ones, and the last `history` that ended."""

    def __init__(self, history: int, metrics: FleetMetrics, wall_us: Callable[[], int]) -> None:
        self._history = history
        self._metrics = metrics
        self.wall_us = wall_us
        self._running: dict[str, RequestTrace] = {}
        self._ended: OrderedDict[str, RequestTrace] = OrderedDict()
        self._on_end: list[EndListener] = []
        self._on_ended: list[BatchListener] = []
        self._untold: list[RequestTrace] = []
        self._on_moved: list[MovedListener] = []
        metrics.before_reading = self.report_ended

    def on_end(self, listener: EndListener) -> None:
        """Call `listener` with each trace when its generation has ended."""
        self._on_end.append(listener)

    def on_ended(self, listener: BatchListener) -> None:
        """Call `listener` with the traces of ended generations and their durations, in batches:
        single calls would cost each request more. A listener calls `report_ended` before it answers
        others."""
        self._on_ended.append(listener)

    def report_ended(self) -> None:
        """Report the generations that have ended since the last call to the metrics and to the
        listeners of `on_ended`."""
        untold, self._untold = self._untold, []
        if not untold:
            return
        durations = [each.durations() for each in untold]
        self._metrics.observe_durations(durations)
        self._count_sources(untold)
        for trace in untold:
            if len(trace.attempts) == 1 and trace.first_token_received_us:
                self._observe_forecast(trace, trace.attempts[0])
        for listener in self._on_ended:
            listener(untold, durations)

    def on_moved(self, listener: MovedListener) -> None:
        """Call `listener` when all blocks of an attempt have moved."""
        self._on_moved.append(listener)

    @property
    def num_running(self) -> int:
        """Traces of generations that have not ended."""
        return len(self._running)

    def begin(self, request_id: str, num_prompt_tokens: int) -> RequestTrace:
        """Open the trace of a generation whose prompt is tokenised."""
        now_us, origin = self.wall_us(), CURRENT_ORIGIN.get()
        received_us = now_us if origin is None else origin.arrived_us
        trace = RequestTrace(request_id, received_us, num_prompt_tokens, now_us)
        if origin is not None:
            trace.owner = origin.caller.digest
            trace.key = origin.caller.tenant.terms.name
        trace.context = CURRENT_TRACE.get()
        self._running[request_id] = trace
        return trace

    def end(self, trace: RequestTrace, outcome: str) -> None:
        """Close a trace: "finished", "failed", or "closed" if the consumer went away. Once a later
        life of the stream has begun, only the later life's trace is kept."""
        trace.outcome = outcome
        trace.finished_us = self.wall_us()
        for listener in self._on_end:
            listener(trace)
        self._untold.append(trace)
        if len(self._untold) >= MAX_UNTOLD:
            self.report_ended()
        if self._running.get(trace.request_id) is not trace:
            return
        del self._running[trace.request_id]
        self._ended.pop(trace.request_id, None)
        self._ended[trace.request_id] = trace
        while len(self._ended) > self._history:
            self._ended.popitem(last=False)

    def _count_sources(self, traces: Sequence[RequestTrace]) -> None:
        """Count where the prompts' KV came from, for the attempts with the first tokens."""
        before = cached = computed = transferred = 0
        for trace in traces:
            first = trace.first_token_attempt
            if first is None or len(trace.attempts) > 1:  # usually there is nothing to sum
                before += trace.num_computed_before
            if first is None:
                continue
            cached += trace.num_cached_tokens
            computed += trace.num_prompt_tokens - trace.num_cached_tokens
            if first.prefill is not None and first.decode is not None:
                moved = first.decode.granted_blocks * first.block_size
                transferred += min(moved, trace.num_prompt_tokens)
        counts = self._metrics.prompt_tokens
        counts.add("computed_before", before)
        counts.add("cached", cached)
        counts.add("computed", computed)
        counts.add("transferred", transferred)

    def _observe_forecast(self, trace: RequestTrace, attempt: AttemptTrace) -> None:
        predicted_ms = attempt.placement.ttft_ms
        if predicted_ms is not None:
            took_ms = (trace.first_token_received_us - attempt.started_us) / 1000
            self._metrics.observe_forecast(predicted_ms, took_ms)
            if attempt.placement.tpot_ms is not None and trace.tpot_ms is not None:
                self._metrics.observe_tpot(attempt.placement.tpot_ms, trace.tpot_ms)

    def attach_prefill(
        self,
        request_id: str,
        attempt: int,
        trace: PrefillTrace,
        is_final: bool,
        clock: ClockOffset | None = None,
    ) -> None:
        """Take the trace of the attempt's prefill worker; the final one replaces the first
        token's."""
        found = self._attempt(request_id, attempt)
        if found is not None and found.involves(trace.worker_id):
            found.prefill = trace
            found.read_clock(trace.worker_id, clock)
            if is_final:
                self._metrics.blocks_moved.inc(trace.blocks_moved)
                self._metrics.bytes_moved.inc(trace.bytes_moved)
                for listener in self._on_moved:
                    listener(found, trace)

    def attach_decode(
        self, request_id: str, attempt: int, trace: DecodeTrace, clock: ClockOffset | None = None
    ) -> None:
        """Take the trace of the attempt's decode worker; a later one replaces an earlier one."""
        found = self._attempt(request_id, attempt)
        if found is not None and found.involves(trace.worker_id):
            found.decode = trace
            found.read_clock(trace.worker_id, clock)

    def get(self, request_id: str) -> RequestTrace | None:
        """A generation's trace; the id of an HTTP request selects its first choice."""
        for name in (request_id, f"{request_id}-0"):
            found = self._running.get(name) or self._ended.get(name)
            if found is not None:
                return found
        return None

    def recent(self) -> Iterator[RequestTrace]:
        """All kept traces: running ones first, then ended ones, the latest first."""
        yield from self._running.values()
        yield from reversed(self._ended.values())

    def running(self) -> Iterator[RequestTrace]:
        """The traces of generations that have not ended."""
        yield from self._running.values()

    def all(self) -> Iterator[RequestTrace]:
        """All kept traces, running ones last."""
        yield from self._ended.values()
        yield from self._running.values()

    def _attempt(self, request_id: str, attempt: int) -> AttemptTrace | None:
        found = self._running.get(request_id) or self._ended.get(request_id)
        return found.find(attempt) if found else None
