"""Which sequences may be admitted past those that do not fit. A large prompt must not hold up small
ones for which there is room, nor be starved by them. So all sequences that pass a waiting one may
take together at most as much memory as it needs itself. After that none may pass, and memory that
becomes free is kept for it. `tests/specification/handoff_model.py` checks that every request still
ends. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scheduling.sequence import Sequence

MAX_TRIES = 64
"""The most sequences that are examined in one step after the first that does not fit."""


class Overtaking:
    """The sequences that do not fit in the current step. `pages_for` returns the memory that a
    sequence needs for a number of tokens, in units that all groups of layers share."""

    def __init__(self, pages_for: Callable[[Sequence, int], int] = Sequence.blocks_for) -> None:
        self._pages_for = pages_for
        self._blocked: list[Sequence] = []
        self._least_left: float = math.inf  # pages that may still pass each of them
        self._num_tries = 0

    @property
    def is_over(self) -> bool:
        """Whether no other sequence may pass, or enough were tried."""
        return self._num_tries >= MAX_TRIES or self._least_left <= 0

    def block(self, sequence: Sequence) -> None:
        """Note that a sequence does not fit."""
        self._blocked.append(sequence)
        left = self._needed(sequence) - sequence.num_passed_pages
        self._least_left = min(self._least_left, left)

    def may_pass(self, sequence: Sequence) -> bool:
        """Whether a sequence may be admitted past all that do not fit."""
        if not self._blocked:
            return True
        self._num_tries += 1
        return self._needed(sequence) <= self._least_left

    def passed(self, sequence: Sequence) -> None:
        """Note that a sequence was admitted."""
        sequence.num_passed_pages = 0
        if self._blocked:
            needed = self._needed(sequence)
            self._least_left -= needed
            for each in self._blocked:
                each.num_passed_pages += needed

    def _needed(self, sequence: Sequence) -> int:
        return self._pages_for(sequence, sequence.num_tokens)
