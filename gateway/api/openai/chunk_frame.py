"""A template of a chunk's JSON: most chunks of a stream differ only in their text.

The template is made from a chunk that was encoded the usual way, so the output is the same.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

_HOLE = "\x00text\x00"
_encode = msgspec.json.Encoder().encode


class TextFrame:
    """Encodes the text-only chunks of one choice."""

    def __init__(self, document_of: Callable[[str], bytes]) -> None:
        """`document_of` encodes a chunk with the given text; it is called once."""
        self._before, hole, self._after = document_of(_HOLE).partition(_encode(_HOLE))
        assert hole, "the document holds its text"

    def fill(self, text: str) -> bytes:
        """The JSON document of a chunk with this text."""
        return b"%b%b%b" % (self._before, _encode(text), self._after)
