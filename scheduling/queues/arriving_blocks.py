"""The blocks that are being fetched or loaded here, so that sequences that need the same ones wait
for them instead of computing or fetching them, too. Pure."""

from __future__ import annotations

from scheduling.sequence import Sequence


class ExpectedBlocks:
    """The hashes of the expected blocks. Those of each sequence follow its computed tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: set[bytes] = set()

    def expect(self, sequence: Sequence, num_blocks: int) -> None:
        """Note that the next `num_blocks` blocks of a sequence are being fetched, and no others."""
        self.forget(sequence)
        sequence.num_expected = num_blocks
        first = sequence.num_computed // self._block_size
        self._hashes.update(sequence.hashes[first : first + num_blocks])

    def forget(self, sequence: Sequence) -> None:
        """Note that no block of a sequence is being fetched any more. Call it before its tokens
        count as computed."""
        if not sequence.num_expected:
            return
        first = sequence.num_computed // self._block_size
        self._hashes.difference_update(sequence.hashes[first : first + sequence.num_expected])
        sequence.num_expected = 0

    def have_next_of(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether the next block that a local sequence lacks is being fetched for another one."""
        if not self._hashes or sequence.remote or num_cached >= len(sequence.hashes):
            return False
        return sequence.hashes[num_cached] in self._hashes
