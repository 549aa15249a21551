"""Which sequences may be admitted past those that do not fit.

A large prompt must not hold up small ones for which there is room, and they must not starve it. So
all sequences that pass a waiting one may take together at most as many blocks as it needs itself.
After that none may pass, and blocks that become free are kept for it.
`tests/specification/handoff_model.py` checks that every request still ends. Pure.
"""

from __future__ import annotations

from scheduling.sequence import Sequence

MAX_TRIES = 64
"""Sequences that are looked at in one step behind the first that does not fit."""


class Overtaking:
    """The sequences that do not fit in the current step."""

    def __init__(self) -> None:
        self._blocked: list[Sequence] = []
        self._num_tries = 0

    @property
    def is_over(self) -> bool:
        """Whether no other sequence may pass, or enough were tried."""
        return self._num_tries >= MAX_TRIES or any(_left(each) <= 0 for each in self._blocked)

    def block(self, sequence: Sequence) -> None:
        """Note that a sequence does not fit."""
        self._blocked.append(sequence)

    def may_pass(self, sequence: Sequence) -> bool:
        """Whether a sequence may be admitted past all that do not fit."""
        if not self._blocked:
            return True
        self._num_tries += 1
        needed = sequence.blocks_for(sequence.num_tokens)
        return all(needed <= _left(each) for each in self._blocked)

    def passed(self, sequence: Sequence) -> None:
        """Note that a sequence was admitted."""
        sequence.num_passed_blocks = 0
        for each in self._blocked:
            each.num_passed_blocks += sequence.blocks_for(sequence.num_tokens)


def _left(blocked: Sequence) -> int:
    """The number of blocks that may still pass this sequence."""
    return blocked.blocks_for(blocked.num_tokens) - blocked.num_passed_blocks
