"""Which KV blocks each worker has in its own tiers, host memory and disk.

Pure. Only the worker itself reads them, so they make a placement cheaper there and nowhere else.
Workers are bits of a mask, as in `router.routing.caches.block_holders`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from protocol.events import TierChange
from protocol.messages import TierName
from router.routing.caches.block_holders import BlockHolders, by_worker


class OwnTiers(NamedTuple):
    """Blocks that follow those in a worker's pool: in host memory, and on disk only."""

    in_host: int
    on_disk: int


class Tiers:
    """What one worker has in its tiers."""

    def __init__(self) -> None:
        self.by_name: dict[TierName, set[bytes]] = {each: set() for each in TierName}

    def __len__(self) -> int:
        return sum(map(len, self.by_name.values()))

    def __contains__(self, digest: object) -> bool:
        return any(digest in each for each in self.by_name.values())


class TierBlocks:
    """The tiers of all workers that have any."""

    def __init__(self) -> None:
        self._held = BlockHolders()
        self._tiers: dict[int, Tiers] = {}
        self._workers = 0

    def __len__(self) -> int:
        """The number of blocks that any worker has. Blocks of former tiers count until they are
        swept."""
        return len(self._held)

    def num_blocks(self, worker: int) -> int:
        """Entries of a worker (one bit); a block in both tiers counts twice."""
        tiers = self._tiers.get(worker)
        return 0 if tiers is None else len(tiers)

    def apply(self, worker: int, changes: Iterable[TierChange]) -> None:
        """Take the changes of a worker's tiers."""
        for change in changes:
            tiers = self._tiers_of(worker)
            held = tiers.by_name[change.tier]
            held.difference_update(change.removed)
            held.update(change.stored)
            self._held.remove(worker, [each for each in change.removed if each not in tiers])
            self._held.add(worker, change.stored)

    def add(self, worker: int, tiers: Tiers, tier: TierName, digests: Sequence[bytes]) -> None:
        """Add blocks to the `tiers` that will replace the worker's."""
        tiers.by_name[tier].update(digests)
        self._held.add(worker, digests)

    def replace(self, worker: int, tiers: Tiers) -> Tiers:
        """Replace all blocks of a worker, and return the former ones, which the caller sweeps."""
        former = self._tiers.pop(worker, Tiers())
        self._workers &= ~worker
        if len(tiers):
            self._tiers[worker] = tiers
            self._workers |= worker
        return former

    def sweep(self, worker: int, digests: Iterable[bytes], coming: Container[bytes]) -> None:
        """Forget the former blocks that a worker no longer has. Blocks that are `coming` stay,
        because the worker will have them."""
        tiers = self._tiers.get(worker, ())
        gone = [each for each in digests if each not in tiers and each not in coming]
        self._held.remove(worker, gone)

    @property
    def has_any(self) -> bool:
        """Whether a worker has blocks in a tier."""
        return self._workers > 0

    def beyond(
        self,
        hashes: Sequence[bytes],
        pools: BlockHolders,
        held: Mapping[int, int],
        windowed: int = 0,
    ) -> dict[int, OwnTiers]:
        """The blocks that workers have in tiers, after the leading ones that they hold in their
        pools (`held`, by worker). Contains only workers that have any. For `windowed` workers, only
        blocks up to the last end count."""
        workers = self._workers
        if not workers or not hashes:
            return {}
        workers &= pools.of(hashes[0]) | self._held.of(hashes[0])
        found = {}
        runs = pools.runs(hashes, workers, also=self._held)
        for worker, num_blocks in by_worker(runs, int).items():
            first = held.get(worker, 0)
            if worker & windowed:
                num_blocks = self._held.last_end(hashes[:num_blocks], worker, also=pools)
            if num_blocks > first:
                following = hashes[first:num_blocks]
                disk = self._tiers[worker].by_name[TierName.DISK]
                host = self._tiers[worker].by_name[TierName.HOST]
                on_disk = sum(each in disk and each not in host for each in following)
                found[worker] = OwnTiers(len(following) - on_disk, on_disk)
        return found

    def _tiers_of(self, worker: int) -> Tiers:
        self._workers |= worker
        return self._tiers.setdefault(worker, Tiers())
