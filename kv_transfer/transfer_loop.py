"""The transfer thread's loop: carries out commands on the transport and turns the transport's
reports into events.

Owns the transport and the table of outstanding writes. If a write fails, or overruns its deadline
(a stopped peer would keep it outstanding for ever), its peer is removed, the peer's other writes
fail, and the owner adds the peer again. A write whose blocks a card is still computing, or whose
peer is still connecting, is held back until then. The loop knows no threads and no queue; the clock
is passed in.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.transports.interface import (
    Notification,
    PeerLost,
    PeerReady,
    SharesByGroup,
    Transport,
    WriteDone,
)
from protocol.errors import PoolMismatch, TransferError


@dataclass(frozen=True)
class PeerAdded:
    """This agent now accepts write commands."""

    agent: str


@dataclass(frozen=True)
class PeerFailed:
    """The agent was not added, or was dropped after a failure. Add it again to continue, unless its
    pool does not fit ours (`is_mismatch`)."""

    agent: str
    reason: str
    is_mismatch: bool = False


@dataclass(frozen=True)
class WriteFinished:
    """A write is over. Times are microseconds of the Unix epoch (0: never posted)."""

    key: Hashable
    error: str | None
    posted_us: int
    done_us: int


@dataclass(frozen=True)
class NotificationArrived:
    """A peer's write has landed here, with this payload."""

    agent: str
    payload: bytes


@dataclass(frozen=True)
class TargetRenewed:
    """Peers that cannot write to our end `failed` may write to `agent`."""

    failed: str
    agent: str
    descriptor: bytes


@dataclass(frozen=True)
class ServiceFailed:
    """The transfer thread died of an unexpected error; no more blocks will be moved."""

    reason: str


OfPeers = NotificationArrived | TargetRenewed
"""Events of the pool that peers write to."""
TransferEvent = PeerAdded | PeerFailed | WriteFinished | OfPeers | ServiceFailed


class Fence(Protocol):
    """A point in a device's stream of work."""

    def is_done(self) -> bool:
        """Whether the device has passed it. The transfer thread calls this."""


@dataclass(frozen=True)
class WriteCommand:
    """Copy own blocks of `group` into an agent's, pairwise; `key` comes back in WriteFinished.

    The write is posted before `post_before` (of the loop's clock) or not at all: the right to write
    may have ended while the command waited or while this process was suspended. With `computed`,
    the write waits for that fence: before it, the blocks are not final. A write that `yields`, as
    the writes of fetches do, lets others pass: one such write is posted at each poll.
    """

    key: Hashable
    agent: str
    source_blocks: Sequence[int]
    target_blocks: Sequence[int]
    notification: bytes
    post_before: float = math.inf
    computed: Fence | None = None
    yields: bool = False
    group: int = 0


@dataclass
class _Outstanding:
    key: Hashable
    agent: str
    posted_us: int
    deadline: float
    is_abandoned: bool = False  # its peer was removed; a new peer may have the same name


def now_us() -> int:
    """Microseconds of the Unix epoch, by the system clock."""
    return time.time_ns() // 1000


class TransferLoop:
    """Commands in, events out, for one transport. One thread calls everything.

    `holds_until` is called before each write; it returns the time until which this process may
    write at all.
    """

    def __init__(
        self,
        transport: Transport,
        emit: Callable[[TransferEvent], None],
        write_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_us: Callable[[], int] = now_us,
    ) -> None:
        """`wall_us` returns microseconds of the Unix epoch, for the times of writes."""
        self.transport = transport
        self._emit = emit
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self._wall_us = wall_us
        self.holds_until: Callable[[], float] = lambda: math.inf
        self._peers: set[str] = set()  # the peers that are ready
        self._connecting: set[str] = set()
        self._outstanding: dict[int, _Outstanding] = {}  # by the transport's handle
        self._held_back: list[WriteCommand] = []  # writes whose blocks or peer are not ready
        self._yielding: deque[WriteCommand] = deque()  # of fetches: one write a poll

    @property
    def has_writes_under_way(self) -> bool:
        """Whether a write may begin or end soon. Writes to dropped peers do not count."""
        return bool(self._held_back or self._yielding) or any(
            not write.is_abandoned for write in self._outstanding.values()
        )

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        """Add or replace a peer: PeerAdded or PeerFailed follows, now or from `poll`."""
        self._forget(agent)
        try:
            self.transport.add_peer(agent, descriptor, num_blocks, shares)
        except TransferError as error:
            self._emit(PeerFailed(agent, str(error), isinstance(error, PoolMismatch)))
            return
        self._connecting.add(agent)

    def remove_peer(self, agent: str) -> None:
        """Forget a peer; its outstanding writes will fail."""
        self._forget(agent)
        self.transport.remove_peer(agent)

    def renew(self, failed: str) -> None:
        """Give peers another end to write to: TargetRenewed follows, if there is one."""
        if self.transport.renew(failed):
            self._emit(TargetRenewed(failed, self.transport.agent, self.transport.descriptor()))

    def write(self, command: WriteCommand) -> None:
        """Post a write, or hold it back: WriteFinished follows, now or from `poll`.

        A write that may no longer be posted fails at once, without waiting for its fence or peer.
        """
        if command.yields:
            self._yielding.append(command)
        else:
            self._try_post(command)

    def _try_post(self, command: WriteCommand) -> None:
        now = self._clock()
        if now >= command.post_before or now >= self.holds_until():
            ended = "grant" if now >= command.post_before else "lease"
            self._emit(WriteFinished(command.key, f"our {ended} ended before it was posted", 0, 0))
        elif command.agent in self._connecting or not _is_computed(command):
            self._held_back.append(command)
        else:
            self._post(command)

    def _post(self, command: WriteCommand) -> None:
        posted_us = self._wall_us()
        try:
            handle = self.transport.post_write(
                command.agent,
                command.source_blocks,
                command.target_blocks,
                command.notification,
                command.group,
                min(command.post_before, self.holds_until()),
            )
        except TransferError as error:
            self._emit(WriteFinished(command.key, str(error), posted_us, self._wall_us()))
            if not isinstance(error, PoolMismatch):
                self._drop(command.agent, str(error))
            return
        deadline = self._clock() + self._write_timeout_s
        self._outstanding[handle] = _Outstanding(command.key, command.agent, posted_us, deadline)

    def poll(self) -> None:
        """Drive the transport, report finished writes, and drop peers that overran a deadline."""
        for event in self.transport.poll():
            match event:
                case WriteDone():
                    self._finish(event)
                case Notification(agent, payload):
                    self._emit(NotificationArrived(agent, payload))
                case PeerReady(agent):
                    self._connecting.discard(agent)
                    self._peers.add(agent)
                    self._emit(PeerAdded(agent))
                case PeerLost(agent, reason):
                    self._drop(agent, reason)
        self._write_held_back()
        if self._yielding:
            self._try_post(self._yielding.popleft())
        now = self._clock()
        for write in list(self._outstanding.values()):
            if now >= write.deadline and not write.is_abandoned:
                self._drop(write.agent, f"a write took longer than {self._write_timeout_s:g} s")

    def _write_held_back(self) -> None:
        """Post the writes that need not wait any longer. If that raises, the rest stay held
        back."""
        waiting, self._held_back = deque(self._held_back), []
        try:
            while waiting:
                self.write(waiting[0])
                waiting.popleft()
        finally:
            self._held_back += waiting

    def fail_outstanding(self, reason: str) -> None:
        """Report every outstanding write as failed; for the end of the loop."""
        for write in self._outstanding.values():
            self._emit(WriteFinished(write.key, reason, write.posted_us, self._wall_us()))
        for command in (*self._held_back, *self._yielding):
            self._emit(WriteFinished(command.key, reason, 0, 0))
        self._outstanding.clear()
        self._held_back.clear()
        self._yielding.clear()

    def close(self) -> None:
        """Close the transport. Outstanding writes fail."""
        self._peers.clear()
        try:
            self.transport.close()
        finally:
            self.fail_outstanding("the transfer service was closed")

    def _finish(self, done: WriteDone) -> None:
        write = self._outstanding.pop(done.handle)
        self._emit(WriteFinished(write.key, done.error, write.posted_us, self._wall_us()))
        if done.error is not None and not write.is_abandoned:
            self._drop(write.agent, done.error)

    def _forget(self, agent: str) -> None:
        """Fail held-back writes and abandon posted ones, so that they do not count for a peer that
        is added later under the same name."""
        self._peers.discard(agent)
        self._connecting.discard(agent)
        for command in (*self._held_back, *self._yielding):
            if command.agent == agent:
                self._emit(WriteFinished(command.key, "the peer was removed", 0, 0))
        for write in self._outstanding.values():
            write.is_abandoned |= write.agent == agent
        self._held_back = [each for each in self._held_back if each.agent != agent]
        self._yielding = deque(each for each in self._yielding if each.agent != agent)

    def _drop(self, agent: str, reason: str) -> None:
        if agent in self._peers or agent in self._connecting:
            self.remove_peer(agent)
            self._emit(PeerFailed(agent, reason))


def _is_computed(command: WriteCommand) -> bool:
    return command.computed is None or command.computed.is_done()
