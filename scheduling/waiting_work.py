"""The blocks that a worker's waiting sequences will need, and their tokens to compute.

A block that several of them share counts once, because one computes it and the others find it.
Tokens of a prefix that was cached when a sequence began to wait do not count. Pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scheduling.sequence import Key, Sequence


@dataclass(frozen=True)
class _Noted:
    """The counts of a sequence: its full blocks, those of them that are not cached, and the partial
    block at its end."""

    blocks: tuple[bytes, ...]
    missing: tuple[bytes, ...]
    partial_blocks: int
    partial_tokens: int


class WaitingWork:
    """Counts by block. `num_blocks` includes cached blocks; `num_tokens` leaves out sequences whose
    prompts other workers compute."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._noted: dict[Key, _Noted] = {}
        self._blocks: Counter[bytes] = Counter()
        self._missing: Counter[bytes] = Counter()
        self._partial_blocks = 0
        self._partial_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the sequences will need."""
        return len(self._blocks) + self._partial_blocks

    @property
    def num_tokens(self) -> int:
        """Number of tokens that they have to compute."""
        return len(self._missing) * self._block_size + self._partial_tokens

    def add(self, sequence: Sequence, num_cached: int) -> None:
        """Add a sequence that begins to wait; `num_cached` of its leading blocks are cached."""
        blocks = tuple(sequence.hashes)
        noted = _Noted(
            blocks,
            () if sequence.remote else blocks[num_cached:],
            sequence.blocks_for(sequence.num_tokens) - len(blocks),
            0 if sequence.remote else sequence.num_tokens - len(blocks) * self._block_size,
        )
        self._noted[sequence.key] = noted
        self._blocks.update(noted.blocks)
        self._missing.update(noted.missing)
        self._partial_blocks += noted.partial_blocks
        self._partial_tokens += noted.partial_tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that no longer waits."""
        noted = self._noted.pop(sequence.key)
        _subtract(self._blocks, noted.blocks)
        _subtract(self._missing, noted.missing)
        self._partial_blocks -= noted.partial_blocks
        self._partial_tokens -= noted.partial_tokens


def _subtract(counts: Counter[bytes], blocks: tuple[bytes, ...]) -> None:
    for digest in blocks:
        if counts[digest] == 1:
            del counts[digest]
        else:
            counts[digest] -= 1
