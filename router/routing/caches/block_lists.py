"""Long lists of blocks that come into the index of the fleet's caches, and leave it, in slices.

A list of a quarter of a million blocks takes a tenth of a second, and the router's loop has streams
to serve. A job does a slice at a time. Look-ups meanwhile give hints, as always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from protocol.messages import CacheDump, TierName
from router.routing.caches.block_holders import BlockHolders
from router.routing.caches.expected_blocks import ExpectedBlocks
from router.routing.caches.tier_blocks import TierBlocks
from router.routing.caches.worker_blocks import Listed, WorkerBlocks

SLICE = 2000
"""The number of blocks that enter or leave the index at once, which takes a millisecond or two."""

Job = Iterator[None]
"""A change of the index, slice by slice."""


class BlockLists:
    """Exchanges all blocks of a worker in the index, which consists of `pools`, `tiers` and
    `expected`. `free` is called with a worker that has left, once the index has nothing of the
    worker."""

    def __init__(
        self,
        pools: BlockHolders,
        tiers: TierBlocks,
        expected: ExpectedBlocks,
        free: Callable[[WorkerBlocks], None],
    ) -> None:
        self._pools = pools
        self._tiers = tiers
        self._expected = expected
        self._free = free
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        """The number of jobs that are not done."""
        return len(self._jobs)

    def go_on(self) -> None:
        """Do the next slice of a job. Raises errors of the `then` that was passed to `take`."""
        job = self._jobs.popleft()
        if _is_unfinished(job):
            self._jobs.append(job)

    def empty(self, worker: WorkerBlocks) -> None:
        """Forget all known blocks of a worker."""
        self.put(worker, Listed())

    def leave(self, worker: WorkerBlocks) -> None:
        """Forget a worker that is gone; nothing is expected there any more."""
        expected = set(worker.pending)
        worker.pending.clear()
        worker.routed.clear()
        worker.is_gone = True
        self.put(worker, Listed(), expected)

    def take(self, worker: WorkerBlocks, dump: CacheDump, then: Callable[[Listed], None]) -> None:
        """Index a dump. When it is whole, call `then`, which replaces the worker's blocks by it. A
        later `take` or `empty` replaces an unfinished dump at once."""
        listed = worker.coming = Listed()
        self._begin(worker, self._take(worker, listed, dump, then))

    def put(self, worker: WorkerBlocks, listed: Listed, expected: set[bytes] | None = None) -> None:
        """Replace a worker's blocks by those that are indexed already. The former blocks leave the
        index, and so do those that are no longer `expected`."""
        former = Listed(worker.hashes, self._tiers.replace(worker.bit, listed.tiers))
        worker.hashes, worker.coming = listed.pool, None
        self._begin(worker, self._sweep(worker, former, expected or set()))

    # -- jobs ----------------------------------------------------------------------------------

    def _begin(self, worker: WorkerBlocks, job: Job) -> None:
        """Do the first slice of a job, which may be all of it."""
        worker.num_jobs += 1
        whole = self._whole(worker, job)
        if _is_unfinished(whole):
            self._jobs.append(whole)

    def _whole(self, worker: WorkerBlocks, job: Job) -> Job:
        """A job, and the call that follows it."""
        try:
            yield from job
        finally:
            worker.num_jobs -= 1
            if worker.is_gone and not worker.num_jobs:
                self._free(worker)

    def _take(
        self, worker: WorkerBlocks, listed: Listed, dump: CacheDump, then: Callable[[Listed], None]
    ) -> Job:
        disk = len(dump.hashes) - dump.num_disk
        host = disk - dump.num_host
        for start in range(0, len(dump.hashes), SLICE):
            if start:
                yield
            if worker.coming is not listed:
                yield from self._sweep(worker, listed, set())
                return
            end = min(start + SLICE, len(dump.hashes))
            pool = dump.hashes[start : min(end, host)]
            listed.pool.update(pool)
            self._pools.add(worker.bit, pool)
            for tier, first, last in ((TierName.HOST, host, disk), (TierName.DISK, disk, end)):
                part = dump.hashes[max(start, first) : min(end, last)]
                if part:
                    self._tiers.add(worker.bit, listed.tiers, tier, part)
        then(listed)

    def _sweep(self, worker: WorkerBlocks, former: Listed, expected: set[bytes]) -> Job:
        """Take blocks out of the index, except for those that the worker has again or will have."""

        def sweep_pool(part: list[bytes]) -> None:
            held, coming = worker.hashes, worker.coming.pool if worker.coming else ()
            gone = [each for each in part if each not in held and each not in coming]
            self._pools.remove(worker.bit, gone)

        def sweep_tier(part: list[bytes]) -> None:
            self._tiers.sweep(worker.bit, part, worker.coming.tiers if worker.coming else ())

        def sweep_expected(part: list[bytes]) -> None:
            self._expected.sweep(worker, part)

        host, disk = former.tiers.by_name.values()
        for digests, sweep in (
            (former.pool, sweep_pool),
            (host, sweep_tier),
            (disk, sweep_tier),
            (expected, sweep_expected),
        ):
            while digests:
                sweep([digests.pop() for _ in range(min(SLICE, len(digests)))])
                if digests:
                    yield


def _is_unfinished(job: Job) -> bool:
    """Do the next slice of a job. Returns whether there are more."""
    for _ in job:
        return True
    return False
