"""Answers a request with its choices: whole, or as a stream of events.

All endpoints that generate share this code; an `AnswerFormat` produces the JSON. When the client
disconnects, every choice ends at once, in a whole answer as in a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from fastapi import Request
from starlette.responses import Response

from protocol.sampling import PromptLogprobs
from router.api.context import ApiContext
from router.api.openai.answer_format import AnswerFormat, CountingFormat, TimedFormat, wants_timing
from router.api.openai.answers import CachedTokens, Usage
from router.api.openai.best_of import best_of_each_prompt
from router.api.request_fields import GenerationFields
from router.api.timing import TIMING_HEADER
from router.http.disconnect import ClientGone, connection_of, while_connected
from router.http.errors import describe
from router.http.json_response import WholeAnswer
from router.http.metrics import CLIENT_GONE_STATUS
from router.http.request_scope import RequestRecord, record_of
from router.http.sse import OPENAI_STYLE, EventStream, EventWriter, StreamStyle
from router.requests.choices import Choice, TextSink, run_choices
from router.requests.event_ids import Bookmark, EventCount, StreamIdentity
from router.requests.output_text import OutputToken, TextDelta
from router.text.tokenizer import Tokenizer

_TIMING = TIMING_HEADER.encode()


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a request: the identity of its stream or answer, and the choices to run.

    An answer holds the `num_best` most likely choices of each prompt, or all of them if None.
    """

    identity: StreamIdentity
    fields: GenerationFields
    choices: list[Choice]
    num_best: int | None = None

    def bookmark(self, key: bytes, body_digest: bytes) -> Bookmark | EventCount:
        """Assigns ids to the events of the request's stream."""
        if self.identity.numbers_events:
            return EventCount(self.identity, key, body_digest)
        return Bookmark(self.identity, len(self.choices), key, body_digest)


async def reply(
    request: Request,
    context: ApiContext,
    plan: Plan,
    answer_format: AnswerFormat,
    style: StreamStyle = OPENAI_STYLE,
) -> Response:
    """Runs the choices. Raises errors that occur before there is anything to send."""
    record, fields, choices = record_of(request.scope), plan.fields, plan.choices
    if not plan.identity.life:
        context.metrics.prompt_tokens.inc(sum(_prompt_lengths(choices).values()))
    if wants_timing(record.header(_TIMING)):
        answer_format = TimedFormat(answer_format, choices, fields.wants_usage, context.trace_of)

    async def run(sink: TextSink) -> None:
        unfinished = [choice for choice in choices if not choice.known.has_ended]
        await run_choices(
            context.generator, unfinished, sink, lambda: context.metrics.probe(record.arrived)
        )

    if not fields.stream:
        answer = _Answer(choices, plan.num_best)
        await while_connected(connection_of(request.scope), run(answer))
        document = await context.tokenizer.off_loop(
            lambda: answer.whole(answer_format), answer.num_prompt_logprobs
        )
        return WholeAnswer(document)

    async def produce(writer: EventWriter) -> None:
        bookmark = plan.bookmark(context.ids_key, record.body_digest)
        chunks = _Chunks(writer, plan, bookmark, answer_format, context.tokenizer)
        try:
            await run(chunks)
            await chunks.finish()
        finally:
            chunks.close()

    return EventStream(
        produce,
        describe=lambda error: describe(error, record.request_id),
        ended=lambda error: _note_end(context, record, error),
        keepalive_s=context.limits.keepalive_s,
        style=style,
    )


class _Answer:
    """Collects the text of all choices; implements `TextSink`."""

    is_full = False

    def __init__(self, choices: list[Choice], num_best: int | None) -> None:
        self._usage = _UsageCount(choices)
        self._choices = choices
        self._num_best = num_best
        self._parts: list[list[TextDelta]] = [[] for _ in choices]

    async def wait_room(self) -> None:
        """There is always room."""

    def take(self, choice: Choice, delta: TextDelta) -> None:
        self._usage.add(choice, delta)
        self._parts[choice.index].append(delta)

    @property
    def num_prompt_logprobs(self) -> int:
        """How many log-probabilities of prompt tokens the answer contains."""
        told = (_told(parts) for parts in self._parts)
        return sum(len(each.logprobs) + len(each.top_ids) for each in told if each) // 4

    def whole(self, answer_format: AnswerFormat) -> bytes:
        """The answer's JSON document, once all choices have ended.

        All choices of a prompt share the log-probabilities that its first choice reported.
        """
        texts: list[tuple[Choice, TextDelta]] = []
        told: dict[int, PromptLogprobs | None] = {}
        for choice in self._choices:
            text = _join(self._parts[choice.index])
            shared = told.setdefault(choice.prompt_index, text.prompt_logprobs)
            if shared is not None:
                text = msgspec.structs.replace(text, prompt_logprobs=shared)
            texts.append((choice, text))
        if self._num_best is not None:
            texts = best_of_each_prompt(texts, self._num_best)
        return answer_format.answer(texts, self._usage.total())


class _Chunks:
    """Writes the text of all choices as events that the client lacks; implements `TextSink`.

    Events that the client already has are formatted, too, because formats keep state. Prompt
    log-probabilities are long, so a thread formats them; meanwhile no other delta is taken.
    """

    def __init__(
        self,
        writer: EventWriter,
        plan: Plan,
        bookmark: Bookmark | EventCount,
        answer_format: AnswerFormat,
        tokenizer: Tokenizer,
    ) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        self._telling: asyncio.Task[None] | None = None
        self._frame = writer.style.frame
        self._usage = _UsageCount(plan.choices)
        self._bookmark = bookmark
        self._begun: set[int] = set()
        self._wants_usage = plan.fields.wants_usage and not plan.identity.knows_usage
        self._sends_all = bool(plan.fields.return_token_ids)
        self._format = answer_format
        if plan.fields.counts_every_chunk:
            self._format = CountingFormat(answer_format, self._usage.total)

    @property
    def is_full(self) -> bool:
        telling = self._telling
        return self._writer.is_full or (telling is not None and not telling.done())

    async def wait_room(self) -> None:
        if self._telling is not None:
            await asyncio.wait((self._telling,))
        await self._writer.wait_room()

    def take(self, choice: Choice, delta: TextDelta) -> None:
        self._usage.add(choice, delta)
        bookmark, has_ended = self._bookmark, delta.finish is not None
        is_new = bookmark.advance(choice.index, len(delta.token_ids), has_ended)
        is_first = choice.index not in self._begun
        if is_first:
            self._begun.add(choice.index)
        if delta.prompt_logprobs is not None:
            tell = self._tell(choice, delta, is_first, self._telling)
            self._telling = asyncio.ensure_future(tell)
            return
        if is_first or delta.text or delta.tokens or delta.finish or self._sends_all:
            document = self._format.chunk(choice, delta, is_first)
            if is_new and document:
                self._write(document)

    async def _tell(
        self, choice: Choice, delta: TextDelta, is_first: bool, earlier: asyncio.Task[None] | None
    ) -> None:
        if earlier is not None:
            await earlier
        self._write(
            await self._tokenizer.in_thread(lambda: self._format.chunk(choice, delta, is_first))
        )

    async def finish(self) -> None:
        """Call after the last delta of all choices."""
        if self._telling is not None:
            await self._telling
        if self._wants_usage:
            self._bookmark.tell_usage()
            self._write(self._format.usage_chunk(self._usage.total()))

    def close(self) -> None:
        """Stops writing; pending prompt log-probabilities are dropped."""
        if self._telling is not None:
            self._telling.cancel()

    def _write(self, document: bytes) -> None:
        events = self._bookmark.marked(self._frame(document))
        if events:
            self._writer.write(events)


def _note_end(context: ApiContext, record: RequestRecord, error: Exception | None) -> None:
    if isinstance(error, ClientGone):
        record.status = CLIENT_GONE_STATUS
    elif error is not None:
        context.metrics.stream_errors.inc()


def _join(deltas: list[TextDelta]) -> TextDelta:
    tokens: list[OutputToken] = [token for delta in deltas for token in delta.tokens]
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        tokens=tokens,
        finish=deltas[-1].finish,
        prompt_logprobs=_told(deltas),
    )


def _told(deltas: Iterable[TextDelta]) -> PromptLogprobs | None:
    """The prompt log-probabilities carried by one of the deltas."""
    return next((each.prompt_logprobs for each in deltas if each.prompt_logprobs), None)


def _prompt_lengths(choices: list[Choice]) -> dict[int, int]:
    return {choice.prompt_index: len(choice.request.token_ids) for choice in choices}


class _UsageCount:
    """Adds up the usage of a request. Cache hits of a prompt are counted for its first choice."""

    def __init__(self, choices: list[Choice]) -> None:
        self._prompts = _prompt_lengths(choices)
        self._counting = {choice.prompt_index: choice.index for choice in reversed(choices)}
        self._cached = dict.fromkeys(self._prompts, 0)
        self._output = sum(each.known.num_tokens for each in choices if each.known.has_ended)

    def add(self, choice: Choice, delta: TextDelta) -> None:
        self._output += len(delta.token_ids)
        prompt = choice.prompt_index
        if self._counting[prompt] == choice.index:
            self._cached[prompt] = max(self._cached[prompt], delta.cached_tokens)

    def total(self) -> Usage:
        prompt = sum(self._prompts.values())
        cached = CachedTokens(sum(self._cached.values()))
        return Usage(prompt, self._output, prompt + self._output, cached)
