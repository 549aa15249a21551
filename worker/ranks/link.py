"""What a hand and the process that started it tell each other: its orders, and the place of its KV.

Messages carry open files: of the memory that the ranks of a host share, of the socket for steps,
which then carries what `engine.parallel.ranks` sends, and of the KV pool. Only the two processes
have the socket, so its messages are trusted.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.checkpoint.shard import Shard
from engine.engine_config import EngineConfig
from engine.parallel.host_mesh import HostMesh
from engine.parallel.ranks import exchange
from engine.parallel.shared_memory import RankSizes
from engine.parallel.sums import RankLost
from kv_transfer.transports.memory_file import SharedMemory
from protocol.layout import KvLayout

_SIZE = struct.Struct("<I")
_MOST_FILES = 2


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
    of a host share `memory`, and wait there `limit_s` for one another. On cards, `devices` are
    those of all ranks, and the file in the place of the memory's is where their process groups
    meet; blocks leave the hand's own pool by `transport` ("": none), as the head orders on the link
    (`end_links`). With several hosts, ranks reach this one's at `address`. Where the head
    `is_away`, the hand has to say how much memory it wants, and what its pool is, and ends when it
    hears nothing for `limit_s`."""

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
    address: str = ""
    is_away: bool = False
    transport: str = ""


@dataclass(frozen=True)
class Wanted:
    """A hand wants memory for the pools of all ranks of its host."""

    num_bytes: int


@dataclass(frozen=True)
class OwnPool:
    """A hand has loaded: where its part of the KV pool begins in the host's memory, and for each
    group of layers the bytes of a block and the number of blocks. `layout` is the rank's."""

    offset: int
    groups: tuple[tuple[int, int], ...]
    layout: KvLayout


Message = Orders | Place | Wanted | OwnPool


def send(link: socket.socket, message: Message, *files: int) -> None:
    """Send a message with open files. Raises RankLost."""
    data = pickle.dumps(message)
    try:
        socket.send_fds(link, [_SIZE.pack(len(data))], files)
        link.sendall(data)
    except OSError as error:
        raise RankLost(f"a rank is gone: {error}") from error


def receive(link: socket.socket) -> tuple[Any, Sequence[int]]:
    """A message and its open files. Raises RankLost."""
    try:
        head, files, _, _ = socket.recv_fds(link, _SIZE.size, _MOST_FILES)
        if len(head) < _SIZE.size:
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
    return pickle.loads(data), files


def mesh_of(
    address: str, shard: Shard, sizes: RankSizes, links: Sequence[socket.socket], limit_s: float
) -> HostMesh | None:
    """The connections to the ranks on other hosts; None if there are none. All ranks call this
    together. Raises ConfigError and RankLost."""
    if sizes.num_hosts == 1:
        return None

    def name_of(rank: int) -> str:
        return f"rank {rank} on node {rank // sizes.num_local}"

    swap = partial(exchange, links, shard.number == 0)
    return HostMesh(address, shard.number, shard.num_ranks, swap, limit_s, name_of)


def mapped(file: int, place: Place) -> memoryview:
    """Map this part of an open file, wherever it begins, and close the file."""
    before = place.offset % mmap.ALLOCATIONGRANULARITY
    try:
        mapping = mmap.mmap(file, before + place.num_bytes, offset=place.offset - before)
    finally:
        os.close(file)
    return memoryview(mapping)[before:]
