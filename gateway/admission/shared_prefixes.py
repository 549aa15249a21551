"""Beginnings of prompts whose cached blocks the requests of all keys share.

An operator declares them; they hold no secret. Knows token ids only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class SharedPrefixes:
    """Declared prefixes, as token ids. Its length is their number."""

    def __init__(self, prefixes: Iterable[list[int]] = ()) -> None:
        self._sorted = sorted(prefixes)

    def __len__(self) -> int:
        return len(self._sorted)

    def num_shared(self, token_ids: list[int]) -> int:
        """The largest number of leading tokens that a prompt has in common with one of the
        prefixes."""
        if not self._sorted:
            return 0
        place = bisect_left(self._sorted, token_ids)
        beside = self._sorted[max(0, place - 1) : place + 1]  # no other prefix has more in common
        return max((_num_common(token_ids, each) for each in beside), default=0)


def _num_common(one: list[int], other: list[int]) -> int:
    """The length of the longest common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
