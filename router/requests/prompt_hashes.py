"""The hashes of a prompt's blocks, computed once. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from protocol.hashing import ChainStart, more_hashes

LONG_PROMPT_TOKENS = 4096
"""Longer prompts are hashed in a thread: see `router.requests.hash_thread`."""


class PromptHashes:
    """The hashes of a prompt's blocks, computed once for all sequences that continue it."""

    def __init__(self) -> None:
        self._start: ChainStart | None = None
        self._hashes: list[bytes] | None = None
        self.computing: tuple[ChainStart, Awaitable[list[bytes]]] | None = None
        """The computation that runs in a thread now."""

    @property
    def known(self) -> Sequence[bytes]:
        """The hashes, if they were computed."""
        return self._hashes or ()

    def has(self, start: ChainStart) -> bool:
        """Whether the hashes of the chain that starts so are known."""
        return self._hashes is not None and self._start == start

    def keep(self, start: ChainStart, hashes: list[bytes]) -> None:
        """Keep hashes that were computed elsewhere."""
        self._start, self._hashes = start, hashes

    def of(self, token_ids: list[int], start: ChainStart, block_size: int) -> list[bytes]:
        """The hashes of this prompt's full blocks; see `protocol.hashing`."""
        if self._hashes is None or self._start != start:
            self._start, self._hashes = start, more_hashes([], start, token_ids, block_size)
        return self._hashes
