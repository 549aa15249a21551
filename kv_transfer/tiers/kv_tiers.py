"""The tiers of one worker as the thread that steps sees them.

Keeps the pool's coldest blocks in host memory, and the coldest of these on disk. Finds the blocks
of a prompt in the tiers, and loads them. A block is identified by its group of layers and its hash.
A tier has a block if it has all its units (`kv_transfer.tiers.units`). Nothing here waits: threads
of the tiers copy, read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from kv_transfer.tiers.disk_tier import DiskTier, NoteRead
from kv_transfer.tiers.host_tier import HostTier, Load
from kv_transfer.tiers.tier_news import GroupNews, TierDelta
from kv_transfer.tiers.units import ColdUnit, Units
from scheduling.block_pools import BlockPools

MAX_WINDOW = 4096
"""The most units of a tier that are kept ready for eviction. Examining one that is saved already
takes 0.1 us."""
SCAN_S = 0.25
"""The pool is examined this often while few blocks are allocated or get new contents."""
EXPIRE_S = 1.0


class WantedBlock(NamedTuple):
    """A block of the pool that is to hold what the block with this hash holds in its group."""

    group: int
    digest: bytes
    block: int


class KvTiers:
    """`host`, and `disk` if there is one, below the pool of `pools`."""

    def __init__(
        self, pools: BlockPools, units: Units, host: HostTier, disk: DiskTier | None = None
    ) -> None:
        self.host = host
        self.disk = disk
        self.units = units
        self._pools = pools
        self._host_window = min(host.num_window, MAX_WINDOW)
        share = self._host_window // len(pools.managers)
        self._windows = [
            min(manager.num_blocks, max(1, share // number))
            for manager, number in zip(pools.managers, units.per_block, strict=True)
        ]
        self._scanned_at = self._expired_at = float("-inf")
        self._num_changes = 0
        self._is_behind = False  # the threads had no time for all units that were found
        for group, manager in enumerate(pools.managers):
            manager.on_withdraw = partial(self.drop, group=group)
        pools.is_kept_below = partial(self.has, 0)
        for tier in self.by_name.values() if pools.has_windows else ():
            tier.index.report_by(GroupNews(units.per_block))

    @property
    def by_name(self) -> dict[str, HostTier | DiskTier]:
        """The tiers that there are."""
        return {"host": self.host} | ({} if self.disk is None else {"disk": self.disk})

    def take_news(self, count: int) -> dict[str, TierDelta]:
        """For each tier, at most `count` blocks that came into it, and at most as many that left
        it, since the last call."""
        return {name: tier.index.news.take(count) for name, tier in self.by_name.items()}

    # -- where blocks are ------------------------------------------------------------------------

    def is_ready(self, group: int, digest: bytes) -> bool:
        """Whether a block can be loaded now."""
        index = self.host.index
        return all(name in index for name in self.units.names(group, digest))

    def is_near(self, group: int, digest: bytes) -> bool:
        """Whether a block can be loaded now, or when the reads under way from the disk have
        finished."""
        reading = self._reading
        index = self.host.index
        return all(name in index or name in reading for name in self.units.names(group, digest))

    def has(self, group: int, digest: bytes) -> bool:
        """Whether a block is in the tiers."""
        return all(map(self._has, self.units.names(group, digest)))

    def num_on_disk(self, blocks: Iterable[tuple[int, bytes]]) -> int:
        """Units of these blocks, by group and hash, that are on disk only."""
        near = (self.host.index, self._reading)
        names = self._names(blocks)
        return sum(self._has(name) and not any(name in each for each in near) for name in names)

    def raise_blocks(self, blocks: Iterable[tuple[int, bytes]], note: NoteRead, now: float) -> int:
        """Read into host memory those of these blocks that are only on disk. `note` is called for
        each unit that has arrived. Returns how many reads were begun."""
        if self.disk is None:
            return 0
        names = self._names(blocks)
        self.host.index.touch(names, now)
        return self.disk.raise_units(names, note, now)

    # -- loading ---------------------------------------------------------------------------------

    def load(self, wanted: Sequence[WantedBlock], over: Callable[[int], None], now: float) -> Load:
        """Load these blocks. `over` is called with the number of leading blocks that arrived. If
        layers keep windows, a part is of no use, so the number is that of all blocks or 0. Blocks
        that no tier can load now must be cached in the pool, and are copied from there."""
        names: list[bytes] = []
        targets: list[int] = []
        copied: list[ColdUnit] = []
        copied_to: list[int] = []
        for group, digest, block in wanted:
            if self.is_ready(group, digest):
                names += self.units.names(group, digest)
                targets += self.units.of_block(group, block)
            else:
                source = self._pools.managers[group].find(digest)
                assert source is not None, "it was found a moment ago"
                copied += self.units.cold(group, source)
                copied_to += self.units.of_block(group, block)

        def done(num_units: int) -> None:
            if not self._pools.has_windows:
                over(num_units)
            else:
                is_whole = load.is_whole and all(map(self._is_unchanged, copied))
                over(len(wanted) if is_whole else 0)

        load = Load(names, targets, done, ([each.unit for each in copied], copied_to))
        self.host.load(load, now)
        if self.disk is not None:
            self.disk.index.touch(names, now)
        return load

    def drop(self, hashes: Sequence[bytes], group: int = 0) -> None:
        """Forget blocks whose contents turned out to be wrong."""
        for name in self._names((group, digest) for digest in hashes):
            self.host.index.drop(name)
            if self.disk is not None:
                self.disk.drop(name)

    def turn(self, now: float) -> None:
        """Take note of finished copies, and begin new ones."""
        self.host.finish()
        if self.disk is not None:
            self.disk.finish()
        num_changes = sum(manager.num_changes for manager in self._pools.managers)
        is_due = num_changes - self._num_changes >= max(1, sum(self._windows) // 8)
        if self._is_behind or is_due or now >= self._scanned_at + SCAN_S:
            self._scanned_at, self._num_changes = now, num_changes
            has_saved = self.host.save(self._unsaved(), self._is_unchanged, now)
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

    # -- steps -----------------------------------------------------------------------------------

    @property
    def _reading(self) -> set[bytes]:
        """The units that are being read from the disk."""
        return set() if self.disk is None else self.disk.reading

    def _has(self, name: bytes) -> bool:
        disk = self.disk
        is_on_disk = disk is not None and (name in disk.index or name in disk.reading)
        return is_on_disk or name in self.host.index

    def _names(self, blocks: Iterable[tuple[int, bytes]]) -> list[bytes]:
        return [name for group, digest in blocks for name in self.units.names(group, digest)]

    def _unsaved(self) -> list[ColdUnit]:
        """The units of the pool's coldest blocks that host memory does not have yet."""
        groups = enumerate(zip(self._pools.managers, self._windows, strict=True))
        return [
            unit
            for group, (manager, window) in groups
            for block in manager.coldest(window, self._is_saved_of(group))
            for unit in self.units.cold(group, block)
        ]

    def _is_saved_of(self, group: int) -> Callable[[bytes], bool]:
        """Whether host memory has, or is about to have, the block with a hash in this group."""
        if group == 0 and self.units.per_block[0] == 1:  # the unit has the block's name
            return self.host.has
        return lambda digest: all(map(self.host.has, self.units.names(group, digest)))

    def _is_unchanged(self, cold: ColdUnit) -> bool:
        return self._pools.managers[cold.group].is_unchanged(cold.block)
