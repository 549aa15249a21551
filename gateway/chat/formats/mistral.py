"""Tool calls as Mistral writes them.

`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` up to version 3 of its tokenizers;
`[TOOL_CALLS]name[ARGS]{...}` from version 11 on, with `[CALL_ID]...` before `[ARGS]` in some,
and without `[ARGS]` in others.
"""

from __future__ import annotations

import re

from gateway.chat.formats.object_calls import ObjectCallsParser
from gateway.chat.json_value import JsonValue
from gateway.chat.tool_grammar import CallForm

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


class MistralParser(ObjectCallsParser):
    """Parses calls after the marker, in either form. `_value` is that of a named call."""

    certain_markers = begins = (MARKER,)

    _value: JsonValue | None = None

    def _step(self) -> bool:
        return super()._step() if self._value is None else self._step_arguments(self._value)

    def _step_head(self) -> bool:
        """After the marker: a list, one object, or a name."""
        self._take_space()
        if not self._pending or self._pending[0] in "[{`" or self._in_list:
            return super()._step_head()
        named = _NAMED.match(self._pending)
        if named:
            self._take(named.end())
            self._begin_call(named["name"])
            self._value = JsonValue()
            return True
        if _NAMED_SO_FAR.fullmatch(self._pending):
            return False
        self._give_up()
        return True

    def _step_arguments(self, value: JsonValue) -> bool:
        if not value.broken:
            self._take(value.scan(self._pending, 0))
            self._add_arguments(value.take_json())
        if value.broken and self._is_partial(MARKER):
            return False
        if value.broken and self._pending.startswith(MARKER) and value.close():
            self._add_arguments(value.take_json())
        if value.complete:
            self._value = None
            self._after_item()
        elif value.broken:
            self._value = None
            self._give_up()
        return value.complete or value.broken

    def _end(self, is_cut: bool) -> None:
        value, self._value = self._value, None
        if value is None:
            super()._end(is_cut)
            return
        is_whole = not is_cut and value.close()
        self._add_arguments(value.take_json())
        if is_whole:
            self._after_item()
            self._leave()
        elif is_cut:
            self._break_call()
            self._pending = ""
        elif not self._try_restore():
            self._pending = ""
