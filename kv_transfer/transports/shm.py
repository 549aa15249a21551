"""The transport for one host: peers map each other's pools and copy into them.

Owns the pool's shared memory, the mappings of peers' pools and one datagram socket, over which
notifications follow the data. A write is a memory copy inside `post_write`; it is over when its
notification is in the peer's queue. A full queue never blocks: `poll` retries in order.
Serves pools in host memory only.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import re
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from kv_transfer.head_slices import HeadSlices, Pieces
from kv_transfer.transports.interface import (
    Notification,
    PoolMemory,
    WriteDone,
    check_blocks,
    fit_slices,
    runs,
)
from kv_transfer.transports.shm_segments import SegmentFolder, default_folder, map_pool
from protocol.errors import ConfigError, TransferError

MAX_NOTIFICATION_BYTES = 64 * 1024
_MAX_DATAGRAMS_PER_POLL = 256
_QUEUE_FULL = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS)

_log = logging.getLogger(__name__)


class _Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The folder of a peer's files, and the pool's place in the peer's shared memory."""

    folder: str
    offset: int
    block_bytes: int
    num_blocks: int


class _Datagram(msgspec.Struct, frozen=True, array_like=True):
    """A notification on the wire."""

    agent: str
    payload: bytes


@dataclass
class _Peer:
    memory: mmap.mmap
    address: int  # of block 0, as mapped in this process
    num_blocks: int
    slices: HeadSlices
    socket: socket.socket
    unsent: deque[tuple[int, bytes]] = field(default_factory=deque)  # handle, datagram


_datagrams = msgspec.msgpack.Decoder(_Datagram)


class ShmTransport:
    """A transport over shared memory of one host; owns its files until `close`."""

    name = "shm"
    paths = ()

    def __init__(self, agent: str, device: str, folder: Path | None = None) -> None:
        """Claim the agent's files and open the socket. Raises ConfigError."""
        if reason := self.why_not(device):
            raise ConfigError(reason)
        self.agent = _checked_name(agent)
        self.num_refused = 0  # datagrams that were not ours
        self._memory: mmap.mmap | None = None
        self._pool: PoolMemory | None = None
        self._peers: dict[str, _Peer] = {}
        self._done: list[WriteDone] = []
        self._next_handle = 0
        self._folder = folder or default_folder()
        self._segment = SegmentFolder(self._folder, agent)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.bind(str(self._segment.socket_path))
        except OSError as error:
            self.close()
            raise ConfigError(f"a socket cannot be made in {self._folder}: {error}") from error

    @staticmethod
    def why_not(device: str) -> str:
        """Why the transport cannot serve pools on this device; "" if it can."""
        if device == "cpu":
            return ""
        return f"the transport shm serves pools in host memory, not on {device}; use nixl"

    def allocate(self, num_bytes: int) -> memoryview | None:
        """The shared memory that the pool must live in; call it once."""
        if self._memory is not None:
            raise ValueError("the memory is allocated already")
        self._memory = self._segment.create_pool(num_bytes)
        return memoryview(self._memory)

    def register(self, pool: PoolMemory) -> None:
        """Record where in the allocated memory the pool lies."""
        if self._pool is not None:
            raise ValueError("a pool is registered already")
        if self.why_not(pool.device):
            raise ConfigError(f"the transport shm does not serve a pool on {pool.device}")
        if self._memory is None:
            raise ValueError("the pool must live in the memory that allocate() returned")
        offset = pool.address - _address_of(self._memory)
        if offset < 0 or offset + pool.num_bytes > len(self._memory):
            raise ValueError("the pool lies outside of the memory that allocate() returned")
        self._pool = pool

    def descriptor(self) -> bytes:
        """The folder of our files, and the pool's place in the memory."""
        pool, memory = self._registered(), self._memory
        assert memory is not None
        return msgspec.msgpack.encode(
            _Descriptor(
                folder=str(self._folder),
                offset=pool.address - _address_of(memory),
                block_bytes=pool.block_bytes,
                num_blocks=pool.num_blocks,
            )
        )

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, slices: HeadSlices | None = None
    ) -> None:
        """Map the peer's pool and connect to its socket."""
        place, own = _decode(descriptor), self._registered()
        if agent == self.agent:
            raise TransferError("a transport cannot be its own peer")
        slices = fit_slices(agent, (place.num_blocks, place.block_bytes), num_blocks, own, slices)
        try:
            files = Path(place.folder) / _checked_name(agent)
        except ValueError as error:
            raise TransferError(str(error)) from error
        self.remove_peer(agent)
        num_bytes = place.offset + place.block_bytes * place.num_blocks
        memory = map_pool(files.with_suffix(".pool"), num_bytes)
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sender.setblocking(False)
        try:
            sender.connect(str(files.with_suffix(".sock")))
        except OSError as error:
            sender.close()
            memory.close()
            raise TransferError(f"peer {agent} does not answer: {error}") from error
        address = _address_of(memory) + place.offset
        self._peers[agent] = _Peer(memory, address, num_blocks, slices, sender)

    def remove_peer(self, agent: str) -> None:
        """Unmap the peer's pool; notifications not yet in the peer's queue are lost."""
        peer = self._peers.pop(agent, None)
        if peer is None:
            return
        self._done += [WriteDone(handle, "the peer was removed") for handle, _ in peer.unsent]
        peer.socket.close()
        peer.memory.close()

    def post_write(
        self,
        agent: str,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        notification: bytes,
    ) -> int:
        """Copy now, without holding the GIL, then queue the notification."""
        peer = self._peers.get(agent)
        if peer is None:
            raise TransferError(f"peer {agent} is not known")
        if len(notification) > MAX_NOTIFICATION_BYTES:
            raise TransferError(f"a notification of {len(notification)} bytes is too long")
        pool = self._registered()
        check_blocks(source_blocks, target_blocks, pool.num_blocks, peer.num_blocks)
        _copy(pool, source_blocks, peer, target_blocks)
        handle = self._next_handle
        self._next_handle += 1
        datagram = msgspec.msgpack.encode(_Datagram(self.agent, notification))
        peer.unsent.append((handle, datagram))
        self._send(peer)
        return handle

    def poll(self) -> list[WriteDone | Notification]:
        """Send the notifications that full queues held back, and receive new ones."""
        for peer in self._peers.values():
            self._send(peer)
        events: list[WriteDone | Notification] = [*self._done, *self._receive()]
        self._done.clear()
        return events

    def close(self) -> None:
        """Remove the files. The pool's mapping lives until its last view is dropped."""
        for agent in list(self._peers):
            self.remove_peer(agent)
        self._socket.close()
        self._segment.close()
        self._memory = None

    def _send(self, peer: _Peer) -> None:
        while peer.unsent:
            handle, datagram = peer.unsent[0]
            try:
                peer.socket.send(datagram)
            except OSError as error:
                if error.errno in _QUEUE_FULL:
                    return
                reason = f"the peer is gone: {error}"
                self._done += [WriteDone(unsent, reason) for unsent, _ in peer.unsent]
                peer.unsent.clear()
                return
            peer.unsent.popleft()
            self._done.append(WriteDone(handle, None))

    def _receive(self) -> list[Notification]:
        arrived = []
        for _ in range(_MAX_DATAGRAMS_PER_POLL):
            try:
                frame = self._socket.recv(2 * MAX_NOTIFICATION_BYTES)
            except BlockingIOError:
                break
            try:
                datagram = _datagrams.decode(frame)
            except msgspec.DecodeError as error:
                self.num_refused += 1
                _log.warning("a foreign datagram of %d bytes is refused: %s", len(frame), error)
                continue
            arrived.append(Notification(datagram.agent, datagram.payload))
        return arrived

    def _registered(self) -> PoolMemory:
        if self._pool is None:
            raise ValueError("no pool is registered")
        return self._pool


def _copy(
    pool: PoolMemory, source_blocks: Sequence[int], peer: _Peer, target_blocks: Sequence[int]
) -> None:
    """Copy straight from one pool into the other: whole blocks, or the pieces of each."""
    if peer.slices.source.count == 1:
        size = pool.block_bytes
        for source, target, count in runs(source_blocks, target_blocks):
            ctypes.memmove(peer.address + target * size, pool.address + source * size, count * size)
        return
    sources = _pieces_of(pool.address, pool.num_blocks, peer.slices.source)
    targets = _pieces_of(peer.address, peer.num_blocks, peer.slices.target)
    for source, target in zip(source_blocks, target_blocks, strict=True):
        np.copyto(targets[target], sources[source])


def _pieces_of(address: int, num_blocks: int, pieces: Pieces) -> np.ndarray:
    """View of a pool's pieces, [num_blocks, pieces of a block, bytes of a piece]. The view does
    not keep the pool's mapping open and must not outlive it."""
    memory = (ctypes.c_uint8 * (num_blocks * pieces.block_bytes)).from_address(address)
    shape = (num_blocks, pieces.count, pieces.size)
    strides = (pieces.block_bytes, pieces.stride, 1)
    return np.ndarray(shape, np.uint8, memoryview(memory), pieces.start, strides)


def _checked_name(agent: str) -> str:
    """An agent's name is also a file name: letters and digits only. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9]{1,64}", agent):
        raise ValueError(f"{agent!r} cannot name shared memory")
    return agent


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _decode(descriptor: bytes) -> _Descriptor:
    try:
        place = msgspec.msgpack.decode(descriptor, type=_Descriptor)
    except msgspec.DecodeError as error:
        raise TransferError(f"a peer's descriptor cannot be used: {error}") from error
    if place.offset < 0 or min(place.block_bytes, place.num_blocks) <= 0:
        raise TransferError("a peer's descriptor has a pool without memory")
    return place
