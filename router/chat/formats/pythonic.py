"""Tool calls as Llama 4 and some templates of Llama 3.2 write them: `[name(key="value"), ...]`.

The list may follow a sentence, or the marker `<|python_start|>` or `<|python_tag|>`. Its first
function must be one that the caller offers, since the answer itself may be a list. Arguments have
names; their values are Python literals, rewritten as JSON as they arrive.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from router.chat.formats.keyword_grammar import KEY, keyword_call
from router.chat.formats.python_value import PythonValue
from router.chat.tool_grammar import CallForm
from router.chat.tool_parser import ToolParser

BEGIN = "<|python_start|>"
END = "<|python_end|>"
TAG = "<|python_tag|>"
FORM = CallForm(
    opening=("[",), closing=("]",), separator=(", ",), call_rules=keyword_call, is_marked=False
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
    START = auto()
    HEAD = auto()
    KEY = auto()
    VALUE = auto()
    AFTER_VALUE = auto()
    AFTER_CALL = auto()
    AFTER_LIST = auto()
    SKIP = auto()


class PythonicParser(ToolParser):
    """Lists of calls, with content around them. `_held` is text that is not part of a call yet."""

    certain_markers = (BEGIN,)

    _place = _Place.START
    _held = ""
    _value: PythonValue | None = None
    _has_arguments = False

    def _step(self) -> bool:
        steps = {
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

    def _step_start(self) -> bool:
        """Content up to a list or a marker."""
        if self._held:
            return self._step_behind_marker()
        found = self._take_content_before(BEGIN, TAG, "[")
        if found is None:
            return False
        self._held = found
        if found == "[":
            self._place = _Place.HEAD
        return True

    def _step_behind_marker(self) -> bool:
        self._held += self._take_space()
        if not self._pending:
            return False
        if self._pending[0] == "[":
            self._held += self._take(1)
            self._place = _Place.HEAD
        else:
            self._restore()
        return True

    def _step_head(self) -> bool:
        """A function's name and bracket, once the text shows that its arguments have names."""
        head = _HEAD.match(self._pending)
        if head is not None and head["name"] in self._tools:
            self._take(head.end())
            self._held = ""
            self._begin_call(head["name"])
            self._add_arguments("{")
            self._has_arguments = False
            self._place = _Place.KEY
            return True
        if head is None and _HEAD_SO_FAR.fullmatch(self._pending):
            return False
        self._restore()
        return True

    def _step_key(self) -> bool:
        """After a bracket or a comma: an argument's name, or the end of the call."""
        self._take_space()
        if self._pending.startswith(")"):
            self._end_call()
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
        self._skip_call()
        return True

    def _step_value(self) -> bool:
        value = self._value
        assert value is not None, "an argument's name came before"
        self._take(value.scan(self._pending, 0))
        self._add_arguments(value.take_json())
        if value.broken:
            self._skip_call()
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
            self._end_call()
        else:
            self._skip_call()
        return True

    def _end_call(self) -> None:
        self._take(1)
        self._add_arguments("}")
        self._place = _Place.AFTER_CALL

    def _step_after_call(self) -> bool:
        """After a call: another call, the end of the list, or else content."""
        self._held += self._take_space()
        if not self._pending:
            return False
        if self._pending[0] == ",":
            self._held += self._take(1)
            self._place = _Place.HEAD
        elif self._pending[0] == "]":
            self._take(1)
            self._held = ""
            self._place = _Place.AFTER_LIST
        else:
            self._restore()
        return True

    def _step_after_list(self) -> bool:
        self._take_space()
        if END.startswith(self._pending) and self._pending != END:
            return False
        if self._pending.startswith(END):
            self._take(len(END))
        self._place = _Place.START
        return True

    def _restore(self) -> None:
        """Makes the held text content."""
        self._add_content(self._held)
        self._held = ""
        self._place = _Place.START

    def _skip_call(self) -> None:
        """Marks a call that went wrong as incomplete; what follows is not content."""
        self._break_call()
        self._place = _Place.SKIP

    def _end(self, is_cut: bool) -> None:
        if self._place in (_Place.KEY, _Place.VALUE, _Place.AFTER_VALUE):
            self._break_call()
            self._pending = ""
        elif is_cut and self._is_markup_so_far():
            self._pending = ""
        else:
            self._add_content(self._held)
        self._held = ""

    def _is_markup_so_far(self) -> bool:
        """Whether the held and pending text may become a list of calls."""
        if self._place is _Place.HEAD:
            head = self._pending.lstrip()
            name = re.split(r"[\s(]", head, maxsplit=1)[0]
            return any(each.startswith(name) for each in self._tools)
        markers = {_Place.AFTER_LIST: (END,), _Place.START: (BEGIN, TAG)}.get(self._place, ())
        return bool(self._held) or self._is_partial(*markers)
