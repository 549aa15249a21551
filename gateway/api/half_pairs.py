"""Halves of surrogate pairs in the JSON of a body.

JavaScript leaves a half where it cuts a text in the middle of an emoji, and escapes it
(`"\\ud83d"`). No parser here accepts it, and a conversation that has one could not go on. The work
of replacing halves is bounded, whatever the body is.
"""

from __future__ import annotations

import re
from itertools import islice

_PAIR_OR_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
_HALF_BYTES = len(rb"\ud83d")
_REPLACEMENT = rb"\ufffd"
_MOST_FOUND = 100_000
_MOST_BACKSLASHES = 64


def without_half_pairs(body: bytes) -> bytes:
    """The body with escaped halves of surrogate pairs replaced by U+FFFD."""
    made = bytearray(body)
    for found in islice(_PAIR_OR_HALF.finditer(body), _MOST_FOUND):
        start, end = found.span()
        if end - start == _HALF_BYTES and _is_escape(body, start):
            made[start:end] = _REPLACEMENT
    return bytes(made)


def _is_escape(body: bytes, start: int) -> bool:
    """Whether the backslash there is not itself escaped: an even number stands before it."""
    before = body[max(0, start - _MOST_BACKSLASHES) : start]
    num_backslashes = len(before) - len(before.rstrip(b"\\"))
    return num_backslashes % 2 == 0 and num_backslashes < _MOST_BACKSLASHES
