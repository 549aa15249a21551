"""Rewrites one JSON value, as models write it, as JSON; it may arrive in pieces.

Valid JSON passes unchanged. Small mistakes are mended on the way: raw control characters and
unknown escapes in strings, single quotes, words without quotes (`True`, `{city: Bern}`), trailing
commas, and closing brackets that are missing or too many. What was written so far is always the
beginning of valid JSON. Neither the result nor the cost depends on where the text is split.
"""

from __future__ import annotations

import json
import math
import re
from enum import Enum, auto

from gateway.text.json_text import MAX_DEPTH

_MAX_WORD_CHARS = 400
_CLOSER_OF = {"{": "}", "[": "]"}
_CLOSERS = frozenset("]}")
_QUOTES = frozenset("\"'")
_JSON_SPACE = frozenset(" \t\r\n")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_LOOSE_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)", re.ASCII)
_CONSTANTS = {
    **dict.fromkeys(("true", "True", "TRUE"), "true"),
    **dict.fromkeys(("false", "False", "FALSE"), "false"),
    **dict.fromkeys(("null", "None", "NaN", "Infinity", "-Infinity", "undefined"), "null"),
}
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_UNICODE_CHARS = len("\\u0000")
_WORD_START = re.compile(r"[\w$+.\-]")
_WORD_END = frozenset(",]}[{\"'<>\n\r")


class Expected(Enum):
    """What comes next in a value."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonValue:
    """One value, which begins at the first character given (no leading white space).

    `complete` is set once the value is whole, `broken` if the text cannot be mended. `json` holds
    the JSON produced so far, until the caller takes it. With `is_key` the value is the key of an
    object that the caller reads.
    """

    def __init__(self, is_key: bool = False) -> None:
        self.complete = False
        self.broken = False
        self.json = ""
        self._is_key = is_key
        self._expected = Expected.VALUE
        self._closers: list[str] = []
        self._quote = ""
        self._escape = ""
        self._word = ""
        self._key_start = 0  # where the last key begins, in `json`
        self._held = ""  # a comma and white space, written once another value follows

    def scan(self, text: str, start: int) -> int:
        """Scans `text` from `start`; returns the index after the part that is in the value."""
        place = start
        while place < len(text):
            if self._quote and not self._escape:
                plain = _PLAIN[self._quote].match(text, place)
                if plain is not None:
                    self.json += plain[0]
                    place = plain.end()
                    continue
            belongs = self._take(text[place])
            place += belongs
            if self.complete or self.broken:
                break
        return place

    def take_json(self) -> str:
        """The JSON text produced since the last call."""
        taken, self.json = self.json, ""
        return taken

    def close(self) -> bool:
        """Closes open brackets at the end of the text. Returns False if a string, a key or a
        value is not whole, since what is missing is unknown."""
        if self._word:
            self._end_word()
        if self.complete:
            return True
        ends_here = self._expected not in (Expected.VALUE, Expected.COLON)
        if self._quote or not self._closers or not ends_here:
            return False
        self.json += "".join(reversed(self._closers))
        self._closers.clear()
        self.complete, self.broken = True, False
        return True

    def complete_anyhow(self) -> bool:
        """Like `close`, but also ends a string, and leaves out a key without a value and a number
        or a word that may be cut off. Returns False if there is no value. Call it before any JSON
        is taken."""
        self._escape = ""
        is_key = self._expected is Expected.KEY_OR_END
        if self._closers and (is_key or self._word.strip() not in _CONSTANTS):
            self._word = ""
        has_begun = bool(self._quote or self._word)
        has_no_value = self._expected in (Expected.COLON, Expected.VALUE) and not has_begun
        if self._closers and ((is_key and has_begun) or has_no_value):
            self.json = self.json[: self._key_start]
            self._quote = ""
            self._expected = Expected.COMMA_OR_END
        if self._quote:
            self._take(self._quote)
        return self.close()

    def _take(self, character: str) -> bool:
        """Takes a character; returns whether it belongs to the value."""
        if self._quote:
            return self._take_in_string(character)
        if self._word:
            if not self._ends_word(character):
                self._word += character
                self.broken = len(self._word) > _MAX_WORD_CHARS
                return True
            self._end_word()
            if self.complete or self.broken:
                return False
        if character.isspace():
            self._take_space(character if character in _JSON_SPACE else " ")
        else:
            self._take_mark(character)
        return not self.broken

    def _take_space(self, character: str) -> None:
        if self._held:
            self._held += character
        else:
            self.json += character

    def _take_mark(self, character: str) -> None:
        """Handles a character outside of strings and words."""
        expected = self._expected
        if character in _CLOSERS:
            self._close_with(character)
        elif expected is Expected.COMMA_OR_END and character == ",":
            self._held = ","
            is_object = self._closers[-1] == "}"
            self._expected = Expected.KEY_OR_END if is_object else Expected.VALUE_OR_END
        elif expected is Expected.COLON and character == ":":
            self.json += ":"
            self._expected = Expected.VALUE
        elif expected in (Expected.COMMA_OR_END, Expected.COLON):
            self.broken = True
        elif character in _QUOTES:
            self._begin('"')
            self._quote = character
        elif _WORD_START.match(character):
            self._word = character
        elif character in _CLOSER_OF and expected is not Expected.KEY_OR_END:
            self._open(character)
        else:
            self.broken = True

    def _open(self, bracket: str) -> None:
        if len(self._closers) >= MAX_DEPTH or self._is_key:
            self.broken = True
            return
        self._begin(bracket)
        self._closers.append(_CLOSER_OF[bracket])
        self._expected = Expected.KEY_OR_END if bracket == "{" else Expected.VALUE_OR_END

    def _close_with(self, bracket: str) -> None:
        """Closes the bracket's own opener and those inside it; without an opener, drops it."""
        if not self._closers or self._expected in (Expected.VALUE, Expected.COLON):
            self.broken = True
            return
        if bracket not in self._closers:
            return
        self.json += self._held[1:]
        self._held = ""
        closed = ""
        while closed != bracket:
            closed = self._closers.pop()
            self.json += closed
        self._expected = Expected.COMMA_OR_END
        self.complete = not self._closers

    def _begin(self, text: str) -> None:
        """Writes the beginning of a key or value, after the comma that waited for it."""
        if self._expected is Expected.KEY_OR_END:
            self._key_start = len(self.json)
        self.json += self._held + text
        self._held = ""

    def _end_value(self) -> None:
        is_key = self._expected is Expected.KEY_OR_END
        self._expected = Expected.COLON if is_key else Expected.COMMA_OR_END
        self.complete = not self._closers and not self.broken

    def _take_in_string(self, character: str) -> bool:
        if self._escape:
            return self._take_in_escape(character)
        if character == self._quote:
            self.json += '"'
            self._quote = ""
            self._end_value()
        elif character == "\\":
            self._escape = character
        else:
            self.json += json.dumps(character, ensure_ascii=False)[1:-1]
        return True

    def _take_in_escape(self, character: str) -> bool:
        """Handles what follows a backslash. An escape that JSON does not know is text."""
        if self._escape == "\\":
            if character == "u":
                self._escape = "\\u"
                return True
            self._escape = ""
            if character in _ESCAPES:
                self.json += "\\" + character
            elif character == "'":
                self.json += character
            else:
                self.json += "\\\\" + json.dumps(character, ensure_ascii=False)[1:-1]
            return True
        if character not in _HEX:
            self.json += "\\" + self._escape
            self._escape = ""
            return False  # so that it is taken again, as text
        self._escape += character
        if len(self._escape) == _UNICODE_CHARS:
            self.json += self._escape
            self._escape = ""
        return True

    def _ends_word(self, character: str) -> bool:
        is_key = self._is_key or self._expected is Expected.KEY_OR_END
        return character in _WORD_END or (is_key and character == ":")

    def _end_word(self) -> None:
        word = self._word.rstrip()
        space = self._word[len(word) :]
        self._word = ""
        is_key = self._is_key or self._expected is Expected.KEY_OR_END
        self._begin(_quoted(word) if is_key else _rewritten(word))
        self.json += "".join(each if each in _JSON_SPACE else " " for each in space)
        self._end_value()


def mended(text: str) -> str | None:
    """The JSON of a whole text that holds one value; None if it cannot be mended."""
    text = text.strip()
    value = JsonValue()
    end = value.scan(text, 0)
    return value.take_json() if value.close() and not text[end:].strip("]} \t\r\n") else None


def _rewritten(word: str) -> str:
    """A number or a constant as JSON; any other word as a string."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _NUMBER.fullmatch(word):
        return word
    if _LOOSE_NUMBER.fullmatch(word):
        value = word.removeprefix("+")
        if _NUMBER.fullmatch(value):
            return value
        number = float(word)
        return _quoted(word) if math.isinf(number) else json.dumps(number)
    return _quoted(word)


def _quoted(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)
