"""A prompt's text with its token ids. Where the text repeats an earlier answer, the answer's own
ids can replace the tokenizer's ids.

Pure. The text never changes: an answer's ids replace the ids of exactly the bytes that they stand
for. They must begin and end at boundaries of the tokens around them, and none of their tokens may
span a cut. A cut is a place at which text that looks like a control token was split. Otherwise the
answer stays as the tokenizer encoded it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate

SPACES = b" \t\r\n"
Pieces = Callable[[Sequence[int]], list[bytes]]
"""Returns the bytes of each token."""


class EncodedText:
    """The bytes of a text, the ids that encode it, and where each of its tokens begins.

    Tokens before the text, such as the one that begins a sequence, have no bytes of the text.
    """

    def __init__(self, data: bytes, ids: Sequence[int], num_before: int, sizes: list[int]) -> None:
        """Made by `try_make` alone."""
        self.data = data
        self.ids = ids
        self.num_before = num_before
        self.starts = [0, *accumulate(sizes)]
        """Where the tokens of the text begin, followed by the text's end."""


def try_make(text: str, ids: Sequence[int], pieces_of: Pieces) -> EncodedText | None:
    """The encoded text; None if its ids do not decode to exactly the text, as with tokenizers that
    normalize, add spaces, or end each text with a token."""
    data = text.encode()
    pieces = pieces_of(ids)
    sizes = list(map(len, pieces))
    extra = sum(sizes) - len(data)
    if extra < 0:
        return None
    num_before = 0
    while extra > 0 and num_before < len(sizes):
        extra -= sizes[num_before]
        num_before += 1
    if extra or b"".join(pieces[num_before:]) != data:
        return None
    return EncodedText(data, ids, num_before, sizes[num_before:])


def spliced(
    encoded: EncodedText,
    answers: Iterable[tuple[int, Sequence[int]]],
    pieces_of: Pieces,
    cuts: Collection[int] = (),
) -> tuple[list[int], int]:
    """The text's ids, with the answers' own ids where the text repeats an answer, and the number of
    answers put in. Each answer is given as the place where its text ends (in bytes, without white
    space at its end) and its ids, in the order of these places. If the text lacks the white space
    at an answer's end, only the ids before this white space are put in. `cuts` are the places that
    no token may span.
    """
    line = _Line(encoded)
    num_found = 0
    for end, ids in answers:
        pieces = pieces_of(ids)
        start = end - len(b"".join(pieces).rstrip(SPACES))
        num_found += any(
            line.try_put(start, ids[:kept], pieces[:kept], cuts)
            for kept in _kept_tokens(pieces, end - start)
        )
    return line.ids(), num_found


def _kept_tokens(pieces: Sequence[bytes], size: int) -> Iterator[int]:
    """The numbers of leading tokens to try: all of them, then as many as make up the first `size`
    bytes."""
    yield len(pieces)
    for kept, total in enumerate(accumulate(map(len, pieces)), 1):
        if total == size and kept < len(pieces):
            yield kept
            return


class _Line:
    """The text's ids while answers are put in: first the ids that are done, with their starts, then
    the text's own ids from `_place` on."""

    def __init__(self, encoded: EncodedText) -> None:
        self._encoded = encoded
        self._own = encoded.ids[encoded.num_before :]
        self._done: list[int] = []
        self._starts: list[int] = []
        self._place = 0

    def try_put(
        self, start: int, ids: Sequence[int], pieces: Sequence[bytes], cuts: Collection[int]
    ) -> bool:
        """Replace the ids of the text from `start` on by these ids of the same text. False if the
        text differs or a token spans either end or a cut."""
        text, starts = b"".join(pieces), self._encoded.starts
        end = start + len(text)
        if start < 0 or self._encoded.data[start:end] != text:
            return False
        own = list(accumulate(map(len, pieces), initial=start))
        after, first = _index(starts, end), self._own_starts_at(start)
        if after is None or after < self._place or not _are_in(own, cuts):
            return False
        if first is not None:
            self._done += self._own[self._place : first]
            self._starts += starts[self._place : first]
        else:
            kept = _index(self._starts, start)
            if kept is None:
                return False
            del self._done[kept:], self._starts[kept:]
        self._done += ids
        self._starts += own[:-1]
        self._place = after
        return True

    def _own_starts_at(self, start: int) -> int | None:
        found = _index(self._encoded.starts, start)
        return None if found is None or found < self._place else found

    def ids(self) -> list[int]:
        """All ids of the text, with the tokens before it."""
        before = self._encoded.ids[: self._encoded.num_before]
        return [*before, *self._done, *self._own[self._place :]]


def _index(starts: Sequence[int], place: int) -> int | None:
    """The index of `place` in the ascending `starts`; None if it is not among them."""
    index = bisect_left(starts, place)
    return index if index < len(starts) and starts[index] == place else None


def _are_in(starts: Sequence[int], cuts: Collection[int]) -> bool:
    """Whether each cut within the tokens lies at the start of a token."""
    inside = [cut for cut in cuts if starts[0] < cut < starts[-1]]
    return not inside or set(starts).issuperset(inside)


def cuts_between(parts: Sequence[str]) -> Iterator[int]:
    """Where the parts of a text meet, in bytes."""
    return accumulate(len(part.encode()) for part in parts[:-1])
