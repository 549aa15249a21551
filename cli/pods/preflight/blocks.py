"""Moves real blocks to the other processes of a run and measures how fast.

Owns the transport and its pool. This process sends half of the pool, which is filled with its own
pattern. Peers write to the other half, each to a share of its own. Knows no handoffs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kv_transfer.transports.interface import (
    Notification,
    PeerLost,
    PeerReady,
    PoolMemory,
    Transport,
    WriteDone,
)
from protocol.errors import ServiceError, TransferError

BLOCK_BYTES = 1 << 20


class BlockMover:
    """One process's end of the transfers; a context manager."""

    def __init__(self, transport: Transport, num_blocks: int, num_processes: int) -> None:
        """`num_blocks` of 1 MiB go to each peer."""
        self.transport = transport
        self.num_blocks = num_blocks * (1 + num_processes)
        self._share = num_blocks
        num_bytes = self.num_blocks * BLOCK_BYTES
        memory = transport.allocate(num_bytes)
        flat = (
            np.zeros(num_bytes, np.uint8)
            if memory is None
            else np.frombuffer(memory.view, np.uint8, num_bytes)
        )
        self._blocks = flat.reshape(self.num_blocks, BLOCK_BYTES)
        transport.register(PoolMemory(flat.ctypes.data, BLOCK_BYTES, self.num_blocks, "cpu"))
        self._arrived: set[int] = set()
        self._done: dict[int, str | None] = {}
        self._connected: dict[str, str | None] = {}

    def __enter__(self) -> BlockMover:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()

    def connect(self, agent: str, descriptor: bytes, num_blocks: int, timeout_s: float) -> None:
        """Open the way to a peer's pool. Raises ServiceError."""
        deadline = time.monotonic() + timeout_s
        try:
            self.transport.add_peer(agent, descriptor, num_blocks)
        except TransferError as error:
            raise ServiceError(f"cannot connect to a peer's blocks: {error}") from error
        while agent not in self._connected:
            self.turn()
            if time.monotonic() > deadline:
                raise ServiceError(f"cannot connect to a peer's blocks within {timeout_s:g} s")
        if (reason := self._connected[agent]) is not None:
            raise ServiceError(f"cannot connect to a peer's blocks: {reason}")

    def write(self, index: int, peer: int, agent: str, timeout_s: float) -> float:
        """Write to a peer that is connected; GiB per second. Raises ServiceError."""
        self._blocks[: self._share] = _pattern(index)
        source = range(self._share)
        target = range(self._share * (1 + index), self._share * (2 + index))
        started = time.monotonic()
        try:
            handle = self.transport.post_write(
                agent, list(source), list(target), index.to_bytes(4, "big")
            )
            while handle not in self._done:
                self.turn()
                if time.monotonic() > started + timeout_s:
                    raise ServiceError(f"nothing arrived at process {peer} within {timeout_s:g} s")
        except TransferError as error:
            raise ServiceError(f"blocks to process {peer}: {error}") from error
        if (reason := self._done[handle]) is not None:
            raise ServiceError(f"blocks to process {peer}: {reason}")
        seconds = time.monotonic() - started
        return self._share * BLOCK_BYTES / seconds / (1 << 30)

    def turn(self) -> None:
        """Let the transport make progress, and keep its reports."""
        for event in self.transport.poll():
            if isinstance(event, WriteDone):
                self._done[event.handle] = event.error
            elif isinstance(event, PeerReady):
                self._connected[event.agent] = None
            elif isinstance(event, PeerLost):
                self._connected[event.agent] = event.reason
            elif isinstance(event, Notification):
                self._arrived.add(int.from_bytes(event.payload, "big"))

    def damaged(self, peers: Sequence[int]) -> list[int]:
        """The peers whose blocks have not arrived whole."""
        return [
            peer
            for peer in peers
            if peer not in self._arrived
            or not bool(
                np.all(
                    self._blocks[self._share * (1 + peer) : self._share * (2 + peer)]
                    == _pattern(peer)
                )
            )
        ]


def _pattern(index: int) -> int:
    """The byte that a process's blocks are full of; never zero."""
    return index % 251 + 1
