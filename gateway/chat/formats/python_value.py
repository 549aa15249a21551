"""Rewrites one Python literal, which arrives in pieces, as JSON.

Accepts strings, numbers, True, False and None (also in JSON's spelling), lists, tuples, and
dictionaries with string keys; anything else is not a value. Nothing is evaluated, and no text is
read twice: the state is a stack of brackets and the expected next element, so neither the result
nor the cost depends on where the text is split.
"""

from __future__ import annotations

import json
import re

from gateway.chat.formats.python_string import PythonString
from gateway.chat.json_value import Expected
from gateway.text.json_text import MAX_DEPTH

_CLOSER_OF = {"[": "]", "(": ")", "{": "}"}
_QUOTES = frozenset("'\"")
_WORDS = {
    **dict.fromkeys(("True", "true"), "true"),
    **dict.fromkeys(("False", "false"), "false"),
    **dict.fromkeys(("None", "null"), "null"),
}
_MAX_WORD_CHARS = 400
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?", re.ASCII)


class PythonValue:
    """One value, which begins at the first character given (no leading white space).

    `complete` is set once the value is whole, `broken` if the text is not a value. `json` holds
    the JSON produced so far, until the caller takes it.
    """

    def __init__(self) -> None:
        self.complete = False
        self.broken = False
        self.json = ""
        self._expected = Expected.VALUE
        self._closers: list[str] = []
        self._string: PythonString | None = None
        self._word = ""
        self._needs_comma = False

    def scan(self, text: str, start: int) -> int:
        """Scans `text` from `start`; returns the index after the part that is in the value."""
        for place in range(start, len(text)):
            belongs = self._take(text[place])
            if self.complete or self.broken:
                return place + 1 if belongs else place
        return len(text)

    def take_json(self) -> str:
        """The JSON text produced since the last call."""
        taken, self.json = self.json, ""
        return taken

    def _take(self, character: str) -> bool:
        """Takes a character; returns whether it belongs to the value."""
        if self._string is not None:
            if self._take_in_string(self._string, character):
                return True
        elif self._word:
            if character.isalnum() or character in "+-._":
                self._word += character
                self.broken = len(self._word) > _MAX_WORD_CHARS
                return True
            self._end_word()
        if self.complete or self.broken:
            return False
        if not character.isspace():
            self._take_mark(character)
        return not self.broken

    def _take_in_string(self, string: PythonString, character: str) -> bool:
        """Takes a character; returns whether it belongs to the string."""
        belongs = string.take(character)
        self.json += string.take_json()
        self.broken = string.broken
        if string.complete:
            self._string = None
            self._end_value()
        return belongs

    def _take_mark(self, character: str) -> None:
        """Handles a character outside of strings and words."""
        expected = self._expected
        may_end = expected not in (Expected.VALUE, Expected.COLON)
        if may_end and self._closers and character == self._closers[-1]:
            self._close()
        elif expected is Expected.COMMA_OR_END and character == ",":
            self._needs_comma = True
            is_dict = self._closers[-1] == "}"
            self._expected = Expected.KEY_OR_END if is_dict else Expected.VALUE_OR_END
        elif expected is Expected.COLON and character == ":":
            self.json += ": "
            self._expected = Expected.VALUE
        elif expected is Expected.KEY_OR_END and character in _QUOTES:
            self._begin_value()
            self._string = PythonString(character)
        elif expected in (Expected.VALUE, Expected.VALUE_OR_END):
            self._start_value(character)
        else:
            self.broken = True

    def _start_value(self, character: str) -> None:
        self._begin_value()
        if character in _QUOTES:
            self._string = PythonString(character)
        elif character in _CLOSER_OF and len(self._closers) < MAX_DEPTH:
            self._closers.append(_CLOSER_OF[character])
            self.json += "{" if character == "{" else "["
            self._expected = Expected.KEY_OR_END if character == "{" else Expected.VALUE_OR_END
        elif character.isalnum() or character in "+-.":
            self._word = character
        else:
            self.broken = True

    def _begin_value(self) -> None:
        """Writes a pending comma. It waited for the next value: Python allows trailing commas."""
        if self._needs_comma:
            self.json += ", "
        self._needs_comma = False

    def _end_word(self) -> None:
        rewritten = _rewritten(self._word)
        self._word = ""
        self.broken = rewritten is None
        self.json += rewritten or ""
        self._end_value()

    def _end_value(self) -> None:
        if self._expected is Expected.KEY_OR_END:
            self._expected = Expected.COLON
        else:
            self._expected = Expected.COMMA_OR_END
            self.complete = not self._closers and not self.broken

    def _close(self) -> None:
        self._needs_comma = False
        self.json += "}" if self._closers.pop() == "}" else "]"
        self._expected = Expected.COMMA_OR_END
        self.complete = not self._closers


def _rewritten(word: str) -> str | None:
    """A number or a constant as JSON; None for any other word."""
    if word in _WORDS:
        return _WORDS[word]
    if _INTEGER.fullmatch(word):
        return word.removeprefix("+")
    if _FLOAT.fullmatch(word):
        value = float(word)
        return json.dumps(value) if abs(value) != float("inf") else None
    return None
