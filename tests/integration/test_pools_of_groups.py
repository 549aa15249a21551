"""Blocks of several groups of layers in one pool, by every transport: each group's blocks lie in
views of their own over the same memory, and a write copies those of one group."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer.transports.interface import (
    Notification,
    PeerReady,
    PoolMemory,
    WriteDone,
)
from kv_transfer.transports.memory_file import SharedMemory
from kv_transfer.transports.registry import create_transport
from protocol.errors import TransferError
from tests.integration.pool_ends import PoolEnd, poll_until

VIEWS = ((48, 8), (32, 12), (96, 4))
"""Bytes of a block, and blocks, of each group: four pages of 96 bytes."""
USED = (48, 32, 80)
"""Bytes of a block that are written."""
NUM_BYTES = 384


class End(PoolEnd):
    """A worker's pool of four large pages."""

    def __init__(self, transport: str, views: tuple[tuple[int, int], ...] = VIEWS) -> None:
        super().__init__(create_transport(transport, "cpu"))
        memory = self.transport.allocate(NUM_BYTES)
        if memory is None:
            memory = SharedMemory(NUM_BYTES)
        self.bytes = np.frombuffer(memory.view, np.uint8, NUM_BYTES)
        size, number = views[0]
        views, used = (views, USED if views == VIEWS else ()) if len(views) > 1 else ((), ())
        pool = PoolMemory(self.bytes.ctypes.data, size, number, "cpu", views=views, used=used)
        self.transport.register(pool)

    def blocks(self, group: int) -> np.ndarray:
        """The memory as blocks of one group."""
        return self.bytes.reshape(VIEWS[group][::-1])


@pytest.fixture
def ends() -> Iterator[list[End]]:
    opened: list[End] = []
    yield opened
    for end in opened:
        end.transport.close()


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_write_copies_blocks_of_one_group(ends: list[End], transport: str) -> None:
    one, other = End(transport), End(transport)
    ends += [one, other]
    one.bytes[:] = np.random.default_rng(7).integers(1, 256, NUM_BYTES, dtype=np.uint8)
    one.transport.add_peer(other.transport.agent, other.transport.descriptor(), VIEWS[0][1])
    poll_until(PeerReady, one, other)
    for group, source, target in [(0, [1, 2], [6, 7]), (1, [11, 4], [0, 4]), (2, [3], [1])]:
        one.events.clear(), other.events.clear()
        before = other.bytes.copy()
        agent = other.transport.agent
        one.transport.post_write(agent, source, target, b"landed", group)
        poll_until(WriteDone, one, other)
        assert [each.error for each in one.events if isinstance(each, WriteDone)] == [None]
        poll_until(Notification, other, one)
        expected = before.reshape(VIEWS[group][::-1])
        expected[target, : USED[group]] = one.blocks(group)[source, : USED[group]]
        assert (other.blocks(group) == expected).all()


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_block_outside_of_its_group_is_refused(ends: list[End], transport: str) -> None:
    one, other = End(transport), End(transport)
    ends += [one, other]
    one.transport.add_peer(other.transport.agent, other.transport.descriptor(), VIEWS[0][1])
    poll_until(PeerReady, one, other)
    with pytest.raises(TransferError, match="outside of a pool of 4 blocks"):
        one.transport.post_write(other.transport.agent, [3], [4], b"landed", 2)


@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_pool_with_other_groups_is_refused(ends: list[End], transport: str) -> None:
    one, other, third = End(transport), End(transport, VIEWS[:1]), End(transport, (VIEWS[0],) * 3)
    ends += [one, other, third]
    with pytest.raises(TransferError, match="of 1 groups of layers, expected 3"):
        one.transport.add_peer(other.transport.agent, other.transport.descriptor(), VIEWS[0][1])
    with pytest.raises(TransferError, match="of 48 bytes on 1 ranks, expected 8 blocks of 32"):
        one.transport.add_peer(third.transport.agent, third.transport.descriptor(), VIEWS[0][1])
