"""What is particular to the transport over shared memory."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.head_slices import HeadSlices, Pieces, Share
from kv_transfer.transports.interface import (
    Notification,
    PeerLost,
    PeerReady,
    PoolMemory,
    TransportEvent,
    WriteDone,
)
from kv_transfer.transports.shm import MAX_NOTIFICATION_BYTES, ShmTransport
from protocol.errors import ConfigError, PoolMismatch, TransferError

BLOCK_BYTES = 64
NUM_BLOCKS = 8
MANY = 10_000
"""More short notifications than the queue of a socket holds."""


class End:
    """A transport with a pool in it, and what it reported."""

    def __init__(self, agent: str, block_bytes: int = BLOCK_BYTES) -> None:
        self.transport = ShmTransport(agent, "cpu")
        memory = self.transport.allocate(block_bytes * NUM_BLOCKS)
        assert memory is not None
        self.blocks = np.frombuffer(memory.view, np.uint8).reshape(NUM_BLOCKS, block_bytes)
        self.transport.register(PoolMemory(self.blocks.ctypes.data, block_bytes, NUM_BLOCKS, "cpu"))
        self.events: list[TransportEvent] = []

    def poll(self) -> list[TransportEvent]:
        """Everything reported so far."""
        self.events += self.transport.poll()
        return self.events

    def take(self) -> list[TransportEvent]:
        """What this call and those before it reported."""
        taken, self.events = self.poll(), []
        return taken


def connect(one: End, other: End, *shares: Share) -> None:
    one.transport.add_peer(
        other.transport.agent, other.transport.descriptor(), NUM_BLOCKS, (shares,) if shares else ()
    )
    poll_until(lambda: len(one.events) > 0, one, other)
    assert one.take() == [PeerReady(other.transport.agent)]


def poll_until(holds: Callable[[], bool], *ends: End) -> None:
    """Let the ends take turns; sockets of one process need no time."""
    for _ in range(1000):
        for end in ends:
            end.poll()
        if holds():
            return
    pytest.fail("it does not come")


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    one, other = End("one"), End("other")
    connect(one, other)
    yield one, other
    one.transport.close()
    other.transport.close()


def test_a_full_queue_never_blocks_and_keeps_the_order(ends: tuple[End, End]) -> None:
    one, other = ends
    notes = [b"note %d" % i for i in range(MANY)]
    handles = [one.transport.post_write("other", [0], [1], note) for note in notes]
    assert len(one.take()) < MANY, "the queue was full"
    poll_until(lambda: len(other.events) == MANY, one, other)
    assert other.events == [Notification("one", note) for note in notes]
    assert one.events[-1] == WriteDone(handles[-1], None)


def test_writes_end_in_order_when_their_notification_is_in_the_queue(
    ends: tuple[End, End],
) -> None:
    one, other = ends
    handles = [one.transport.post_write("other", [0], [1], b"note") for _ in range(MANY)]
    poll_until(lambda: len(one.events) == MANY, one, other)
    assert one.events == [WriteDone(handle, None) for handle in handles]


def test_removing_a_peer_fails_what_it_has_not_taken(ends: tuple[End, End]) -> None:
    one, other = ends
    handles = [one.transport.post_write("other", [0], [1], b"note") for _ in range(MANY)]
    one.transport.remove_peer("other")
    done = one.take()
    assert [event.handle for event in done if isinstance(event, WriteDone)] == handles
    assert done[0] == WriteDone(handles[0], None)
    assert done[-1] == WriteDone(handles[-1], "the peer was removed")
    one.transport.remove_peer("other")
    num_done = done.count(WriteDone(handles[-1], "the peer was removed"))
    poll_until(lambda: len(other.events) >= num_done, other)
    assert Notification("one", b"note") in other.events


def test_a_peer_that_closed_is_an_error_and_its_memory_is_freed(ends: tuple[End, End]) -> None:
    one, other = ends
    handles = [one.transport.post_write("other", [0], [1], b"note") for _ in range(MANY)]
    gc.collect()  # perhaps there are some of other tests
    before = shared_pools()
    other.transport.close()
    other.blocks = np.zeros(0)
    gc.collect()
    done = one.take()
    assert shared_pools() == before - 2, "the peer's, too, is unmapped"
    assert [event.handle for event in done if isinstance(event, WriteDone)] == handles
    last = done[-1]
    assert isinstance(last, WriteDone)
    assert "the peer is gone" in str(last.error)
    with pytest.raises(TransferError, match="it is gone"):
        one.transport.post_write("other", [0], [1], b"note")
    assert one.take() == []


def shared_pools() -> int:
    """Mappings of pools in this process."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:baton-kv" in line for line in maps)


def test_a_peer_that_nobody_answers_for(ends: tuple[End, End]) -> None:
    one, other = ends
    descriptor = other.transport.descriptor()
    other.transport.close()
    one.take()
    with pytest.raises(TransferError, match=r"one host and in one network namespace"):
        one.transport.add_peer("other", descriptor, NUM_BLOCKS)
    with pytest.raises(TransferError, match="not known"):
        one.transport.post_write("other", [0], [1], b"note")


def test_a_peer_that_dies_while_we_connect(ends: tuple[End, End]) -> None:
    one, _ = ends
    third = End("third")
    one.transport.add_peer("third", third.transport.descriptor(), NUM_BLOCKS)
    with pytest.raises(TransferError, match="not mapped"):
        one.transport.post_write("third", [0], [1], b"note")
    third.transport.close()
    (lost,) = one.take()
    assert isinstance(lost, PeerLost)
    assert lost.agent == "third"
    with pytest.raises(TransferError, match="not known"):
        one.transport.post_write("third", [0], [1], b"note")


def test_a_notification_has_a_limit(ends: tuple[End, End]) -> None:
    one, other = ends
    longest = bytes(MAX_NOTIFICATION_BYTES)
    one.transport.post_write("other", [0], [1], longest)
    poll_until(lambda: len(other.events) > 0, one, other)
    assert other.take() == [Notification("one", longest)]
    with pytest.raises(TransferError, match="too long"):
        one.transport.post_write("other", [0], [1], longest + b"x")


def test_a_pool_must_lie_in_the_allocated_memory() -> None:
    transport = ShmTransport("one", "cpu")
    elsewhere = np.zeros(BLOCK_BYTES * NUM_BLOCKS, np.uint8)
    place = PoolMemory(elsewhere.ctypes.data, BLOCK_BYTES, NUM_BLOCKS, "cpu")
    with pytest.raises(ValueError, match="must live in"):
        transport.register(place)
    transport.allocate(BLOCK_BYTES)
    with pytest.raises(ValueError, match="outside"):
        transport.register(place)
    with pytest.raises(ConfigError, match="cuda"):
        transport.register(PoolMemory(1, 1, 1, "cuda:0"))
    with pytest.raises(ValueError, match="already"):
        transport.allocate(BLOCK_BYTES)
    transport.close()
    transport.close()


def test_elsewhere_than_on_linux_a_private_folder_and_a_file_without_a_name_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    linux = ((os, "memfd_create"), (fcntl, "F_GET_SEALS"), (mmap, "MADV_HUGEPAGE"))
    for module, name in (*linux, (socket, "SO_PEERCRED")):
        monkeypatch.delattr(module, name)
    one, other = End("one"), End("other")
    connect(one, other)
    folders = list(tmp_path.iterdir())
    assert len(folders) == 2
    assert {stat.S_IMODE(each.stat().st_mode) for each in folders} == {0o700}
    assert {file.name for each in folders for file in each.iterdir()} == {"kv"}
    one.blocks[3] = 9
    one.transport.post_write("other", [3], [5], b"note")
    assert (other.blocks[5] == 9).all()
    poll_until(lambda: len(other.events) > 0, other)
    one.transport.close()
    other.transport.close()
    assert list(tmp_path.iterdir()) == []


def test_pieces_of_blocks_land_in_their_places_and_nowhere_else() -> None:
    """Blocks of 2 layers, keys and values, 2 heads of 8 bytes into such of 4 heads."""
    one, other = End("one"), End("other", 2 * BLOCK_BYTES)
    slices = HeadSlices(Pieces(64, 16, 4, 0, 16), Pieces(128, 16, 4, 16, 32))
    one.blocks[:] = np.arange(1, 1 + one.blocks.size, dtype=np.uint32).reshape(one.blocks.shape)
    connect(one, other, Share(0, 0, slices))
    one.transport.post_write("other", [1, 6], [7, 2], b"note")
    expected = np.zeros((NUM_BLOCKS, 4, 2, 16), np.uint8)
    expected[[7, 2], :, 1] = one.blocks[[1, 6]].reshape(2, 4, 16)
    assert (other.blocks == expected.reshape(NUM_BLOCKS, -1)).all()
    one.transport.remove_peer("other")
    with pytest.raises(PoolMismatch, match="expected 8 blocks of 64 bytes on 1"):
        one.transport.add_peer("other", other.transport.descriptor(), NUM_BLOCKS)
    foreign = Share(0, 0, HeadSlices(Pieces(32, 16, 2, 0, 16), Pieces(128, 16, 2, 0, 16)))
    with pytest.raises(PoolMismatch, match="do not fit our pool"):
        one.transport.add_peer("other", other.transport.descriptor(), NUM_BLOCKS, [(foreign,)])
    one.transport.close()
    other.transport.close()
