"""Answering with the choices of a request: whole, or as a stream of events.

The same for both kinds of completion; an `AnswerFormat` gives the JSON. A client that goes away
ends every choice at once, in either way of answering.
"""

from __future__ import annotations

from contextlib import aclosing

from fastapi import Request
from starlette.responses import Response

from protocol.messages import FinishReason
from router.api.answer_format import AnswerFormat, TimedFormat, wants_timing
from router.api.context import ApiContext
from router.api.request_fields import GenerationFields
from router.api.responses import CachedTokens, Usage
from router.api_metrics import CLIENT_GONE_STATUS
from router.choices import Choice, ChoiceDeltas, merge, run_choice
from router.disconnect import ClientGone, while_connected
from router.http_errors import describe
from router.output import OutputToken, TextDelta
from router.request_scope import RequestRecord, record_of
from router.sse import Events, EventStream


async def reply(
    request: Request,
    context: ApiContext,
    fields: GenerationFields,
    choices: list[Choice],
    answer_format: AnswerFormat,
) -> Response:
    """Runs the choices. Raises what goes wrong before there is anything to send."""
    record = record_of(request.scope)
    num_prompt_tokens = sum(_prompt_lengths(choices).values())
    context.metrics.prompt_tokens.inc(num_prompt_tokens)
    if wants_timing(request.headers):
        answer_format = TimedFormat(answer_format, choices, fields.wants_usage, context.trace_of)
    deltas = _run(context, choices, record)
    if not fields.stream:
        body = await while_connected(request.receive, _collect(deltas, choices, answer_format))
        return Response(body, media_type="application/json")
    return EventStream(
        _events(deltas, choices, fields, answer_format),
        describe=lambda error: describe(error, record.request_id).body(),
        ended=lambda error: _note_end(context, record, error),
        keepalive_s=context.limits.keepalive_s,
    )


def _run(context: ApiContext, choices: list[Choice], record: RequestRecord) -> ChoiceDeltas:
    return merge(
        [
            run_choice(context.generator, choice, context.metrics.probe(record.arrived))
            if choice.request.sampling.max_tokens
            else _nothing(choice)
            for choice in choices
        ]
    )


async def _nothing(choice: Choice) -> ChoiceDeltas:
    """The output of a choice that asks for none: its echo says it all."""
    yield choice, TextDelta("", [], finish=FinishReason.LENGTH)


async def _collect(
    deltas: ChoiceDeltas, choices: list[Choice], answer_format: AnswerFormat
) -> bytes:
    usage = _UsageCount(choices)
    parts: list[list[TextDelta]] = [[] for _ in choices]
    async with aclosing(deltas):
        async for choice, delta in deltas:
            usage.add(choice, delta)
            parts[choice.index].append(delta)
    texts = [(choice, _join(parts[choice.index])) for choice in choices]
    return answer_format.answer(texts, usage.total())


async def _events(
    deltas: ChoiceDeltas,
    choices: list[Choice],
    fields: GenerationFields,
    answer_format: AnswerFormat,
) -> Events:
    usage = _UsageCount(choices)
    begun: set[int] = set()
    async with aclosing(deltas):
        async for choice, delta in deltas:
            usage.add(choice, delta)
            is_first = choice.index not in begun
            begun.add(choice.index)
            if is_first or delta.text or delta.tokens or delta.finish or fields.return_token_ids:
                yield answer_format.chunk(choice, delta, is_first)
    if fields.wants_usage:
        yield answer_format.usage_chunk(usage.total())


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
    )


def _prompt_lengths(choices: list[Choice]) -> dict[int, int]:
    return {choice.prompt_index: len(choice.request.token_ids) for choice in choices}


class _UsageCount:
    """Adds up the usage of a request; a prompt's cache hits are those of its first choice."""

    def __init__(self, choices: list[Choice]) -> None:
        self._prompts = _prompt_lengths(choices)
        self._counting = {choice.prompt_index: choice.index for choice in reversed(choices)}
        self._cached = dict.fromkeys(self._prompts, 0)
        self._output = 0

    def add(self, choice: Choice, delta: TextDelta) -> None:
        self._output += len(delta.token_ids)
        prompt = choice.prompt_index
        if self._counting[prompt] == choice.index:
            self._cached[prompt] = max(self._cached[prompt], delta.cached_tokens)

    def total(self) -> Usage:
        prompt = sum(self._prompts.values())
        cached = CachedTokens(sum(self._cached.values()))
        return Usage(prompt, self._output, prompt + self._output, cached)
