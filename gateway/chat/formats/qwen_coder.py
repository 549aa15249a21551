"""Tool calls as Qwen3-Coder writes them, in tags, with one tag for each argument:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The tool's schema says which values are text; others are JSON or Python literals. Text streams as
it arrives. The outer tag may be missing, as models forget it.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Any, ClassVar

from gateway.chat.code_scan import partial_end
from gateway.chat.json_value import mended
from gateway.chat.tool_grammar import CallForm
from gateway.chat.tool_parser import ToolParser
from gateway.grammars.grammar import check_grammar_length, json_schema_part, text_part
from http_kit.errors import MAX_PARAM_CHARS, shortened
from protocol.errors import InvalidRequest

BEGIN = "<tool_call>"
END = "</tool_call>"
FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_SPACE = r"\s{0,64}"
_HEAD = re.compile(rf"{_SPACE}<function={_SPACE}(?P<name>[\w.-]{{1,256}}){_SPACE}>")
_HEAD_SO_FAR = re.compile(rf"{_SPACE}<function={_SPACE}[\w.-]{{0,256}}{_SPACE}")
_KEY = re.compile(r"<parameter=(?P<key>[^>\n]{1,256})>")
_KEY_SO_FAR = re.compile(r"<parameter=[^>\n]{0,256}(>)?")
_KINDS_ELSEWHERE = frozenset(("anyOf", "oneOf", "allOf", "$ref", "enum", "const"))
_KEY_CHARS = re.compile(r"[^>\n]{1,128}")


class _Place(Enum):
    CONTENT = auto()
    HEAD = auto()
    KEY = auto()
    VALUE = auto()
    AFTER_CALL = auto()
    SKIP = auto()


class QwenCoderParser(ToolParser):
    """Any number of calls, with content before, between and after them. A family may have outer
    tags of its own, and other `padding` around values."""

    certain_markers = (BEGIN, FUNCTION)
    begin: ClassVar[str] = BEGIN
    end: ClassVar[str] = END
    padding: ClassVar[str] = "\n"

    _place = _Place.CONTENT
    _schema: dict[str, Any]
    _has_arguments = False
    _is_text = False
    _value = ""
    _has_begun = False

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

    def _step_content(self) -> bool:
        found = self._find_block((self.begin, FUNCTION))
        if found is None:
            return False
        if found == self.begin:
            self._take(len(found))
        self._place = _Place.HEAD
        return True

    def _step_head(self) -> bool:
        head = _HEAD.match(self._pending)
        if head is not None:
            self._take(head.end())
            self._schema = self._tools.get(head["name"], {})
            self._begin_call(head["name"])
            self._add_arguments("{")
            self._has_arguments = False
            self._place = _Place.KEY
            return True
        text = self._pending.lstrip()
        if FUNCTION.startswith(text) or _HEAD_SO_FAR.fullmatch(self._pending):
            return False
        if not self._open_block.text:
            self._take(len(FUNCTION))
        self._restore()
        self._place = _Place.CONTENT
        return True

    def _step_key(self) -> bool:
        """Between arguments: the next one, or the end of the call."""
        self._take_space()
        if not self._pending or self._is_partial(_PARAMETER, _FUNCTION_END, self.end):
            return False
        if self._pending.startswith((_FUNCTION_END, self.end)):
            self._take(len(_FUNCTION_END) if self._pending.startswith(_FUNCTION_END) else 0)
            self._add_arguments("}")
            self._open_block.end_call()
            self._place = _Place.AFTER_CALL
            return True
        key = _KEY.match(self._pending)
        if key is not None and not self._is_partial(key[0] + self.padding):
            self._take(key.end())
            self._take(len(self.padding) if self._pending.startswith(self.padding) else 0)
            self._begin_value(key["key"].strip())
            return True
        if _KEY_SO_FAR.fullmatch(self._pending):
            return False
        self._place = _Place.CONTENT if self._try_restore() else _Place.SKIP
        return True

    def _begin_value(self, key: str) -> None:
        comma = ", " if self._has_arguments else ""
        self._add_arguments(f"{comma}{_quoted(key)}: ")
        self._has_arguments = True
        self._is_text = _is_text(self._schema, key)
        self._value, self._has_begun = "", False
        self._place = _Place.VALUE

    def _step_value(self) -> bool:
        """The value up to its end tag; where models forget that, up to the next tag."""
        ends = (_PARAMETER_END, f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
        starts = [start for start in map(self._pending.find, ends) if start >= 0]
        if starts:
            self._add_value(self._take(min(starts)).removesuffix(self.padding))
            self._end_value()
            self._take(len(_PARAMETER_END) if self._pending.startswith(_PARAMETER_END) else 0)
            return True
        held = max(partial_end(self._pending, each) for each in (*ends, f"\n{_PARAMETER_END}"))
        text = self._take(len(self._pending) - max(held, self._pending.endswith("\n")))
        self._add_value(text)
        return False

    def _add_value(self, text: str) -> None:
        if not self._is_text:
            self._value += text
            return
        begin = "" if self._has_begun else '"'
        self._has_begun = True
        self._add_arguments(begin + _quoted(text)[1:-1])

    def _end_value(self) -> None:
        if self._is_text:
            self._add_arguments('"' if self._has_begun else '""')
        else:
            value = self._value.strip()
            self._add_arguments(mended(value) or _quoted(self._value))
        self._place = _Place.KEY

    def _step_after_call(self) -> bool:
        self._take_space()
        if not self._pending or self._is_partial(self.end):
            return False
        if self._pending.startswith(self.end):
            self._take(len(self.end))
            self._open_block.end_call()
        self._leave_block()
        self._place = _Place.CONTENT
        return True

    def _step_skip(self) -> bool:
        if not self._skip_to(self.end, self.begin):
            return False
        if self._pending.startswith(self.end):
            self._take(len(self.end))
        self._place = _Place.CONTENT
        return True

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
            self._end_behind_call(is_cut, self.end)
        elif place is _Place.SKIP:
            self._pending = ""
        elif is_cut:
            self._drop_start()


def _is_text(schema: dict[str, Any], key: str) -> bool:
    """Whether an argument's value is plain text: true unless its schema has another type."""
    properties = schema.get("properties")
    wanted = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(wanted, dict):
        return True
    kinds = wanted.get("type")
    if isinstance(kinds, str):
        return kinds == "string"
    return kinds is None and not _KINDS_ELSEWHERE & wanted.keys()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def tag_call(rule: str, name: str, schema: dict[str, Any], padding: str = "\n") -> list[str]:
    """The rules of a grammar for one call. The first rule is named `rule`; `padding` surrounds
    values.

    Arguments come in the order of the schema's properties; required ones are always present.
    Raises InvalidRequest for names that no tag can hold, and for rules that are too long.
    """
    listed, wanted = schema.get("properties"), schema.get("required")
    properties: dict[str, Any] = dict(listed) if isinstance(listed, dict) else {}
    needed = wanted if isinstance(wanted, list) else []
    required = [each for each in needed if isinstance(each, str)]
    for key in required:
        properties.setdefault(key, True)
    definitions: dict[str, Any] = {
        each: schema[each] for each in ("$defs", "definitions") if each in schema
    }
    parts, rules = [text_part(f"<function={name}>\n")], []
    for place, (key, value) in enumerate(properties.items()):
        if not _KEY_CHARS.fullmatch(key) or key != key.strip():
            shown = shortened(key, MAX_PARAM_CHARS)
            raise InvalidRequest(
                f"'tools': {shown!r}, an argument of {name!r}, cannot be written by this model",
                "tools",
            )
        argument = f"{rule}_argument_{place}"
        tags = f"<parameter={key}>{padding}", f"{padding}{_PARAMETER_END}\n"
        rules += _argument_rules(argument, tags, value, _is_text(schema, key), definitions)
        check_grammar_length(sum(map(len, rules)), "tools")
        parts.append(argument if key in required else f"{argument}?")
    return [f"{rule}: {' '.join(parts)} {text_part(_FUNCTION_END)}", *rules]


def _argument_rules(
    rule: str, tags: tuple[str, str], schema: Any, is_text: bool, definitions: dict[str, Any]
) -> list[str]:
    head, end = map(text_part, tags)
    if is_text:
        return [f"{rule}: {head} {rule}_text", f"{rule}_text[suffix={end}]: /(?s:.*)/"]
    value = schema | definitions if isinstance(schema, dict) else schema
    return [f"{rule}: {head} {json_schema_part(value)} {end}"]


FORM = CallForm(begin=(BEGIN, "\n"), end=("\n", END), separator=("\n",), call_rules=tag_call)
