"""Tool calls as Llama 4 and some templates of Llama 3.2 write them: `[name(key="value"), ...]`.

The list may follow a sentence, or the marker `<|python_start|>` or `<|python_tag|>`. Its first
function must be one that the caller offers, since the answer itself may be a list. Arguments have
names; their values are Python literals, rewritten as JSON as they arrive.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from gateway.chat.formats.keyword_grammar import KEY, keyword_call
from gateway.chat.formats.python_value import PythonValue
from gateway.chat.tool_grammar import CallForm
from gateway.chat.tool_parser import ToolParser

BEGIN = "<|python_start|>"
END = "<|python_end|>"
TAG = "<|python_tag|>"
FORM = CallForm(
    opening=("[",), closing=("]",), separator=(", ",), call_rules=keyword_call, is_marked=False
)
SKETCH = re.compile(
    rf"({re.escape(BEGIN)}|{re.escape(TAG)})?\s*\[[\w.-]+\(\w+=.+\w+=.+\)\]({re.escape(END)})?",
    re.DOTALL,
)
_SPACE = r"\s{0,64}"
_HEAD = re.compile(
    rf"{_SPACE}(?P<name>[\w.-]{{1,64}}){_SPACE}\({_SPACE}(?=\)|{KEY}{_SPACE}=)", re.ASCII
)
_HEAD_SO_FAR = re.compile(
    rf"{_SPACE}([\w.-]{{1,64}}{_SPACE}(\({_SPACE}({KEY}{_SPACE})?)?)?", re.ASCII
)
_KEY = re.compile(rf"(?P<key>{KEY}){_SPACE}={_SPACE}(?=\S)", re.ASCII)
_KEY_SO_FAR = re.compile(rf"({KEY}{_SPACE}(={_SPACE})?)?", re.ASCII)


class _Place(Enum):
    CONTENT = auto()
    START = auto()
    HEAD = auto()
    KEY = auto()
    VALUE = auto()
    AFTER_VALUE = auto()
    AFTER_CALL = auto()
    AFTER_LIST = auto()
    SKIP = auto()


class PythonicParser(ToolParser):
    """Lists of calls, with content around them."""

    certain_markers = (BEGIN,)
    is_bare = True

    _place = _Place.CONTENT
    _value: PythonValue | None = None
    _has_arguments = False

    def _step(self) -> bool:
        steps = {
            _Place.CONTENT: self._step_content,
            _Place.START: self._step_start,
            _Place.HEAD: self._step_head,
            _Place.KEY: self._step_key,
            _Place.VALUE: self._step_value,
            _Place.AFTER_VALUE: self._step_after_value,
            _Place.AFTER_CALL: self._step_after_call,
            _Place.AFTER_LIST: self._step_after_list,
            _Place.SKIP: self._skip_to,
        }
        return steps[self._place]()

    def _step_content(self) -> bool:
        found = self._find_block((BEGIN, TAG), ("[",))
        if found is None:
            return False
        self._take(len(found))
        self._place = _Place.HEAD if found == "[" else _Place.START
        return True

    def _step_start(self) -> bool:
        """Behind a marker: a list."""
        self._take_space()
        if not self._pending:
            return False
        if self._pending[0] == "[":
            self._take(1)
            self._place = _Place.HEAD
        else:
            self._give_up()
        return True

    def _step_head(self) -> bool:
        """A function's name and bracket, once the text shows that its arguments have names."""
        head = _HEAD.match(self._pending)
        if head is not None and head["name"] in self._tools:
            self._take(head.end())
            self._begin_call(head["name"])
            self._add_arguments("{")
            self._has_arguments = False
            self._place = _Place.KEY
            return True
        if head is None and _HEAD_SO_FAR.fullmatch(self._pending):
            return False
        self._give_up()
        return True

    def _step_key(self) -> bool:
        """After a bracket or a comma: an argument's name, or the end of the call."""
        self._take_space()
        if self._pending.startswith(")"):
            self._close_call()
            return True
        key = _KEY.match(self._pending)
        if key is not None:
            self._take(key.end())
            comma = ", " if self._has_arguments else ""
            self._add_arguments(f"{comma}{json.dumps(key['key'])}: ")
            self._has_arguments = True
            self._value = PythonValue()
            self._place = _Place.VALUE
            return True
        if _KEY_SO_FAR.fullmatch(self._pending):
            return False
        self._give_up()
        return True

    def _step_value(self) -> bool:
        value = self._value
        assert value is not None, "an argument's name came before"
        self._take(value.scan(self._pending, 0))
        self._add_arguments(value.take_json())
        if value.broken:
            self._give_up()
        elif value.complete:
            self._place = _Place.AFTER_VALUE
        return value.broken or value.complete

    def _step_after_value(self) -> bool:
        self._take_space()
        if not self._pending:
            return False
        if self._pending[0] == ",":
            self._take(1)
            self._place = _Place.KEY
        elif self._pending[0] == ")":
            self._close_call()
        else:
            self._give_up()
        return True

    def _close_call(self) -> None:
        self._take(1)
        self._add_arguments("}")
        self._open_block.end_call()
        self._place = _Place.AFTER_CALL

    def _step_after_call(self) -> bool:
        """After a call: another call, or the end of the list."""
        self._take_space()
        if not self._pending:
            return False
        if self._pending[0] == ",":
            self._take(1)
            self._place = _Place.HEAD
        elif self._pending[0] == "]":
            self._take(1)
            self._open_block.end_call()
            self._place = _Place.AFTER_LIST
        else:
            self._give_up()
        return True

    def _step_after_list(self) -> bool:
        self._take_space()
        if not self._pending or self._is_partial(END):
            return False
        if self._pending.startswith(END):
            self._take(len(END))
            self._open_block.end_call()
        self._leave_block()
        self._place = _Place.CONTENT
        return True

    def _give_up(self) -> None:
        """Ends the list at text that is not a call or cannot be read as a call."""
        self._place = _Place.CONTENT if self._try_restore() else _Place.SKIP

    def _end(self, is_cut: bool) -> None:
        place, self._place = self._place, _Place.CONTENT
        if place in (_Place.KEY, _Place.VALUE, _Place.AFTER_VALUE):
            if is_cut:
                self._break_call()
            if is_cut or not self._try_restore():
                self._pending = ""
        elif place in (_Place.AFTER_CALL, _Place.AFTER_LIST):
            self._end_behind_call(is_cut, END)
        elif place is _Place.SKIP:
            self._pending = ""
        elif place is _Place.CONTENT:
            if is_cut:
                self._drop_start()
        elif is_cut and (place is _Place.START or self._may_be_head()):
            self._break_call()
            self._pending = ""
        elif not self._try_restore():
            self._pending = ""

    def _may_be_head(self) -> bool:
        """Whether the pending text may be the beginning of a call."""
        name = re.split(r"[\s(]", self._pending.lstrip(), maxsplit=1)[0]
        return any(each.startswith(name) for each in self._tools)
