"""The blocks of ended tasks that a peer may still write to. Owns them until no peer can."""

from __future__ import annotations

from collections.abc import Iterable

from kv_transfer.handoff.key import HandoffKey
from scheduling.sequence import Sequence


class FencedBlocks:
    """Sequences of ended tasks, by handoff, whose blocks stay pinned."""

    def __init__(self) -> None:
        self._sequences: dict[HandoffKey, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> list[Sequence]:
        """All of them."""
        return list(self._sequences.values())

    @property
    def num_blocks(self) -> int:
        """Blocks behind fences."""
        return sum(len(each.block_table) for each in self._sequences.values())

    def keep(self, key: HandoffKey, sequence: Sequence) -> None:
        """Keep the blocks of a task that has ended before its handoff."""
        self._sequences[key] = sequence

    def take(self, key: HandoffKey) -> Sequence | None:
        """Hand the blocks of an ended handoff to the caller; None if there are none."""
        return self._sequences.pop(key, None)

    def blocks_of(self, keys: Iterable[HandoffKey]) -> set[int]:
        """The blocks behind the fences of these handoffs."""
        found = (self._sequences.get(key) for key in keys)
        return {block for sequence in found if sequence for block in sequence.block_table}

    def describe(self) -> list[str]:
        """One line for each handoff, for people."""
        return [
            f"{len(sequence.block_table)} blocks: {key}, ended, a peer may still write to them"
            for key, sequence in self._sequences.items()
        ]
