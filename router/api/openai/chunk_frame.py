"""A chunk's JSON with a hole for its text: most chunks of a stream differ in nothing else.

Made from a chunk that was encoded the usual way, so that it cannot differ from one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

_HOLE = "\x00text\x00"
_encode = msgspec.json.Encoder().encode


class TextFrame:
    """Gives the documents of one choice's plain chunks."""

    def __init__(self, document_of: Callable[[str], bytes]) -> None:
        """`document_of` encodes a chunk with a text; called once."""
        self._before, hole, self._after = document_of(_HOLE).partition(_encode(_HOLE))
        assert hole, "the document holds its text"

    def fill(self, text: str) -> bytes:
        """The document of a chunk with this text."""
        return b"%b%b%b" % (self._before, _encode(text), self._after)
