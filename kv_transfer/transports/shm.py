"""The transport for one host: peers map each other's pools and copy into them.

Owns the pool's shared memory, the server that gives it to peers, and the clients for peers' pools,
which also carry notifications after the data. A write is a memory copy inside `post_write`; it is
over when its notification is in the queue of the peer's socket. A full queue never blocks: `poll`
retries in order. Serves pools in host memory only.
"""

from __future__ import annotations

import ctypes
import math
import selectors
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec
import numpy as np

from kv_transfer.head_slices import Share
from kv_transfer.strided_pieces import pieces_of
from kv_transfer.transports.framed_stream import MAX_FRAME_BYTES
from kv_transfer.transports.interface import (
    PeerLost,
    PeerReady,
    PoolMemory,
    PoolPart,
    SharesByGroup,
    TransportEvent,
    WriteDone,
    check_blocks,
    fit_groups,
    known,
    runs,
)
from kv_transfer.transports.memory_client import MemoryClient
from kv_transfer.transports.memory_file import SharedMemory, address_of
from kv_transfer.transports.memory_server import MemoryServer
from protocol.errors import ConfigError, PoolMismatch, TransferError

MAX_NOTIFICATION_BYTES = MAX_FRAME_BYTES


class _Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The address and key of a pool's memory, where each rank's part lies in it, and the bytes of a
    block there. `views` as in `PoolMemory`. `by_group` has, for each rank but the first, the bytes
    as in `PoolPart`."""

    agent: str
    address: str
    key: bytes
    offsets: list[int]
    block_bytes: list[int]
    num_blocks: int
    views: tuple[tuple[int, int], ...] = ()
    by_group: list[tuple[int, ...]] = []

    @property
    def pool(self) -> PoolMemory:
        """The pool, with offsets in place of addresses. Raises ValueError if it contradicts
        itself."""
        others = self.by_group or [()] * len(self.offsets[1:])
        sizes = zip(self.offsets, self.block_bytes, [(), *others], strict=True)
        first, *rest = [PoolPart(offset, size, "cpu", groups) for offset, size, groups in sizes]
        return PoolMemory(
            first.address, first.block_bytes, self.num_blocks, "cpu", tuple(rest), self.views
        )


@dataclass
class _Peer:
    client: MemoryClient
    offsets: list[int]  # of each rank's block 0 in the memory
    num_blocks: list[int]  # by group
    shares: list[tuple[Share, ...]]  # by group
    address: int = 0  # of the memory, as mapped in this process
    unsent: deque[int] = field(default_factory=deque)  # handles of writes, oldest first


class ShmTransport:
    """A transport over shared memory of one host; owns memory and sockets until `close`."""

    name = "shm"
    heals_by_new_ends = False
    is_disconnecting = False
    paths = ()

    def __init__(self, agent: str, device: str) -> None:
        """Open the socket for peers. Raises ConfigError."""
        if reason := self.why_not(device):
            raise ConfigError(reason)
        self.agent = agent
        self._memory: SharedMemory | None = None
        self._pool: PoolMemory | None = None
        self._peers: dict[str, _Peer] = {}
        self._events: list[TransportEvent] = []
        self._handles = count()
        self._selector = selectors.DefaultSelector()
        try:
            self._server = MemoryServer(self._selector)
        except ConfigError:
            self._selector.close()
            raise

    @staticmethod
    def why_not(device: str) -> str:
        """Why the transport cannot serve pools on this device; "" if it can."""
        if device == "cpu":
            return ""
        return f"the transport shm serves pools in host memory, not on {device}; use nixl"

    @property
    def num_refused(self) -> int:
        """Number of connections to our memory that did not come from peers."""
        return self._server.num_refused

    def allocate(self, num_bytes: int) -> SharedMemory | None:
        """The shared memory that the pool must live in; call it once."""
        if self._memory is not None:
            raise ValueError("the memory is allocated already")
        self._memory = SharedMemory(num_bytes)
        return self._memory

    def register(self, pool: PoolMemory) -> None:
        """Record where in the allocated memory the pool lies; peers may map it from now on."""
        if self._pool is not None:
            raise ValueError("a pool is registered already")
        if self.why_not(pool.device):
            raise ConfigError(f"the transport shm does not serve a pool on {pool.device}")
        if self._memory is None:
            raise ValueError("the pool must live in the memory that allocate() returned")
        for part in pool.parts:
            start = part.address - address_of(self._memory.view)
            end = start + part.block_bytes * pool.num_blocks
            if start < 0 or end > len(self._memory.view):
                raise ValueError("the pool lies outside of the memory that allocate() returned")
        self._pool = pool
        self._server.serve(self._memory.file)

    def descriptor(self) -> bytes:
        """Our socket, the key to our memory, and the pool's place in it."""
        pool, memory = self._registered(), self._memory
        assert memory is not None
        base = memory.offset - address_of(memory.view)
        return msgspec.msgpack.encode(
            _Descriptor(
                agent=self.agent,
                address=self._server.address,
                key=self._server.key,
                offsets=[base + part.address for part in pool.parts],
                block_bytes=[part.block_bytes for part in pool.parts],
                num_blocks=pool.num_blocks,
                views=pool.views,
                by_group=[part.by_group for part in pool.others] if pool.views else [],
            )
        )

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        """Connect to the peer's socket; the peer is ready once its pool is mapped."""
        self.remove_peer(agent)
        place, own = _decode(descriptor), self._registered()
        if agent == self.agent:
            raise PoolMismatch("a transport cannot be its own peer")
        if agent != place.agent:
            raise PoolMismatch(f"the descriptor of {agent} is that of {place.agent}")
        shapes = [each.shape for each in place.pool.groups]
        fitting = fit_groups(agent, shapes, num_blocks, own, shares)
        parts = zip(place.offsets, place.block_bytes, strict=True)
        num_bytes = max(offset + size * place.num_blocks for offset, size in parts)
        client = MemoryClient(self.agent, place.address, place.key, num_bytes)
        numbers = [each.num_blocks for each in shapes]
        self._peers[agent] = _Peer(client, place.offsets, numbers, fitting)

    def remove_peer(self, agent: str) -> None:
        """Unmap the peer's pool; notifications not yet in the peer's queue are lost."""
        peer = self._peers.pop(agent, None)
        if peer is None:
            return
        self._events += [WriteDone(handle, "the peer was removed") for handle in peer.unsent]
        peer.client.close()

    def post_write(
        self,
        agent: str,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        notification: bytes,
        group: int = 0,
        post_before: float = math.inf,
    ) -> int:
        """Copy now, without holding the GIL, then queue the notification."""
        peer = known(self._peers, agent)
        if not peer.client.is_open:
            raise TransferError(f"the memory of peer {agent} is not mapped: it is gone")
        if len(notification) > MAX_NOTIFICATION_BYTES:
            raise TransferError(f"a notification of {len(notification)} bytes is too long")
        pool = self._registered().groups[group]
        check_blocks(source_blocks, target_blocks, pool.num_blocks, peer.num_blocks[group])
        _copy(pool, source_blocks, peer, target_blocks, group)
        handle = next(self._handles)
        peer.client.queue(notification)
        peer.unsent.append(handle)
        self._send(peer)
        return handle

    def poll(self) -> list[TransportEvent]:
        """Connect to peers, send the notifications that full queues held back, and receive."""
        for agent, peer in list(self._peers.items()):
            self._advance(agent, peer)
        for key, _ in self._selector.select(0):
            key.data()
        events, self._events = self._events, []
        return [*events, *self._server.take_notifications()]

    def expect(self, data: bool) -> None:
        """Do nothing: peers write without us."""

    def disconnect(self, kept: Collection[str]) -> int:
        """Do nothing: no peer is on another machine."""
        return 0

    def renew(self, failed: str) -> bool:
        """Return False: a peer that has lost its connection opens another one itself."""
        return False

    def retire(self, agent: str) -> None:
        """Do nothing: the transport never changes its agent."""

    def close(self) -> None:
        """Close everything. The pool's mapping lives until its last view is dropped."""
        for agent in list(self._peers):
            self.remove_peer(agent)
        if self._selector.get_map() is not None:
            self._server.close()
            self._selector.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _advance(self, agent: str, peer: _Peer) -> None:
        """Take the next step of a peer's connection. The memory of a peer that goes away is freed
        at once; the peer itself is forgotten when the next write fails."""
        was_open = peer.client.is_open
        try:
            peer.client.poll()
        except TransferError as error:
            if was_open:
                self._fail_unsent(peer, str(error))
            else:
                self.remove_peer(agent)
                self._events.append(PeerLost(agent, str(error)))
            return
        if peer.client.is_open and not was_open:
            assert peer.client.memory is not None
            peer.address = address_of(peer.client.memory)
            self._events.append(PeerReady(agent))
        if peer.unsent:
            self._send(peer)

    def _send(self, peer: _Peer) -> None:
        try:
            num_sent = peer.client.flush()
        except TransferError as error:
            self._fail_unsent(peer, str(error))
            return
        self._events += [WriteDone(peer.unsent.popleft(), None) for _ in range(num_sent)]

    def _fail_unsent(self, peer: _Peer, reason: str) -> None:
        self._events += [WriteDone(handle, f"the peer is gone: {reason}") for handle in peer.unsent]
        peer.unsent.clear()

    def _registered(self) -> PoolMemory:
        if self._pool is None:
            raise ValueError("no pool is registered")
        return self._pool


def _copy(
    pool: PoolMemory,
    source_blocks: Sequence[int],
    peer: _Peer,
    target_blocks: Sequence[int],
    group: int,
) -> None:
    """Copy directly from one pool into the other: whole blocks of a group, or the pieces of
    each."""
    for share in peer.shares[group]:
        ours = pool.parts[share.source].address
        theirs = peer.address + peer.offsets[share.target]
        if share.is_whole:
            size = share.slices.source.block_bytes
            for source, target, count in runs(source_blocks, target_blocks):
                ctypes.memmove(theirs + target * size, ours + source * size, count * size)
            continue
        sources = pieces_of(ours, pool.num_blocks, share.slices.source)
        targets = pieces_of(theirs, peer.num_blocks[group], share.slices.target)
        for source, target in zip(source_blocks, target_blocks, strict=True):
            np.copyto(targets[target], sources[source])


def _decode(descriptor: bytes) -> _Descriptor:
    try:
        place = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        is_sound = min(place.offsets, default=-1) >= 0 and place.pool.is_sound
    except (msgspec.DecodeError, ValueError) as error:
        raise PoolMismatch(f"a peer's descriptor cannot be used: {error}") from error
    if not is_sound:
        raise PoolMismatch("a peer's descriptor has a pool without memory, or contradicts itself")
    return place
