"""Answers a request with its choices: whole, or as a stream of events.

All endpoints that generate share this code; an `AnswerFormat` produces the JSON. When the client
disconnects, every choice ends at once, in a whole answer as in a stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from gateway.api.context import ApiContext
from gateway.api.replies.answer_format import AnswerFormat, TimedFormat, wants_timing
from gateway.api.replies.best_of import best_of_each_prompt
from gateway.api.replies.event_chunks import EventChunks
from gateway.api.replies.json_pieces import take_some
from gateway.api.replies.plan import Plan
from gateway.api.replies.timing import TIMING_HEADER
from gateway.api.replies.usage import UsageCount
from gateway.http.json_response import MAX_PIECE_BYTES, LongAnswer, WholeAnswer
from gateway.http.request_scope import RequestRecord, record_of
from gateway.metrics import CLIENT_GONE_STATUS, LatencyProbe
from gateway.output.choices import Choice, TextSink, run_choices
from gateway.output.event_ids import Bookmark, EventCount, Unmarked
from gateway.output.output_text import OutputToken, TextDelta
from http_kit.disconnect import ClientGone, connection_of, while_connected
from http_kit.errors import describe
from http_kit.sse import (
    KEEP_ALIVE,
    KEEP_ALIVE_ALONE,
    OPENAI_STYLE,
    EventSink,
    EventStream,
    EventWriter,
    StreamStyle,
)
from protocol.sampling import PromptLogprobs

MAX_INLINE_VALUES = 4096
"""Longer answers are formatted in a thread, and written in pieces."""
DELTA_BYTES, VALUE_BYTES = 256, 150
"""Memory of a delta, and of a log-probability of an output token."""
RELEASED_AT_ONCE = 64
COUNTED_BYTES = 64 * 1024
"""An answer's memory is counted in steps of this size."""
_TIMING = TIMING_HEADER.encode()
_EVENTS = b"text/event-stream"
"""Clients that say in `Accept` that they read this get the ids of events. Others, such as load
generators with a reader of their own, often know no other field than `data`."""


async def reply(
    request: Request,
    context: ApiContext,
    plan: Plan,
    answer_format: AnswerFormat,
    style: StreamStyle = OPENAI_STYLE,
) -> Response:
    """Runs the choices. Raises errors that occur before there is anything to send."""
    record, fields, choices = record_of(request.scope), plan.fields, plan.choices
    if _TIMING in record.headers and wants_timing(record.header(_TIMING)):
        answer_format = TimedFormat(answer_format, choices, fields.wants_usage, context.timing_of)
    usage = UsageCount(choices)
    run = _runner(context, record, plan, usage)
    if not fields.stream:
        answer = _Answer(plan, usage, record)
        try:
            await while_connected(connection_of(request.scope), run(answer))
            if answer.num_values <= MAX_INLINE_VALUES:
                return WholeAnswer(b"".join(answer.pieces(answer_format)))
        except BaseException:
            context.tokenizer.start_in_thread(answer.release)
            raise
        document = _LongDocument(answer, answer_format)
        return LongAnswer(
            lambda: context.tokenizer.for_answer(document.next_piece),
            lambda: context.tokenizer.start_in_thread(document.release),
        )

    has_ids = bool(plan.identity.life) or _EVENTS in record.headers.get(b"accept", b"")
    if not has_ids and style.keep_alive == KEEP_ALIVE:
        style = replace(style, keep_alive=KEEP_ALIVE_ALONE)

    async def produce(writer: EventWriter) -> None:
        bookmark: Bookmark | EventCount | Unmarked = Unmarked()
        if has_ids:
            bookmark = plan.bookmark(context.ids_key, record.request_digest)
        chunks = EventChunks(writer, plan, usage, bookmark, answer_format, context.tokenizer)
        try:
            await run(chunks)
            await chunks.finish()
        finally:
            chunks.close()

    return event_stream(context, record, produce, style)


async def run_unattended(
    context: ApiContext, record: RequestRecord, plan: Plan, answer_format: AnswerFormat
) -> None:
    """Runs the choices of a request whose client does not wait. The answer format is given the
    whole answer, whose JSON is dropped. Raises errors of the generation."""
    usage = UsageCount(plan.choices)
    answer = _Answer(plan, usage, record)
    try:
        await _runner(context, record, plan, usage)(answer)
        await context.tokenizer.for_answer(lambda: deque(answer.pieces(answer_format), maxlen=0))
    finally:
        context.tokenizer.start_in_thread(answer.release)


async def run_into(
    context: ApiContext,
    record: RequestRecord,
    plan: Plan,
    answer_format: AnswerFormat,
    events: EventSink,
) -> None:
    """Runs the choices of a request and writes their events without ids, to be read by clients
    that may come and go. Raises errors of the generation."""
    usage = UsageCount(plan.choices)
    chunks = EventChunks(events, plan, usage, Unmarked(), answer_format, context.tokenizer)
    try:
        await _runner(context, record, plan, usage)(chunks)
        await chunks.finish()
    finally:
        chunks.close()


def _runner(
    context: ApiContext, record: RequestRecord, plan: Plan, usage: UsageCount
) -> Callable[[TextSink], Coroutine[Any, Any, None]]:
    """Returns a function that runs the choices into a sink. Counts their prompt tokens now."""
    record.has_begun = True
    is_new, metrics = not plan.identity.life, context.metrics
    if is_new:
        metrics.prompt_tokens.value += usage.num_prompt

    def probe(choice: Choice) -> LatencyProbe:
        return LatencyProbe(metrics, record.arrived, is_new and usage.counts_cached(choice))

    unfinished = [choice for choice in plan.choices if not choice.known.has_ended]
    return partial(run_choices, context.generator, unfinished, probe=probe, answers=context.answers)


class _Answer:
    """Collects the text of all choices, and counts its memory; implements `TextSink`."""

    is_full = False

    def __init__(self, plan: Plan, usage: UsageCount, record: RequestRecord) -> None:
        """Raises Overloaded if the router has no room for the answer."""
        choices = plan.choices
        self._usage = usage
        self._choices = choices
        self._num_best = plan.num_best
        self._record = record
        self._uncounted_bytes = 0
        self._num_logprobs = 0
        self._parts: list[list[TextDelta]] = [[] for _ in choices]
        self._is_counted = not choices[0].request.is_open_ended
        if self._is_counted and choices[0].request.sampling.logprobs is not None:
            record.hold(sum(_logprobs_bytes(choice) for choice in choices))

    async def wait_room(self) -> None:
        """There is always room."""

    def take(self, choice: Choice, delta: TextDelta) -> None:
        """Raises Overloaded if the router has no room for more."""
        self._usage.add(choice, delta)
        self._parts[choice.index].append(delta)
        self._uncounted_bytes += DELTA_BYTES
        if delta.tokens:
            num_logprobs = len(delta.tokens) * _width(delta)
            self._num_logprobs += num_logprobs
            if not self._is_counted:
                self._uncounted_bytes += num_logprobs * VALUE_BYTES
        if delta.prompt_logprobs is not None:
            self._num_logprobs += delta.prompt_logprobs.num_bytes
            self._uncounted_bytes += delta.prompt_logprobs.num_bytes
        if self._uncounted_bytes >= COUNTED_BYTES:
            self._record.hold(self._uncounted_bytes)
            self._uncounted_bytes = 0

    def release(self) -> None:
        """Frees the memory bit by bit, because freeing all at once would block every thread. Call
        this from a thread, after the last piece."""
        for parts in self._parts:
            while parts:
                del parts[-RELEASED_AT_ONCE:]

    @property
    def num_values(self) -> int:
        """How many values the answer contains, at least: tokens and log-probabilities."""
        num_values = self._usage.num_output + self._num_logprobs
        for choice in self._choices:
            num_values += len(choice.echo)
        return num_values

    def pieces(self, answer_format: AnswerFormat) -> Generator[bytes, None, None]:
        """The answer's JSON document, once all choices have ended.

        All choices of a prompt share the log-probabilities that its first choice reported.
        """
        texts: list[tuple[Choice, TextDelta]] = []
        by_prompt: dict[int, PromptLogprobs | None] = {}
        for choice in self._choices:
            text = _join(self._parts[choice.index])
            shared = by_prompt.setdefault(choice.prompt_index, text.prompt_logprobs)
            if shared is not None:
                text = msgspec.structs.replace(text, prompt_logprobs=shared)
            texts.append((choice, text))
        if self._num_best is not None:
            texts = best_of_each_prompt(texts, self._num_best)
        yield from answer_format.answer(texts, self._usage.total())


class _LongDocument:
    """The JSON document of a long answer, made in threads."""

    def __init__(self, answer: _Answer, answer_format: AnswerFormat) -> None:
        self._answer = answer
        self._pieces = answer.pieces(answer_format)
        self._lock = threading.Lock()

    def next_piece(self) -> bytes:
        """The next `MAX_PIECE_BYTES` or a little more; b"" at the end."""
        with self._lock:
            return take_some(self._pieces, MAX_PIECE_BYTES)

    def release(self) -> None:
        """Frees the answer. Call it when no piece of the answer is needed any more."""
        with self._lock:
            self._pieces.close()
            self._answer.release()


def event_stream(
    context: ApiContext,
    record: RequestRecord,
    produce: Callable[[EventWriter], Coroutine[Any, Any, None]],
    style: StreamStyle,
) -> EventStream:
    """The events that `produce` writes, as the answer to the record's request."""
    return EventStream(
        produce,
        describe=lambda error: describe(error, record.request_id),
        ended=lambda error: _note_end(context, record, error),
        keepalive_s=context.limits.keepalive_s,
        style=style,
    )


def _note_end(context: ApiContext, record: RequestRecord, error: Exception | None) -> None:
    if isinstance(error, ClientGone):
        record.status = CLIENT_GONE_STATUS
    elif error is not None:
        context.metrics.stream_errors.inc()


def _join(deltas: list[TextDelta]) -> TextDelta:
    if len(deltas) == 1:
        return deltas[0]
    tokens: list[OutputToken] = [token for delta in deltas for token in delta.tokens]
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        tokens=tokens,
        finish=deltas[-1].finish,
        prompt_logprobs=_prompt_logprobs(deltas),
    )


def _logprobs_bytes(choice: Choice) -> int:
    """Memory of the log-probabilities of a choice's whole output."""
    sampling = choice.request.sampling
    if sampling.logprobs is None:
        return 0
    return sampling.max_tokens * (1 + sampling.logprobs) * VALUE_BYTES


def _width(delta: TextDelta) -> int:
    """Log-probabilities of each token of a delta."""
    return 1 + len(delta.tokens[0].logprobs.top) if delta.tokens else 0


def _prompt_logprobs(deltas: Iterable[TextDelta]) -> PromptLogprobs | None:
    """The prompt log-probabilities carried by one of the deltas."""
    return next((each.prompt_logprobs for each in deltas if each.prompt_logprobs), None)
