"""The facts of a finished request for the doctor, from its trace. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from console.doctor.observation import RequestFacts
from console.doctor.symptoms import median_or_none
from protocol.traces import StepSpan
from router.requests.stages import Part, stage_times
from router.requests.trace import AttemptTrace, RequestTrace
from router.requests.trace_json import times_of
from router.routing.placement import Mode

MIN_STEPS = 32
"""The fewest decode steps for which the quarters of an output are compared."""


def request_facts(trace: RequestTrace, now_us: int) -> RequestFacts:
    """The facts of a trace that has ended."""
    first: dict[str, float] = {}
    rest: dict[str, float] = {}
    for row in stage_times(times_of(trace, now_us)):
        part = first if row.part is Part.FIRST_TOKEN else rest
        part[row.stage.value] = part.get(row.stage.value, 0.0) + row.ms
    last = trace.attempts[-1] if trace.attempts else None
    placement = last.placement if last else None
    spans = last.decode.step_spans if last and last.decode else []
    durations = [(each.end_us - each.start_us) / each.num_steps / 1000 for each in spans]
    long, shared, long_ms = _long_steps(spans, durations)
    early, late = _quarters(durations)
    return RequestFacts(
        received_us=trace.received_us,
        key=trace.key,
        outcome=trace.outcome or "finished",
        num_attempts=len(trace.attempts),
        failed_attempts=tuple(_workers(e) for e in trace.attempts if e.failed is not None),
        prefill=placement.prefill.worker_id if placement and placement.prefill else None,
        decode=placement.decode.worker_id if placement else None,
        num_prompt_tokens=trace.num_prompt_tokens,
        cached_tokens=trace.num_cached_tokens,
        expected_cached_tokens=_expected(trace.first_token_attempt, trace.num_prompt_tokens),
        decode_cached_tokens=last.decode.cached_tokens if last and last.decode else 0,
        num_output_tokens=trace.num_output_tokens,
        ttft_ms=trace.ttft_ms,
        tpot_ms=trace.tpot_ms,
        first=first,
        rest=rest,
        num_steps=sum(each.num_steps for each in spans),
        num_long_steps=long,
        num_long_shared_steps=shared,
        long_step_ms=long_ms,
        early_step_ms=early,
        late_step_ms=late,
    )


def _workers(attempt: AttemptTrace) -> tuple[str, ...]:
    """The ids of the workers that an attempt was placed on."""
    placed = (attempt.placement.prefill, attempt.placement.decode)
    return tuple(each.worker_id for each in placed if each is not None)


def _expected(attempt: AttemptTrace | None, num_tokens: int) -> int:
    """The prompt tokens that the placement expected in the worker's cache."""
    if attempt is None or attempt.placement.mode not in (Mode.LOCAL, Mode.REMOTE):
        return 0
    if attempt.prefill is None and attempt.decode is None:
        return 0  # the worker has not reported its cached tokens
    chosen = attempt.placement.prefill or attempt.placement.decode
    return max(0, num_tokens - chosen.missing_tokens)


def _long_steps(
    spans: Sequence[StepSpan], durations: Sequence[float]
) -> tuple[int, int, float | None]:
    """The number of long steps (over twice the median), the number of long steps with prompt
    tokens, and the median of the long steps in ms."""
    if not spans:
        return 0, 0, None
    limit = 2 * median(durations)
    long = [(span, ms) for span, ms in zip(spans, durations, strict=True) if ms > limit]
    shared = sum(span.num_steps for span, _ in long if span.chunk_tokens)
    return sum(span.num_steps for span, _ in long), shared, median_or_none(ms for _, ms in long)


def _quarters(durations: Sequence[float]) -> tuple[float | None, float | None]:
    """The median step of the first and of the last quarter."""
    quarter = len(durations) // 4
    if len(durations) < MIN_STEPS:
        return None, None
    return median(durations[:quarter]), median(durations[-quarter:])
