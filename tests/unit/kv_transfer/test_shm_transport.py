"""What is particular to the transport over shared memory."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.shm_transport import MAX_NOTIFICATION_BYTES, ShmTransport
from kv_transfer.transport import Notification, PoolMemory, WriteDone
from protocol.errors import ConfigError, TransferError

BLOCK_BYTES = 64
NUM_BLOCKS = 8


class End:
    """A transport with a pool in it, in a folder of the test's."""

    def __init__(self, agent: str, folder: Path) -> None:
        self.transport = ShmTransport(agent, "cpu", folder)
        memory = self.transport.allocate(BLOCK_BYTES * NUM_BLOCKS)
        assert memory is not None
        self.blocks = np.frombuffer(memory, np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)
        self.transport.register(PoolMemory(self.blocks.ctypes.data, BLOCK_BYTES, NUM_BLOCKS, "cpu"))


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
