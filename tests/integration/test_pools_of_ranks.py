"""Blocks between workers of any two numbers of ranks and stages, by every transport: each rank of
the target gets its heads of its layers, whatever the source's ranks hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import msgspec
import numpy as np
import pytest

from kv_transfer.head_slices import plan_shares
from kv_transfer.transports.interface import (
    Notification,
    PeerReady,
    PoolMemory,
    PoolPart,
    WriteDone,
)
from kv_transfer.transports.memory_file import SharedMemory
from kv_transfer.transports.registry import create_transport
from protocol.errors import TransferError
from protocol.layout import KvLayout
from tests.effort import pairwise as pairwise_tested
from tests.integration.pool_ends import PoolEnd, poll_until
from tests.layouts import part_of

NUM_BLOCKS = 6
RANKS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 3)]
"""Ranks of a layer, more than heads, too; and stages, of one or two layers."""
KNOWS = [(True, True), (False, True), (True, False), (False, False)]
"""Which of the two workers orders its blocks for the other's ranks."""
LAYOUT = KvLayout(
    model_fingerprint="model",
    dtype="bfloat16",
    num_layers=3,
    num_kv_heads=4,
    block_size=2,
    head_dim=4,
)


class End(PoolEnd):
    """A worker's pool, shared by its ranks, in one memory: `parts` are [blocks, numbers]."""

    def __init__(
        self, transport: str, num_ranks: int, num_stages: int = 1, peer_stages: int = 0
    ) -> None:
        layout = msgspec.structs.replace(LAYOUT, peer_stages=peer_stages)
        self.layout = layout.shard(0, num_ranks, num_stages - 1, num_stages)
        super().__init__(create_transport(transport, "cpu"))
        ends = [0, *accumulate(each.block_bytes * NUM_BLOCKS for each in self.layout.ranks)]
        memory = self.transport.allocate(ends[-1])
        if memory is None:
            memory = SharedMemory(ends[-1])
        view = memoryview(memory.view)
        self.parts = [
            np.frombuffer(view[start:end], np.uint16).reshape(NUM_BLOCKS, -1)
            for start, end in pairwise(ends)
        ]
        places = [
            PoolPart(part.ctypes.data, each.block_bytes, "cpu")
            for each, part in zip(self.layout.ranks, self.parts, strict=True)
        ]
        pool = PoolMemory(
            places[0].address, places[0].block_bytes, NUM_BLOCKS, "cpu", tuple(places[1:])
        )
        self.transport.register(pool)

    def parts_of(self, blocks: np.ndarray) -> list[np.ndarray]:
        """Each rank's part of `blocks`, [blocks, numbers]."""
        return [part_of(each, blocks) for each in self.layout.ranks]


@pytest.fixture
def ends() -> Iterator[list[End]]:
    opened: list[End] = []
    yield opened
    for end in opened:
        end.transport.close()


def add(one: End, other: End) -> None:
    agent = other.transport.agent
    shares = plan_shares(one.layout, other.layout)
    one.transport.add_peer(agent, other.transport.descriptor(), NUM_BLOCKS, shares)


@pairwise_tested("transport, knows, source, target", ["nixl", "shm"], KNOWS, RANKS, RANKS)
def test_each_rank_gets_its_heads_of_its_layers(
    ends: list[End],
    transport: str,
    knows: tuple[bool, bool],
    source: tuple[int, int],
    target: tuple[int, int],
) -> None:
    one = End(transport, *source, peer_stages=target[1] * knows[0])
    other = End(transport, *target, peer_stages=source[1] * knows[1])
    ends += [one, other]
    shape = (NUM_BLOCKS, *LAYOUT.block_shape)
    numbers = np.random.default_rng(7).integers(1, 1 << 16, shape, dtype=np.uint16)
    for part, own in zip(one.parts, one.parts_of(numbers), strict=True):
        part[:] = own
    add(one, other)
    poll_until(PeerReady, one, other)
    one.transport.post_write(other.transport.agent, [1, 2, 5], [4, 5, 0], b"landed")
    poll_until(WriteDone, one, other)
    assert [each.error for each in one.events if isinstance(each, WriteDone)] == [None]
    poll_until(Notification, other, one)
    expected = np.zeros_like(numbers)
    expected[[4, 5, 0]] = numbers[[1, 2, 5]]
    for part, wanted in zip(other.parts, other.parts_of(expected), strict=True):
        assert (part == wanted).all()


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_pool_of_other_ranks_than_expected_is_refused(ends: list[End], transport: str) -> None:
    one, other = End(transport, 1), End(transport, 2)
    ends += [one, other]
    agent, descriptor = other.transport.agent, other.transport.descriptor()
    with pytest.raises(TransferError, match="on 2 ranks, expected 6 blocks of 384 bytes on 1"):
        one.transport.add_peer(agent, descriptor, NUM_BLOCKS)
    (shares,) = plan_shares(one.layout, other.layout)
    alone = (shares[:1],)
    with pytest.raises(TransferError, match="on 2 ranks, expected 6 blocks of 192 bytes on 1"):
        one.transport.add_peer(agent, descriptor, NUM_BLOCKS, alone)
    of_two = plan_shares(other.layout, other.layout)
    with pytest.raises(TransferError, match="do not fit our pool: 6 blocks of 384 bytes on 1"):
        one.transport.add_peer(agent, descriptor, NUM_BLOCKS, of_two)


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_peer_that_no_longer_fits_is_forgotten(ends: list[End], transport: str) -> None:
    one, other = End(transport, 1), End(transport, 2)
    ends += [one, other]
    add(one, other)
    with pytest.raises(TransferError, match="on 2 ranks, expected"):
        one.transport.add_peer(other.transport.agent, other.transport.descriptor(), NUM_BLOCKS)
    with pytest.raises(TransferError, match="is not known"):
        one.transport.post_write(other.transport.agent, [1], [1], b"late")
