"""Prompts as lists of block ids (`hash_ids`): which blocks are equal, and how long they are.

An id stands for its block behind the blocks before it, so a block's number depends on both: it does
not matter whether the ids are hashes of whole prefixes or of each block alone. The block size is
not written in such traces; it is the power of two that fits the numbers of tokens and of ids.
"""

from __future__ import annotations

from collections.abc import Iterable

from simulator.traces.lines import TraceLine

_MOST_TOKENS = 4096
_SIZES = (512, *(1 << power for power in range(_MOST_TOKENS.bit_length())))
"""Possible block sizes, the likely ones first."""
_GAP = 1 << 24  # more than a prompt has blocks


class BlockIds:
    """Reads the ids of one trace's prompts."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._sizes = _SIZES

    @property
    def block_tokens(self) -> int:
        """The block size that fits all prompts so far. If several do, 512, or else the smallest."""
        return self._sizes[0]

    def read(self, line: TraceLine, num_prompt: int) -> list[int]:
        """The numbers of the prompt's blocks, the last of which may be incomplete. Raises
        ConfigError if the number of ids fits no block size, or not that of the lines before."""
        ids = line.integers("hash_ids")
        fitting = tuple(each for each in self._sizes if -(-num_prompt // each) == len(ids))
        if not fitting:
            sizes = f"{self.block_tokens} tokens of the prompt, as in the lines before"
            if self._sizes is _SIZES:
                sizes = "1, 2, 4, ... or 4,096 tokens of the prompt"
            raise line.wrong("hash_ids", f"one id for every {sizes}")
        self._sizes = fitting
        return self._numbered(ids)

    def _numbered(self, ids: Iterable[int]) -> list[int]:
        """A number for each id and its predecessors; consecutive ids have consecutive numbers, so
        that only the beginnings of such runs are remembered."""
        found: list[int] = []
        number, due = -1, None
        for each in ids:
            if each == due:
                number += 1
            else:
                number = self._numbers.setdefault((number, each), len(self._numbers) * _GAP)
            found.append(number)
            due = each + 1
        return found
