"""The transport over NIXL: UCX underneath, WRITE only, polled by the one thread that owns it.

Owns the agent, the registration of the pool and the prepared descriptor lists: one for our own
pool, one for the pool of each peer. A block is one entry of a list, so a write is two index arrays.
For a peer with other ranks, each piece of a block is one entry, and our pool has a list of such
pieces. The agent has no progress thread (it would spin a core) and STRICT locking. Only `close`
deregisters memory: deregistering earlier would not keep a peer's late write out. A peer's metadata
goes into native code that trusts it, so the caller of `add_peer` must authenticate it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import numpy as np

from kv_transfer.head_slices import Pieces, Share, whole_shares
from kv_transfer.transports.interface import (
    Notification,
    PeerReady,
    PoolMemory,
    SharesByGroup,
    TransportEvent,
    WriteDone,
    check_blocks,
    fit_groups,
    known,
)
from kv_transfer.transports.memory_file import SharedMemory
from kv_transfer.transports.nixl_descriptor import (
    NixlDescriptor,
    decode_descriptor,
    segment_of,
)
from kv_transfer.transports.nixl_module import error_types, load_nixl
from kv_transfer.transports.tcp_sockets import listening_ports, shut_down
from kv_transfer.transports.ucx_network import said_to_ucx
from kv_transfer.transports.ucx_paths import ucx_paths
from protocol.errors import ConfigError, PoolMismatch, TransferError

_log = logging.getLogger(__name__)


@dataclass
class _PeerGroup:
    blocks: Any  # prepared descriptor list of the peer's pool, as blocks of one group, if any
    num_blocks: int
    source: _Places  # the pieces that a write reads of each of our blocks


_Places = tuple[tuple[int, Pieces], ...]
"""Pieces of a block, each with the rank in whose part they lie."""


@dataclass
class _Write:
    agent: str
    request: Any  # NIXL's transfer handle
    error: str | None = None  # set once the write must be cancelled


class NixlTransport:
    """A transport over NIXL and UCX; owns the agent until `close`."""

    name = "nixl"
    is_disconnecting = False
    heals_by_new_ends = True
    """A fault in a UCX worker stays until the worker is replaced."""

    def __init__(self, agent: str, device: str) -> None:
        """Create the agent. Raises ConfigError if NIXL or its UCX backend cannot start."""
        nixl = load_nixl(device)
        self.agent = agent
        self.paths = ucx_paths(device, os.environ)
        self._device = device
        self._errors = error_types(nixl)
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        others = listening_ports()
        try:
            self._nixl: Any = nixl.nixl_agent(agent, config)
        except self._errors as error:
            raise ConfigError(
                f"NIXL cannot start its UCX backend{said_to_ucx(os.environ)}: {error!r}"
            ) from error
        if "UCX" not in self._nixl.backends:
            raise ConfigError("this installation of NIXL has no UCX backend")
        self._ports = listening_ports() - others
        self._peer_ports: set[int] = set()
        self._pool: PoolMemory | None = None
        self._registration: Any = None
        self._own_blocks: dict[tuple[int, _Places], Any] = {}  # descriptor lists, by group
        self._peers: dict[str, list[_PeerGroup]] = {}  # by group
        self._ready: list[str] = []  # ready peers that `poll` has not reported yet
        self._writes: dict[int, _Write] = {}
        self._handles = count()

    @staticmethod
    def why_not(device: str) -> str:
        """Why NIXL cannot be loaded here; "" if it can."""
        try:
            load_nixl(device)
        except ConfigError as error:
            return str(error)
        return ""

    def allocate(self, num_bytes: int) -> SharedMemory | None:
        """None: any memory of the device can be registered."""
        return None

    def register(self, pool: PoolMemory) -> None:
        """Register the pool with UCX and prepare the list of its blocks."""
        if self._pool is not None:
            raise ValueError("a pool is registered already")
        if pool.device != self._device:
            raise ConfigError(f"the pool is on {pool.device}, the transport on {self._device}")
        segment, _ = segment_of(pool.device)
        memory = [
            (part.address, part.block_bytes * pool.num_blocks, segment_of(part.device)[1], "")
            for part in pool.parts
        ]
        try:
            self._registration = self._nixl.register_memory(memory, segment, ["UCX"])
            for group, each in enumerate(pool.groups):
                self._prepare_own(group, each, whole_shares(each.shape.block_bytes))
        except self._errors as error:
            raise TransferError(f"NIXL cannot register the pool: {error!r}") from error
        self._pool = pool

    def descriptor(self) -> bytes:
        """The agent's metadata and the pool's location."""
        pool = self._registered()
        return msgspec.msgpack.encode(
            NixlDescriptor(
                metadata=self._nixl.get_agent_metadata(),
                parts=list(pool.parts),
                num_blocks=pool.num_blocks,
                ports=tuple(sorted(self._ports)),
                views=pool.views,
            )
        )

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        """Load the peer's metadata and prepare the list of its blocks, or of their pieces."""
        self.remove_peer(agent)
        theirs, own = decode_descriptor(descriptor), self._registered()
        if agent == self.agent:
            raise PoolMismatch("a transport cannot be its own peer")
        fitting = fit_groups(agent, theirs.shapes, num_blocks, own, shares)
        try:
            loaded = self._nixl.add_remote_agent(theirs.metadata)
        except self._errors as error:
            raise TransferError(f"NIXL refuses the metadata of {agent}: {error!r}") from error
        loaded_name = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
        if loaded_name != agent:
            self._forget_remote(loaded_name)
            raise PoolMismatch(f"the metadata of {agent} names agent {loaded_name}")
        try:
            pools = enumerate(zip(fitting, own.groups, theirs.pool.groups, strict=True))
            groups = [
                self._prepare_group(agent, group, ours, target, shared)
                for group, (shared, ours, target) in pools
            ]
            self._peer_ports.update(theirs.ports)
            self._nixl.make_connection(agent, ["UCX"])
        except self._errors as error:
            self._forget_remote(agent)
            raise TransferError(f"NIXL cannot prepare the pool of {agent}: {error!r}") from error
        self._peers[agent] = groups
        self._ready.append(agent)

    def remove_peer(self, agent: str) -> None:
        """Cancel outstanding writes to the peer and disconnect."""
        groups = self._peers.pop(agent, None)
        if groups is None:
            return
        self._ready = [each for each in self._ready if each != agent]
        for write in self._writes.values():
            if write.agent == agent:
                write.error = write.error or "the peer was removed"
                self._release(write)
        try:
            for each in groups:
                if each.blocks is not None:
                    each.blocks.release()
        except self._errors as error:
            _log.warning("NIXL keeps the block list of peer %s: %r", agent, error)
        self._forget_remote(agent)

    def post_write(
        self,
        agent: str,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        notification: bytes,
        group: int = 0,
        post_before: float = math.inf,
    ) -> int:
        """Post one WRITE; with shared memory or CMA most of the copying happens in this call."""
        groups = known(self._peers, agent)
        peer = groups[group]
        num_own, count = self._registered().groups[group].num_blocks, _num_pieces(peer.source)
        check_blocks(source_blocks, target_blocks, num_own, peer.num_blocks)
        try:
            request = self._nixl.make_prepped_xfer(
                "WRITE",
                self._own_blocks[group, peer.source],
                _entries(source_blocks, num_own, count),
                peer.blocks,
                _entries(target_blocks, peer.num_blocks, count),
                notification,
                ["UCX"],
            )
        except self._errors as error:
            raise TransferError(f"NIXL cannot write to {agent}: {error!r}") from error
        handle = next(self._handles)
        # From here on the request may read our memory, so `poll` must end it in any case.
        write = self._writes[handle] = _Write(agent, request)
        try:
            if self._nixl.transfer(request) == "ERR":
                write.error = "NIXL could not post the write"
        except self._errors as error:
            write.error = repr(error)
        return handle

    def notify(self, agent: str, payload: bytes) -> None:
        """Notify a peer that is ready. Raises TransferError."""
        try:
            self._nixl.send_notif(agent, payload)
        except self._errors as error:
            raise TransferError(f"NIXL cannot notify {agent}: {error!r}") from error

    def poll(self) -> list[TransportEvent]:
        """Drive UCX: complete own writes, which sends their notifications, and collect peers'."""
        events: list[TransportEvent] = [PeerReady(agent) for agent in self._ready]
        self._ready.clear()
        for handle, write in list(self._writes.items()):
            if self._is_over(write):
                del self._writes[handle]
                events.append(WriteDone(handle, write.error))
        try:
            arrived = self._nixl.get_new_notifs(["UCX"])
        except self._errors as error:
            raise TransferError(f"NIXL cannot be polled: {error!r}") from error
        for agent, payloads in arrived.items():
            events += [Notification(agent, payload) for payload in payloads]
        return events

    def expect(self, data: bool) -> None:
        """Do nothing: writes of peers proceed when our owner polls."""

    def disconnect(self, kept: Collection[str]) -> int:
        """Shut down UCX's TCP connections. Over RDMA, posted writes land in time even if their
        process is stopped."""
        return shut_down(self._ports, set(self._peer_ports), kept)

    def renew(self, failed: str) -> bool:
        """False: one agent is one end."""
        return False

    def retire(self, agent: str) -> None:
        """Do nothing: there is one end."""

    def close(self) -> None:
        """Cancel, disconnect, deregister and destroy the agent."""
        if self._nixl is None:
            return
        for agent in list(self._peers):
            self.remove_peer(agent)
        for write in self._writes.values():
            self._release(write)
        self._writes.clear()
        try:
            for blocks in self._own_blocks.values():
                blocks.release()
            if self._registration is not None:
                self._nixl.deregister_memory(self._registration, ["UCX"])
        except self._errors as error:
            _log.warning("NIXL keeps the pool registered: %r", error)
        self._own_blocks.clear()
        self._registration = self._nixl = None

    def _is_over(self, write: _Write) -> bool:
        """Whether the write has ended and its request is released. Sets the write's error."""
        if write.error is None:
            try:
                state = self._nixl.check_xfer_state(write.request)
            except self._errors as error:
                state = "ERR"
                write.error = repr(error)
            if state == "PROC":
                return False
            if state == "ERR" and write.error is None:
                write.error = "NIXL reports an error"
        return self._release(write)

    def _release(self, write: _Write) -> bool:
        """Release a request. False while NIXL cannot cancel it: it may still read our memory."""
        try:
            write.request.release()
        except self._errors as error:
            _log.debug("NIXL cannot release a write to %s yet: %r", write.agent, error)
            return False
        return True

    def _prepare_group(
        self, agent: str, group: int, own: PoolMemory, theirs: PoolMemory, shares: Sequence[Share]
    ) -> _PeerGroup:
        """The lists for writes of one group to a peer."""
        if not shares:
            return _PeerGroup(None, theirs.num_blocks, ())
        source = self._prepare_own(group, own, shares)
        target = tuple((share.target, share.slices.target) for share in shares)
        return _PeerGroup(self._prepare(agent, theirs, target), theirs.num_blocks, source)

    def _prepare_own(self, group: int, pool: PoolMemory, shares: Sequence[Share]) -> _Places:
        """Prepare the list of the pieces that these shares read of our blocks of one group."""
        source = _sources(shares)
        if (group, source) not in self._own_blocks:
            self._own_blocks[group, source] = self._prepare("NIXL_INIT_AGENT", pool, source)
        return source

    def _prepare(self, agent: str, pool: PoolMemory, places: _Places) -> Any:
        """The list of a pool's pieces: the first of each block, then the second of each, ..."""
        segment, _ = segment_of(pool.device)
        rows = []
        for rank, pieces in places:
            part = pool.parts[rank]
            _, index = segment_of(part.device)
            rows += [
                (part.address + offset, pieces.size, index, part.block_bytes, pool.num_blocks)
                for offset in pieces.offsets()
            ]
        strided = np.array(rows, dtype=np.uint64)
        return self._nixl.prep_xfer_dlist(agent, strided, segment, ["UCX"])

    def _forget_remote(self, agent: str) -> None:
        try:
            self._nixl.remove_remote_agent(agent)
        except self._errors as error:
            _log.warning("NIXL cannot remove peer %s: %r", agent, error)

    def _registered(self) -> PoolMemory:
        if self._pool is None:
            raise ValueError("no pool is registered")
        return self._pool


def _sources(shares: Sequence[Share]) -> _Places:
    return tuple((share.source, share.slices.source) for share in shares)


def _num_pieces(places: _Places) -> int:
    return sum(pieces.count for _, pieces in places)


def _entries(blocks: Sequence[int], num_blocks: int, count: int) -> np.ndarray:
    """Indices of all pieces of these blocks in the list of a pool's pieces, piece by piece: NIXL
    joins neighbours that are adjacent on both sides."""
    entries = np.asarray(blocks, dtype=np.int32)
    if count == 1:
        return entries
    return np.add.outer(np.arange(count, dtype=np.int32) * num_blocks, entries).reshape(-1)
