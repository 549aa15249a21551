"""The common part of all model families' parsers: text in, tool calls and content out.

Each family defines how calls are marked. The result does not depend on where the text is split.
Text that turns out not to be a call is content, unchanged. White space around calls belongs to
the format. Markup of calls never becomes content where the token limit cuts the text off: what
could be the beginning of a call is dropped there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar

from router.chat.call_reader import CallReader
from router.chat.events import (
    ContentText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallBroken,
    ToolEvent,
)

CallIds = Callable[[int], str]
"""The id of a message's n-th call."""


class ToolParser(ABC):
    """Parses one message. `tools` are the schemas of the tools that the caller offers, by name.

    A family's `_step` takes text from the front of `_pending` and returns whether anything
    changed; False means that it needs more text. `_end` handles a call that is not finished at
    the end of the text; the rest of `_pending` is content. `certain_markers` show that a call
    begins even where none is expected.
    """

    certain_markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, call_ids: CallIds, tools: Mapping[str, dict[str, Any]]) -> None:
        self._call_ids = call_ids
        self._tools = tools
        self._pending = ""
        self._length = 0
        self._events: list[ToolEvent] = []
        self._num_calls = 0
        self._space = ""
        self._after_call = False

    def begin_at(self, place: int) -> None:
        """Sets how many characters of the model's text come before this parser's input."""
        self._length = place

    def push(self, text: str) -> list[ToolEvent]:
        """The events that are certain after this text."""
        self._length += len(text)
        self._pending += text
        while self._pending and self._step():
            pass
        return self._take_events()

    def flush(self, is_cut: bool) -> list[ToolEvent]:
        """The remaining events, at the end of the text; `is_cut` if the token limit ended it."""
        self._end(is_cut)
        self._add_content(self._take(len(self._pending)))
        if not self._num_calls and self._space:
            self._events.append(ContentText(self._space, self._length))
        return self._take_events()

    @abstractmethod
    def _step(self) -> bool: ...

    @abstractmethod
    def _end(self, is_cut: bool) -> None: ...

    def _take(self, length: int) -> str:
        taken, self._pending = self._pending[:length], self._pending[length:]
        return taken

    def _take_content_before(self, *markers: str) -> str | None:
        """Emits the content before the first of the markers. Takes and returns the marker; None
        if there is none yet."""
        found = [(self._pending.find(each), each) for each in markers]
        present = [(start, -len(each), each) for start, each in found if start >= 0]
        if present:
            start, _, marker = min(present)
            self._add_content(self._take(start))
            return self._take(len(marker))
        held = max(partial_end(self._pending, each) for each in markers)
        self._add_content(self._take(len(self._pending) - held))
        return None

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
            self._space = ""
        self._after_call = True
        self._events.append(event)

    def _begin_call(self, name: str) -> None:
        call_id = self._call_ids(self._num_calls)
        self._add_call_event(ToolCallBegin(self._num_calls, call_id, name))

    def _break_call(self) -> None:
        """Marks the call that began last as incomplete."""
        self._add_call_event(ToolCallBroken(self._num_calls - 1))

    def _add_arguments(self, text: str) -> None:
        """Adds arguments to the call that began last."""
        if text:
            self._add_call_event(ToolCallArguments(self._num_calls - 1, text))

    def _add_content(self, text: str) -> None:
        """Adds the text taken last as content. Trailing space waits, since a call may follow."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        if content:
            end = self._length - len(self._pending) - len(self._space)
            self._events.append(ContentText(content, end))

    def _take_events(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events


def partial_end(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
