"""What one group of layers keeps of a sequence, counted in blocks. Pure.

A group without a window keeps everything. A windowed one keeps the blocks that later tokens still
see, and room for the steps under way and the next one. It never needs more than this quota, so a
sequence that holds its quota waits for no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.layout import first_covering, kept_from

STEPS = 2
"""Steps that may write to a sequence's blocks before the first of them has landed: one under way,
and the one that is planned meanwhile."""


@dataclass(frozen=True)
class GroupRule:
    """The rule of one group. `blocks_per_page` as in `KvLayout`."""

    block_size: int
    window: int | None = None
    blocks_per_page: int = 1

    def covers_from(self, boundary: int) -> int:
        """The first block that the group must hold to continue after `boundary` blocks; it must
        hold all blocks from there to the boundary."""
        return 0 if self.window is None else first_covering(boundary, self.block_size, self.window)

    def kept_from(self, num_tokens: int) -> int:
        """The first block that is kept when `num_tokens` tokens are computed and landed."""
        return kept_from(num_tokens, self.block_size, self.window)

    @property
    def cover(self) -> int:
        """The most blocks that a window reaches back from a block boundary."""
        assert self.window is not None
        return -(-(self.window - 1) // self.block_size)

    def held(self, num_blocks: int, step_tokens: int) -> int:
        """How many of `num_blocks` blocks a sequence holds at a time, if a step computes up to
        `step_tokens` tokens of it.

        The sum has one block before the last boundary, that boundary's cover, the rest of the block
        in which the oldest step begins, and the blocks for the steps' tokens.
        """
        if self.window is None:
            return num_blocks
        return min(num_blocks, self.cover + 2 - (-STEPS * step_tokens // self.block_size))

    def is_checkpoint(self, block: int, every: int, prompt_blocks: int) -> bool:
        """Whether a windowed group needs this block to continue from a checkpoint. Checkpoints are
        the boundaries after each `every` blocks, and the last two of `prompt_blocks` full blocks.
        """
        if block >= self.covers_from(-(-(block + 1) // every) * every):
            return True
        return self.covers_from(max(0, prompt_blocks - 1)) <= block < prompt_blocks

    def pages(self, num_blocks: int) -> int:
        """Number of large pages that hold `num_blocks` blocks."""
        return -(-num_blocks // self.blocks_per_page)
