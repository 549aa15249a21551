"""Where the blocks of a pool lie in memory, as transports want to know it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_pool import KvPool
from kv_transfer.transports.interface import PoolMemory, PoolPart
from worker.ranks.link import OwnPool


def pool_memory(pool: KvPool) -> PoolMemory:
    """Where the blocks of all groups lie, on all ranks whose parts this process has."""
    views = tuple((each.block_bytes, each.num_blocks) for each in pool.groups)
    block_bytes, num_blocks = views[0]
    views = views if len(views) > 1 else ()
    others, device = tuple(_part(each) for each in pool.others), str(pool.device)
    return PoolMemory(pool.base_address, block_bytes, num_blocks, device, others, views)


def pool_on_node(pools: Sequence[OwnPool], address: int) -> PoolMemory:
    """The pools of a node's ranks, in memory from `address` on."""
    parts = [
        PoolPart(
            address + each.offset,
            each.groups[0][0],
            "cpu",
            tuple(size for size, _ in each.groups) if len(each.groups) > 1 else (),
        )
        for each in pools
    ]
    first, groups = parts[0], pools[0].groups
    views = groups if len(groups) > 1 else ()
    others = tuple(parts[1:])
    return PoolMemory(first.address, first.block_bytes, groups[0][1], "cpu", others, views)


def _part(pool: KvPool) -> PoolPart:
    """The part of the worker's pool on another rank."""
    first, *others = [each.block_bytes for each in pool.groups]
    by_group = (first, *others) if others else ()
    return PoolPart(pool.base_address, first, str(pool.device), by_group)
