"""Formats one answer of `/v1/responses`, whole or as events, from the message parser's output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.api.openai.answers import ChatTokenLogprob
from gateway.api.openai.logprobs import TokenNames, chat_logprobs
from gateway.api.openai_responses import answer as api
from gateway.api.replies.json_pieces import slices
from gateway.api.replies.usage import Usage
from gateway.chat.content_tokens import ContentTokens
from gateway.chat.message_events import (
    ContentText,
    MessageEvent,
    MessageFinish,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallBroken,
)
from gateway.chat.message_parser import MessageParser
from gateway.output.choices import Choice
from gateway.output.output_text import TextDelta
from gateway.text.tokenizer import Tokenizer
from http_kit.errors import HttpError
from http_kit.sse import tagged_events

_MOST_TOP = 20


@dataclass
class _Logprobs:
    """Log-probabilities of tokens in JSON, one by one: `whole` as the output text shows them,
    `short` as events do, without `bytes`.

    Several events repeat the log-probabilities of the whole text. Each token is encoded once, when
    it comes, so that the end of a long text is quick.
    """

    whole: list[bytes] = field(default_factory=list)
    short: list[bytes] = field(default_factory=list)

    def add(self, entry: ChatTokenLogprob) -> None:
        """Add the log-probabilities of the next token."""
        top = [api.TopTextLogprob(each.token, each.logprob) for each in entry.top_logprobs]
        self.whole.append(msgspec.json.encode(entry))
        self.short.append(msgspec.json.encode(api.TextLogprob(entry.token, entry.logprob, top)))

    def extend(self, other: _Logprobs) -> None:
        """Add the log-probabilities of further tokens."""
        self.whole += other.whole
        self.short += other.short


@dataclass
class _OpenItem:
    """The output item that is being written; a call if `begin` is set."""

    id: str
    kind: type[MessageEvent]
    begin: ToolCallBegin | None = None
    text: str = ""
    is_broken: bool = False
    logprobs: _Logprobs = field(default_factory=_Logprobs)

    def item(self, status: api.ItemStatus) -> api.OutputItem:
        """The item in its present state."""
        if self.begin is not None:
            return api.OutputCall(self.id, status, self.begin.id, self.begin.name, self.text)
        parts = [self.part()] if status != "in_progress" else []
        if self.kind is ReasoningText:
            shown = [each for each in parts if isinstance(each, api.ReasoningText)]
            return api.OutputReasoning(self.id, status, shown)
        texts = [each for each in parts if isinstance(each, api.OutputText)]
        return api.OutputMessage(self.id, status, texts)

    def part(self, is_empty: bool = False) -> api.Part:
        """The item's only part."""
        text = "" if is_empty else self.text
        if self.kind is ReasoningText:
            return api.ReasoningText(text)
        return api.OutputText(text, logprobs=[] if is_empty else _listed(self.logprobs.whole))


class ResponseFormat:
    """See AnswerFormat. A chunk holds all the framed events that one delta produces.

    `blank` is the response before it has output; with `has_logprobs` the output text includes
    log-probabilities. `on_end` is called with the whole response, possibly in a thread.
    """

    def __init__(
        self,
        blank: api.Response,
        parser: MessageParser,
        tokenizer: Tokenizer,
        has_logprobs: bool,
        on_end: Callable[[api.Response], object],
    ) -> None:
        self._blank = blank
        self._on_end = on_end
        self._parser = parser
        self._tokenizer = tokenizer
        self._tokens = ContentTokens() if has_logprobs else None
        self._sequence_number = -1
        self._done: list[api.OutputItem] = []
        self._open: _OpenItem | None = None
        self._finish: MessageFinish = "stop"

    def chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> bytes:
        """See AnswerFormat."""
        return tagged_events(([*self._begin()] if is_first else []) + self._push(delta))

    def long_chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> Iterator[bytes]:
        """See AnswerFormat; log-probabilities of a prompt are not offered."""
        yield self.chunk(choice, delta, is_first)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat: the end of the response."""
        response = self._response(usage)
        last = api.Completed if response.status == "completed" else api.Incomplete
        return tagged_events([last(self._next(), response)])

    def answer(self, texts: Sequence[tuple[Choice, TextDelta]], usage: Usage) -> Iterator[bytes]:
        """See AnswerFormat."""
        self._push(texts[0][1])
        yield msgspec.json.encode(self._response(usage))

    def failure(self, error: HttpError) -> bytes:
        """The last event of a stream that could not be finished."""
        response = self.failed(error)
        self._on_end(response)
        begun = [] if self._sequence_number >= 0 else self._begin()
        return tagged_events([*begun, api.Failed(self._next(), response)])

    def failed(self, error: HttpError) -> api.Response:
        """The response that ends with an error."""
        failure = api.ResponseFailure("server_error", error.message)
        return self._replaced(status="failed", output=self._done, error=failure)

    def queued(self) -> bytes:
        """The first events of a response in the background, before its generation starts."""
        queued = self._replaced(status="queued")
        return tagged_events([api.Created(self._next(), queued), api.Queued(self._next(), queued)])

    def _begin(self) -> list[api.ResponseEvent]:
        created = [] if self._sequence_number >= 0 else [api.Created(self._next(), self._blank)]
        return [*created, api.InProgress(self._next(), self._blank)]

    def _push(self, delta: TextDelta) -> list[api.ResponseEvent]:
        events: list[api.ResponseEvent] = []
        if self._tokens is not None:
            self._tokens.add(delta)
        parsed = self._parser.push(delta)
        for event in parsed.events:
            events += self._item_events(event)
        if parsed.finish is not None:
            self._finish = parsed.finish
            events += self._close("incomplete" if parsed.finish == "length" else "completed")
        return events

    def _item_events(self, event: MessageEvent) -> list[api.ResponseEvent]:
        """The event as item events, in an item of its kind; every call has its own item."""
        if isinstance(event, ToolCallBroken):
            assert self._open is not None, "the call began"
            self._open.is_broken = True
            return []
        logprobs = self._logprobs(event)
        if isinstance(event, ToolCallBegin):
            return self._open_item(_OpenItem(self._name("fc"), ToolCallArguments, event))
        kind = type(event)
        begin: list[api.ResponseEvent] = []
        if self._open is None or self._open.kind is not kind:
            prefix = "rs" if kind is ReasoningText else "msg"
            begin = self._open_item(_OpenItem(self._name(prefix), kind))
        item = self._open
        assert item is not None, "it was opened"
        item.text += event.text
        place = (self._next(), len(self._done), item.id, event.text)
        if isinstance(event, ContentText):
            item.logprobs.extend(logprobs)
            return [*begin, api.TextDelta(*place, _listed(logprobs.short))]
        if isinstance(event, ReasoningText):
            return [*begin, api.ReasoningDelta(*place)]
        return [*begin, api.ArgumentsDelta(*place)]

    def _open_item(self, item: _OpenItem) -> list[api.ResponseEvent]:
        events = self._close("completed")
        self._open = item
        index = len(self._done)
        events.append(api.ItemAdded(self._next(), index, item.item("in_progress")))
        if item.begin is None:
            part = item.part(is_empty=True)
            events.append(api.PartAdded(self._next(), index, item.id, part))
        return events

    def _close(self, status: api.ItemStatus) -> list[api.ResponseEvent]:
        item, self._open = self._open, None
        if item is None:
            return []
        index = len(self._done)
        events: list[api.ResponseEvent] = []
        if item.begin is not None:
            name = item.begin.name
            events.append(api.ArgumentsDone(self._next(), index, item.id, name, item.text))
        else:
            place = (self._next(), index, item.id, item.text)
            if item.kind is ReasoningText:
                events.append(api.ReasoningDone(*place))
            else:
                events.append(api.TextDone(*place, _listed(item.logprobs.short)))
            events.append(api.PartDone(self._next(), index, item.id, item.part()))
        whole = item.item("incomplete" if item.is_broken else status)
        events.append(api.ItemDone(self._next(), index, whole))
        self._done.append(whole)
        return events

    def _logprobs(self, event: MessageEvent) -> _Logprobs:
        """The log-probabilities of an event's tokens, if the client asked for them."""
        logprobs = _Logprobs()
        if self._tokens is not None:
            names = TokenNames(self._tokenizer)
            for part in slices(self._tokens.of(event), _MOST_TOP):
                for entry in chat_logprobs(part, names).content:
                    logprobs.add(entry)
        return logprobs

    def _response(self, usage: Usage) -> api.Response:
        """The response with its whole output."""
        is_whole = self._finish != "length"
        response = self._replaced(
            status="completed" if is_whole else "incomplete",
            completed_at=int(time.time()) if is_whole else None,
            incomplete_details=None if is_whole else api.IncompleteDetails("max_output_tokens"),
            output=self._done,
            usage=api.ResponseUsage(
                usage.prompt_tokens,
                api.InputDetails(usage.prompt_tokens_details.cached_tokens),
                usage.completion_tokens,
                api.OutputDetails(usage.reasoning_tokens),
                usage.total_tokens,
            ),
        )
        self._on_end(response)
        return response

    def _replaced(self, **changes: object) -> api.Response:
        return msgspec.structs.replace(self._blank, **changes)

    def _name(self, prefix: str) -> str:
        return f"{prefix}_{self._blank.id.partition('_')[2]}_{len(self._done) + bool(self._open)}"

    def _next(self) -> int:
        self._sequence_number += 1
        return self._sequence_number


def _listed(encoded: Sequence[bytes]) -> Any:
    """A field's value: the list of these JSON texts."""
    return msgspec.Raw(b"[" + b",".join(encoded) + b"]") if encoded else []
