"""The hashes of a prompt's blocks: computed once, and in a thread if the prompt is long."""

from __future__ import annotations

import asyncio
import time

from protocol.hashing import block_hashes

LONG_PROMPT_TOKENS = 4096
"""Longer prompts are hashed in a thread."""
HASHED_AT_ONCE = 2048
"""Tokens that are hashed before the thread lets others run."""


class PromptHashes:
    """The hashes of a prompt's blocks, computed once for all sequences that continue it."""

    def __init__(self) -> None:
        self._root = b""
        self._hashes: list[bytes] | None = None
        self._computing: tuple[bytes, asyncio.Future[list[bytes]]] | None = None

    def of(self, token_ids: list[int], root: bytes, block_size: int) -> list[bytes]:
        """The hashes of this prompt's full blocks; see `protocol.hashing`."""
        if self._hashes is None or self._root != root:
            self._root, self._hashes = root, block_hashes(root, token_ids, block_size)
        return self._hashes

    async def prepare(self, token_ids: list[int], root: bytes, block_size: int) -> None:
        """Compute the hashes in a thread, so that `of` need not. The sequences of one prompt wait
        for the same thread."""
        if self._hashes is not None and self._root == root:
            return
        if self._computing is None or self._computing[0] != root:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(None, _hash_in_parts, root, token_ids, block_size)
            self._computing = root, future
        hashes = await asyncio.shield(self._computing[1])
        self._root, self._hashes = root, hashes


def _hash_in_parts(root: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
    """The hashes of all full blocks. Gives up the interpreter's lock between the parts."""
    hashes: list[bytes] = []
    step = max(1, HASHED_AT_ONCE // block_size) * block_size
    for start in range(0, len(token_ids), step):
        parent = hashes[-1] if hashes else root
        hashes += block_hashes(parent, token_ids[start : start + step], block_size)
        time.sleep(0)
    return hashes
