"""The tiers of one worker as the thread that steps sees them.

Keeps the pool's coldest blocks in host memory, and the coldest of these on disk; tells which blocks
of a prompt are there, and loads them. Nothing here waits: threads of the tiers copy, read and
write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kv_transfer.tiers.disk_tier import DiskTier, NoteRead
from kv_transfer.tiers.host_tier import HostTier, Load
from kv_transfer.tiers.tier_news import TierDelta
from scheduling.block_manager import BlockManager

MAX_WINDOW = 4096
"""Blocks of a tier that are kept ready for eviction, at most: looking at each takes 0.1 us."""
SCAN_S = 0.25
"""The time between two looks at the pool while few blocks are allocated or released."""
EXPIRE_S = 1.0


class Leading(NamedTuple):
    """How many leading blocks of a prompt the tiers hold, one after the other: `num_host` in host
    memory or on their way into it, and `num_disk` on disk only."""

    num_host: int
    num_disk: int


class KvTiers:
    """`host`, and `disk` if there is one, below the pool of `blocks`."""

    def __init__(self, blocks: BlockManager, host: HostTier, disk: DiskTier | None = None) -> None:
        self.host = host
        self.disk = disk
        self._blocks = blocks
        self._host_window = min(host.num_window, MAX_WINDOW)
        self._window = min(blocks.num_blocks, self._host_window)
        self._scanned_at = self._expired_at = float("-inf")
        self._num_changes = 0
        self._is_behind = False  # the threads had no time for all that was found
        blocks.on_withdraw = self.drop

    @property
    def by_name(self) -> dict[str, HostTier | DiskTier]:
        """The tiers that there are."""
        return {"host": self.host} | ({} if self.disk is None else {"disk": self.disk})

    def take_news(self, count: int) -> dict[str, TierDelta]:
        """At most `count` blocks that came into each tier, and that left it, since the last
        call."""
        return {name: tier.index.news.take(count) for name, tier in self.by_name.items()}

    def find(self, hashes: Sequence[bytes]) -> Leading:
        """Where the first blocks of a chain are, up to the first that is nowhere."""
        num_host = num_disk = 0
        for digest in hashes:
            if digest in self.host.index or self.is_coming(digest):
                num_host += 1
            elif self.disk is not None and digest in self.disk.index:
                num_disk += 1
            else:
                break
        return Leading(num_host, num_disk)

    def num_ready(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain can be loaded now."""
        index = self.host.index
        return next((i for i, digest in enumerate(hashes) if digest not in index), len(hashes))

    def is_coming(self, digest: bytes) -> bool:
        """Whether a block is being read from the disk."""
        return self.disk is not None and digest in self.disk.reading

    def raise_blocks(self, hashes: Sequence[bytes], note: NoteRead, now: float) -> int:
        """Read the blocks of a chain that are on disk only into host memory; `note` is called for
        each that has arrived. Returns how many reads were begun."""
        if self.disk is None:
            return 0
        self.host.index.touch(hashes, now)
        return self.disk.raise_blocks(hashes, note, now)

    def load(self, load: Load, now: float) -> None:
        """Load blocks that `num_ready` counted."""
        self.host.load(load, now)
        if self.disk is not None:
            self.disk.index.touch(load.hashes, now)

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Forget blocks whose contents turned out to be wrong."""
        for digest in hashes:
            self.host.index.drop(digest)
            if self.disk is not None:
                self.disk.drop(digest)

    def turn(self, now: float) -> None:
        """Take note of finished copies, and begin new ones."""
        self.host.finish()
        if self.disk is not None:
            self.disk.finish()
        num_new = self._blocks.num_changes - self._num_changes
        is_due = num_new >= max(1, self._window // 8) or now >= self._scanned_at + SCAN_S
        if self._is_behind or is_due:
            self._scanned_at, self._num_changes = now, self._blocks.num_changes
            cold = self._blocks.coldest(self._window)
            has_saved = self.host.save(cold, self._blocks.is_unchanged, now)
            has_written = self.disk is None or self.disk.save_coldest(self._host_window, now)
            self._is_behind = not (has_saved and has_written)
        if now >= self._expired_at + EXPIRE_S:
            self._expired_at = now
            self.host.index.expire(now)
            if self.disk is not None:
                self.disk.expire(now)

    def close(self) -> None:
        """End the threads, and close what they use."""
        if self.disk is not None:
            self.disk.close()
        self.host.close()
