"""A transport that heals: a peer whose connection has failed is added again by a new end.

An end is a transport of its own under its own name, so that a fault inside one end (a UCX worker
that cannot connect any more) does not affect the next. Peers write to the end that `agent` named
when they got the descriptor. Each of our peers belongs to one end. An end without peers and writes
is closed, unless peers may write to it. A failed write is reported only when its end says that it
is over, so no fence is lifted earlier. Owns the ends.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

from kv_transfer.transports.interface import (
    PeerLost,
    PoolMemory,
    SharesByGroup,
    Transport,
    TransportEvent,
    WriteDone,
    known,
)
from kv_transfer.transports.memory_file import SharedMemory
from protocol.errors import ConfigError, PoolMismatch, TransferError

MAX_ENDS = 8
"""The most ends; beyond that, the newest end is used again."""
_REMEMBERED = 1024

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _End:
    transport: Transport
    is_target: bool = False  # peers may write to it
    peers: set[str] = field(default_factory=set)
    writes: dict[int, int] = field(default_factory=dict)  # the end's handles to ours

    @property
    def is_idle(self) -> bool:
        return not (self.is_target or self.peers or self.writes)


class HealingTransport:
    """Ends made by `open_end`, the newest last. `agent` and `descriptor` name the end that new
    peers write to."""

    is_disconnecting = False

    def __init__(self, open_end: Callable[[], Transport]) -> None:
        """Open the first end. Raises ConfigError."""
        self._open_end = open_end
        self._target = _End(open_end(), is_target=True)
        self._ends = [self._target]
        self._pool: PoolMemory | None = None
        self._end_of: dict[str, _End] = {}  # by peer
        self._failed: OrderedDict[str, _End] = OrderedDict()  # by peer, the end that failed
        self._peer_of: dict[int, str] = {}  # by our handle of a write
        self._handles = count()
        self._is_expecting = False

    @property
    def name(self) -> str:
        """The name of the transport of every end."""
        return self._target.transport.name

    @property
    def agent(self) -> str:
        """The name of the end to write to."""
        return self._target.transport.agent

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of every end."""
        return self._target.transport.paths

    def allocate(self, num_bytes: int) -> SharedMemory | None:
        """Memory of the first end, in which the pool must live; None if any will do."""
        return self._target.transport.allocate(num_bytes)

    def register(self, pool: PoolMemory) -> None:
        """Register the pool at the first end. Later ends register the pool when they open."""
        self._target.transport.register(pool)
        self._pool = pool

    def descriptor(self) -> bytes:
        """The descriptor of the end to write to."""
        return self._target.transport.descriptor()

    def renew(self, failed: str) -> bool:
        """Let new peers, and those that cannot write to the end `failed`, write to another end,
        which `agent` and `descriptor` describe from now on. Returns False if there is no other
        end."""
        if failed == self.agent:
            end = self._newest_after(self._target)
            if end is self._target:
                return False
            end.is_target = True
            self._target = end
        return True

    def retire(self, agent: str) -> None:
        """Note that no peer writes to the end of this name any more."""
        for end in self._ends:
            if end.transport.agent == agent and end is not self._target:
                end.is_target = False

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        """Connect to a peer from the newest end or, if connecting from there has failed, from a new
        one. Raises TransferError; a PoolMismatch does not count as a failed connection."""
        if any(each.transport.agent == agent for each in self._ends):
            raise PoolMismatch("a transport cannot be its own peer")
        self.remove_peer(agent)
        end = self._newest_after(self._failed.get(agent))
        try:
            end.transport.add_peer(agent, descriptor, num_blocks, shares)
        except PoolMismatch:
            raise
        except TransferError:
            self._note_failed(agent, end)
            raise
        end.peers.add(agent)
        self._end_of[agent] = end

    def remove_peer(self, agent: str) -> None:
        """Forget a peer. If writes to it were under way, the next end adds it again."""
        end = self._end_of.pop(agent, None)
        if end is None:
            return
        if any(self._peer_of[handle] == agent for handle in end.writes.values()):
            self._note_failed(agent, end)
        end.peers.discard(agent)
        end.transport.remove_peer(agent)

    def post_write(
        self,
        agent: str,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        notification: bytes,
        group: int = 0,
        post_before: float = math.inf,
    ) -> int:
        """See Transport."""
        end = known(self._end_of, agent)
        try:
            inner = end.transport.post_write(
                agent, source_blocks, target_blocks, notification, group, post_before
            )
        except PoolMismatch:
            raise
        except TransferError:
            self._note_failed(agent, end)
            raise
        handle = next(self._handles)
        end.writes[inner] = handle
        self._peer_of[handle] = agent
        return handle

    def poll(self) -> list[TransportEvent]:
        """Drive every end; close those that are of no more use."""
        events: list[TransportEvent] = []
        for end in self._ends:
            for event in end.transport.poll():
                match event:
                    case WriteDone(inner, error):
                        handle = end.writes.pop(inner)
                        agent = self._peer_of.pop(handle)
                        if error is not None and self._end_of.get(agent) is end:
                            self._note_failed(agent, end)
                        events.append(WriteDone(handle, error))
                    case PeerLost(agent):
                        self._note_failed(agent, end)
                        end.peers.discard(agent)
                        self._end_of.pop(agent, None)
                        events.append(event)
                    case _:
                        events.append(event)
        if len(self._ends) > 1:
            self._close_idle()
        return events

    def expect(self, data: bool) -> None:
        """See Transport."""
        self._is_expecting = data
        for end in self._ends:
            end.transport.expect(data)

    def disconnect(self, kept: Collection[str]) -> int:
        """Break the connections of every end."""
        return sum(end.transport.disconnect(kept) for end in tuple(self._ends))

    def close(self) -> None:
        """Close every end."""
        for end in self._ends:
            end.transport.close()

    def _newest_after(self, failed: _End | None) -> _End:
        """An end that is newer than the failed one, if another one may be opened."""
        newest = self._ends[-1]
        if newest is not failed or len(self._ends) >= MAX_ENDS:
            return newest
        try:
            end = _End(self._opened())
        except (ConfigError, TransferError) as error:
            _log.warning("a new end of KV transfers cannot be opened: %s", error)
            return newest
        _log.info("a new end of KV transfers, %s, replaces a failed one", end.transport.agent)
        self._ends.append(end)
        return end

    def _opened(self) -> Transport:
        """A new end, as far as the others are. Raises ConfigError and TransferError."""
        transport = self._open_end()
        try:
            if self._pool is not None:
                transport.register(self._pool)
        except (ConfigError, TransferError):
            transport.close()
            raise
        transport.expect(self._is_expecting)
        return transport

    def _note_failed(self, agent: str, end: _End) -> None:
        self._failed[agent] = end
        self._failed.move_to_end(agent)
        if len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)

    def _close_idle(self) -> None:
        """Close the idle ends, except the newest one, which the next failed peer may use."""
        for end in [each for each in self._ends[:-1] if each.is_idle]:
            self._ends.remove(end)
            end.transport.close()
