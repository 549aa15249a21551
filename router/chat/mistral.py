"""Tool calls as Mistral writes them.

`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` up to version 3 of its tokenizers;
`[TOOL_CALLS]name[ARGS]{...}` from version 11 on, with `[CALL_ID]...` before `[ARGS]` in some,
and without `[ARGS]` in others.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from router.chat.call_reader import CallReader
from router.chat.events import ToolCallBegin
from router.chat.json_value import JsonValue
from router.chat.tool_grammar import CallForm
from router.chat.tool_parser import ToolParser

MARKER = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
LIST_FORM = CallForm(opening=(MARKER, " ["), closing=("]",), separator=(", ",))
NAMED_FORM = CallForm(begin=(MARKER,), middle=(ARGS,), separator=(), arguments_key=None)
SPECIAL_MARKERS = (MARKER, ARGS, CALL_ID)
_SPACE = r"\s{0,64}"
_NAMED = re.compile(
    rf"(?P<name>[\w.-]{{1,256}}){_SPACE}(\[CALL_ID\]{_SPACE}\w{{1,64}}{_SPACE})?"
    rf"(\[ARGS\]{_SPACE})?(?=\{{)"
)
_NAMED_SO_FAR = re.compile(
    rf"[\w.-]{{0,256}}{_SPACE}(\[[A-Z_]{{0,7}}\]?{_SPACE}"
    rf"(\w{{0,64}}{_SPACE}(\[[A-Z]{{0,4}}\]?{_SPACE})?)?)?"
)


class _Place(Enum):
    CONTENT = auto()
    HEAD = auto()
    ITEM = auto()
    AFTER_ITEM = auto()
    ARGUMENTS = auto()


class MistralParser(ToolParser):
    """Parses calls after the marker, in either form."""

    _place = _Place.CONTENT
    _held = ""
    _reader: CallReader | None = None
    _value: JsonValue | None = None

    def _step(self) -> bool:
        if self._place is _Place.CONTENT:
            return self._step_content()
        if self._place is _Place.HEAD:
            return self._step_head()
        if self._place is _Place.ITEM:
            return self._step_item()
        if self._place is _Place.AFTER_ITEM:
            return self._step_after_item()
        return self._step_arguments()

    def _step_content(self) -> bool:
        if not self._take_content_before(MARKER):
            return False
        self._held = MARKER
        self._place = _Place.HEAD
        return True

    def _step_head(self) -> bool:
        """After the marker: a list, one object, or a name."""
        self._held += self._take_space()
        if not self._pending:
            return False
        if self._pending[0] == "[":
            self._held += self._take(1)
            self._place = _Place.ITEM
            return True
        if self._pending[0] == "{":
            self._place = _Place.ITEM
            return True
        named = _NAMED.match(self._pending)
        if named:
            self._take(named.end())
            call_id = self._call_ids(self._num_calls)
            self._add_call_event(ToolCallBegin(self._num_calls, call_id, named["name"]))
            self._held, self._value = "", JsonValue()
            self._place = _Place.ARGUMENTS
            return True
        if _NAMED_SO_FAR.fullmatch(self._pending):
            return False
        self._give_up()
        return True

    def _step_arguments(self) -> bool:
        assert self._value is not None
        self._add_arguments(self._take(self._value.scan(self._pending, 0)))
        if self._value.complete or self._value.broken:
            self._place = _Place.CONTENT
            return True
        return False

    def _step_item(self) -> bool:
        reader = self._reader = self._reader or self._new_reader()
        self._read(reader)
        if reader.broken:
            self._give_up()
        elif reader.done:
            self._reader, self._held = None, ""
            self._place = _Place.AFTER_ITEM
        return reader.broken or reader.done

    def _step_after_item(self) -> bool:
        """After an object: another object, the end of the list, or else content."""
        self._held += self._take_space()
        if not self._pending:
            return False
        if self._pending[0] == ",":
            self._held += self._take(1)
            self._place = _Place.ITEM
            return True
        if self._pending[0] == "]":
            self._take(1)
        self._held = ""
        self._place = _Place.CONTENT
        return True

    def _give_up(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.begun:
            self._held += reader.raw
        if reader is None or not reader.begun:
            self._add_content(self._held)
        self._held = ""
        self._place = _Place.CONTENT
