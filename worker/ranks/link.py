"""What the head tells a hand on their socket before the first step: its orders, then its memory.

Both messages carry an open file: of the memory that the ranks share, and of the KV pool. Afterwards
the socket carries what `engine.parallel.ranks` sends. Only the two processes have the socket, so
its messages are trusted.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.shard import Shard
from engine.engine_config import EngineConfig
from engine.parallel.shared_memory import RankSizes
from engine.parallel.sums import RankLost
from kv_transfer.transports.memory_file import SharedMemory

_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class Place:
    """Where memory lies in its open file, in bytes."""

    offset: int
    num_bytes: int

    @staticmethod
    def of(memory: SharedMemory) -> Place:
        """The place of the whole memory."""
        return Place(memory.offset, len(memory.view))


@dataclass(frozen=True)
class Orders:
    """The part of the engine's model that a hand computes, and its number of CPU threads. All ranks
    share `memory`, and wait there `limit_s` for one another. On cards, `devices` are those of all
    ranks, and the message's file is where their process groups meet."""

    shard: Shard
    sizes: RankSizes
    config: EngineConfig
    threads: int
    memory: Place
    limit_s: float
    log_level: str
    log_format: str
    worker: str
    devices: tuple[str, ...] = ()


def send(link: socket.socket, message: Orders | Place, file: int) -> None:
    """Send a message with an open file. Raises RankLost."""
    data = pickle.dumps(message)
    try:
        socket.send_fds(link, [_SIZE.pack(len(data))], [file])
        link.sendall(data)
    except OSError as error:
        raise RankLost(f"a rank is gone: {error}") from error


def receive(link: socket.socket) -> tuple[Any, int]:
    """A message and its open file. Raises RankLost."""
    try:
        head, files, _, _ = socket.recv_fds(link, _SIZE.size, 1)
        if len(head) < _SIZE.size or not files:
            raise RankLost("the head is gone")
        (size,) = _SIZE.unpack(head)
        data = bytearray()
        while len(data) < size:
            part = link.recv(size - len(data))
            if not part:
                raise RankLost("the head is gone")
            data += part
    except OSError as error:
        raise RankLost(f"the head is gone: {error}") from error
    return pickle.loads(data), files[0]


def mapped(file: int, place: Place) -> memoryview:
    """Map this part of an open file, wherever it begins, and close the file."""
    before = place.offset % mmap.ALLOCATIONGRANULARITY
    try:
        mapping = mmap.mmap(file, before + place.num_bytes, offset=place.offset - before)
    finally:
        os.close(file)
    return memoryview(mapping)[before:]
