"""The history of each generation, for running ones and the last finished ones.

Owns the traces behind `/requests` and receipts. Accepts workers' traces whenever they arrive: a
prefill worker's last one comes after its handoff closed, often after the stream ended. Times are
microseconds since the Unix epoch on each process's clock; durations are milliseconds.
`router.requests.trace_json` makes the JSON.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from http_kit.caller import CURRENT_ORIGIN
from process.trace_context import CURRENT_TRACE, TraceContext
from protocol.traces import DecodeTrace, PrefillTrace
from router.fleet.clock_offset import ClockOffset, ClockReading
from router.metrics import FleetMetrics
from router.routing.placement import Placement

MAX_UNTOLD = 64
"""Generations that are accounted for at once, in about a millisecond."""
_SAME_CLOCK = ClockReading(0, 0)
EndListener = Callable[["RequestTrace"], None]
Durations = dict[str, float | None]
BatchListener = Callable[[Sequence["RequestTrace"], Sequence[Durations]], None]
MovedListener = Callable[["AttemptTrace", PrefillTrace], None]


class AttemptTrace(msgspec.Struct):
    """One attempt: its placement, its workers' traces, and the reason if it failed.

    `source` is the other worker, which sends the KV: a prefill worker, or the decode worker that
    hands the request over. `clocks` are readings of the workers' clocks, taken when their traces
    came. `path` is the path that its KV took, "" if unknown. `reported_computed` counts the prompt
    tokens that the worker on which it failed had computed.
    """

    number: int
    placement: Placement
    started_us: int
    source: str = ""
    prefill: PrefillTrace | None = None
    decode: DecodeTrace | None = None
    failed: str | None = None
    failed_us: int = 0
    block_size: int = 0
    path: str = ""
    reported_computed: int = 0
    clocks: dict[str, ClockReading] = {}

    @property
    def workers(self) -> str:
        """The workers, for people."""
        prefill = self.placement.prefill
        decode = self.placement.decode.worker_id
        return decode if prefill is None else f"{prefill.worker_id} → {decode}"

    def involves(self, worker_id: str) -> bool:
        """Whether this worker takes part in the attempt."""
        return worker_id in (self.placement.decode.worker_id, self.source)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that its workers have reported as computed."""
        traces = [each for each in (self.prefill, self.decode) if each is not None]
        traced = sum(chunk.num_tokens for each in traces for chunk in each.chunks)
        return max(self.reported_computed, traced)

    def clock_of(self, worker_id: str) -> ClockReading:
        """The reading of a worker's clock; without one, a clock equal to ours."""
        return self.clocks.get(worker_id, _SAME_CLOCK)

    def read_clock(self, worker_id: str, clock: ClockOffset | None) -> None:
        """Note a worker's clock."""
        if clock is not None and clock.reading is not None:
            self.clocks[worker_id] = clock.reading


class RequestTrace(msgspec.Struct):
    """One generation from its arrival to its end; `outcome` is None while it runs.

    `context` is the trace that the request is part of, the client's own or one that begins here.
    `owner` is the digest of the key that sent the request, `key` the key's name. `first_attempt` is
    the number of the attempt that gave the first token, 0 before that; this attempt did not compute
    `num_cached_tokens` of the prompt. The dispatcher counts and times the tokens itself, without a
    call for each.
    """

    request_id: str
    received_us: int
    num_prompt_tokens: int
    tokenized_us: int = 0
    attempts: list[AttemptTrace] = []
    num_output_tokens: int = 0
    first_attempt: int = 0
    num_cached_tokens: int = 0
    first_token_received_us: int = 0
    first_token_us: int = 0
    last_token_us: int = 0
    finished_us: int = 0
    outcome: str | None = None
    context: TraceContext | None = None
    owner: bytes = b""
    key: str = ""

    def find(self, attempt: int) -> AttemptTrace | None:
        """The attempt with this number, if there is one."""
        for each in self.attempts:
            if each.number == attempt:
                return each
        return None

    @property
    def first_token_attempt(self) -> AttemptTrace | None:
        """The attempt that gave the first token; None before that."""
        return self.find(self.first_attempt) if self.first_attempt else None

    @property
    def num_computed_before(self) -> int:
        """Prompt tokens that earlier attempts than the one with the first token computed, as far as
        their workers have reported."""
        first_token_attempt = self.first_token_attempt
        lost = [
            each
            for each in self.attempts
            if first_token_attempt is None or each.number < first_token_attempt.number
        ]
        return sum(each.computed_tokens for each in lost)

    @property
    def trace_id(self) -> str | None:
        """The id of the trace that the request is part of."""
        return None if self.context is None else self.context.trace_id

    @property
    def ttft_ms(self) -> float | None:
        """From the arrival to the first token; None without a token."""
        return _span_ms(self.received_us, self.first_token_us)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for fewer than two."""
        decode = _span_ms(self.first_token_us, self.last_token_us)
        if decode is None or self.num_output_tokens < 2:
            return None
        return decode / (self.num_output_tokens - 1)

    def durations(self) -> Durations:
        """Milliseconds of each phase of the last attempt; None for phases that did not happen.
        Avoids helper calls, because it runs for every request."""
        received, first, last = self.received_us, self.first_token_us, self.last_token_us
        attempts, decode_ms = self.attempts, _span_ms(first, last)
        found = dict(_NOTHING)
        if self.tokenized_us:
            found["tokenize_ms"] = max(0, self.tokenized_us - received) / 1000
            if attempts:
                found["placement_ms"] = max(0, attempts[0].started_us - self.tokenized_us) / 1000
        if first:
            found["ttft_ms"] = max(0, first - received) / 1000
            found["delivery_ms"] = _span_ms(self.first_token_received_us, first)
            found["total_ms"] = max(0, last - received) / 1000
            found["decode_ms"] = decode_ms
            if decode_ms is not None and self.num_output_tokens > 1:
                found["tpot_ms"] = decode_ms / (self.num_output_tokens - 1)
        if attempts:
            _add_phases(attempts[-1], found)
        return found


_NOTHING: Durations = dict.fromkeys(
    (
        "tokenize_ms", "placement_ms", "dispatch_ms", "queue_ms", "prefill_ms", "ttft_ms",
        "delivery_ms", "handoff_ms", "first_step_ms", "decode_ms", "tpot_ms", "total_ms",
    )
)  # fmt: skip


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
        for trace in untold:
            self._count_sources(trace)
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

    def _count_sources(self, trace: RequestTrace) -> None:
        """Count where the prompt's KV came from, for the attempt with the first token."""
        first = trace.first_token_attempt
        if first is None or len(trace.attempts) > 1:  # usually there is nothing to sum
            self._metrics.prompt_tokens.add("computed_before", trace.num_computed_before)
        if first is None:
            return
        cached = trace.num_cached_tokens
        self._metrics.prompt_tokens.add("cached", cached)
        self._metrics.prompt_tokens.add("computed", trace.num_prompt_tokens - cached)
        if first.prefill is not None and first.decode is not None:
            moved = first.decode.granted_blocks * first.block_size
            self._metrics.prompt_tokens.add("transferred", min(moved, trace.num_prompt_tokens))

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


def _add_phases(attempt: AttemptTrace, found: Durations) -> None:
    """Add the phases of one attempt, on whichever worker they took place.

    The handoff lasts from the end of the last chunk to the first decode step that has its KV.
    """
    prefill, decode = attempt.prefill, attempt.decode
    worker = prefill or decode
    if worker is None:
        return
    chunks = worker.chunks
    offset_us = attempt.clock_of(worker.worker_id).offset_us
    if worker.received_us:
        found["dispatch_ms"] = max(0, worker.received_us - offset_us - attempt.started_us) / 1000
    if chunks:
        found["prefill_ms"] = max(0, chunks[-1].end_us - chunks[0].start_us) / 1000
    if prefill is not None:
        found["queue_ms"] = _span_ms(prefill.received_us, prefill.scheduled_us)
    elif decode is not None:
        scheduled = chunks[0].start_us if chunks else decode.admitted_us
        found["queue_ms"] = _span_ms(decode.received_us, scheduled)
    if decode is None:
        return
    found["first_step_ms"] = decode.first_step_ms
    if prefill is not None and chunks and decode.first_step_us:
        began_us = chunks[-1].end_us - offset_us
        first_us = decode.first_step_us - attempt.clock_of(decode.worker_id).offset_us
        found["handoff_ms"] = max(0, first_us - began_us) / 1000


def _span_ms(start_us: int, end_us: int) -> float | None:
    """Milliseconds between two times; None if one of them is missing.

    The clocks of two hosts may differ: a negative span becomes zero.
    """
    if not start_us or not end_us:
        return None
    return max(0, end_us - start_us) / 1000
