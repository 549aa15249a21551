"""Calls that are a name and a JSON object: `<function=NAME>{...}</function>`, `>>>NAME\\n{...}`.

The base of several families. A call begins once its name and the opening bracket are known; other
text after the marker is content. A malformed call is skipped up to its end marker.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import ClassVar

from gateway.chat.call_block import CallBlock
from gateway.chat.json_value import JsonValue
from gateway.chat.tool_grammar import CallForm
from gateway.chat.tool_parser import ToolParser

FUNCTION_BEGIN = "<function="
FUNCTION_END = "</function>"
FUNCTION_FORM = CallForm(
    begin=(FUNCTION_BEGIN,), middle=(">",), end=(FUNCTION_END,), separator=(), arguments_key=None
)
RECIPIENT = ">>>"
RECIPIENT_FORM = CallForm(separator=(RECIPIENT,), middle=("\n",), arguments_key=None)
_TO_ALL = "all\n"


class Place(Enum):
    """Which part of a call comes next."""

    CONTENT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    AFTER_CALL = auto()
    SKIP = auto()


class NamedCallsParser(ToolParser):
    """Parses calls after `begin`. `head` matches the name up to the bracket; `head_so_far` matches
    any beginning of a text that `head` matches."""

    begin: ClassVar[str]
    end: ClassVar[str | None] = None
    tail: ClassVar[str] = "]} \t\r\n"
    """The characters that may stand between the arguments and the end of a call."""
    head: ClassVar[re.Pattern[str]]
    head_so_far: ClassVar[re.Pattern[str]]

    _place = Place.CONTENT
    _value: JsonValue | None = None

    def _step(self) -> bool:
        if self._place is Place.CONTENT:
            return self._step_content()
        if self._place is Place.HEAD:
            return self._step_head()
        if self._place is Place.ARGUMENTS:
            return self._step_arguments()
        if self._place is Place.AFTER_CALL:
            return self._step_after_call()
        return self._step_skip()

    @property
    def _begins(self) -> tuple[str, ...]:
        return (self.begin,)

    @property
    def _ends(self) -> tuple[str, ...]:
        """The markers that may follow a call. The last one ends its block."""
        return () if self.end is None else (self.end,)

    @property
    def _markers(self) -> tuple[str, ...]:
        return (*self._begins, *self._ends)

    def _step_content(self) -> bool:
        found = self._find_block(self._begins)
        if found is None:
            return False
        self._take(len(found))
        self._place = Place.HEAD
        return True

    def _step_head(self) -> bool:
        head = self.head.match(self._pending)
        if head is not None:
            self._take(head.end())
            self._begin_named(head)
            self._value = JsonValue()
            self._place = Place.ARGUMENTS
            return True
        if self._may_become_head():
            return False
        self._restore()
        self._place = Place.CONTENT
        return True

    def _may_become_head(self) -> bool:
        return self.head_so_far.fullmatch(self._pending) is not None

    def _begin_named(self, head: re.Match[str]) -> None:
        self._begin_call(head["name"])

    def _step_arguments(self) -> bool:
        value = self._value
        assert value is not None, "a name came before"
        if not value.broken:
            self._take(value.scan(self._pending, 0))
            self._add_arguments(value.take_json())
        if value.broken and self._is_partial(*self._markers):
            return False
        if value.broken and self._is_at_end() and value.close():
            self._add_arguments(value.take_json())
        if value.complete:
            self._open_block.end_call()
            self._place = Place.AFTER_CALL
        elif value.broken:
            return self._step_broken()
        return value.complete

    def _step_broken(self) -> bool:
        """At arguments that cannot be read on."""
        self._place = Place.CONTENT if self._try_restore() else Place.SKIP
        return True

    def _is_at_end(self) -> bool:
        return any(self._pending.startswith(each) for each in self._markers)

    def _step_after_call(self) -> bool:
        """After the arguments: an end marker, perhaps after surplus brackets, or content."""
        text = self._pending.lstrip(self.tail)
        self._take(len(self._pending) - len(text))
        self._open_block.end_call()
        if not text or self._is_partial(*self._markers):
            return False
        end = next((each for each in self._ends if text.startswith(each)), None)
        if end is not None:
            self._take(len(end))
            self._open_block.end_call()
            if end != self._ends[-1]:
                return True
        self._leave_block()
        self._place = Place.CONTENT
        return True

    def _step_skip(self) -> bool:
        """After a call that cannot be read: the end of its block, or another call."""
        last = self._ends[-1:]
        if not self._skip_to(*self._begins, *last):
            return False
        if self._pending.startswith(last):
            self._take(len(last[0]))
        self._place = Place.CONTENT
        return True

    def _end(self, is_cut: bool) -> None:
        place, self._place = self._place, Place.CONTENT
        if place is Place.ARGUMENTS:
            self._end_arguments(is_cut)
        elif place is Place.HEAD and is_cut and self._may_be_head():
            self._block = None
            self._pending = ""
        elif place is Place.HEAD:
            self._restore()
        elif place is Place.AFTER_CALL:
            self._end_behind_call(is_cut, *self._markers)
        elif place is Place.SKIP:
            self._pending = ""
        elif is_cut:
            self._drop_start()

    def _end_arguments(self, is_cut: bool) -> None:
        value = self._value
        assert value is not None, "a name came before"
        is_whole = not is_cut and value.close()
        self._add_arguments(value.take_json())
        if is_whole:
            self._open_block.end_call()
            self._leave_block()
        elif is_cut:
            self._break_call()
            self._pending = ""
        elif not self._try_restore():
            self._pending = ""

    def _may_be_head(self) -> bool:
        """Whether the pending text, which a marker precedes, is the beginning of a call."""
        return True


class FunctionTagParser(NamedCallsParser):
    """Llama 3.1's and functionary 3.1's calls: `<function=NAME>{...}</function>`."""

    certain_markers = (FUNCTION_BEGIN,)
    begin = FUNCTION_BEGIN
    end = FUNCTION_END
    head = re.compile(r"(?P<name>[\w.-]{1,256})>\s{0,64}(?=\{)")
    head_so_far = re.compile(r"[\w.-]{0,256}(>\s{0,64})?")


class RecipientParser(NamedCallsParser):
    """Functionary 3.2's messages: `>>>NAME`, then the arguments in the next line. The recipient
    `all` is the user. The prompt ends with the first marker, which the model may repeat."""

    begin = RECIPIENT
    head = re.compile(r"(?P<name>[\w.-]{1,256})\n\s{0,64}(?=\{)")
    head_so_far = re.compile(r"[\w.-]{0,256}(\n\s{0,64})?")

    _place = Place.HEAD
    _is_first = True

    def _step_head(self) -> bool:
        if self._is_first:
            self._block = self._block or CallBlock(is_marked=True)
            if not self._block.text and self._is_partial(RECIPIENT):
                return False
            if not self._block.text and self._pending.startswith(RECIPIENT):
                self._take(len(RECIPIENT))
                return True
        if self._is_partial(_TO_ALL):
            return False
        self._is_first = False
        if self._pending.startswith(_TO_ALL):
            self._take(len(_TO_ALL))
            self._block = None
            self._place = Place.CONTENT
            return True
        return super()._step_head()

    def _end(self, is_cut: bool) -> None:
        if self._place is Place.HEAD:
            self._block = self._block or CallBlock(is_marked=True)
        super()._end(is_cut)

    def _may_be_head(self) -> bool:
        name = self._pending.partition("\n")[0]
        return any(each.startswith(name) for each in (*self._tools, _TO_ALL, RECIPIENT))
