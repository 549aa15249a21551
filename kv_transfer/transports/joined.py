"""A transport of several ends, each for the parts of some ranks, in this process and in others.

Towards its owner it is one transport. A write goes out by each end that has a share of the blocks,
to each of the peer's ends that wants one, and is over when all these parts are. The notification
follows them, from our first end to the peer's first end, so it arrives after all data wherever that
lies. Between two workers of one end each, everything passes straight through. Owns the ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import Protocol, runtime_checkable

from kv_transfer.head_slices import Share
from kv_transfer.transports.distant_end import DistantEnd
from kv_transfer.transports.interface import (
    Notification,
    PeerLost,
    PeerReady,
    PoolMemory,
    SharesByGroup,
    Transport,
    TransportEvent,
    WriteDone,
    known,
)
from kv_transfer.transports.joined_descriptor import EndOfPool, encode_ends, ends_of
from kv_transfer.transports.memory_file import SharedMemory
from protocol.errors import PoolMismatch, TransferError

FIRST = 0


@runtime_checkable
class NotifyingTransport(Transport, Protocol):
    """A transport that can also notify a peer without a write."""

    def notify(self, agent: str, payload: bytes) -> None:
        """Notify a peer that is ready. Raises TransferError."""


_Way = tuple[int, str]
"""From one of our ends, by its index, to one of a peer's, by its name."""


@dataclass
class _Peer:
    ways: set[_Way]
    by_group: Sequence[Sequence[_Way]]  # the ways of a write, our first end's first
    awaited: set[_Way]  # ways that are not ready


@dataclass
class _Write:
    agent: str
    notification: bytes  # to send when all parts are over
    parts: set[tuple[int, int]] = field(default_factory=set)  # under way: end and its handle
    error: str | None = None


class JoinedTransport:
    """`agent` is the name of the first end, which is in this process."""

    def __init__(
        self, first: NotifyingTransport, open_others: Callable[[], Sequence[DistantEnd]] = tuple
    ) -> None:
        """`open_others` opens the ends in other processes, for the ranks that follow, once the pool
        is registered. It raises TransferError."""
        self.name = first.name
        self.agent = first.agent
        self.paths = first.paths
        self._first = first
        self._open_others = open_others
        self._others: Sequence[DistantEnd] = ()
        self._num_ranks: list[int] = []  # of each end
        self._peers: dict[str, _Peer] = {}
        self._peer_at: dict[_Way, str] = {}
        self._writes: dict[int, _Write] = {}
        self._parts: dict[tuple[int, int], int] = {}  # to the write
        self._handles = count()

    def allocate(self, num_bytes: int) -> SharedMemory | None:
        """Memory of the first end, in which its part of the pool must live; None if any will do."""
        return self._first.allocate(num_bytes)

    def register(self, pool: PoolMemory) -> None:
        """Register this process's part of the pool, and open the other ends."""
        self._first.register(pool)
        self._others = self._open_others()
        self._num_ranks = [len(pool.parts), *(each.num_ranks for each in self._others)]

    def descriptor(self) -> bytes:
        """The descriptor of the only end, or those of all."""
        if not self._others:
            return self._first.descriptor()
        ends = zip(self._ends, self._num_ranks, strict=True)
        return encode_ends([EndOfPool(end.agent, ranks, end.descriptor()) for end, ranks in ends])

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        """Connect each of our ends to those of the peer's with which it shares heads and layers."""
        self.remove_peer(agent)
        theirs = ends_of(agent, descriptor)
        if len(theirs) == 1 and not self._others:
            self._first.add_peer(agent, descriptor, num_blocks, shares)
            way = (FIRST, agent)
            self._peers[agent] = _Peer({way}, (), set())
            self._peer_at[way] = agent
            return
        wanted = self._shares_by_way(agent, theirs, shares)
        by_group = [
            [way for way, each in wanted.items() if each[group]] for group in range(len(shares))
        ]
        peer = self._peers[agent] = _Peer(set(), by_group, set(wanted))
        descriptors = {each.agent: each.descriptor for each in theirs}
        try:
            for way, each in wanted.items():
                index, target = way
                self._ends[index].add_peer(target, descriptors[target], num_blocks, each)
                peer.ways.add(way)
                self._peer_at[way] = agent
        except TransferError:
            self.remove_peer(agent)
            raise

    def remove_peer(self, agent: str) -> None:
        """Disconnect all ends from those of the peer."""
        peer = self._peers.pop(agent, None)
        if peer is not None:
            for index, target in sorted(peer.ways):
                del self._peer_at[index, target]
                self._ends[index].remove_peer(target)

    def post_write(
        self,
        agent: str,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        notification: bytes,
        group: int = 0,
        post_before: float = math.inf,
    ) -> int:
        """Post a part by each way of the group; see Transport."""
        peer = known(self._peers, agent)
        direct = [(FIRST, agent)]
        ways = peer.by_group[group] if peer.by_group else direct
        is_direct = ways == direct
        write = _Write(agent, b"" if is_direct else notification)
        for index, target in ways:
            if index == FIRST:
                note = notification if is_direct else b""
                try:
                    inner = self._first.post_write(
                        target, source_blocks, target_blocks, note, group, post_before
                    )
                except TransferError as error:
                    if not write.parts:
                        raise
                    write.error = str(error)
                    break
            else:
                end = self._others[index - 1]
                inner = end.post_write(target, source_blocks, target_blocks, group, post_before)
            write.parts.add((index, inner))
        handle = next(self._handles)
        self._writes[handle] = write
        for part in write.parts:
            self._parts[part] = handle
        return handle

    def poll(self) -> list[TransportEvent]:
        """The events of all ends, as those of one."""
        events: list[TransportEvent] = []
        for event in self._first.poll():
            if isinstance(event, Notification):
                events.append(event)
            else:
                self._follow(FIRST, event, events)
        for index, end in enumerate(self._others, start=1):
            for event in end.poll():
                self._follow(index, event, events)
        return events

    def expect(self, data: bool) -> None:
        """See Transport; every end polls for itself."""
        for each in self._ends:
            each.expect(data)

    def disconnect(self, kept: Collection[str]) -> int:
        """Break the connections of every end."""
        for each in self._others:
            each.disconnect(kept)
        return self._first.disconnect(kept)

    @property
    def is_disconnecting(self) -> bool:
        """See Transport."""
        return any(each.is_disconnecting for each in self._others)

    def renew(self, failed: str) -> bool:
        """False: all ends together are one."""
        return False

    def retire(self, agent: str) -> None:
        """Do nothing: there is one end."""

    def close(self) -> None:
        """Close every end."""
        for each in self._others:
            each.close()
        self._first.close()

    @property
    def _ends(self) -> Sequence[Transport | DistantEnd]:
        return (self._first, *self._others)

    def _shares_by_way(
        self, agent: str, theirs: Sequence[EndOfPool], shares: SharesByGroup
    ) -> dict[_Way, SharesByGroup]:
        """What goes from each of our ends to each of the peer's, by group, with the ranks of each
        end counted from 0. Our first end reaches the peer's first in any case, to notify it.
        Raises PoolMismatch if the ranks of the shares are not those of the ends."""
        sizes = [
            1 + max((getattr(s, side) for each in shares for s in each), default=0)
            for side in ("source", "target")
        ]
        counts = [each.num_ranks for each in theirs] if len(theirs) > 1 else [sizes[1]]
        if sizes != [sum(self._num_ranks), sum(counts)]:
            raise PoolMismatch(
                f"{self._num_ranks} ranks at our ends and {counts} at those of agent {agent} do "
                f"not fit shares of {sizes[0]} and {sizes[1]} ranks"
            )
        found: dict[_Way, SharesByGroup] = {}
        for index, ours in enumerate(_ranges(self._num_ranks)):
            for end, ranks in zip(theirs, _ranges(counts), strict=True):
                part = [_between(each, ours, ranks) for each in shares]
                if any(part) or (index == FIRST and end is theirs[0]):
                    found[index, end.agent] = part
        return found

    def _follow(self, index: int, event: TransportEvent, events: list[TransportEvent]) -> None:
        match event:
            case WriteDone(inner, error):
                self._finish_part((index, inner), error, events)
            case PeerReady(target):
                agent = self._peer_at.get((index, target))
                if agent is not None:
                    awaited = self._peers[agent].awaited
                    awaited.discard((index, target))
                    if not awaited:
                        events.append(PeerReady(agent))
            case PeerLost(target, reason):
                agent = self._peer_at.get((index, target))
                if agent is not None:
                    self.remove_peer(agent)
                    events.append(PeerLost(agent, reason))

    def _finish_part(
        self, part: tuple[int, int], error: str | None, events: list[TransportEvent]
    ) -> None:
        handle = self._parts.pop(part)
        write = self._writes[handle]
        write.parts.discard(part)
        write.error = write.error or error
        if write.parts:
            return
        del self._writes[handle]
        if write.notification and write.error is None:
            write.error = self._notified(write)
        events.append(WriteDone(handle, write.error))

    def _notified(self, write: _Write) -> str | None:
        """Notify the peer of a write; returns why that is impossible."""
        if write.agent not in self._peers:
            return "the peer was removed"
        try:
            self._first.notify(write.agent, write.notification)
        except TransferError as error:
            return str(error)
        return None


def _ranges(counts: Sequence[int]) -> list[range]:
    ends = list(accumulate(counts))
    return [range(end - size, end) for end, size in zip(ends, counts, strict=True)]


def _between(shares: Sequence[Share], source: range, target: range) -> tuple[Share, ...]:
    return tuple(
        replace(
            each,
            source=each.source - source.start,
            target=each.target - target.start,
            num_targets=len(target),
        )
        for each in shares
        if each.source in source and each.target in target
    )
