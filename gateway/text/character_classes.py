"""Letters, numbers and spaces of Unicode, written out as sets for regular expressions.

Regex engines use different versions of Unicode, and Python's differs from a tokenizer's. A
character is certain if Unicode 3.2 and Python's version agree on it: both say letter, or both
number, or both neither. Engines treat unknown characters like those that are neither. All other
characters are left out.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from unicodedata import ucd_3_2_0

SPACES = r"\t-\r \u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space by Unicode's `White_Space` property."""

_UNCERTAIN = frozenset("\u017f\u180e")  # folds into "s"; an old space
_PLANE = range(0x10000)
_PICTURES = range(0x1F000, 0x1FB00)


@dataclass(frozen=True)
class CharacterClasses:
    """Contents of regex sets, without brackets: letters, numbers, all certain characters."""

    letters: str
    numbers: str
    certain: str


@cache
def character_classes() -> CharacterClasses:
    """The classes, computed once per process (in some hundredths of a second)."""
    found: dict[str, list[int]] = {"L": [], "N": [], "": []}
    for code in (*_PLANE, *_PICTURES):
        kind = _kind(chr(code))
        if kind is not None:
            found[kind].append(code)
    letters, numbers, others = found["L"], found["N"], found[""]
    return CharacterClasses(
        _ranges(letters), _ranges(numbers), _ranges(sorted((*letters, *numbers, *others)))
    )


def _kind(character: str) -> str | None:
    """ "L" or "N"; "" for a character that is neither; None for one that is not certain."""
    now, before = unicodedata.category(character), ucd_3_2_0.category(character)
    if now in ("Cn", "Cs", "Co") or character in _UNCERTAIN:
        return None
    if now[0] in "LN" or before[0] in "LN":
        return now[0] if now[0] == before[0] else None
    return ""


def _ranges(codes: Iterable[int]) -> str:
    """The content of a regex set; `codes` are in ascending order."""
    return "".join(
        f"\\U{first:08x}-\\U{last:08x}" if first < last else f"\\U{first:08x}"
        for first, last in _runs(codes)
    )


def _runs(codes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Each run of consecutive codes, as its first and last code."""
    first: int | None = None
    last = 0
    for code in codes:
        if first is not None and code == last + 1:
            last = code
            continue
        if first is not None:
            yield first, last
        first = last = code
    if first is not None:
        yield first, last
