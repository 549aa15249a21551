"""The blocks that a worker's waiting sequences will need, and their tokens to compute.

A block that several of them share counts once, because one computes it and the others find it.
Tokens of a prefix that was cached when a sequence began to wait do not count. Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from scheduling.sequence import Key, Sequence


class _Noted(NamedTuple):
    """The counts of a sequence: its full blocks, those of them that are not cached, and the blocks
    that it needs besides: the partial one at its end, and those of other groups of layers."""

    blocks: tuple[bytes, ...]
    missing: tuple[bytes, ...]
    blocks_beside: int
    partial_tokens: int


class WaitingWork:
    """Counts by block. `num_blocks` includes cached blocks; `num_tokens` leaves out sequences whose
    prompts other workers compute."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._noted: dict[Key, _Noted] = {}
        self._blocks: Counter[bytes] = Counter()
        self._missing: Counter[bytes] = Counter()
        self._blocks_beside = 0
        self._partial_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the sequences will need."""
        return len(self._blocks) + self._blocks_beside

    @property
    def num_tokens(self) -> int:
        """Number of tokens that they have to compute."""
        return len(self._missing) * self._block_size + self._partial_tokens

    def add(self, sequence: Sequence, num_cached: int, num_blocks: int) -> None:
        """Add a sequence that begins to wait and will need `num_blocks` blocks; `num_cached` of its
        leading blocks are cached. One whose layers all have windows may need fewer than it has
        full blocks, and shares none of them for long."""
        full = tuple(sequence.hashes)
        blocks = full if num_blocks >= len(full) else ()
        noted = _Noted(
            blocks,
            () if sequence.remote else full[num_cached:],
            num_blocks - len(blocks),
            0 if sequence.remote else sequence.num_tokens - len(full) * self._block_size,
        )
        self._noted[sequence.key] = noted
        if full:
            self._blocks.update(noted.blocks)
            self._missing.update(noted.missing)
        self._blocks_beside += noted.blocks_beside
        self._partial_tokens += noted.partial_tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that no longer waits."""
        noted = self._noted.pop(sequence.key)
        _subtract(self._blocks, noted.blocks)
        _subtract(self._missing, noted.missing)
        self._blocks_beside -= noted.blocks_beside
        self._partial_tokens -= noted.partial_tokens


def _subtract(counts: Counter[bytes], blocks: tuple[bytes, ...]) -> None:
    for digest in blocks:
        if counts[digest] == 1:
            del counts[digest]
        else:
            counts[digest] -= 1
