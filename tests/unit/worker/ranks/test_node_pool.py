"""The pool that a node serves is the one that a head would serve, had it the same ranks."""

from __future__ import annotations

import msgspec
import pytest

from engine.kv_pool import KvPool
from protocol.layout import KvGroup, KvLayout
from scheduling.pool_sizes import blocks_with
from worker.ranks.link import OwnPool
from worker.ranks.pool_memory import pool_memory, pool_on_node

WHOLE = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    num_layers=4,
    num_kv_heads=4,
    block_size=2,
    head_dim=4,
)
GROUPED = msgspec.structs.replace(WHOLE, grouping=(KvGroup((0, 1)), KvGroup((2, 3), 5)))


@pytest.mark.parametrize("layout", [WHOLE, GROUPED], ids=["one group", "two groups"])
@pytest.mark.parametrize("first_rank", [0, 2])
def test_a_node_serves_the_pools_of_its_ranks(layout: KvLayout, first_rank: int) -> None:
    ranks = layout.shard(0, 2, 1, 2).ranks[first_rank : first_rank + 2]
    num_blocks = blocks_with(ranks[0], 4 * ranks[0].blocks_per_page(0))
    pools = [KvPool(each, num_blocks) for each in ranks]
    base = min(each.base_address for each in pools)
    told = [
        OwnPool(
            each.base_address - base,
            tuple((group.block_bytes, group.num_blocks) for group in each.groups),
            each.layout,
        )
        for each in pools
    ]
    pools[0].others = pools[1:]
    assert pool_on_node(told, base) == pool_memory(pools[0])
