"""From a block's hash to the workers that hold it: one look-up for all workers of a fleet.

Workers are bits of a mask. Knows nothing of events, dumps or time;
`router.routing.caches.cache_index` decides which worker holds what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from itertools import repeat
from operator import and_, or_
from typing import NamedTuple, TypeVar

from protocol.hashing import end_of

T = TypeVar("T")

AHEAD = 64
"""Look-ups that are made at once."""
EXACT_BLOCKS = 512
"""Leading blocks of a prompt that are looked up one by one."""
STRIDE = 16
"""Of the later blocks, every 16th is looked up: a cache evicts the tail of a chain first, so a
worker that holds a block holds those before it, except for rare remains of a broken transfer."""


class Run(NamedTuple):
    """The workers that hold exactly `num_blocks` leading blocks of a prompt."""

    num_blocks: int
    workers: int


class BlockHolders:
    """A mask of workers for each block that some worker holds."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, worker: int, digests: Collection[bytes]) -> None:
        """Note that a worker (one bit) holds these blocks."""
        masks = self._masks
        if masks.keys().isdisjoint(digests):  # the usual, quick case: no worker holds any of them
            masks.update(dict.fromkeys(digests, worker))
            return
        held = map(masks.get, digests, repeat(0))
        masks.update(zip(digests, map(or_, held, repeat(worker)), strict=False))

    def remove(self, worker: int, digests: Iterable[bytes]) -> None:
        """Note that a worker does not hold these blocks."""
        masks = self._masks
        for digest in digests:
            mask = masks.get(digest, 0)
            if mask == worker:
                del masks[digest]
            elif mask & worker:
                masks[digest] = mask ^ worker

    def of(self, digest: bytes) -> int:
        """The workers that hold a block."""
        return self._masks.get(digest, 0)

    def last_end(
        self, hashes: Sequence[bytes], worker: int, also: BlockHolders | None = None
    ) -> int:
        """The number of blocks up to the last place among `hashes` where a prefix of the worker can
        end, by its reports here or in `also`."""
        for num_blocks in range(len(hashes), 0, -1):
            end = end_of(hashes[num_blocks - 1])
            if (self.of(end) | (0 if also is None else also.of(end))) & worker:
                return num_blocks
        return 0

    def runs(
        self,
        hashes: Sequence[bytes],
        workers: int,
        start: int = 0,
        also: BlockHolders | None = None,
    ) -> list[Run]:
        """The number of leading blocks of a prompt that each of these workers holds, here or in
        `also`. The caller knows that they hold those before `start`."""
        held = self._masks.get
        others = None if also is None else also._masks.get
        found: list[Run] = []
        place, num_blocks = start, len(hashes)
        while workers and place < num_blocks:
            stride = 1 if place < EXACT_BLOCKS else STRIDE
            end = EXACT_BLOCKS if place < EXACT_BLOCKS <= num_blocks else num_blocks
            ahead = hashes[place + stride - 1 : min(end, place + AHEAD * stride) : stride]
            masks = map(held, ahead, repeat(0))
            if others is not None:
                masks = map(or_, masks, map(others, ahead, repeat(0)))
            if ahead and reduce(and_, masks, workers) == workers:
                # The usual, quick case: these workers hold all blocks of the stride.
                place += len(ahead) * stride
                continue
            for _ in range(max(1, len(ahead))):
                last = min(place + stride, num_blocks) - 1
                holding = held(hashes[last], 0) & workers
                if others is not None and holding != workers:
                    holding |= others(hashes[last], 0) & workers
                if holding == workers:
                    place = last + 1
                else:
                    within = hashes[place : last + 1]
                    place, workers = self._enter(within, workers, place, also, found)
                    if not workers:
                        return found
        if workers:
            found.append(Run(num_blocks, workers))
        return found

    def _enter(
        self,
        hashes: Sequence[bytes],
        workers: int,
        place: int,
        also: BlockHolders | None,
        found: list[Run],
    ) -> tuple[int, int]:
        """Look up the blocks of a stride one by one; returns the stride's end and the workers that
        hold all of it."""
        for digest in hashes:
            holding = (self.of(digest) | (0 if also is None else also.of(digest))) & workers
            if holding != workers:
                found.append(Run(place, workers ^ holding))
                workers = holding
            place += 1
        return place, workers


def by_worker(runs: Iterable[Run], of: Callable[[int], T]) -> dict[int, T]:
    """What `of` makes of the number of blocks, by worker, for workers that hold any."""
    found = {}
    for num_blocks, mask in runs:
        if num_blocks:
            made = of(num_blocks)
            while mask:
                bit = mask & -mask
                found[bit] = made
                mask ^= bit
    return found
