"""Bounds how much of a prefill pool the prompts for one decode worker may hold while they wait for
it.

Without a bound, prompts for a full decode worker fill the pool and hold up those for an idle one.
Pure bookkeeping; the scheduler reports admissions and releases, the owner reports grants.
"""

from __future__ import annotations

from scheduling.block_pools import Prefix
from scheduling.sequence import Key, Sequence
from scheduling.sequence_blocks import SequenceBlocks


class TargetShares:
    """The admitted prompts for which their targets have not granted blocks yet.

    If there are several targets, the prompts that wait for one of them hold at most `limit` pages,
    or one prompt. `num_targets` is the number of workers that continue prompts of this worker.
    """

    def __init__(self, limit: float, blocks: SequenceBlocks) -> None:
        self.num_targets = 1
        self._limit = limit
        self._blocks = blocks
        self._waiting: dict[Key, Sequence] = {}

    def admit(self, sequence: Sequence) -> None:
        """Note that a prompt has got its blocks."""
        if sequence.prefill_only:
            self._waiting[sequence.key] = sequence

    def release(self, sequence: Sequence) -> None:
        """Note that the target has granted its blocks, or that the prompt's blocks are released.
        May be called again."""
        self._waiting.pop(sequence.key, None)

    def exceeds(self, sequence: Sequence, cached: Prefix) -> bool:
        """Whether the prompts for this sequence's target would hold too much with it; `cached` is
        its prefix."""
        if not sequence.prefill_only or self.num_targets < 2:
            return False
        waiting = [each for each in self._waiting.values() if each.target == sequence.target]
        if not waiting:
            return False
        held = [
            {block for each in waiting for block in each.tables[group].blocks}
            for group in range(len(cached.blocks))
        ]
        shared = [
            sum(block in known for block in blocks)
            for known, blocks in zip(held, cached.blocks, strict=True)
        ]
        pages_of = self._blocks.pools.pages_for
        new = self._blocks.pages_for(sequence, sequence.num_tokens) - pages_of(shared)
        return any(held) and pages_of(map(len, held)) + new > self._limit
