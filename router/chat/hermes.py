"""Tool calls as Qwen 2.5, Qwen 3 and Hermes write them: `<tool_call>{json}</tool_call>`."""

from __future__ import annotations

from router.chat.call_reader import CallReader
from router.chat.tool_grammar import CallForm
from router.chat.tool_parser import ToolParser

BEGIN = "<tool_call>"
END = "</tool_call>"
FORM = CallForm(begin=(BEGIN, "\n"), end=("\n", END), separator=("\n",))


class HermesParser(ToolParser):
    """Any number of marked objects, with content before, between and after them."""

    _reader: CallReader | None = None
    _awaits_end = False

    def _step(self) -> bool:
        if self._awaits_end:
            return self._step_end()
        if self._reader is None:
            if not self._take_content_before(BEGIN):
                return False
            self._reader = self._new_reader()
            return True
        reader = self._reader
        self._read(reader)
        if reader.broken:
            self._give_up()
        elif reader.done:
            self._reader = None
            self._awaits_end = True
        return reader.broken or reader.done

    def _step_end(self) -> bool:
        """Takes the end marker; any other text in its place is content."""
        self._take_space()
        if END.startswith(self._pending) and self._pending != END:
            return False
        self._awaits_end = False
        if self._pending.startswith(END):
            self._take(len(END))
        return True

    def _give_up(self) -> None:
        if self._awaits_end and END.startswith(self._pending):
            self._pending = ""
        reader, self._reader = self._reader, None
        if reader is not None and not reader.begun:
            self._add_content(BEGIN + reader.raw)
