"""Tool calls as Llama 3 writes them: a message that is `{"name": ..., "parameters": {...}}`.

The marker `<|python_tag|>` may come first, or after some content; several objects are separated
by `;`. Without the marker, only an object at the beginning of the message can be a call, and only
if it names a tool that the caller offers, since the answer itself may be JSON.
"""

from __future__ import annotations

from router.chat.call_reader import CallReader
from router.chat.tool_grammar import CallForm
from router.chat.tool_parser import ToolParser

MARKER = "<|python_tag|>"
FORM = CallForm(arguments_key="parameters")


class LlamaParser(ToolParser):
    """Parses objects at the beginning of the message, or after the marker."""

    _reader: CallReader | None = None
    _prefix = ""
    _at_start = True
    _may_call = False

    def _step(self) -> bool:
        if self._reader is not None:
            return self._step_call(self._reader)
        if self._at_start or self._may_call:
            return self._step_before_call()
        if self._take_content_before(MARKER):
            self._begin_object(MARKER)
            return True
        return False

    def _step_before_call(self) -> bool:
        """Handles white space, a separator and the marker before an object."""
        self._prefix += self._take_space()
        if self._may_call and self._pending.startswith(";"):
            self._prefix += self._take(1)
            return True
        if self._pending.startswith("{"):
            self._begin_object(self._prefix)
            return True
        if self._pending.startswith(MARKER):
            self._begin_object(self._prefix + self._take(len(MARKER)))
            return True
        if MARKER.startswith(self._pending):
            return False
        self._add_content(self._prefix)
        self._leave()
        return True

    def _begin_object(self, prefix: str) -> None:
        self._prefix = prefix
        self._reader = self._new_reader(self._names)

    def _step_call(self, reader: CallReader) -> bool:
        self._read(reader)
        if reader.broken:
            self._give_up()
            self._leave()
        elif reader.done:
            self._reader, self._prefix = None, ""
            self._at_start, self._may_call = False, True
        return reader.broken or reader.done

    def _leave(self) -> None:
        """From here on only the marker begins a call."""
        self._prefix = ""
        self._at_start = self._may_call = False

    def _give_up(self) -> None:
        reader, self._reader = self._reader, None
        if reader is None:
            self._add_content(self._prefix)
        elif not reader.begun:
            self._add_content(self._prefix + reader.raw)
        self._prefix = ""
