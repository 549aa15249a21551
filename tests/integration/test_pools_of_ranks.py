"""Blocks between workers of any two numbers of ranks, by every transport: each rank of the target
gets its heads, whatever the source's ranks hold."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer.head_slices import plan_shares
from kv_transfer.transports.interface import (
    Notification,
    PeerReady,
    PoolMemory,
    Transport,
    WriteDone,
)
from kv_transfer.transports.registry import create_transport
from kv_transfer.transports.shared_memory import SharedMemory
from protocol.errors import TransferError
from protocol.layout import KvLayout

NUM_BLOCKS = 6
DEADLINE_S = 20.0
LAYOUT = KvLayout(
    model_fingerprint="model",
    dtype="bfloat16",
    num_layers=3,
    num_kv_heads=4,
    block_size=2,
    head_dim=4,
)


class End:
    """A worker's pool, shared by its ranks, in one memory: `parts` is [ranks, blocks, layers, 2,
    heads of a rank, block_size, head_dim]."""

    def __init__(self, transport: str, num_ranks: int) -> None:
        self.layout = LAYOUT.shard(0, num_ranks)
        self.transport: Transport = create_transport(transport, "cpu")
        size = self.layout.block_bytes * NUM_BLOCKS
        memory = self.transport.allocate(num_ranks * size)
        if memory is None:
            memory = SharedMemory(num_ranks * size)
        shape = (num_ranks, NUM_BLOCKS, *self.layout.block_shape)
        self.parts = np.frombuffer(memory.view, np.uint16, np.prod(shape)).reshape(shape)
        first = self.parts.ctypes.data
        others = tuple((first + rank * size, "cpu") for rank in range(1, num_ranks))
        pool = PoolMemory(first, self.layout.block_bytes, NUM_BLOCKS, "cpu", others)
        self.transport.register(pool)
        self.events: list[object] = []

    @property
    def blocks(self) -> np.ndarray:
        """The pool's blocks with the heads of all ranks, [blocks, layers, 2, heads, ...]."""
        return np.concatenate(list(self.parts), axis=3)

    def poll(self) -> None:
        self.events += self.transport.poll()


@pytest.fixture
def ends() -> Iterator[list[End]]:
    opened: list[End] = []
    yield opened
    for end in opened:
        end.transport.close()


def poll_until(kind: type, end: End, *others: End) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not any(isinstance(event, kind) for event in end.events):
        assert time.monotonic() < deadline, f"no {kind.__name__}: {end.events}"
        for each in (end, *others):
            each.poll()


def add(one: End, other: End) -> None:
    agent = other.transport.agent
    shares = plan_shares(one.layout, other.layout)
    one.transport.add_peer(agent, other.transport.descriptor(), NUM_BLOCKS, shares)


@pytest.mark.parametrize("transport", ["nixl", "shm"])
@pytest.mark.parametrize(("source", "target"), list(itertools.product([1, 2, 4], repeat=2)))
def test_each_rank_gets_its_heads(
    ends: list[End], transport: str, source: int, target: int
) -> None:
    one, other = End(transport, source), End(transport, target)
    ends += [one, other]
    numbers = np.random.default_rng(7).integers(1, 1 << 16, one.parts.shape, dtype=np.uint16)
    one.parts[:] = numbers
    add(one, other)
    poll_until(PeerReady, one, other)
    one.transport.post_write(other.transport.agent, [1, 2, 5], [4, 5, 0], b"landed")
    poll_until(WriteDone, one, other)
    assert [each.error for each in one.events if isinstance(each, WriteDone)] == [None]
    poll_until(Notification, other, one)
    expected = np.zeros_like(other.blocks)
    expected[[4, 5, 0]] = one.blocks[[1, 2, 5]]
    assert (other.blocks == expected).all()


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_pool_of_other_ranks_than_expected_is_refused(ends: list[End], transport: str) -> None:
    one, other = End(transport, 1), End(transport, 2)
    ends += [one, other]
    agent, descriptor = other.transport.agent, other.transport.descriptor()
    with pytest.raises(TransferError, match="on 2 ranks, expected 6 of 384 on 1"):
        one.transport.add_peer(agent, descriptor, NUM_BLOCKS)
    alone = plan_shares(one.layout, other.layout)[:1]
    with pytest.raises(TransferError, match="on 2 ranks, expected 6 of 192 on 1"):
        one.transport.add_peer(agent, descriptor, NUM_BLOCKS, alone)
    of_two = plan_shares(other.layout, other.layout)
    with pytest.raises(TransferError, match="whose blocks have 384 on 1"):
        one.transport.add_peer(agent, descriptor, NUM_BLOCKS, of_two)
