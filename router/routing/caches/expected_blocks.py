"""Blocks of prompts that were routed to a worker. A block is expected until the worker holds it or
its time is over.

Expectations belong to prompts, expire with them, and are bounded for each worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from router.routing.caches.block_holders import BlockHolders
from router.routing.caches.worker_blocks import WorkerBlocks

MAX_PENDING = 32_768
"""The most blocks that are expected on one worker; beyond that, the oldest prompts are
forgotten."""


class ExpectedBlocks:
    """The expected blocks of all workers; `masks` has the workers where each block is expected."""

    def __init__(self, ttl_s: float) -> None:
        self.masks = BlockHolders()
        self._ttl_s = ttl_s
        self._next_expiry = math.inf  # or an earlier time

    def add(self, worker: WorkerBlocks, hashes: Sequence[bytes], now: float) -> None:
        """Expect these blocks of a prompt on a worker, except for those that it holds."""
        if worker.routed:
            self._expire(worker, now)
        expiry = now + self._ttl_s
        new = hashes
        if not worker.hashes.isdisjoint(hashes):
            new = [digest for digest in hashes if digest not in worker.hashes]
        if new:
            worker.pending.update(dict.fromkeys(new, expiry))
            worker.routed.append((expiry, new))
            if expiry < self._next_expiry:
                self._next_expiry = expiry
            self.masks.add(worker.bit, new)
        while len(worker.pending) > MAX_PENDING and len(worker.routed) > 1:
            self.forget(worker, worker.routed.popleft()[1])

    def forget(self, worker: WorkerBlocks, digests: Iterable[bytes]) -> None:
        """Stop expecting these blocks."""
        gone = [each for each in digests if worker.pending.pop(each, None) is not None]
        self.masks.remove(worker.bit, gone)

    def sweep(self, worker: WorkerBlocks, digests: Iterable[bytes]) -> None:
        """Take blocks that are no longer expected out of `masks`."""
        gone = [each for each in digests if each not in worker.pending]
        self.masks.remove(worker.bit, gone)

    def expire(self, workers: Iterable[WorkerBlocks], now: float) -> None:
        """Forget what is expired, if anything is."""
        if now < self._next_expiry:
            return
        self._next_expiry = math.inf
        for worker in workers:
            self._expire(worker, now)
            if worker.routed:
                self._next_expiry = min(self._next_expiry, worker.routed[0][0])

    def _expire(self, worker: WorkerBlocks, now: float) -> None:
        while worker.routed and worker.routed[0][0] <= now:
            _, digests = worker.routed.popleft()
            pending, gone = worker.pending, []
            for each in digests:  # some blocks may be expected again, until a later time
                expiry = pending.get(each)
                if expiry is not None and expiry <= now:
                    del pending[each]
                    gone.append(each)
            self.masks.remove(worker.bit, gone)
