"""Blocks of several groups of layers in one pool, by every transport: each group's blocks lie in
views of their own over the same memory, of all ranks, and a write copies those of one group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_transfer.head_slices import plan_shares
from kv_transfer.transports.interface import (
    Notification,
    PeerReady,
    PoolMemory,
    PoolPart,
    SharesByGroup,
    WriteDone,
)
from kv_transfer.transports.memory_file import SharedMemory
from kv_transfer.transports.registry import create_transport
from protocol.errors import TransferError
from protocol.layout import KvLayout, group_layers
from tests.effort import pairwise as pairwise_tested
from tests.integration.pool_ends import PoolEnd, poll_until

NUM_PAGES = 4
RANKS = [(1, 1), (2, 1), (1, 2), (2, 3)]
"""Ranks of a layer, and stages, of which the last of three has no layer without a window."""
LAYOUT = KvLayout(
    model_fingerprint="model",
    dtype="bfloat16",
    num_layers=6,
    num_kv_heads=2,
    block_size=2,
    head_dim=4,
    grouping=group_layers([None, 8, 4, None, 4, 8], 99),
)
GROUPS = range(len(LAYOUT.groups))


def block_counts(layout: KvLayout) -> list[int]:
    return [NUM_PAGES * layout.blocks_per_page(group) for group in GROUPS[: len(layout.groups)]]


class End(PoolEnd):
    """A worker's pool of four large pages, shared by its ranks, in one memory."""

    def __init__(self, transport: str, ranks: tuple[int, int], whole: KvLayout = LAYOUT) -> None:
        size, num_stages = ranks
        self.layout = layout = whole.shard(0, size, num_stages - 1, num_stages)
        super().__init__(create_transport(transport, "cpu"))
        sizes = [each.page_bytes if each.grouping else each.block_bytes for each in layout.ranks]
        ends = [0, *accumulate(NUM_PAGES * size for size in sizes)]
        memory = self.transport.allocate(ends[-1]) or SharedMemory(ends[-1])
        view = memoryview(memory.view)
        self.bytes = [np.frombuffer(view[start:end], np.uint8) for start, end in pairwise(ends)]
        groups = GROUPS[: len(layout.groups)]
        strides = [[rank.block_stride(group) for group in groups] for rank in layout.ranks]
        first, *others = [
            PoolPart(own.ctypes.data, of_rank[0], "cpu", tuple(of_rank) if len(groups) > 1 else ())
            for own, of_rank in zip(self.bytes, strides, strict=True)
        ]
        views = tuple(zip(strides[0], block_counts(layout), strict=True))
        size, number = views[0]
        views = views if len(views) > 1 else ()
        pool = PoolMemory(first.address, size, number, "cpu", tuple(others), views)
        self.transport.register(pool)

    def parts_of(self, blocks: np.ndarray, group: int) -> list[np.ndarray]:
        """Each rank's part of `blocks`, [blocks, layers, 2, heads, ...], as bytes."""
        found = []
        for rank in self.layout.ranks:
            layers, heads = rank.of_group(group).layers, rank.heads
            part = blocks[:, layers.start : layers.stop, :, heads.start : heads.stop]
            found.append(np.ascontiguousarray(part).reshape(len(blocks), -1).view(np.uint8))
        return found


def parts(layout: KvLayout, memory: Sequence[np.ndarray], group: int) -> list[np.ndarray]:
    """The memory of each rank as blocks of a group, [blocks, bytes that hold something]."""
    number = block_counts(layout)[group]
    sizes = [rank.of_group(group).block_bytes for rank in layout.ranks]
    return [own.reshape(number, -1)[:, :used] for own, used in zip(memory, sizes, strict=True)]


@pytest.fixture
def ends() -> Iterator[list[End]]:
    opened: list[End] = []
    yield opened
    for end in opened:
        end.transport.close()


def add(one: End, other: End, shares: SharesByGroup = ()) -> None:
    number = block_counts(other.layout)[0]
    one.transport.add_peer(other.transport.agent, other.transport.descriptor(), number, shares)
    poll_until(PeerReady, one, other)


def write(one: End, other: End, source: Sequence[int], target: Sequence[int], group: int) -> None:
    one.events.clear(), other.events.clear()
    one.transport.post_write(other.transport.agent, source, target, b"landed", group)
    poll_until(WriteDone, one, other)
    assert [each.error for each in one.events if isinstance(each, WriteDone)] == [None]
    poll_until(Notification, other, one)


@pairwise_tested("transport, source, target", ["nixl", "shm"], RANKS, RANKS)
def test_a_write_copies_each_ranks_part_of_blocks_of_one_group(
    ends: list[End], transport: str, source: tuple[int, int], target: tuple[int, int]
) -> None:
    one, other = End(transport, source), End(transport, target)
    ends += [one, other]
    add(one, other, plan_shares(one.layout, other.layout))
    chance = np.random.default_rng(7)
    for group in GROUPS:
        shape = (block_counts(LAYOUT)[group], *LAYOUT.of_group(group).block_shape)
        numbers = chance.integers(1, 1 << 16, shape, dtype=np.uint16)
        for part, own in zip(
            parts(one.layout, one.bytes, group), one.parts_of(numbers, group), strict=True
        ):
            part[:] = own
        expected = [memory.copy() for memory in other.bytes]
        write(one, other, [1, 3, 2], [0, 2, 3], group)
        for part, wanted in zip(
            parts(other.layout, expected, group), other.parts_of(numbers, group), strict=True
        ):
            part[[0, 2, 3]] = wanted[[1, 3, 2]]
        for memory, wanted in zip(other.bytes, expected, strict=True):
            assert (memory == wanted).all(), "nothing else is touched"


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_block_outside_of_its_group_is_refused(ends: list[End], transport: str) -> None:
    one, other = End(transport, (1, 1)), End(transport, (1, 1))
    ends += [one, other]
    add(one, other)
    number = block_counts(LAYOUT)[2]
    with pytest.raises(TransferError, match=f"outside of a pool of {number} blocks"):
        one.transport.post_write(other.transport.agent, [3], [number], b"landed", 2)


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_pool_with_other_groups_is_refused(ends: list[End], transport: str) -> None:
    one_group = msgspec.structs.replace(LAYOUT, grouping=())
    other_groups = msgspec.structs.replace(
        LAYOUT, grouping=group_layers([None, None, 8, 4, 4, 4], 99)
    )
    one, other, third, ranks = (
        End(transport, (1, 1)),
        End(transport, (1, 1), one_group),
        End(transport, (1, 1), other_groups),
        End(transport, (1, 2)),
    )
    ends += [one, other, third, ranks]
    with pytest.raises(TransferError, match="of 1 groups of layers, expected 3"):
        add(one, other)
    with pytest.raises(
        TransferError, match=r"has 8 blocks of 192 bytes on 1 ranks, expected 8 blocks of 128"
    ):
        add(one, third)
    with pytest.raises(TransferError, match="on 2 ranks, expected"):
        add(one, ranks)
    with pytest.raises(TransferError, match="do not fit our pool"):
        add(one, ranks, plan_shares(ranks.layout, ranks.layout))


@pytest.mark.parametrize(
    "changed",
    [
        {"others": (PoolPart(8, 64, "cpu", (64,)),)},
        {"num_blocks": 5},
        {"views": ((64, 4), (48, 5))},
    ],
)
def test_groups_that_do_not_fill_the_same_memory_are_no_pool(changed: Any) -> None:
    part = PoolPart(8, 96, "cpu", (96, 32))
    pool = PoolMemory(4096, 64, 4, "cpu", (part,), ((64, 4), (21, 12)))
    pool = replace(pool, views=((66, 4), (22, 12)), block_bytes=66)
    assert pool.is_sound
    assert not replace(pool, **changed).is_sound
