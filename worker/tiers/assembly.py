"""Opens the tiers that a worker's settings ask for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from engine.device import bind_thread
from engine.gpu.pinned_copies import PinnedCopies
from engine.host_memory import available_memory
from engine.kv_pool import KvPool
from engine.loader import LoadedEngine
from kv_transfer.tiers.block_file import BlockFile
from kv_transfer.tiers.copies import BlockCopies, HostCopies
from kv_transfer.tiers.disk_folder import claim_file
from kv_transfer.tiers.disk_key import DiskScope
from kv_transfer.tiers.disk_tier import DiskTier
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.io_thread import IoThread
from kv_transfer.tiers.kv_tiers import KvTiers
from kv_transfer.tiers.rank_copies import RankCopies
from kv_transfer.tiers.units import Units
from kv_transfer.transports.interface import PoolMemory
from protocol.errors import ConfigError
from worker.ranks.pool_memory import pool_memory
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)


def open_tiers(
    settings: WorkerSettings, loaded: LoadedEngine, wake: Callable[[], None], stack: ExitStack
) -> KvTiers | None:
    """The tiers below a worker's pool; None if it has none. Raises ConfigError."""
    if not settings.host_tier_bytes:
        return None
    pool = loaded.pool
    if not pool.has_all_ranks:
        log.warning("host_tier_bytes has no effect: ranks on several cards have no tiers")
        return None
    units = _units(pool)
    copies = _copies(pool, units, settings.host_tier_bytes)
    thread = IoThread("kv-host-tier", wake, lambda: bind_thread(pool.device))
    host = HostTier(copies, thread, units.unit_bytes, settings.tier_max_age_s)
    stack.callback(host.close)
    disk = _disk_tier(settings, pool, units, host, wake)
    if disk is not None:
        stack.callback(disk.close)
    room = copies.num_slots * units.unit_bytes // pool.layout.worker_block_bytes
    log.info("%d KV blocks of all layers fit into host memory below the pool", room)
    return KvTiers(loaded.engine.scheduler.pools, units, host, disk)


def _units(pool: KvPool) -> Units:
    """The units of the whole cache's blocks. Ranks hold each group's in another way."""
    whole = pool.layout.unsharded
    if pool.layout.is_unsharded or pool.device.type == "cuda":
        return Units.of(whole)
    return Units.of(whole, pool.groups[0].num_blocks * whole.block_stride(0))


def _copies(pool: KvPool, units: Units, num_bytes: int) -> BlockCopies:
    num_slots, free = num_bytes // units.unit_bytes, available_memory()
    if num_slots < max(units.per_block):
        raise ConfigError(
            f"host_tier_bytes {num_bytes} hold no KV block, which has "
            f"{max(units.block_bytes)} bytes"
        )
    if num_bytes > free:
        raise ConfigError(
            f"host_tier_bytes {num_bytes} are more than the {free} bytes that are free here "
            "(the machine's memory, or the container's limit)"
        )
    if pool.device.type == "cuda":
        return PinnedCopies(pool, units.unit_bytes, num_slots)
    if not pool.layout.is_unsharded:
        return RankCopies(pool_memory(pool), pool.layout, units, num_slots)
    num_units = pool.num_bytes // units.unit_bytes
    memory = PoolMemory(pool.base_address, units.unit_bytes, num_units, "cpu")
    return HostCopies(memory, num_slots)


def _disk_tier(
    settings: WorkerSettings,
    pool: KvPool,
    units: Units,
    host: HostTier,
    wake: Callable[[], None],
) -> DiskTier | None:
    if settings.disk_tier_dir is None:
        return None
    # blocks of a card are kept in the card's layout
    kept = pool.layout if pool.device.type == "cuda" else pool.layout.unsharded
    scope = DiskScope(settings.cluster_secret, kept.fingerprint)
    fd = claim_file(Path(settings.disk_tier_dir), scope)
    file = BlockFile(fd, scope, units.unit_bytes, settings.disk_tier_bytes, time.time)
    if file.num_slots < max(units.per_block):
        file.close()
        raise ConfigError(
            f"disk_tier_bytes {settings.disk_tier_bytes} hold no KV block, which has "
            f"{max(units.block_bytes)} bytes"
        )
    if file.is_foreign:
        log.warning(
            "%s held KV blocks of another model, layout or secret: they are erased",
            settings.disk_tier_dir,
        )
    thread = IoThread("kv-disk-tier", wake)
    disk = DiskTier(file, host, thread, units.unit_bytes, settings.tier_max_age_s)
    found = disk.restore(time.monotonic(), time.time())
    room = units.unit_bytes * found // pool.layout.worker_block_bytes
    log.info("%d KV blocks of all layers were found again on disk", room)
    return disk
