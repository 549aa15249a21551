"""Blocks of ended tasks and given-up fetches that a peer may still write to. Owns them until no
peer can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kv_transfer.handoff.key import HandoffKey


class FencedBlocks:
    """Pinned blocks, by handoff. `len` is the number of handoffs."""

    def __init__(self) -> None:
        self._blocks: dict[HandoffKey, list[int]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> list[int]:
        """All fenced blocks. A block that several handoffs pin is listed for each."""
        return [block for blocks in self._blocks.values() for block in blocks]

    @property
    def num_blocks(self) -> int:
        """The number of fenced blocks."""
        return sum(len(each) for each in self._blocks.values())

    def keep(self, key: HandoffKey, blocks: Sequence[int]) -> None:
        """Keep the blocks of a handoff that continues although its result is not needed."""
        self._blocks[key] = list(blocks)

    def take(self, key: HandoffKey) -> list[int]:
        """Hand the blocks of an ended handoff to the caller; there may be none."""
        return self._blocks.pop(key, [])

    def blocks_of(self, keys: Iterable[HandoffKey]) -> set[int]:
        """The fenced blocks of these handoffs."""
        return {block for key in keys for block in self._blocks.get(key, ())}

    def describe(self) -> list[str]:
        """One line for each handoff, for people."""
        return [
            f"{len(blocks)} blocks: {key}, ended, a peer may still write to them"
            for key, blocks in self._blocks.items()
        ]
