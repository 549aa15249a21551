"""Hashes a long prompt in a thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import time

from protocol.hashing import ChainStart, block_hashes
from router.requests.prompt_hashes import PromptHashes

HASHED_AT_ONCE = 2048
"""Tokens that are hashed before the thread lets others run."""


async def hash_in_thread(
    hashes: PromptHashes, token_ids: list[int], start: ChainStart, block_size: int
) -> None:
    """Compute the hashes of a prompt in advance. The sequences of one prompt wait for the same
    thread."""
    if hashes.has(start):
        return
    if hashes.computing is None or hashes.computing[0] != start:
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(None, _hash_in_parts, start, token_ids, block_size)
        hashes.computing = start, future
    hashes.keep(start, await asyncio.shield(hashes.computing[1]))


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
