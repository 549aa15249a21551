"""Calls in tags, with tags of its own for each argument: the base of several families.

    BEGIN CALL NAME ... ARGUMENT KEY ... VALUE VALUE_END ... CALL_END END

The tool's schema says which values are text; others are JSON or Python literals. Text streams as
it arrives. The outer tags may be missing, as models forget them, and so may the end of a value
before a tag that begins a line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import ClassVar

from gateway.chat.code_scan import partial_end
from gateway.chat.formats.tag_values import (
    MAX_SCALAR_CHARS,
    TEXT,
    Kinds,
    is_text_or_scalar,
    json_of,
    kinds_of_arguments,
    quoted,
)
from gateway.chat.tool_parser import ToolParser

SPACE = r"\s{0,64}"
NAME = r"[\w.-]{1,256}"
_BLANKS = re.compile(rf"\A{SPACE}")
_NO_STRING: Kinds = frozenset()


class _Place(Enum):
    CONTENT = auto()
    HEAD = auto()
    KEY = auto()
    VALUE = auto()
    AFTER_CALL = auto()
    SKIP = auto()


class TagCallsParser(ToolParser):
    """Any number of calls, with content before, between and after them.

    - `begin`, `end`: the tags around calls; a call ends at `end` if `call_end` is empty.
    - `call`: the beginning of a call; empty if its name follows `begin`.
    - `head`: matches from the beginning of a call up to its first argument, with the group `name`.
    - `argument`: the beginning of an argument.
    - `key`: matches up to the value, with the group `key`. The group `string`, if there is one, is
      the model's own type of the value: `true` for text.
    - `head_so_far`, `key_so_far`: match any beginning of a text that `head` or `key` matches.
    - `padding`: surrounds values.
    - `tags_begin_lines`: whether a tag after a value without an end tag must begin a line.
    """

    begin: ClassVar[str]
    end: ClassVar[str]
    call: ClassVar[str] = ""
    call_end: ClassVar[str] = ""
    argument: ClassVar[str]
    value_end: ClassVar[str]
    padding: ClassVar[str] = ""
    tags_begin_lines: ClassVar[bool] = True
    head: ClassVar[re.Pattern[str]]
    head_so_far: ClassVar[re.Pattern[str]]
    key: ClassVar[re.Pattern[str]]
    key_so_far: ClassVar[re.Pattern[str]]

    _place = _Place.CONTENT
    _name = ""
    _has_arguments = False
    _value_kinds: Kinds = TEXT
    _value = ""
    _is_text = False
    _has_begun = False
    _kinds: Mapping[str, Mapping[str, Kinds | None]] = {}  # of arguments, by tool

    def _step(self) -> bool:
        steps = {
            _Place.CONTENT: self._step_content,
            _Place.HEAD: self._step_head,
            _Place.KEY: self._step_key,
            _Place.VALUE: self._step_value,
            _Place.AFTER_CALL: self._step_after_call,
            _Place.SKIP: self._step_skip,
        }
        return steps[self._place]()

    @property
    def _begins(self) -> tuple[str, ...]:
        return (self.begin, self.call) if self.call else (self.begin,)

    @property
    def _outer_ends(self) -> tuple[str, ...]:
        return (self.end,)

    @property
    def _call_ends(self) -> tuple[str, ...]:
        return (self.call_end, *self._outer_ends) if self.call_end else self._outer_ends

    def _step_content(self) -> bool:
        found = self._find_block(self._begins)
        if found is None:
            return False
        if found != self.call:
            self._take(len(found))
        self._place = _Place.HEAD
        return True

    def _step_head(self) -> bool:
        head = self.head.match(self._pending)
        if head is not None:
            self._take(head.end())
            self._name = head["name"]
            self._begin_call(self._name)
            self._add_arguments("{")
            self._has_arguments = False
            self._place = _Place.KEY
            return True
        if self.call.startswith(self._pending.lstrip()) or self.head_so_far.fullmatch(
            self._pending
        ):
            return False
        if not self._open_block.text:
            self._take(len(self.call))
        self._restore()
        self._place = _Place.CONTENT
        return True

    def _step_key(self) -> bool:
        """Between arguments: the next one, or the end of the call."""
        self._take_space()
        if not self._pending or self._is_partial(self.argument, *self._call_ends):
            return False
        if self._pending.startswith(self._call_ends):
            is_own = self.call_end and self._pending.startswith(self.call_end)
            self._take(len(self.call_end) if is_own else 0)
            self._add_arguments("}")
            self._open_block.end_call()
            self._place = _Place.AFTER_CALL
            return True
        key = self.key.match(self._pending)
        if key is not None and not self._is_partial(key[0] + self.padding):
            self._take(key.end())
            self._take(len(self.padding) if self._pending.startswith(self.padding) else 0)
            self._begin_value(key["key"].strip(), key.groupdict().get("string"))
            return True
        if self.key_so_far.fullmatch(self._pending):
            return False
        self._place = _Place.CONTENT if self._try_restore() else _Place.SKIP
        return True

    def _begin_value(self, key: str, is_string: str | None) -> None:
        comma = ", " if self._has_arguments else ""
        self._add_arguments(f"{comma}{quoted(key)}: ")
        self._has_arguments = True
        self._value_kinds = self._kinds_of_argument(key, is_string)
        self._is_text = self._value_kinds == TEXT
        self._value, self._has_begun = "", False
        self._place = _Place.VALUE

    def _kinds_of_argument(self, key: str, is_string: str | None) -> Kinds:
        """By the schema, and by what the model says where that leaves a choice."""
        name = self._name
        if name not in self._kinds:
            self._kinds = {**self._kinds, name: kinds_of_arguments(self._tools.get(name, {}))}
        kinds = self._kinds[name].get(key)
        if kinds is None:
            return _NO_STRING if is_string == "false" else TEXT
        if is_string == "true" and "string" in kinds:
            return TEXT
        return kinds - TEXT if is_string == "false" and kinds != TEXT else kinds

    def _step_value(self) -> bool:
        """The value up to its end tag; where models forget that, up to the next tag."""
        place, is_end = self._end_of_value()
        if is_end:
            self._add_value(self._take(place).removesuffix(self.padding))
            self._end_value()
            is_tagged = self._pending.startswith(self.value_end)
            self._take(len(self.value_end) if is_tagged else 0)
            return True
        self._add_value(self._take(place))
        return False

    def _end_of_value(self) -> tuple[int, bool]:
        """How much of the pending text belongs to the value for certain, and whether its end
        follows. The end of a call counts only if another tag or nothing follows."""
        text = self._pending
        behind = "\n" if self.tags_begin_lines else ""
        marks = (self.value_end, f"{behind}{self.argument}", f"{behind}{self._call_ends[0]}")
        for found in re.finditer("|".join(map(re.escape, marks)), text):
            place, mark = found.start(), found[0]
            is_tag = self._is_tag(mark, text[place + len(mark) :])
            if is_tag is None:
                return place - text[:place].endswith("\n"), False
            if is_tag:
                is_forgotten = mark != self.value_end and not behind
                return place - (is_forgotten and text[:place].endswith("\n")), True
        ends = (*marks, f"{self.padding}{self.value_end}")
        held = max(partial_end(text, each) for each in ends)
        kept = len(text) - held
        return kept - text[:kept].endswith("\n"), False

    def _is_tag(self, mark: str, rest: str) -> bool | None:
        """Whether a mark that is followed by `rest` ends the value. None: more text decides."""
        if mark == self.value_end:
            return True
        if mark.endswith(self.argument):
            text = self.argument + rest
            if self.key.match(text) is not None:
                return True
            return None if self.key_so_far.fullmatch(text) and not self._is_last else False
        rest = _BLANKS.sub("", rest, count=1)
        if not rest:
            return True if self._is_last else None
        if self.call_end and rest.startswith(self._outer_ends):
            return True
        if self.call_end and any(each.startswith(rest) for each in self._outer_ends):
            return None
        return self._is_call(rest)

    def _is_call(self, text: str) -> bool | None:
        """Whether the text begins a call. None: more text decides."""
        for begin in self._begins:
            if text.startswith(begin):
                head = text if begin == self.call else text[len(begin) :]
                if self.head.match(head) is not None:
                    return True
                may_be = not head or self.head_so_far.fullmatch(head) is not None
                return None if may_be and not self._is_last else False
        return None if any(each.startswith(text) for each in self._begins) else False

    def _add_value(self, text: str) -> None:
        if not self._is_text:
            self._value += text
            is_long = len(self._value) > MAX_SCALAR_CHARS
            if not is_long or not is_text_or_scalar(self._value_kinds):
                return
            self._is_text = True
            text, self._value = self._value, ""
        begin = "" if self._has_begun else '"'
        self._has_begun = True
        self._add_arguments(begin + quoted(text)[1:-1])

    def _end_value(self) -> None:
        if self._is_text:
            self._add_arguments('"' if self._has_begun else '""')
        else:
            self._add_arguments(json_of(self._value, self._value_kinds))
        self._place = _Place.KEY

    def _step_after_call(self) -> bool:
        self._take_space()
        if not self._pending or self._is_partial(*self._outer_ends):
            return False
        if self._take_outer_end():
            self._open_block.end_call()
        self._leave_block()
        self._place = _Place.CONTENT
        return True

    def _step_skip(self) -> bool:
        if not self._skip_to(*self._outer_ends, *self._begins[:1]):
            return False
        self._take_outer_end()
        self._place = _Place.CONTENT
        return True

    def _take_outer_end(self) -> bool:
        end = next((each for each in self._outer_ends if self._pending.startswith(each)), "")
        self._take(len(end))
        return bool(end)

    def _end(self, is_cut: bool) -> None:
        place, self._place = self._place, _Place.CONTENT
        if place in (_Place.KEY, _Place.VALUE):
            if is_cut:
                self._break_call()
            if is_cut or not self._try_restore():
                self._pending = ""
        elif place is _Place.HEAD and is_cut:
            self._block = None
            self._pending = ""
        elif place is _Place.HEAD:
            self._restore()
        elif place is _Place.AFTER_CALL:
            self._end_behind_call(is_cut, *self._outer_ends)
        elif place is _Place.SKIP:
            self._pending = ""
        elif is_cut:
            self._drop_start()
