"""A trace as operators and clients read it: JSON by the router's clock, with every stage.

Workers' times are shifted first (`router.requests.shifted_traces`), so that all times of one answer
are from one clock; `clock_offsets_us` has the shifts.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from protocol.traces import DecodeTrace, PrefillTrace
from router.requests.interface import ChosenWorkers, GenerationTiming, TimingLookup
from router.requests.prompt_sources import prompt_sources
from router.requests.shifted_traces import shifted
from router.requests.stages import (
    AttemptTimes,
    RequestTimes,
    Stage,
    StageTime,
    first_token_times,
    stage_times,
)
from router.requests.trace import AttemptTrace, RequestTrace
from router.requests.trace_store import TraceStore
from router.routing.placement import Candidate

RUNNING = "running"


def trace_json(trace: RequestTrace, now_us: int) -> dict[str, Any]:
    """The body of `/requests/{id}/trace`."""
    last = trace.attempts[-1] if trace.attempts else None
    first = trace.first_token_attempt
    predicting = first or last
    times = times_of(trace, now_us)
    prefill = last.prefill if last else None
    local = last.decode.chunks if last and last.decode else ()
    return {
        "request_id": trace.request_id,
        "trace_id": trace.trace_id,
        "key": trace.key or None,
        "outcome": trace.outcome or RUNNING,
        "error": trace.error or None,
        "received_us": trace.received_us,
        "tokenized_us": trace.tokenized_us,
        "placement": _placement_json(last) if last else None,
        "attempts": [
            _attempt_json(each, shown)
            for each, shown in zip(trace.attempts, times.attempts, strict=True)
        ],
        "first_token_received_us": trace.first_token_received_us,
        "first_token_us": trace.first_token_us,
        "last_token_us": trace.last_token_us,
        "finished_us": trace.finished_us,
        "clock_offsets_us": {
            name: reading.offset_us
            for attempt in trace.attempts
            for name, reading in attempt.clocks.items()
        },
        "num_prompt_tokens": trace.num_prompt_tokens,
        "num_cached_tokens": trace.num_cached_tokens,
        "num_computed_before": trace.num_computed_before,
        "prompt_sources": prompt_sources(
            _computing(trace), trace.num_prompt_tokens, trace.num_cached_tokens
        ),
        "num_output_tokens": trace.num_output_tokens,
        "num_chunks": len(prefill.chunks if prefill else local),
        "blocks_moved": prefill.blocks_moved if prefill else 0,
        "bytes_moved": prefill.bytes_moved if prefill else 0,
        "transport": prefill.transport if prefill else "",
        "first_token_attempt": first.number if first else None,
        "predicted_ttft_ms": predicting.placement.ttft_ms if predicting else None,
        **trace.durations(),
        "stages": [_stage_json(each) for each in stage_times(times)],
    }


def _computing(trace: RequestTrace) -> PrefillTrace | DecodeTrace | None:
    """The report of the worker that computed the prompt for the first token."""
    attempt = trace.first_token_attempt
    if attempt is None:
        return None
    return attempt.prefill or attempt.decode


def receipt_json(trace: RequestTrace, now_us: int) -> dict[str, Any]:
    """The body of `/v1/requests/{id}/receipt`: where the request ran and why, and what happened.
    Without process ids, endpoints or clocks."""
    whole = trace_json(trace, now_us)
    names = (
        "request_id", "trace_id", "outcome", "error", "received_us", "finished_us", "placement",
        "first_token_attempt", "predicted_ttft_ms", "ttft_ms", "tpot_ms", "num_prompt_tokens",
        "num_cached_tokens", "num_computed_before", "prompt_sources", "num_output_tokens",
        "attempts", "stages",
    )  # fmt: skip
    return {name: whole[name] for name in names}


def row_json(trace: RequestTrace, now_us: int) -> dict[str, Any]:
    """One row of `/requests`."""
    last = trace.attempts[-1].placement if trace.attempts else None
    rows = first_token_times(times_of(trace, now_us))
    largest = max(rows, key=lambda each: each.ms)
    return {
        "request_id": trace.request_id,
        "key": trace.key or None,
        "outcome": trace.outcome or RUNNING,
        "received_us": trace.received_us,
        "num_attempts": len(trace.attempts),
        "prefill": last.prefill.worker_id if last and last.prefill else None,
        "decode": last.decode.worker_id if last else None,
        "ttft_ms": trace.ttft_ms,
        "tpot_ms": trace.tpot_ms,
        "largest_stage": largest.stage.value,
        "stages": [[each.stage.value, each.ms] for each in rows],
    }


def timing_lookup(traces: TraceStore) -> TimingLookup:
    """A function that returns the timing of a generation so far, for API clients."""

    def timing_of(request_id: str) -> GenerationTiming | None:
        trace = traces.get(request_id)
        return None if trace is None else _timing(trace)

    return timing_of


def _timing(trace: RequestTrace) -> GenerationTiming:
    spans = trace.durations()
    placement = None
    if trace.attempts:
        last = trace.attempts[-1].placement
        prefill = last.prefill.worker_id if last.prefill else None
        placement = ChosenWorkers(last.mode.value, prefill, last.decode.worker_id, last.reason)
    return GenerationTiming(
        placement=placement,
        num_attempts=len(trace.attempts),
        ttft_ms=spans["ttft_ms"],
        queue_ms=spans["queue_ms"],
        prefill_ms=spans["prefill_ms"],
        handoff_ms=spans["handoff_ms"],
        decode_ms=spans["decode_ms"],
    )


def times_of(trace: RequestTrace, now_us: int) -> RequestTimes:
    """All times of the trace by the router's clock."""
    until_us = trace.finished_us or now_us
    nexts = (*(each.started_us for each in trace.attempts[1:]), until_us)
    return RequestTimes(
        received_us=trace.received_us,
        tokenized_us=trace.tokenized_us,
        first_token_received_us=trace.first_token_received_us,
        first_token_us=trace.first_token_us,
        last_token_us=trace.last_token_us,
        until_us=until_us,
        is_running=trace.outcome is None,
        num_prompt_tokens=trace.num_prompt_tokens,
        attempts=tuple(
            _attempt_times(trace, each, next_us)
            for each, next_us in zip(trace.attempts, nexts, strict=False)
        ),
    )


def _attempt_times(trace: RequestTrace, attempt: AttemptTrace, next_us: int) -> AttemptTimes:
    prefill, decode = attempt.prefill, attempt.decode
    is_first = attempt.started_us <= trace.first_token_received_us <= next_us
    if prefill is not None:
        latest = trace.first_token_received_us if is_first and prefill.chunks else 0
        clock = attempt.clock_of(prefill.worker_id)
        prefill = shifted(prefill, clock, attempt.started_us, latest)
    if decode is not None:
        clock = attempt.clock_of(decode.worker_id)
        decode = shifted(decode, clock, attempt.started_us, min(trace.last_token_us, next_us))
    return AttemptTimes(
        mode=attempt.placement.mode,
        started_us=attempt.started_us,
        failed_us=attempt.failed_us,
        next_us=next_us,
        workers=attempt.workers,
        failed=attempt.failed,
        prefill=prefill,
        decode=decode,
        path=attempt.path,
    )


def _attempt_json(attempt: AttemptTrace, times: AttemptTimes) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "mode": attempt.placement.mode.value,
        "started_us": attempt.started_us,
        "placement": _placement_json(attempt),
        "prefill": None if times.prefill is None else _prefill_json(times.prefill, attempt.path),
        "decode": None if times.decode is None else _decode_json(times.decode),
        "failed": attempt.failed,
        "failed_us": attempt.failed_us or None,
    }


def _prefill_json(trace: PrefillTrace, path: str) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(trace)
    return {**shown, "path": path or None}


def _decode_json(trace: DecodeTrace) -> dict[str, Any]:
    """The trace with its steps as lists: start, end, batch, number of steps, prompt tokens."""
    shown: dict[str, Any] = msgspec.to_builtins(trace)
    del shown["steps_since_us"]
    shown["steps"] = [
        [each.start_us, each.end_us, each.batch, each.num_steps, each.chunk_tokens]
        for each in trace.step_spans
    ]
    return shown


def _placement_json(attempt: AttemptTrace) -> dict[str, Any]:
    """The placement, with its decode and prefill workers given by name."""
    placement = attempt.placement
    shown: dict[str, Any] = msgspec.to_builtins(placement)
    return {
        **shown,
        "decode": placement.decode.worker_id,
        "prefill": placement.prefill.worker_id if placement.prefill else None,
        "decode_candidates": _candidates_json(placement.decode_candidates, placement.tie_ms),
        "prefill_candidates": _candidates_json(placement.prefill_candidates, placement.tie_ms),
    }


def _candidates_json(candidates: tuple[Candidate, ...], tie_ms: float) -> list[dict[str, Any]]:
    if not candidates:
        return []
    limit = min(each.cost_ms for each in candidates) + tie_ms
    return [{**msgspec.to_builtins(each), "near_tie": each.cost_ms <= limit} for each in candidates]


def _stage_json(row: StageTime) -> dict[str, Any]:
    shown = asdict(row)
    shown["part"], shown["stage"] = row.part.value, Stage(row.stage).value
    return shown
