"""Halves of surrogate pairs in the JSON of a body.

JavaScript leaves a half where it cuts a text in the middle of an emoji, and escapes it
(`"\\ud83d"`). No parser here accepts it, so a conversation that contains a half could not continue.
The cost is bounded for any body. A long body is searched in slices, between which other threads can
run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

_PAIR_OR_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
_HALF_BYTES = len(rb"\ud83d")
_PAIR_BYTES = 2 * _HALF_BYTES
SLICE_BYTES = 1 << 16
_REPLACEMENT = rb"\ufffd"
_MOST_FOUND = 100_000
_MOST_BACKSLASHES = 64


def without_half_pairs(body: bytes) -> bytes:
    """The body with escaped halves of surrogate pairs replaced by U+FFFD."""
    made = bytearray(body)
    for start, end in islice(_pairs_and_halves(body), _MOST_FOUND):
        if end - start == _HALF_BYTES and _is_escape(body, start):
            made[start:end] = _REPLACEMENT
    return bytes(made)


def _pairs_and_halves(body: bytes) -> Iterator[tuple[int, int]]:
    """Where each pair or half starts and ends, in order."""
    start = 0
    while start < len(body):
        found = _PAIR_OR_HALF.search(body, start, start + SLICE_BYTES + _PAIR_BYTES)
        if found is None or found.start() >= start + SLICE_BYTES:
            start += SLICE_BYTES  # the next slice has the whole pair, if one is cut
        else:
            yield found.span()
            start = found.end()


def _is_escape(body: bytes, start: int) -> bool:
    """Whether the backslash there is not itself escaped: an even number stands before it."""
    before = body[max(0, start - _MOST_BACKSLASHES) : start]
    num_backslashes = len(before) - len(before.rstrip(b"\\"))
    return num_backslashes % 2 == 0 and num_backslashes < _MOST_BACKSLASHES
