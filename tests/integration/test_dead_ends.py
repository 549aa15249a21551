"""A UCX worker dies while its process lives: peers reach the pool by another end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.transports.healing import HealingTransport
from protocol.errors import TransferError
from tests.deafness import deafen
from tests.integration.transport_workers import TransportWorker, Worker, connect, wait_until

NUM_BLOCKS, BLOCK_BYTES = 16, 4096


class MortalWorker(TransportWorker):
    """Uses TCP. Its transport can be made deaf, and given another end."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        os.environ |= {"UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "fatal"}
        super().__init__("nixl", num_blocks, block_bytes)

    def deafen(self) -> int:
        return deafen(self._nixl._ports, self._nixl._peer_ports)

    def renew(self, failed: str) -> bool:
        return self.transport.renew(failed)

    @property
    def _nixl(self) -> Any:
        assert isinstance(self.transport, HealingTransport)
        (end,) = self.transport._target.transport._ends  # type: ignore[attr-defined]
        return end


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    pair = [Worker(MortalWorker, NUM_BLOCKS, BLOCK_BYTES) for _ in range(2)]
    yield pair[0], pair[1]
    for each in pair:
        each.end()


def write_fails(sender: Worker, agent: str) -> bool:
    """Whether a write fails, after which the peer is removed."""
    try:
        error = sender.write_and_wait(agent, [1], [1], b"lost")
    except TransferError as refused:
        error = str(refused)
    sender.remove_peer(agent)
    return error is not None


def test_a_deaf_end_stays_deaf_and_another_one_hears(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    sender.fill(list(range(NUM_BLOCKS)), 1)
    deaf = connect(sender, receiver)
    assert sender.write_and_wait(deaf, [0], [0], b"before") is None
    receiver.wait_for_note(b"before")
    assert receiver.deafen() > 0
    wait_until(lambda: write_fails(sender, deaf), "failing write")
    with pytest.raises(TransferError):  # although the sender connects from a new end
        connect(sender, receiver)

    assert receiver.renew(deaf)
    agent = connect(sender, receiver)
    assert agent != deaf
    assert sender.write_and_wait(agent, [2], [3], b"after") is None
    receiver.wait_for_note(b"after")
    assert receiver.read([3]) == sender.read([2])
    assert receiver.occupied() == [0, 3], "nothing of the failed writes"
