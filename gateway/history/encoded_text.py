"""A prompt's text with its token ids, in which ids of earlier answers can take their text's place.

Pure. The text never changes: an answer's ids replace the ids of exactly the bytes that they stand
for. They begin and end at boundaries of the tokens around them, and no token of theirs spans a cut,
at which a text that only looks like a control token was taken apart. An answer for which that does
not hold is left as the tokenizer encoded it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate

SPACES = b" \t\r\n"
TokenBytes = Callable[[int], bytes]


class EncodedText:
    """The bytes of a text, the ids that encode it, and where each of its tokens begins.

    Tokens before the text, such as the one that begins a sequence, have no bytes of the text.
    """

    def __init__(self, data: bytes, ids: Sequence[int], num_before: int, sizes: list[int]) -> None:
        """Use `try_make`."""
        self.data = data
        self.ids = ids
        self.num_before = num_before
        self.starts = [0, *accumulate(sizes)]
        """Where the tokens of the text begin, and at last its end."""

    def ends_before(self, token_ids: Collection[int]) -> list[int]:
        """The ends of text: where one of these tokens begins, and the end of all text."""
        ids, before = self.ids, self.num_before
        found = [start for start, id_ in zip(self.starts, ids[before:], strict=False)
                 if id_ in token_ids]  # fmt: skip
        return [*found, len(self.data)]

    def with_trimmed(self, ends: Iterable[int]) -> list[int]:
        """These ends, and those that they have without the white space before them, in order."""
        found = set()
        for end in ends:
            found.add(end)
            start = end
            while start and self.data[start - 1] in SPACES:
                start -= 1
            found.add(start)
        return sorted(found - {0})


def try_make(text: str, ids: Sequence[int], token_bytes: TokenBytes) -> EncodedText | None:
    """The encoded text; None if its ids do not decode to the text and nothing else, as those of
    tokenizers that normalize, add spaces, or end each text with a token."""
    data = text.encode()
    pieces = list(map(token_bytes, ids))
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
    token_bytes: TokenBytes,
    cuts: Collection[int] = (),
) -> tuple[list[int], int]:
    """The text's ids with those of the answers in their places, and how many answers found theirs.

    An answer is where its text ends, in bytes, and its ids; answers come in the order of their
    ends. `cuts` are the places that no token may span.
    """
    line = _Line(encoded)
    num_found = 0
    for end, ids in answers:
        sizes = [len(token_bytes(each)) for each in ids]
        start = end - sum(sizes)
        if start < 0 or b"".join(map(token_bytes, ids)) != encoded.data[start:end]:
            continue
        inside = set(accumulate(sizes, initial=start))
        if all(cut in inside for cut in cuts if start < cut < end):
            num_found += line.try_put(start, end, ids, sizes)
    return line.ids(), num_found


class _Line:
    """The ids so far: `done` ones with their starts, and then the text's own from a place on."""

    def __init__(self, encoded: EncodedText) -> None:
        self._encoded = encoded
        self._own = encoded.ids[encoded.num_before :]
        self._done: list[int] = []
        self._starts: list[int] = []
        self._place = 0

    def try_put(self, start: int, end: int, ids: Sequence[int], sizes: Sequence[int]) -> bool:
        """Put ids in the place of those from `start` to `end`; False if a token spans either."""
        starts = self._encoded.starts
        after = _index(starts, end)
        first = self._own_starts_at(start)
        if after is None or after < self._place:
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
        self._starts += accumulate(sizes[:-1], initial=start)
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
    """The index of a place among ascending ones; None if it is not there."""
    index = bisect_left(starts, place)
    return index if index < len(starts) and starts[index] == place else None


def cuts_between(parts: Sequence[str]) -> Iterator[int]:
    """Where the parts of a text meet, in bytes."""
    return accumulate(len(part.encode()) for part in parts[:-1])
