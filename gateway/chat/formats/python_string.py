"""Rewrites one Python string literal, character by character, as a JSON string."""

from __future__ import annotations

import json

_SIMPLE = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "\n": "",
}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_OCTAL = 3


class PythonString:
    """A literal with one or three quotes on each side; the first `quote` has been read.

    `complete` is set once the literal is whole, `broken` if an escape is not a valid character.
    Escapes that Python does not know are kept as text; a slash may be escaped, as in JSON.
    """

    def __init__(self, quote: str) -> None:
        self.complete = False
        self.broken = False
        self._json = '"'
        self._quote = quote
        self._num_quotes = 1  # consecutive quotes just read
        self._is_empty = True
        self._is_triple = False
        self._escape = ""

    def take_json(self) -> str:
        """The JSON text produced since the last call."""
        taken, self._json = self._json, ""
        return taken

    def take(self, character: str) -> bool:
        """Takes a character. Returns False if the character is not part of the literal: the first
        character after an empty string shows that the string has ended."""
        if self._escape:
            self._take_in_escape(character)
        elif character == self._quote:
            self._take_quote()
        elif self._is_empty and self._num_quotes == 2 and not self._is_triple:
            self._end()
            return False
        else:
            self._settle_quotes()
            if character == "\\":
                self._escape = character
            else:
                self._add(character)
        return True

    def _take_quote(self) -> None:
        """Handles one more quote: the string opens with one or three, and as many close it."""
        self._num_quotes += 1
        if self._is_empty and not self._is_triple:
            self._is_triple = self._num_quotes == 3
            self._num_quotes = 0 if self._is_triple else self._num_quotes
        elif self._num_quotes == (3 if self._is_triple else 1):
            self._end()

    def _settle_quotes(self) -> None:
        """Called before any other character: quotes inside a triple-quoted string are text."""
        if self._is_triple:
            self._add(self._quote * self._num_quotes)
        self._num_quotes = 0
        self._is_empty = False

    def _take_in_escape(self, character: str) -> None:
        kind = self._escape[1:2]
        if kind and kind in "01234567" and not ("0" <= character <= "7"):
            self._end_escape(chr(int(self._escape[1:], 8)))
            self.take(character)
            return
        self._escape += character
        kind, digits = self._escape[1], self._escape[2:]
        if kind in "01234567":
            if len(self._escape) > _MAX_OCTAL:
                self._end_escape(chr(int(self._escape[1:], 8)))
        elif kind not in _NUM_DIGITS:
            self._end_escape(_SIMPLE.get(kind, self._escape))
        elif digits and digits[-1] not in "0123456789abcdefABCDEF":
            self.broken = True
        elif len(digits) == _NUM_DIGITS[kind]:
            code = int(digits, 16)
            self.broken = code > 0x10FFFF
            if not self.broken:
                self._end_escape(chr(code))

    def _end_escape(self, text: str) -> None:
        self._escape = ""
        self._add(text)

    def _add(self, text: str) -> None:
        """Adds text. Surrogates stay escaped, so that the JSON decoder can join the pairs."""
        for character in text:
            is_half = "\ud800" <= character <= "\udfff"
            self._json += json.dumps(character, ensure_ascii=is_half)[1:-1]

    def _end(self) -> None:
        self.complete = True
        self._json += '"'
