"""The KV blocks that steps under way on this rank's device write to.

The thread that runs steps notes each before it queues the step's work, and the fence behind that
work afterwards. Any other thread asks for the fence behind the blocks that it is about to read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.fences import Fence
from engine.parallel.ranks import Step


@dataclass
class _Written:
    """A step's fence: not passed while the step is being queued."""

    blocks: frozenset[tuple[int, int]]  # group and block
    behind: Fence | None = None

    def is_done(self) -> bool:
        """See Fence. Raises RuntimeError when the card has failed."""
        return self.behind is not None and self.behind.is_done()


class BlocksUnderWay:
    """The steps of one rank in their order. `block_size`: tokens of a block. Does not know states,
    which models on cards do not have."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._lock = threading.Lock()
        self._steps: deque[_Written] = deque()

    def begin(self, step: Step) -> None:
        """Note a step whose work is about to be queued."""
        written = _Written(frozenset(self._blocks_of(step)))
        with self._lock:
            while self._steps and self._steps[0].is_done():
                self._steps.popleft()
            self._steps.append(written)

    def end(self, fence: Fence) -> None:
        """Note the fence behind the work of the newest step."""
        self._steps[-1].behind = fence

    def behind(self, group: int, blocks: Sequence[int]) -> _Written | None:
        """What to wait for before these blocks of a group are read; None if no step under way
        writes to them."""
        with self._lock:
            steps = list(self._steps)
        wanted = {(group, block) for block in blocks}
        found = (each for each in reversed(steps) if not wanted.isdisjoint(each.blocks))
        return next(found, None)  # a device runs steps in order

    def _blocks_of(self, step: Step) -> set[tuple[int, int]]:
        size = self._block_size
        return {
            (group, table[place - first])
            for query, context, _, tables, _ in step.segments
            for group, (first, table) in enumerate(tables)
            for place in range((context - query) // size, (context - 1) // size + 1)
        }
