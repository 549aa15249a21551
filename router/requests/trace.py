"""The trace of one generation: its attempts, its workers' traces, its times.

Times are microseconds since the Unix epoch on each process's clock; durations are milliseconds.
`router.requests.trace_store` keeps the traces, `router.requests.trace_json` makes their JSON.
"""

from __future__ import annotations

import msgspec

from process.trace_context import TraceContext
from protocol.traces import DecodeTrace, PrefillTrace
from router.fleet.clock_offset import ClockOffset, ClockReading
from router.routing.placement import Placement

_SAME_CLOCK = ClockReading(0, 0)
Durations = dict[str, float | None]


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

    `error` is the code of the error with which it ended, "" without one.
    `context` is the trace that the request is part of, the client's own or one that begins here.
    `owner` is the digest of the key that sent the request, `key` the key's name. The attempt that
    gave the first token is `first_token_attempt`; it did not compute `num_cached_tokens` of the
    prompt. The dispatcher counts and times the tokens itself, without a call for each.
    """

    request_id: str
    received_us: int
    num_prompt_tokens: int
    tokenized_us: int = 0
    attempts: list[AttemptTrace] = []
    num_output_tokens: int = 0
    first_token_attempt: AttemptTrace | None = None
    num_cached_tokens: int = 0
    first_token_received_us: int = 0
    first_token_us: int = 0
    last_token_us: int = 0
    finished_us: int = 0
    outcome: str | None = None
    error: str = ""
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


def _add_phases(attempt: AttemptTrace, found: Durations) -> None:
    """Add the phases of one attempt, on whichever worker they took place.

    The handoff lasts from the end of the last chunk to the first decode step that has its KV. The
    phases of a prompt that another worker computes are unknown until that worker's trace is here:
    all tokens of the decode worker may overtake the trace.
    """
    prefill, decode = attempt.prefill, attempt.decode
    if decode is not None:
        found["first_step_ms"] = decode.first_step_ms
    worker = prefill if attempt.source else decode
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
        if chunks and decode is not None and decode.first_step_us:
            began_us = chunks[-1].end_us - offset_us
            first_us = decode.first_step_us - attempt.clock_of(decode.worker_id).offset_us
            found["handoff_ms"] = max(0, first_us - began_us) / 1000
    elif decode is not None:
        scheduled = chunks[0].start_us if chunks else decode.admitted_us
        found["queue_ms"] = _span_ms(decode.received_us, scheduled)


def _span_ms(start_us: int, end_us: int) -> float | None:
    """Milliseconds between two times; None if one of them is missing.

    The clocks of two hosts may differ: a negative span becomes zero.
    """
    if not start_us or not end_us:
        return None
    return max(0, end_us - start_us) / 1000
