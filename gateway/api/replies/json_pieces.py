"""Long JSON documents, made piece by piece so that none is ever in memory as a whole.

A struct is encoded with holes in place of its long lists; `Holes.pieces` yields the text around
the holes and, in between, the pieces that fill them. Nothing is made before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
_MARK = b"\0"
"""Never part of JSON text: encoders escape it."""
SLICE_VALUES = 1024
"""Values in one slice of a list: encoding them takes about a millisecond."""


class Holes:
    """The holes of one document."""

    def __init__(self) -> None:
        self._fillings: list[Iterator[bytes]] = []

    def put(self, filling: Iterator[bytes]) -> Any:
        """A field's value: when the document is written, `filling` yields its JSON."""
        self._fillings.append(filling)
        return msgspec.Raw(b"%b%d%b" % (_MARK, len(self._fillings) - 1, _MARK))

    def pieces(self, struct: Any) -> Iterator[bytes]:
        """The whole document, whose fields may be holes of this object."""
        document = msgspec.json.encode(struct)
        if not self._fillings:  # the usual case
            yield document
            return
        parts = document.split(_MARK)
        yield parts[0]
        for number, text in zip(parts[1::2], parts[2::2], strict=True):
            yield from self._fillings[int(number)]
            yield text


def slices(items: Sequence[_T], values_each: int) -> Iterator[Sequence[_T]]:
    """The items in slices of about `SLICE_VALUES` values."""
    size = max(1, SLICE_VALUES // max(1, values_each))
    for start in range(0, len(items), size):
        yield items[start : start + size]


def list_pieces(parts: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """One JSON list from the items of all parts."""
    is_first = True
    for part in parts:
        if part:
            text = msgspec.json.encode(part)
            yield b"[" + text[1:-1] if is_first else b"," + text[1:-1]
            is_first = False
    yield b"[]" if is_first else b"]"


def list_of(documents: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    """One JSON list whose items come in pieces."""
    separator = b"["
    for document in documents:
        yield separator
        yield from document
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def with_last_changed(pieces: Iterable[bytes], change: Callable[[bytes], bytes]) -> Iterator[bytes]:
    """The pieces with the last one changed."""
    waiting: bytes | None = None
    for piece in pieces:
        if waiting is not None:
            yield waiting
        waiting = piece
    if waiting is not None:
        yield change(waiting)


def take_some(pieces: Iterator[bytes], num_bytes: int) -> bytes:
    """The next pieces, together `num_bytes` or a little more; b"" after the last one."""
    taken: list[bytes] = []
    while num_bytes > 0:
        piece = next(pieces, None)
        if piece is None:
            break
        taken.append(piece)
        num_bytes -= len(piece)
    return b"".join(taken)
