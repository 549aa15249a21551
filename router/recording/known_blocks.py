"""Digests of prompts' blocks. A block's digest is written only once while it is remembered. A
block's hash covers all tokens up to its end. So if a prompt begins with blocks that were written
before, only the digest of the last of these is written, then the digests of new blocks. Digests are
keyed: without the key nobody can test a guess of the text. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

RECORDED_TOKENS = 64
"""Tokens of a recorded block, if they are a multiple of the fleet's block size."""
MOST_KNOWN = 1 << 17
_DIGEST_BYTES = 8


def recorded_tokens(block_size: int) -> int:
    """Tokens of a recorded block: the smallest multiple of the fleet's blocks from 64 on."""
    return -(-RECORDED_TOKENS // block_size) * block_size


class KnownBlocks:
    """The blocks in the current file. They are whole prefixes: the predecessors of a known block
    are known, too."""

    def __init__(self, key: bytes, most: int = MOST_KNOWN) -> None:
        self._key = key
        self._most = most
        self._known: set[bytes] = set()

    def clear(self) -> None:
        """Forget all blocks, as for a new file."""
        self._known.clear()

    def digest(self, value: bytes) -> str:
        """The digest of any value, hexadecimal."""
        return blake2b(value, digest_size=_DIGEST_BYTES, key=self._key).hexdigest()

    def note(self, hashes: Sequence[bytes], block_size: int) -> tuple[str, list[str]]:
        """The digest of the last known block ("" if none is known), and those of the blocks after
        it, which count as known from now on. `hashes` are those of a prompt's full blocks."""
        each = recorded_tokens(block_size) // block_size
        ends = hashes[each - 1 :: each]
        if len(self._known) + len(ends) > self._most:
            self.clear()
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            if ends[middle] in self._known:
                low = middle + 1
            else:
                high = middle
        new = ends[low:]
        self._known.update(new)
        return self.digest(ends[low - 1]) if low else "", [self.digest(one) for one in new]
