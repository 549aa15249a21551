"""The hashes of a prompt's blocks: computed once, and in a thread if the prompt is long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from protocol.hashing import ChainStart, block_hashes, more_hashes

LONG_PROMPT_TOKENS = 4096
"""Longer prompts are hashed in a thread."""
HASHED_AT_ONCE = 2048
"""Tokens that are hashed before the thread lets others run."""


class PromptHashes:
    """The hashes of a prompt's blocks, computed once for all sequences that continue it."""

    def __init__(self) -> None:
        self._start: ChainStart | None = None
        self._hashes: list[bytes] | None = None
        self._computing: tuple[ChainStart, asyncio.Future[list[bytes]]] | None = None

    @property
    def known(self) -> Sequence[bytes]:
        """The hashes, if they were computed."""
        return self._hashes or ()

    def of(self, token_ids: list[int], start: ChainStart, block_size: int) -> list[bytes]:
        """The hashes of this prompt's full blocks; see `protocol.hashing`."""
        if self._hashes is None or self._start != start:
            self._start, self._hashes = start, more_hashes([], start, token_ids, block_size)
        return self._hashes

    async def prepare(self, token_ids: list[int], start: ChainStart, block_size: int) -> None:
        """Compute the hashes in a thread, in advance of `of`. The sequences of one prompt wait for
        the same thread."""
        if self._hashes is not None and self._start == start:
            return
        if self._computing is None or self._computing[0] != start:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(None, _hash_in_parts, start, token_ids, block_size)
            self._computing = start, future
        hashes = await asyncio.shield(self._computing[1])
        self._start, self._hashes = start, hashes


def _hash_in_parts(start: ChainStart, token_ids: list[int], block_size: int) -> list[bytes]:
    """The hashes of all full blocks. Gives up the interpreter's lock between the parts."""
    hashes: list[bytes] = []
    step = max(1, HASHED_AT_ONCE // block_size) * block_size
    for end in (start.num_shared * block_size, len(token_ids)):
        for begin in range(len(hashes) * block_size, end, step):
            part = token_ids[begin : min(begin + step, end)]
            hashes += block_hashes(start.parent(hashes), part, block_size)
            time.sleep(0)
    return hashes
