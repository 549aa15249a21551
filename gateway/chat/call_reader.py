"""Reads one tool call written as a JSON object: `{"name": ..., "arguments": {...}}`.

Llama's `parameters` means the same as `arguments`; other keys are skipped. The call begins as
soon as its name is known and its arguments start; the arguments are then emitted as they arrive,
mended as `json_value` says. Until the call begins, the reader emits nothing: `raw` keeps the text
in case it is not a call.
"""

from __future__ import annotations

import json
from collections.abc import Set
from enum import Enum, auto

from gateway.chat.json_value import JsonValue, mended
from gateway.chat.message_events import ToolCallArguments, ToolCallBegin, ToolEvent
from gateway.text.json_text import well_formed

_ARGUMENT_KEYS = ("arguments", "parameters")
_KNOWN_KEYS = ("name", *_ARGUMENT_KEYS, "type", "id", "function")
_KEY_START = frozenset("\"'_")


class _Expected(Enum):
    OPENING = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class CallReader:
    """Reads one object. With `names`, an object that calls any other name is not a call.

    `done` is set once the object is closed, `broken` if the object is not a call. If `begun` is
    also set, events of the broken call were already emitted. After either, the reader takes no more
    text. An object with an error after complete arguments counts as closed.
    """

    def __init__(self, index: int, call_id: str, names: Set[str] | None = None) -> None:
        self.events: list[ToolEvent] = []
        self.raw = ""
        self.begun = False
        self.done = False
        self.broken = False
        self._index = index
        self._call_id = call_id
        self._names = names
        self._expected = _Expected.OPENING
        self._value: JsonValue | None = None
        self._collected = ""
        self._streams = False
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None
        self._is_whole = False  # its arguments have ended

    @property
    def may_be_call(self) -> bool:
        """Whether the text so far may be the beginning of a call, judging by its keys."""
        if self.broken:
            return False
        if self._expected is _Expected.KEY and self._value is not None:
            key = self._collected.strip('"')
            return any(known.startswith(key) for known in _KNOWN_KEYS)
        return not self._key or self._key in _KNOWN_KEYS

    def close(self) -> bool:
        """Close the object at the end of the text. If the call is incomplete, sets `broken` and
        returns False."""
        value = self._value
        if value is not None and self._expected is _Expected.VALUE and value.close():
            self._take_json(value)
            self._value, self.broken = None, False
            self._end_value()
        is_between = self._value is None and self._expected in (_Expected.KEY, _Expected.COMMA)
        if self._name is not None and (is_between or self._is_whole):
            self._close()
            self.broken = False
        else:
            self.broken = True
        return self.done

    def push(self, text: str) -> int:
        """Takes the text that belongs to the object; returns the number of characters taken."""
        place = 0
        while place < len(text) and not (self.done or self.broken):
            if self._value is not None:
                place = self._read_value(self._value, text, place)
            elif text[place].isspace():
                place += 1
            else:
                place = self._read_mark(text[place], place)
        self.raw += text[:place]
        return place

    def _read_mark(self, character: str, place: int) -> int:
        """Handles a character outside of keys and values; returns where to continue reading."""
        expected = self._expected
        if expected is _Expected.OPENING and character == "{":
            self._expected = _Expected.KEY
        elif expected in (_Expected.KEY, _Expected.COMMA) and character == "}":
            self._close()
        elif expected is _Expected.COMMA and character == ",":
            self._expected = _Expected.KEY
        elif expected is _Expected.COLON and character == ":":
            self._expected = _Expected.VALUE
        elif (
            expected is _Expected.KEY and (character in _KEY_START or character.isalpha())
        ) or expected is _Expected.VALUE:
            self._start_value(character)
            return place
        elif self.begun:
            self.done = True  # its arguments are whole
            return place
        else:
            self.broken = True
            return place
        return place + 1

    def _start_value(self, character: str) -> None:
        self._value = JsonValue(is_key=self._expected is _Expected.KEY)
        self._collected = ""
        self._streams = (
            self._expected is _Expected.VALUE
            and self._key in _ARGUMENT_KEYS
            and self._name is not None
            and not self.begun
            and character == "{"
        )
        if self._streams:
            self._begin()

    def _read_value(self, value: JsonValue, text: str, place: int) -> int:
        end = value.scan(text, place)
        self._take_json(value)
        if value.broken:
            self.done = self.begun and self._is_whole
            self.broken = not self.done
        elif value.complete:
            self._value = None
            self._end_value()
        return end

    def _take_json(self, value: JsonValue) -> None:
        if self._streams:
            self._add_arguments(value.take_json())
        else:
            self._collected += value.take_json()

    def _end_value(self) -> None:
        if self._expected is _Expected.KEY:
            self._key = _text_of(self._collected) or ""
            self._expected = _Expected.COLON
            return
        self._expected = _Expected.COMMA
        if self._key == "name" and not self.begun:
            name = _text_of(self._collected)
            is_known = bool(name) and (self._names is None or name in self._names)
            self._name = name if is_known else None
            self.broken = not is_known
        elif self._key in _ARGUMENT_KEYS:
            self._is_whole = True
            if not self.begun:
                self._arguments = _object_of(self._collected)
                self.broken = self._arguments is None
                self._name = None if self.broken else self._name

    def _close(self) -> None:
        if not self.begun:
            if self._name is None:
                self.broken = True
                return
            self._begin()
            self._add_arguments(self._arguments or "{}")
        self.done = True

    def _begin(self) -> None:
        assert self._name is not None
        self.begun = True
        self.events.append(ToolCallBegin(self._index, self._call_id, self._name))

    def _add_arguments(self, text: str) -> None:
        if text:
            self.events.append(ToolCallArguments(self._index, text))


def _text_of(value: str) -> str | None:
    """The decoded JSON string; None for any other value."""
    try:
        decoded = json.loads(value)
    except ValueError:
        return None
    return well_formed(decoded) if isinstance(decoded, str) else None


def _object_of(value: str) -> str | None:
    """The text of a JSON object. Also accepts an object in a string, and null as an empty one."""
    if value == "null":
        return "{}"
    text = value
    if value.startswith('"'):
        text = mended(_text_of(value) or "") or ""
    return text if text.startswith("{") else None
