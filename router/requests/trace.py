"""Where each generation's time went, for running generations and the last finished ones.

Owns the traces behind `/requests/{id}/trace`. Accepts workers' traces whenever they arrive: a
prefill worker's last one comes after its handoff closed, often after the stream ended. Times are
microseconds since the Unix epoch on each process's clock; durations are milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from process.trace_context import CURRENT_TRACE
from protocol.traces import DecodeTrace, PrefillTrace
from router.fleet.metrics import FleetMetrics
from router.routing.view import Placement


@dataclass
class AttemptTrace:
    """One attempt: its placement, its workers' traces, and why it failed if it did."""

    number: int
    placement: Placement
    started_us: int
    prefill: PrefillTrace | None = None
    decode: DecodeTrace | None = None
    failed: str | None = None

    @property
    def last_chunk_end_us(self) -> int:
        """When the prompt's last chunk ended, on whichever worker; 0 if not known."""
        chunks = self.prefill.chunks if self.prefill else self.decode.chunks if self.decode else ()
        return chunks[-1].end_us if chunks else 0

    def as_json(self) -> dict[str, Any]:
        """This attempt as the trace endpoint shows it."""
        return {
            "attempt": self.number,
            "mode": self.placement.mode.value,
            "started_us": self.started_us,
            "prefill": None if self.prefill is None else msgspec.to_builtins(self.prefill),
            "decode": None if self.decode is None else msgspec.to_builtins(self.decode),
            "failed": self.failed,
        }


@dataclass
class RequestTrace:
    """One generation from its arrival to its end; `outcome` stays None while it runs.

    `trace_id` is the id of the client's own trace, if the client sent one.
    """

    request_id: str
    received_us: int
    num_prompt_tokens: int
    attempts: list[AttemptTrace] = field(default_factory=list)
    num_output_tokens: int = 0
    first_token_us: int = 0
    last_token_us: int = 0
    finished_us: int = 0
    outcome: str | None = None
    trace_id: str | None = None

    def note_tokens(self, count: int, now_us: int) -> None:
        """Tokens went out to the client."""
        self.first_token_us = self.first_token_us or now_us
        self.last_token_us = now_us
        self.num_output_tokens += count

    def find(self, attempt: int) -> AttemptTrace | None:
        """The attempt with this number, if there is one."""
        return next((each for each in self.attempts if each.number == attempt), None)

    def durations(self) -> dict[str, float | None]:
        """Milliseconds of each phase of the last attempt; None where it did not happen."""
        ttft = _span_ms(self.received_us, self.first_token_us)
        decode = _span_ms(self.first_token_us, self.last_token_us)
        tpot = None
        if decode is not None and self.num_output_tokens > 1:
            tpot = decode / (self.num_output_tokens - 1)
        spans: dict[str, float | None] = dict.fromkeys(("queue_ms", "prefill_ms", "handoff_ms"))
        if self.attempts:
            spans = _phases(self.attempts[-1])
        return {"ttft_ms": ttft, **spans, "decode_ms": decode, "tpot_ms": tpot}

    def as_json(self) -> dict[str, Any]:
        """The body of `/requests/{id}/trace`."""
        last = self.attempts[-1] if self.attempts else None
        prefill = last.prefill if last else None
        local = last.decode.chunks if last and last.decode else ()
        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "outcome": self.outcome or "running",
            "received_us": self.received_us,
            "placement": _placement_json(last.placement) if last else None,
            "attempts": [each.as_json() for each in self.attempts],
            "first_token_us": self.first_token_us,
            "finished_us": self.finished_us,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_chunks": len(prefill.chunks if prefill else local),
            "blocks_moved": prefill.blocks_moved if prefill else 0,
            "bytes_moved": prefill.bytes_moved if prefill else 0,
            "transport": prefill.transport if prefill else "",
            **self.durations(),
        }


class TraceStore:
    """Traces by generation id: all running ones, and the last `history` that ended."""

    def __init__(self, history: int, metrics: FleetMetrics, wall_us: Callable[[], int]) -> None:
        self._history = history
        self._metrics = metrics
        self.wall_us = wall_us
        self._running: dict[str, RequestTrace] = {}
        self._ended: OrderedDict[str, RequestTrace] = OrderedDict()

    @property
    def num_running(self) -> int:
        """Traces of generations that have not ended."""
        return len(self._running)

    def begin(self, request_id: str, num_prompt_tokens: int) -> RequestTrace:
        """Open the trace of a generation."""
        trace = RequestTrace(request_id, self.wall_us(), num_prompt_tokens)
        context = CURRENT_TRACE.get()
        if context is not None:
            trace.trace_id = context.trace_id
        self._running[request_id] = trace
        return trace

    def end(self, trace: RequestTrace, outcome: str) -> None:
        """Close a trace: "finished", "failed", or "closed" if the consumer went away. Its
        durations go into the metrics. Once a later life of the stream has begun, only the later
        life's trace is kept."""
        trace.outcome = outcome
        trace.finished_us = self.wall_us()
        self._metrics.observe_durations(trace.durations())
        if self._running.get(trace.request_id) is not trace:
            return
        del self._running[trace.request_id]
        self._ended.pop(trace.request_id, None)
        self._ended[trace.request_id] = trace
        while len(self._ended) > self._history:
            self._ended.popitem(last=False)

    def attach_prefill(
        self, request_id: str, attempt: int, trace: PrefillTrace, is_final: bool
    ) -> None:
        """Take a prefill worker's trace; the final one replaces the first token's."""
        if is_final:
            self._metrics.blocks_moved.inc(trace.blocks_moved)
            self._metrics.bytes_moved.inc(trace.bytes_moved)
        found = self._attempt(request_id, attempt)
        if found is not None:
            found.prefill = trace

    def attach_decode(self, request_id: str, attempt: int, trace: DecodeTrace) -> None:
        """Take a decode worker's trace; a later one replaces an earlier one."""
        found = self._attempt(request_id, attempt)
        if found is not None:
            found.decode = trace

    def get(self, request_id: str) -> RequestTrace | None:
        """A generation's trace; an HTTP request's id means its first choice."""
        for name in (request_id, f"{request_id}-0"):
            found = self._running.get(name) or self._ended.get(name)
            if found is not None:
                return found
        return None

    def _attempt(self, request_id: str, attempt: int) -> AttemptTrace | None:
        found = self._running.get(request_id) or self._ended.get(request_id)
        return found.find(attempt) if found else None


def _phases(attempt: AttemptTrace) -> dict[str, float | None]:
    """Queue, prefill and handoff durations of one attempt, on whichever worker they took place.

    The handoff lasts from the end of the last chunk to the first decode step that has its KV.
    """
    prefill, decode = attempt.prefill, attempt.decode
    chunks = prefill.chunks if prefill else decode.chunks if decode else ()
    queue = handoff = None
    if prefill is not None:
        queue = _span_ms(prefill.received_us, prefill.scheduled_us)
        if decode is not None:
            handoff = _span_ms(attempt.last_chunk_end_us, decode.first_step_us)
    elif decode is not None:
        scheduled = chunks[0].start_us if chunks else decode.admitted_us
        queue = _span_ms(decode.received_us, scheduled)
    computed = _span_ms(chunks[0].start_us, chunks[-1].end_us) if chunks else None
    return {"queue_ms": queue, "prefill_ms": computed, "handoff_ms": handoff}


def _span_ms(start_us: int, end_us: int) -> float | None:
    """Milliseconds between two times; None if one of them is missing.

    The clocks of two hosts may differ: a negative span becomes zero.
    """
    if not start_us or not end_us:
        return None
    return max(0, end_us - start_us) / 1000


def _placement_json(placement: Placement) -> dict[str, Any]:
    """The placement, with its decode and prefill workers given by name."""
    return {
        **msgspec.to_builtins(placement),
        "decode": placement.decode.worker_id,
        "prefill": placement.prefill.worker_id if placement.prefill else None,
    }
