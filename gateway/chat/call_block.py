"""The part of an answer's text that holds one call or a list of calls, with their markers. Events
of calls wait here until the block is complete, because the text may turn out to be content. The
answer's parser owns and reads the block.
"""

from __future__ import annotations

from gateway.chat.message_events import ToolCallBegin, ToolEvent


class CallBlock:
    """A block of calls.

    - `is_marked`: it began with a marker; without one it may still be prose.
    - `is_quoted`: it is an example.
    - `events`: events that were not emitted yet; `is_streamed`: some events were emitted already.
    - `in_call`: the last call is not complete.
    """

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
        """The block's text so far."""
        return "".join(self._texts)

    @property
    def rest(self) -> str:
        """The text after the last complete call."""
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
        """Note that all text so far belongs to complete calls."""
        self.in_call = False
        self._whole_events = len(self.events)
        self._whole_chars = self.num_chars

    def drop_events(self, keeps_whole_calls: bool = False) -> int:
        """Drop the events that were not emitted: all, or with `keeps_whole_calls` only those of
        incomplete calls. Returns the number of dropped calls."""
        kept = self._whole_events if keeps_whole_calls else 0
        dropped = self.events[kept:]
        del self.events[kept:]
        return sum(isinstance(each, ToolCallBegin) for each in dropped)

    def take_events(self) -> list[ToolEvent]:
        """Return the events that were not emitted, and count them as emitted."""
        events, self.events = self.events, []
        self._whole_events = 0
        self.is_streamed = self.is_streamed or bool(events)
        return events
