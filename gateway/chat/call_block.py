"""The part of an answer's text that holds calls: one, or a list, with the markers around.

Its events wait here until the block is whole, since the same text is content if it turns out not
to be a call. The block is owned by the parser of the answer, which reads it.
"""

from __future__ import annotations

from gateway.chat.events import ToolCallBegin, ToolEvent


class CallBlock:
    """A block; without a marker (`is_marked`) it may still be prose, and one that `is_quoted` is
    an example. `events` were not emitted yet; `is_streamed` says that others were. `in_call` says
    that the last call is not whole."""

    def __init__(self, is_marked: bool, is_quoted: bool = False) -> None:
        self.is_marked = is_marked
        self.is_quoted = is_quoted
        self.is_streamed = False
        self.in_call = False
        self.num_chars = 0
        self.events: list[ToolEvent] = []
        self._texts: list[str] = []
        self._whole_chars = 0  # up to the end of the last whole call
        self._whole_events = 0

    @property
    def text(self) -> str:
        """All of the block's text that was read."""
        return "".join(self._texts)

    @property
    def rest(self) -> str:
        """The text behind the last whole call."""
        return self.text[self._whole_chars :]

    @property
    def has_whole_calls(self) -> bool:
        """Whether a call has ended."""
        return self._whole_chars > 0

    def add_text(self, text: str) -> None:
        """Adds text that was read."""
        self._texts.append(text)
        self.num_chars += len(text)

    def add_event(self, event: ToolEvent) -> None:
        """Adds an event of a call."""
        self.in_call = self.in_call or isinstance(event, ToolCallBegin)
        self.events.append(event)

    def end_call(self) -> None:
        """Takes note that all text so far belongs to whole calls."""
        self.in_call = False
        self._whole_events = len(self.events)
        self._whole_chars = self.num_chars

    def drop_events(self, keeps_whole_calls: bool = False) -> int:
        """Drops events that were not emitted, of unfinished calls or of all; returns of how many
        calls."""
        kept = self._whole_events if keeps_whole_calls else 0
        dropped = self.events[kept:]
        del self.events[kept:]
        return sum(isinstance(each, ToolCallBegin) for each in dropped)

    def take_events(self) -> list[ToolEvent]:
        """The events, which are emitted now."""
        events, self.events = self.events, []
        self._whole_events = 0
        self.is_streamed = self.is_streamed or bool(events)
        return events
