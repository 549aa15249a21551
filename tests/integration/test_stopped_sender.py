"""A sender on another machine is stopped in the middle of a write over TCP, and counts as gone. The
rest of its write lands nowhere when it goes on, because the receiver has closed the connection."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from bench.tools.two_hosts import ADDRESSES
from tests.integration.distant_hosts import enter, two_hosts
from tests.integration.transport_workers import TransportWorker, Worker, connect, wait_until

NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 20
BLOCKS = list(range(NUM_BLOCKS))
TRIES = 20


class DistantWorker(TransportWorker):
    """Runs on a host of its own."""

    def __init__(self, namespace: str, num_blocks: int, block_bytes: int) -> None:
        enter(namespace)
        os.environ["UCX_TLS"] = "tcp,self"
        super().__init__("nixl", num_blocks, block_bytes)

    def num_complete(self) -> int:
        return len(self.pool.complete())

    def disconnect(self, *kept: str) -> int:
        return self.transport.disconnect(kept)


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    with two_hosts() as hosts:
        pair = [Worker(DistantWorker, each, NUM_BLOCKS, BLOCK_BYTES) for each in hosts.namespaces]
        try:
            yield pair[0], pair[1]
            for each in pair:
                each.end()
        finally:
            for each in pair:
                if each.process._popen is not None and each.process.is_alive():
                    each.process.kill()


def stop_in_mid_write(sender: Worker, receiver: Worker, agent: str) -> int:
    """Stop the sender when a part of its write has landed; returns the write's handle."""
    for attempt in range(TRIES):
        receiver.clear()
        handle: int = sender.write(agent, BLOCKS, BLOCKS, b"%d" % attempt)
        wait_until(receiver.num_complete, "first blocks")
        os.kill(sender.process.pid, signal.SIGSTOP)
        if 0 < landed(receiver) < NUM_BLOCKS:
            return handle
        os.kill(sender.process.pid, signal.SIGCONT)
        wait_until(lambda handle=handle: sender.write_done(handle), "end of a write")
    raise AssertionError("the sender was never stopped in the middle")


def landed(receiver: Worker) -> int:
    """The number of whole blocks that have landed, once no more come."""
    counts = [-1, receiver.num_complete()]
    while counts[-1] != counts[-2]:
        counts.append(receiver.num_complete())
    return counts[-1]


def test_nothing_lands_after_the_fence(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    sender.fill(BLOCKS, 1)
    agent = connect(sender, receiver)
    handle = stop_in_mid_write(sender, receiver, agent)
    assert receiver.disconnect() > 0
    receiver.fill(BLOCKS, 2)
    reused = receiver.read(BLOCKS)
    os.kill(sender.process.pid, signal.SIGCONT)
    assert wait_until(lambda: sender.write_done(handle), "end of the write") != (None,)
    assert receiver.read(BLOCKS) == reused
    sender.remove_peer(agent)
    connect(sender, receiver)
    assert sender.write_and_wait(agent, [0], [0], b"again") is None
    receiver.wait_for_note(b"again")
    assert receiver.read([0, 1]) == [*sender.read([0]), reused[1]]


def test_connections_of_peers_that_answer_are_kept(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    agent = connect(sender, receiver)
    assert sender.write_and_wait(agent, [0], [0], b"before") is None
    receiver.wait_for_note(b"before")
    assert receiver.disconnect(*ADDRESSES, "127.0.0.1") == 0
    assert sender.write_and_wait(agent, [1], [1], b"after") is None
    receiver.wait_for_note(b"after")
