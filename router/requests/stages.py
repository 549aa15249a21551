"""The stages of a request: its spans, laid end to end, for every millisecond.

Each microsecond between two marks belongs to the first span that covers it, and to UNEXPLAINED if
none does, so the stages of a part always add up to the part. Pure: all times are of one clock;
workers' times are already shifted to the router's (`router.requests.shifted_traces`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from process.number_text import count, integer
from protocol.traces import ChunkSpan, DecodeTrace, PrefillTrace
from router.routing.placement import Mode


class Part(StrEnum):
    """The two parts of a request: up to its first token, and from there to its last."""

    FIRST_TOKEN = "first_token"
    REST = "rest"


class Stage(StrEnum):
    """The kind of a span: what its time was spent on."""

    TOKENIZE = "tokenize"
    """From the arrival of the request's head: received, validated, tokenised."""
    PLACEMENT = "placement"
    """Admission, the wait for this router's turn, and the choice of workers."""
    LOST_ATTEMPT = "lost_attempt"
    """An attempt that failed, until the next one began."""
    DISPATCH = "dispatch"
    """From the router to the worker, which reads messages between two steps."""
    QUEUE = "queue"
    """Waiting on the worker for the first chunk."""
    PREFILL = "prefill"
    """The prompt's chunks."""
    BETWEEN_CHUNKS = "between_chunks"
    """Between two chunks: steps of other prompts, or no step."""
    REPORT = "report"
    """The first token on its way from the worker to the router."""
    DELIVERY = "delivery"
    """The first token: detokenised and written to the client."""
    TRANSFER = "transfer"
    """Handoff: KV blocks that no chunk hid."""
    STEP_BOUNDARY = "step_boundary"
    """Handoff: all blocks have arrived; the running step has to end first."""
    DECODE = "decode"
    """Decode steps."""
    SHARED_DECODE = "shared_decode"
    """Decode steps that also computed chunks of other prompts."""
    STALL = "stall"
    """Longer gaps between decode steps, with a reason."""
    BETWEEN_STEPS = "between_steps"
    """Short gaps between decode steps."""
    LAST_TOKEN = "last_token"
    """The last token on its way to the router and the client."""
    WAITING = "waiting"
    """A running attempt whose workers have not reported anything yet."""
    UNEXPLAINED = "unexplained"
    """No span covers it."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time of one stage; `where` names the process, `text` the event."""

    start_us: int
    end_us: int
    stage: Stage
    where: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class StageTime:
    """A row of the table of stages."""

    part: Part
    stage: Stage
    where: str
    ms: float
    text: str


@dataclass(frozen=True, slots=True)
class AttemptTimes:
    """One attempt's times by the router's clock. `failed_us` is the time of its failure, 0 if it
    did not fail. `next_us` is the start of the next attempt, or the request's end. `workers` names
    its workers, for people."""

    mode: Mode
    started_us: int
    failed_us: int
    next_us: int
    workers: str
    failed: str | None
    prefill: PrefillTrace | None
    decode: DecodeTrace | None
    path: str = ""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """A request's marks by the router's clock; 0 for events that have not happened. `until_us` is
    its end, or now."""

    received_us: int
    tokenized_us: int
    first_token_received_us: int
    first_token_us: int
    last_token_us: int
    until_us: int
    is_running: bool
    num_prompt_tokens: int
    attempts: tuple[AttemptTimes, ...]


def stage_times(times: RequestTimes) -> list[StageTime]:
    """The stages of both parts, with UNEXPLAINED in each, even if it is 0. An output may have
    thousands of steps, so this takes milliseconds."""
    first = first_token_times(times)
    if not times.first_token_us or times.last_token_us <= times.first_token_us:
        return first
    rest = _laid_out(Part.REST, _rest_spans(times), times.first_token_us, times.last_token_us)
    return first + rest


def first_token_times(times: RequestTimes) -> list[StageTime]:
    """The stages of the first part, which ends with the first token, or with the request if there
    is no token."""
    end = times.first_token_us or times.until_us
    return _laid_out(Part.FIRST_TOKEN, _first_spans(times), times.received_us, end)


def _laid_out(part: Part, spans: Iterable[Span], start_us: int, end_us: int) -> list[StageTime]:
    """The spans end to end between two marks, summed up by stage and place."""
    sums: dict[tuple[Stage, str], list[int]] = {}
    texts: dict[tuple[Stage, str], tuple[int, str]] = {}
    cursor, unexplained = start_us, 0
    for span in sorted(spans, key=lambda each: each.start_us):
        begin, end = max(span.start_us, cursor), min(span.end_us, end_us)
        if end <= begin:
            continue
        unexplained += begin - cursor
        cursor = end
        key = (span.stage, span.where)
        sums.setdefault(key, []).append(end - begin)
        if end - begin >= texts.get(key, (0, ""))[0]:
            texts[key] = (end - begin, span.text)  # the longest span's text
    unexplained += max(0, end_us - cursor)
    rows = [
        StageTime(part, stage, where, sum(parts) / 1000, texts[stage, where][1])
        for (stage, where), parts in sums.items()
    ]
    rows.append(StageTime(part, Stage.UNEXPLAINED, "", unexplained / 1000, ""))
    return rows


# -- up to the first token ----------------------------------------------------------------------


def _first_spans(times: RequestTimes) -> list[Span]:
    router = "router"
    tokens = count(times.num_prompt_tokens, "token")
    spans = [Span(times.received_us, times.tokenized_us, Stage.TOKENIZE, router, tokens)]
    if times.attempts:
        started_us = times.attempts[0].started_us
        spans.append(Span(times.tokenized_us, started_us, Stage.PLACEMENT, router))
    for attempt in times.attempts:
        is_last = attempt is times.attempts[-1]
        if attempt.failed is not None and not is_last:
            spans.append(_lost(attempt))
        elif attempt.prefill is None and attempt.decode is None:
            if is_last and times.is_running:
                until_us = times.first_token_received_us or times.until_us
                text = "workers report with the first token"
                waiting = Stage.WAITING
                spans.append(Span(attempt.started_us, until_us, waiting, attempt.workers, text))
        else:
            spans += _prefill_spans(attempt, times)
    received = times.first_token_received_us
    if received:
        spans.append(Span(received, times.first_token_us, Stage.DELIVERY, router, "to the client"))
    return spans


def _prefill_spans(attempt: AttemptTimes, times: RequestTimes) -> list[Span]:
    """From the attempt's start to its first token, on whichever worker computed the prompt."""
    trace = attempt.prefill or attempt.decode
    assert trace is not None
    chunks, where = trace.chunks, trace.worker_id
    scheduled = attempt.prefill.scheduled_us if attempt.prefill else 0
    scheduled = scheduled or (chunks[0].start_us if chunks else trace.received_us)
    spans = [
        Span(attempt.started_us, trace.received_us, Stage.DISPATCH, f"router → {where}"),
        Span(trace.received_us, scheduled, Stage.QUEUE, where),
    ]
    if not chunks:
        return spans
    computed = sum(each.num_tokens for each in chunks)
    text = (
        f"{count(computed, 'token')} in {count(len(chunks), 'chunk')}; "
        f"{integer(trace.cached_tokens)} from the cache"
    )
    text += _fetched_text(trace)
    spans += [Span(each.start_us, each.end_us, Stage.PREFILL, where, text) for each in chunks]
    spans += _between(scheduled, chunks, attempt)
    if times.first_token_received_us:
        report = Span(
            chunks[-1].end_us, times.first_token_received_us, Stage.REPORT, f"{where} → router"
        )
        spans.append(report)
    return spans


_PEERS = "other workers' caches"


def _fetched_text(trace: PrefillTrace | DecodeTrace) -> str:
    """How many tokens came from other workers' caches, and how many from each tier."""
    blocks: dict[str, int] = {}
    for each in trace.fetches:
        blocks[each.tier] = blocks.get(each.tier, 0) + each.found
    per_block = trace.fetched_tokens // max(1, sum(blocks.values()))
    return "".join(
        f", {integer(number * per_block)} from {tier or _PEERS}"
        for tier, number in blocks.items()
        if number and per_block
    )


def _between(scheduled_us: int, chunks: tuple[ChunkSpan, ...], attempt: AttemptTimes) -> list[Span]:
    """The gaps between the prompt's chunks."""
    trace = attempt.prefill or attempt.decode
    assert trace is not None
    waits = attempt.prefill.waits if attempt.prefill else ()
    reasons = {each.end_us: each.reason for each in waits}
    ends = [scheduled_us, *(each.end_us for each in chunks)]
    return [
        Span(
            end, chunk.start_us, Stage.BETWEEN_CHUNKS, trace.worker_id,
            reasons.get(chunk.start_us, "between two steps"),
        )
        for end, chunk in zip(ends, chunks, strict=False)
    ]  # fmt: skip


def _lost(attempt: AttemptTimes) -> Span:
    text = attempt.failed or ""
    return Span(attempt.started_us, attempt.next_us, Stage.LOST_ATTEMPT, attempt.workers, text)


# -- from the first token to the last -------------------------------------------------------------


def _rest_spans(times: RequestTimes) -> list[Span]:
    spans: list[Span] = []
    for attempt in times.attempts:
        is_last = attempt is times.attempts[-1]
        if attempt.decode is not None:
            spans += _decode_spans(attempt, times)
        if is_last:
            continue
        if attempt.failed is not None:
            begin, failed_us = max(times.first_token_us, attempt.started_us), attempt.failed_us
            text = "its steps are not known: it was lost"
            spans.append(Span(begin, failed_us, Stage.DECODE, attempt.workers, text))
            spans.append(replace(_lost(attempt), start_us=failed_us))
        elif attempt.decode is not None:
            end = attempt.decode.finished_us
            text = "handed over to another decode worker"
            spans.append(Span(end, attempt.next_us, Stage.LOST_ATTEMPT, attempt.workers, text))
    return spans


def _decode_spans(attempt: AttemptTimes, times: RequestTimes) -> list[Span]:
    trace = attempt.decode
    assert trace is not None
    where, spans = trace.worker_id, _handoff_spans(attempt, times)
    steps = trace.step_spans
    reasons = {each.start_us: each.reason for each in trace.stalls}
    if not steps:
        return spans
    text = count(sum(each.num_steps for each in steps), "step")
    shared = sum(each.chunk_tokens for each in steps)
    shared_text = f"beside {count(shared, 'prompt token')} of other requests"
    end = steps[0].start_us
    for each in steps:
        is_alone = each.chunk_tokens == 0
        stage = Stage.DECODE if is_alone else Stage.SHARED_DECODE
        words = text if is_alone else shared_text
        if each.start_us > end:
            reason = reasons.get(end)
            gap = Stage.STALL if reason else Stage.BETWEEN_STEPS
            spans.append(Span(end, each.start_us, gap, where, reason or "the worker's own work"))
        spans.append(Span(each.start_us, each.end_us, stage, where, words))
        end = each.end_us
    if attempt is times.attempts[-1]:
        last = f"{where} → router"
        spans.append(Span(end, times.last_token_us, Stage.LAST_TOKEN, last, "to the client"))
    return spans


def _handoff_spans(attempt: AttemptTimes, times: RequestTimes) -> list[Span]:
    """From the first token, or the attempt's start, to the first step with all KV."""
    trace = attempt.decode
    assert trace is not None
    begin, where = max(times.first_token_us, attempt.started_us), trace.worker_id
    spans = []
    if attempt.prefill is not None:
        source = attempt.prefill
        way = f"{source.worker_id} → {where}"
        blocks = count(source.blocks_moved, "block")
        text = f"{blocks} over {attempt.path or source.transport or '?'}"
        spans.append(Span(begin, trace.blocks_arrived_us, Stage.TRANSFER, way, text))
        begin = max(begin, trace.blocks_arrived_us)
    elif attempt.mode is Mode.HANDOVER and trace.blocks_arrived_us:
        spans.append(Span(begin, trace.blocks_arrived_us, Stage.TRANSFER, where, "handover"))
        begin = max(begin, trace.blocks_arrived_us)
    if trace.first_step_us:
        text = "the running step had to end"
        spans.append(Span(begin, trace.first_step_us, Stage.STEP_BOUNDARY, where, text))
    return spans
