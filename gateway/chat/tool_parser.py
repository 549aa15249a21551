"""The common part of all model families' parsers: text in, tool calls and content out.

Each family defines how calls are marked. The result does not depend on where the text is split.
Text that turns out not to be a call is content, unchanged. White space around calls belongs to
the format. A block is the text of one call or of a list of calls, with its markers. A block
is held back until it is whole, so that a block that cannot be read is content. If the block grows
long, its calls are emitted as they arrive. Markup of calls never becomes content when the token
limit cuts the text: text that could be the beginning of a call is dropped.

Code is content, with one exception: a fence at the end of an answer that holds nothing but calls.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar, Protocol, Self

from gateway.chat.call_block import CallBlock
from gateway.chat.call_reader import CallReader
from gateway.chat.code_fences import CodeFences
from gateway.chat.code_scan import CodeScan, Kind, partial_end
from gateway.chat.message_events import (
    ContentText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallBroken,
    ToolEvent,
)

CallIds = Callable[[int], str]
"""The id of a message's n-th call."""
MAX_HELD_CHARS = 1024
"""Longer blocks have their calls emitted before they are whole."""


class CallParser(Protocol):
    """Parses one message: text in; content, calls, and any reasoning between them out."""

    certain_markers: ClassVar[tuple[str, ...]]
    """See ToolParser."""

    def begin_at(self, place: int) -> None:
        """Sets how many characters of the model's text come before this parser's input."""

    def push(self, text: str) -> list[ToolEvent]:
        """The events that are certain after this text."""

    def flush(self, is_cut: bool) -> list[ToolEvent]:
        """The remaining events, at the end of the text; `is_cut` if the token limit ended it."""


class ToolParser(ABC):
    """Parses one message. `tools` are the schemas of the tools that the caller offers, by name.

    A family's `_step` takes text from the front of `_pending` and returns whether anything
    changed; False means that it needs more text. Outside of blocks it begins with `_find_block`.
    `_end` handles a block that is not finished at the end of the text; the rest of `_pending` is
    content. `certain_markers` show that a call begins even where none is expected; a family that
    `is_bare` also reads calls without a marker.
    """

    certain_markers: ClassVar[tuple[str, ...]] = ()
    is_bare: ClassVar[bool] = False

    def __init__(
        self,
        call_ids: CallIds,
        tools: Mapping[str, dict[str, Any]],
        max_held_chars: int = MAX_HELD_CHARS,
        num_calls: int = 0,
    ) -> None:
        self._call_ids = call_ids
        self._tools = tools
        self._max_held_chars = max_held_chars
        self._num_calls = num_calls
        self._pending = ""
        self._length = 0
        self._is_last = False  # no text follows the pending one
        self._events: list[ToolEvent] = []
        self._space = ""
        self._after_call = False
        self._has_content = False
        self._scan = CodeScan()
        self._block: CallBlock | None = None
        self._fences = CodeFences()

    def begin_at(self, place: int) -> None:
        """Sets how many characters of the model's text come before this parser's input."""
        self._length = place

    def push(self, text: str) -> list[ToolEvent]:
        """The events that are certain after this text."""
        self._length += len(text)
        self._pending += text
        self._advance()
        if self._block is not None and self._may_stream(self._block):
            self._emit_calls(self._block.take_events())
        return self._take_events()

    def flush(self, is_cut: bool) -> list[ToolEvent]:
        """The remaining events, at the end of the text; `is_cut` if the token limit ended it."""
        self._is_last = not is_cut
        self._advance()
        if self._fences.lines is not None:
            if not self._fences.close(self._take(len(self._pending)), is_cut):
                self._release_fences()
        else:
            self._end(is_cut)
        self._add_content(self._take(len(self._pending)))
        self._num_calls += self._fences.num_calls
        self._emit_calls(self._fences.events)
        if not self._num_calls and self._space:
            self._events.append(ContentText(self._space, self._length))
        return self._take_events()

    @abstractmethod
    def _step(self) -> bool: ...

    @abstractmethod
    def _end(self, is_cut: bool) -> None: ...

    def _advance(self) -> None:
        while self._pending:
            in_fence = self._fences.lines is not None
            has_moved = self._step_fence() if in_fence else self._step()
            if not has_moved and in_fence is (self._fences.lines is not None):
                break

    def _step_fence(self) -> bool:
        """Takes more of the open fence."""
        assert self._fences.lines is not None, "it is open"
        length, is_closing = self._fences.lines.take(self._pending, self._is_last)
        text = self._take(length)
        self._scan.pass_content(text)
        if is_closing:
            may_be_call = self._fences.close(text)
        else:
            self._fences.push(text)
            may_be_call = self._fences.may_be_call
        if not may_be_call:
            self._release_fences()
        return length > 0

    def _release_fences(self) -> None:
        """Turns the held fences into content."""
        text = self._fences.release()
        if text:
            self._emit_content(text)

    def _fence_parser(self) -> Self | None:
        """A parser for calls in a fence; None where a fence cannot hold calls. A format with
        markers needs no fence, so a fence counts there only if it is the whole answer."""
        if not self.is_bare and (self._has_content or self._after_call):
            return None
        num_calls = self._num_calls + self._fences.num_calls
        return type(self)(self._call_ids, self._tools, sys.maxsize, num_calls)

    def _take(self, length: int) -> str:
        taken, self._pending = self._pending[:length], self._pending[length:]
        if self._block is not None:
            self._block.add_text(taken)
        return taken

    def _skip_to(self, *markers: str) -> bool:
        """Drops text up to the first of the markers; returns whether there is one yet."""
        found = [self._pending.find(each) for each in markers]
        starts = [start for start in found if start >= 0]
        if starts:
            self._take(min(starts))
            return True
        held = max((partial_end(self._pending, each) for each in markers), default=0)
        self._take(len(self._pending) - held)
        return False

    def _is_partial(self, *markers: str) -> bool:
        """Whether the pending text is the beginning of a marker, but not all of it."""
        return any(each.startswith(self._pending) and each != self._pending for each in markers)

    def _take_space(self) -> str:
        return self._take(len(self._pending) - len(self._pending.lstrip()))

    def _find_block(self, marked: tuple[str, ...], bare: tuple[str, ...] = ()) -> str | None:
        """Emits the content before the first call, and begins a block there. Returns the call's
        marker, which is not taken yet; None if there is none, or a fence comes first."""
        while True:
            found = self._scan.find(self._pending, marked, bare, self._is_last)
            self._add_content(self._take(found.start))
            if found.kind is Kind.UNKNOWN:
                return None
            if found.kind is Kind.CALL:
                self._release_fences()
                marker = self._pending[: found.length]
                self._block = CallBlock(marker in marked, found.is_quoted)
                return marker
            text, parser = self._take(found.length), self._fence_parser()
            self._scan.pass_content(text)
            if found.kind is Kind.FENCE:
                self._fences.open(text, parser)
                if parser is None:
                    self._release_fences()
                return None
            if parser is None:
                self._add_content(text)
            elif not self._fences.take_line(text, parser):
                self._release_fences()

    def _leave_block(self) -> None:
        """Ends the block after its last whole call. Calls without a marker within a line of prose
        are content, and so is the text after the last call."""
        block = self._open_block
        is_prose = not block.is_marked and "\n" not in block.rest and bool(self._pending)
        if (block.is_quoted or is_prose) and not self._may_stream(block):
            self._restore()
            return
        self._num_calls -= block.drop_events(keeps_whole_calls=True)
        self._emit_calls(block.take_events())
        self._end_block(block.rest)

    def _restore(self) -> None:
        """Makes the whole block content, because it is not a call or cannot be read as a call."""
        block = self._open_block
        self._num_calls -= block.drop_events()
        self._end_block(block.text)

    def _try_restore(self) -> bool:
        """Makes the block content and returns True. If the block's calls have been emitted, marks
        the unfinished call as broken and returns False."""
        if not self._may_stream(self._open_block):
            self._restore()
            return True
        self._break_call()
        return False

    def _break_call(self) -> None:
        """Ends a block whose text cannot be read on: a call that it leaves unfinished counts as
        broken."""
        block = self._open_block
        if block.is_quoted:
            self._restore()
            return
        if block.in_call:
            block.add_event(ToolCallBroken(self._num_calls - 1))
        self._emit_calls(block.take_events())
        self._block = None

    def _end_block(self, content: str) -> None:
        """Ends the block; `content` is the rest of its text, which does not belong to a call."""
        self._block = None
        self._scan.pass_content(content)
        self._add_content(content)

    @property
    def _open_block(self) -> CallBlock:
        """The block that is being read."""
        assert self._block is not None, "a block began"
        return self._block

    def _drop_start(self) -> None:
        """Drops pending text that may be the beginning of a call, outside of blocks."""
        is_code = self._pending.startswith(("`", "~"))
        if not is_code or (self._fence_parser() is not None and not self._scan.line.strip()):
            self._pending = ""

    def _end_behind_call(self, is_cut: bool, *markers: str) -> None:
        """Ends the block at the end of the text. If the token limit cut the text, trailing
        separators and the beginning of a marker are not content."""
        if is_cut:
            self._open_block.end_call()
            self._pending = "" if self._is_partial(*markers) else self._pending
        self._leave_block()

    def _may_stream(self, block: CallBlock) -> bool:
        """Whether calls of this block may be emitted before it is whole."""
        is_long = block.num_chars > self._max_held_chars and not block.is_quoted
        return is_long and (block.is_streamed or bool(block.events))

    def _new_reader(self, names: Set[str] | None) -> CallReader:
        return CallReader(self._num_calls, self._call_ids(self._num_calls), names)

    def _read(self, reader: CallReader) -> None:
        """Passes pending text to the reader, and adds the reader's events."""
        self._take(reader.push(self._pending))
        for event in reader.events:
            self._add_call_event(event)
        reader.events.clear()

    def _add_call_event(self, event: ToolEvent) -> None:
        if isinstance(event, ToolCallBegin):
            self._num_calls += 1
        self._open_block.add_event(event)

    def _begin_call(self, name: str) -> None:
        call_id = self._call_ids(self._num_calls)
        self._add_call_event(ToolCallBegin(self._num_calls, call_id, name))

    def _add_arguments(self, text: str) -> None:
        """Adds arguments to the call that began last."""
        if text:
            self._add_call_event(ToolCallArguments(self._num_calls - 1, text))

    def _emit_calls(self, events: list[ToolEvent]) -> None:
        if events:
            self._events += events
            self._space, self._after_call = "", True
            self._scan.pass_calls()

    def _add_content(self, text: str) -> None:
        """Adds the text taken last as content."""
        if self._fences.held:
            if not text.strip():
                self._fences.held += text
                return
            text = self._fences.release() + text
        self._emit_content(text)

    def _emit_content(self, text: str) -> None:
        """Emits the text taken last. Trailing space waits, since a call may follow."""
        if self._after_call and not self._has_content:
            text = text.lstrip()
            self._after_call = not text
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        if content:
            self._has_content = True
            end = self._length - len(self._pending) - len(self._space)
            self._events.append(ContentText(content, end))

    def _take_events(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events
