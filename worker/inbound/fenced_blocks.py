"""Blocks of ended tasks and given-up fetches that a peer may still write to. Owns these blocks
until no peer can write to them."""

from __future__ import annotations

from collections.abc import Iterable

from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.outgoing import GroupedBlocks


class FencedBlocks:
    """Pinned blocks, by handoff. `len` is the number of handoffs."""

    def __init__(self, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self._blocks: dict[HandoffKey, GroupedBlocks] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> list[list[int]]:
        """All fenced blocks of each group. A block that several handoffs pin is listed for each."""
        found: list[list[int]] = [[] for _ in range(self._num_groups)]
        for each in self._blocks.values():
            for group, blocks in enumerate(each):
                found[group] += blocks
        return found

    @property
    def num_blocks(self) -> int:
        """The number of fenced blocks."""
        return sum(len(blocks) for each in self._blocks.values() for blocks in each)

    def keep(self, key: HandoffKey, blocks: GroupedBlocks) -> None:
        """Keep the blocks of a handoff that continues although its result is not needed."""
        self._blocks[key] = [list(each) for each in blocks]

    def take(self, key: HandoffKey) -> GroupedBlocks:
        """Hand the blocks of an ended handoff to the caller; there may be none."""
        return self._blocks.pop(key, ())

    def blocks_of(self, keys: Iterable[HandoffKey]) -> list[set[int]]:
        """The fenced blocks of these handoffs, by group."""
        found: list[set[int]] = [set() for _ in range(self._num_groups)]
        for key in keys:
            for group, blocks in enumerate(self._blocks.get(key, ())):
                found[group].update(blocks)
        return found

    def describe(self) -> list[str]:
        """One line for each handoff, for people."""
        return [
            f"{sum(map(len, blocks))} blocks: {key}, ended, a peer may still write to them"
            for key, blocks in self._blocks.items()
        ]
