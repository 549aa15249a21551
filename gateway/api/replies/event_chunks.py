"""The events of a request's choices, written as their deltas come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from gateway.api.replies.answer_format import AnswerFormat, CountingFormat
from gateway.api.replies.json_pieces import take_some
from gateway.api.replies.plan import Plan
from gateway.api.replies.usage import UsageCount
from gateway.http.json_response import MAX_PIECE_BYTES
from gateway.output.choices import Choice
from gateway.output.event_ids import Bookmark, EventCount, Unmarked
from gateway.output.output_text import TextDelta
from gateway.text.tokenizer import Tokenizer
from http_kit.sse import EventSink, as_it_is

_HOLE = b"\0"


class EventChunks:
    """Writes all choices as events, leaving out those the client already has. A `TextSink`.

    Events that the client already has are formatted, too, because formats keep state. Prompt
    log-probabilities and long last events are formatted piece by piece in a thread, as fast as the
    client reads. Meanwhile the sink takes no other delta.
    """

    def __init__(
        self,
        writer: EventSink,
        plan: Plan,
        usage: UsageCount,
        bookmark: Bookmark | EventCount | Unmarked,
        answer_format: AnswerFormat,
        tokenizer: Tokenizer,
    ) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        self._long_write: asyncio.Task[None] | None = None
        self._frame = writer.style.frame
        self._usage = usage
        self._bookmark = bookmark
        self._begun: set[int] = set()
        self._ends_long = plan.repeats_output
        self._wants_usage = plan.fields.wants_usage and not plan.identity.knows_usage
        self._sends_all = bool(plan.fields.return_token_ids)
        self._format = answer_format
        if plan.fields.counts_every_chunk:
            self._format = CountingFormat(answer_format, self._usage.total)

    @property
    def is_full(self) -> bool:
        writing = self._long_write
        return self._writer.is_full or (writing is not None and not writing.done())

    async def wait_room(self) -> None:
        if self._long_write is not None:
            await asyncio.wait((self._long_write,))
        await self._writer.wait_room()

    def take(self, choice: Choice, delta: TextDelta) -> None:
        self._usage.add(choice, delta)
        bookmark, has_ended = self._bookmark, delta.finish is not None
        is_new = bookmark.advance(choice.index, len(delta.token_ids), has_ended)
        is_first = choice.index not in self._begun
        if is_first:
            self._begun.add(choice.index)
        if delta.prompt_logprobs is not None or (has_ended and self._ends_long):
            pieces = self._format.long_chunk(choice, delta, is_first)
            writing = self._write_in_pieces(pieces, self._long_write)
            self._long_write = asyncio.ensure_future(writing)
            return
        if is_first or delta.text or delta.tokens or delta.finish or self._sends_all:
            document = self._format.chunk(choice, delta, is_first)
            if is_new and document and (events := bookmark.marked(self._frame(document))):
                self._writer.write(events)

    async def _write_in_pieces(
        self, pieces: Iterator[bytes], earlier: asyncio.Task[None] | None
    ) -> None:
        """Writes a document that comes in pieces, after the `earlier` one."""
        if earlier is not None:
            await earlier
        if self._frame is as_it_is:
            await self._write_long(lambda: b"".join(pieces))
            return
        before, _, after = self._frame(_HOLE).partition(_HOLE)
        piece = self._bookmark.marked(before)
        while piece:
            self._writer.write(piece)
            await self._writer.wait_room()
            piece = await self._tokenizer.for_answer(lambda: take_some(pieces, MAX_PIECE_BYTES))
        self._writer.write(after)

    async def _write_long(self, events: Callable[[], bytes]) -> None:
        """Writes whole events that a thread makes, as fast as the client reads."""
        whole = await self._tokenizer.for_answer(lambda: self._bookmark.marked(events()))
        for at in range(0, len(whole), MAX_PIECE_BYTES):
            self._writer.write(whole[at : at + MAX_PIECE_BYTES])
            await asyncio.sleep(0)  # the event writer sends in the next turn of the loop
            await self._writer.wait_room()

    async def finish(self) -> None:
        """Call after the last delta of all choices."""
        if self._long_write is not None:
            await self._long_write
        if not self._wants_usage:
            return
        self._bookmark.add_usage()
        usage = self._usage.total()
        if self._ends_long:
            await self._write_long(lambda: self._frame(self._format.usage_chunk(usage)))
        else:
            events = self._bookmark.marked(self._frame(self._format.usage_chunk(usage)))
            if events:
                self._writer.write(events)

    def close(self) -> None:
        """Stops writing; pending prompt log-probabilities are dropped."""
        if self._long_write is not None:
            self._long_write.cancel()
