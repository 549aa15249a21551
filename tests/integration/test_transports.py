"""The contract of every transport, between real processes: what is written, and who is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from protocol.errors import TransferError
from tests.effort import some
from tests.integration.transport_workers import (
    ServiceWorker,
    TransportWorker,
    Worker,
    connect,
    wait_until,
)

BLOCKS = {
    b"one": ([3], [11]),
    b"adjacent": ([0, 1, 2, 3], [4, 5, 6, 7]),
    b"scattered": ([9, 2, 15, 0, 4], [1, 14, 7, 8, 0]),
    b"whole pool reversed": (list(range(16)), list(reversed(range(16)))),
}
"""Which blocks are written, and where."""


def test_blocks_land_exact_and_nowhere_else(spawn: Callable[..., Worker]) -> None:
    sender, receiver = spawn(), spawn()
    agent = connect(sender, receiver)
    sender.fill(list(range(16)), 1)
    for name, (source, target) in BLOCKS.items():
        receiver.clear()

        assert sender.write_and_wait(agent, source, target, name) is None
        receiver.wait_for_note(name)

        assert receiver.read(target) == sender.read(source)
        assert receiver.occupied() == sorted(target)


@pytest.mark.parametrize("block_bytes", some([1000, 8, 4 * 1024 * 1024], 2))
def test_block_sizes(spawn: Callable[..., Worker], block_bytes: int) -> None:
    sender = spawn(TransportWorker, 6, block_bytes)
    receiver = spawn(TransportWorker, 6, block_bytes)
    agent = connect(sender, receiver)
    sender.fill([0, 1, 2, 3, 4, 5], 2)

    assert sender.write_and_wait(agent, [5, 0, 1, 4], [0, 2, 3, 5], b"sized") is None
    receiver.wait_for_note(b"sized")

    assert receiver.read([0, 2, 3, 5]) == sender.read([5, 0, 1, 4])
    assert receiver.occupied() == [0, 2, 3, 5]


def test_pools_may_differ_in_their_number_of_blocks(spawn: Callable[..., Worker]) -> None:
    sender = spawn(TransportWorker, 4, 4096)
    receiver = spawn(TransportWorker, 300, 4096)
    agent = connect(sender, receiver)
    sender.fill([3], 3)

    assert sender.write_and_wait(agent, [3], [299], b"far") is None
    receiver.wait_for_note(b"far")

    assert receiver.read([299]) == sender.read([3])
    with pytest.raises(TransferError, match="target block"):
        sender.write(agent, [0], [300], b"too far")
    with pytest.raises(TransferError, match="source block"):
        sender.write(agent, [4], [0], b"not ours")
    assert receiver.occupied() == [299]


def test_a_notification_comes_after_its_data(spawn: Callable[..., Worker]) -> None:
    num_blocks, block_bytes = 64, 256 * 1024
    sender = spawn(TransportWorker, num_blocks, block_bytes)
    receiver = spawn(TransportWorker, num_blocks, block_bytes)
    agent = connect(sender, receiver)
    sender.fill(list(range(num_blocks)), 4)

    handles = [
        sender.write(agent, [i, i + 1], [i, i + 1], b"pair %d" % i) for i in range(0, num_blocks, 2)
    ]
    for i in range(0, num_blocks, 2):
        writer, _, complete = receiver.wait_for_note(b"pair %d" % i)
        assert writer == sender.introduce()[0]
        assert {i, i + 1} <= set(complete)
    for handle in handles:
        assert wait_until(lambda h=handle: sender.write_done(h), "end of a write") == (None,)
    everything = list(range(num_blocks))
    assert receiver.read(everything) == sender.read(everything)


def test_both_directions_at_once(spawn: Callable[..., Worker]) -> None:
    one, other = spawn(), spawn()
    to_other, to_one = connect(one, other), connect(other, one)
    one.fill([0, 1, 2, 3], 5)
    other.fill([4, 5, 6, 7], 6)

    first = one.write(to_other, [0, 1, 2, 3], [8, 9, 10, 11], b"there")
    second = other.write(to_one, [4, 5, 6, 7], [12, 13, 14, 15], b"back")

    other.wait_for_note(b"there")
    one.wait_for_note(b"back")
    assert wait_until(lambda: one.write_done(first), "end of a write") == (None,)
    assert wait_until(lambda: other.write_done(second), "end of a write") == (None,)
    assert other.read([8, 9, 10, 11]) == one.read([0, 1, 2, 3])
    assert one.read([12, 13, 14, 15]) == other.read([4, 5, 6, 7])


def test_one_worker_writes_to_several(spawn: Callable[..., Worker]) -> None:
    sender = spawn()
    receivers = [spawn(), spawn()]
    sender.fill([0, 1], 7)
    for i, receiver in enumerate(receivers):
        agent = connect(sender, receiver)
        assert sender.write_and_wait(agent, [i], [i + 5], b"to you") is None
    for i, receiver in enumerate(receivers):
        receiver.wait_for_note(b"to you")
        assert receiver.occupied() == [i + 5]


def test_a_slow_reader_loses_no_notification(spawn: Callable[..., Worker]) -> None:
    sender, receiver = spawn(), spawn()
    agent = connect(sender, receiver)
    assert sender.write_and_wait(agent, [0], [0], b"first") is None
    os.kill(receiver.process.pid, signal.SIGSTOP)
    handles = [sender.write(agent, [0], [1], b"note %d" % i) for i in range(100)]
    os.kill(receiver.process.pid, signal.SIGCONT)

    for i, handle in enumerate(handles):
        assert wait_until(lambda h=handle: sender.write_done(h), "end of a write") == (None,)
        receiver.wait_for_note(b"note %d" % i)


def test_the_service_moves_blocks_both_ways(spawn: Callable[..., Worker]) -> None:
    one, other = spawn(ServiceWorker), spawn(ServiceWorker)
    to_other, to_one = connect(one, other), connect(other, one)
    one.fill([0, 1], 11)
    assert one.write_and_wait(to_other, [0, 1], [4, 9], b"there") is None
    assert other.wait_for_note(b"there")[0] == to_one
    assert other.write_and_wait(to_one, [4, 9], [14, 15], b"back") is None
    one.wait_for_note(b"back")
    assert one.read([14, 15]) == one.read([0, 1])
