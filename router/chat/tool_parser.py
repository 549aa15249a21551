"""The common part of all model families' parsers: text in, tool calls and content out.

Each family defines how calls are marked. The result does not depend on where the text is split.
Text that turns out not to be a call is content, unchanged. White space around calls belongs to
the format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Set

from router.chat.call_reader import CallReader
from router.chat.events import ContentText, ToolCallArguments, ToolCallBegin, ToolEvent

CallIds = Callable[[int], str]
"""The id of a message's n-th call."""


class ToolParser(ABC):
    """Parses one message. `names` are the tools that the caller offers.

    A family's `_step` takes text from the front of `_pending` and returns whether anything
    changed; False means that it needs more text. `_give_up` turns the held text of an unfinished
    call into content.
    """

    def __init__(self, call_ids: CallIds, names: Set[str]) -> None:
        self._call_ids = call_ids
        self._names = names
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

    def flush(self) -> list[ToolEvent]:
        """The remaining events, at the end of the text."""
        self._give_up()
        self._add_content(self._take(len(self._pending)))
        if not self._num_calls and self._space:
            self._events.append(ContentText(self._space, self._length))
        return self._take_events()

    @abstractmethod
    def _step(self) -> bool: ...

    @abstractmethod
    def _give_up(self) -> None: ...

    def _take(self, length: int) -> str:
        taken, self._pending = self._pending[:length], self._pending[length:]
        return taken

    def _take_content_before(self, marker: str) -> bool:
        """Emits the content before the marker. Takes the marker and returns True if found."""
        start = self._pending.find(marker)
        if start >= 0:
            self._add_content(self._take(start))
            self._take(len(marker))
            return True
        self._add_content(self._take(len(self._pending) - partial_end(self._pending, marker)))
        return False

    def _take_space(self) -> str:
        return self._take(len(self._pending) - len(self._pending.lstrip()))

    def _new_reader(self, names: Set[str] | None = None) -> CallReader:
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
