"""Bounds how much of a prefill pool the prompts for one decode worker may hold while they wait for
it.

Without a bound, prompts for a full decode worker fill the pool and hold up those for an idle one.
Pure bookkeeping; the scheduler reports admissions and releases, the owner reports grants.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduling.sequence import Key, Sequence


class TargetShares:
    """The admitted prompts for which their targets have not granted blocks yet.

    If there are several targets, the prompts that wait for one of them hold at most `limit` blocks,
    or one prompt. `num_targets` is the number of workers that continue our prompts.
    """

    def __init__(self, limit: float) -> None:
        self.num_targets = 1
        self._limit = limit
        self._waiting: dict[Key, Sequence] = {}

    def admit(self, sequence: Sequence) -> None:
        """Note that a prompt has got its blocks."""
        if sequence.prefill_only:
            self._waiting[sequence.key] = sequence

    def release(self, sequence: Sequence) -> None:
        """Note that the target has granted its blocks, or that the prompt's blocks are released.
        May be called again."""
        self._waiting.pop(sequence.key, None)

    def exceeds(self, sequence: Sequence, cached: Iterable[int]) -> bool:
        """Whether the prompts for this sequence's target would hold too much with it. `cached` are
        the blocks that already hold its prefix."""
        if not sequence.prefill_only or self.num_targets < 2:
            return False
        waiting = [each for each in self._waiting.values() if each.target == sequence.target]
        held = {block for each in waiting for block in each.block_table}
        new = sequence.blocks_for(sequence.num_tokens) - sum(block in held for block in cached)
        return bool(held) and len(held) + new > self._limit
