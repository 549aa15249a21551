"""What is particular to the transport over shared memory."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.head_slices import HeadSlices, Pieces
from kv_transfer.transports.interface import Notification, PoolMemory, WriteDone
from kv_transfer.transports.shm import MAX_NOTIFICATION_BYTES, ShmTransport
from protocol.errors import ConfigError, TransferError

BLOCK_BYTES = 64
NUM_BLOCKS = 8


class End:
    """A transport with a pool in it, in a folder of the test's."""

    def __init__(self, agent: str, folder: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self.transport = ShmTransport(agent, "cpu", folder)
        memory = self.transport.allocate(block_bytes * NUM_BLOCKS)
        assert memory is not None
        self.blocks = np.frombuffer(memory, np.uint8).reshape(NUM_BLOCKS, block_bytes)
        self.transport.register(PoolMemory(self.blocks.ctypes.data, block_bytes, NUM_BLOCKS, "cpu"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: socket names are bounded."""
    with tempfile.TemporaryDirectory(prefix="baton") as name:
        yield Path(name) / "s"
        assert not (Path(name) / "s").exists()


@pytest.fixture
def ends(folder: Path) -> Iterator[tuple[End, End]]:
    one, other = End("one", folder), End("other", folder)
    one.transport.add_peer("other", other.transport.descriptor(), NUM_BLOCKS)
    yield one, other
    one.transport.close()
    other.transport.close()


def test_a_full_queue_never_blocks_and_keeps_the_order(ends: tuple[End, End]) -> None:
    one, other = ends
    handles = [one.transport.post_write("other", [0], [1], b"note %d" % i) for i in range(1000)]
    done: list[object] = []
    notes: list[object] = []
    while len(done) < len(handles):
        done += one.transport.poll()
        notes += other.transport.poll()
    notes += other.transport.poll()
    assert done == [WriteDone(handle, None) for handle in handles]
    assert notes == [Notification("one", b"note %d" % i) for i in range(1000)]


def test_removing_a_peer_fails_what_it_has_not_taken(ends: tuple[End, End]) -> None:
    one, _ = ends
    handles = [one.transport.post_write("other", [0], [1], b"note") for _ in range(1000)]
    one.transport.remove_peer("other")
    done = one.transport.poll()
    assert [event.handle for event in done if isinstance(event, WriteDone)] == handles
    assert done[0] == WriteDone(handles[0], None)
    assert done[-1] == WriteDone(handles[-1], "the peer was removed")
    one.transport.remove_peer("other")


def test_a_peer_that_closed_is_an_error(ends: tuple[End, End]) -> None:
    one, other = ends
    other.transport.close()
    handle = one.transport.post_write("other", [0], [1], b"note")
    (done,) = one.transport.poll()
    assert isinstance(done, WriteDone)
    assert done.handle == handle
    assert "the peer is gone" in str(done.error)


def test_foreign_datagrams_are_refused_and_counted(ends: tuple[End, End], folder: Path) -> None:
    one, other = ends
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for frame in (b"", b"\xff\xff", b"\x92\x01\x02", bytes(4096)):
            stranger.sendto(frame, str(folder / "other.sock"))
    one.transport.post_write("other", [0], [1], b"note")
    assert other.transport.poll() == [Notification("one", b"note")]
    assert other.transport.num_refused == 4


def test_a_notification_has_a_limit(ends: tuple[End, End]) -> None:
    one, other = ends
    longest = bytes(MAX_NOTIFICATION_BYTES)
    one.transport.post_write("other", [0], [1], longest)
    assert other.transport.poll() == [Notification("one", longest)]
    with pytest.raises(TransferError, match="too long"):
        one.transport.post_write("other", [0], [1], longest + b"x")


@pytest.mark.parametrize("agent", ["../other", "", "a.b", "x" * 65])
def test_names_that_could_leave_the_folder(ends: tuple[End, End], agent: str) -> None:
    one, other = ends
    with pytest.raises(TransferError, match="cannot name"):
        one.transport.add_peer(agent, other.transport.descriptor(), NUM_BLOCKS)
    with pytest.raises(ValueError, match="cannot name"):
        ShmTransport(agent, "cpu")


def test_a_pool_must_lie_in_the_allocated_memory(folder: Path) -> None:
    transport = ShmTransport("one", "cpu", folder)
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


def test_a_folder_too_deep_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    with pytest.raises(ConfigError, match="socket"):
        ShmTransport("one", "cpu", deep)
    assert not deep.exists()


def test_pieces_of_blocks_land_in_their_places_and_nowhere_else(folder: Path) -> None:
    """Blocks of 2 layers, keys and values, 2 heads of 8 bytes into such of 4 heads."""
    one, other = End("one", folder), End("other", folder, 2 * BLOCK_BYTES)
    slices = HeadSlices(Pieces(64, 16, 4, 0, 16), Pieces(128, 16, 4, 16, 32))
    one.blocks[:] = np.arange(1, 1 + one.blocks.size, dtype=np.uint32).reshape(one.blocks.shape)
    one.transport.add_peer("other", other.transport.descriptor(), NUM_BLOCKS, slices)
    one.transport.post_write("other", [1, 6], [7, 2], b"note")
    expected = np.zeros((NUM_BLOCKS, 4, 2, 16), np.uint8)
    expected[[7, 2], :, 1] = one.blocks[[1, 6]].reshape(2, 4, 16)
    assert (other.blocks == expected.reshape(NUM_BLOCKS, -1)).all()
    one.transport.remove_peer("other")
    with pytest.raises(TransferError, match="expected 8 of 64"):
        one.transport.add_peer("other", other.transport.descriptor(), NUM_BLOCKS)
    foreign = HeadSlices(Pieces(32, 16, 2, 0, 16), Pieces(128, 16, 2, 0, 16))
    with pytest.raises(TransferError, match="do not fit our pool"):
        one.transport.add_peer("other", other.transport.descriptor(), NUM_BLOCKS, foreign)
    one.transport.close()
    other.transport.close()
