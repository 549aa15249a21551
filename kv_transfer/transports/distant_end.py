"""Ends of a transport in other processes of a worker, for the parts of the pool that lie there: on
other hosts, or on cards.

Orders and reports travel over a connection that this module does not own. Only the call that opens
ends waits for an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import count
from queue import Empty, SimpleQueue

from kv_transfer.transports.end_messages import (
    AddPeer,
    CloseEnd,
    Disconnect,
    Disconnected,
    EndOrder,
    EndReport,
    Expect,
    Opened,
    OpenEnd,
    OpenFailed,
    PeerIsLost,
    PeerIsReady,
    RemovePeer,
    Write,
    WriteOver,
    decode_report,
    encode,
)
from kv_transfer.transports.interface import (
    PeerLost,
    PeerReady,
    SharesByGroup,
    TransportEvent,
    WriteDone,
)
from protocol.errors import TransferError

OPEN_S = 30.0


class DistantHost:
    """The ends in one other process. `send` passes on what an end there is told; any thread calls
    it. Its owner calls `take` with what comes back. If the process has another clock, the owner
    keeps `beat` up to date: the nonce of the newest beat from there, and when it came."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self.beat: tuple[int, float] = (0, 0.0)
        self._send = send
        self._numbers = count()
        self._ends: dict[int, DistantEnd] = {}

    def begin_end(self) -> DistantEnd:
        """Tell the process to open an end; see `open_ends`."""
        number = next(self._numbers)
        end = self._ends[number] = DistantEnd(self, number)
        self.tell(OpenEnd(number))
        return end

    def tell(self, order: EndOrder) -> None:
        """Pass on an order."""
        self._send(encode(order))

    def forget(self, number: int) -> None:
        """Drop what an end reports from now on."""
        self._ends.pop(number, None)

    def take(self, data: bytes) -> None:
        """Take a report. Raises ProtocolError."""
        report = decode_report(data)
        end = self._ends.get(report.end)
        if end is not None:
            end.take(report)


class DistantEnd:
    """One end. One thread calls its methods, except `take` and `disconnect`."""

    def __init__(self, host: DistantHost, number: int) -> None:
        self.agent = ""
        self.num_ranks = 0
        self._host = host
        self._number = number
        self._descriptor = b""
        self._opened: SimpleQueue[Opened | OpenFailed] = SimpleQueue()
        self._num_told = self._num_broken = 0  # each is counted by one thread
        self._is_closed = False
        self._events: SimpleQueue[TransportEvent] = SimpleQueue()
        self._handles = count()

    def wait_until_open(self, deadline: float) -> None:
        """Raises TransferError if the end is not open by then, a time of `time.monotonic`."""
        try:
            report = self._opened.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TransferError(
                "another process of this worker has not opened an end in time"
            ) from None
        if isinstance(report, OpenFailed):
            raise TransferError(
                f"another process of this worker cannot open an end: {report.reason}"
            )
        self.agent, self._descriptor = report.agent, report.descriptor
        self.num_ranks = report.num_ranks

    def take(self, report: EndReport) -> None:
        """Note what the end reports."""
        match report:
            case Opened() | OpenFailed():
                self._opened.put(report)
            case PeerIsReady(agent=agent):
                self._events.put(PeerReady(agent))
            case PeerIsLost(agent=agent, reason=reason):
                self._events.put(PeerLost(agent, reason))
            case WriteOver(handle=handle, error=error):
                self._events.put(WriteDone(handle, error))
            case Disconnected():
                self._num_broken += 1

    def descriptor(self) -> bytes:
        """See Transport."""
        return self._descriptor

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        """See Transport; a peer that does not fit is lost later."""
        self._host.tell(AddPeer(self._number, agent, descriptor, num_blocks, tuple(shares)))

    def remove_peer(self, agent: str) -> None:
        """See Transport."""
        self._host.tell(RemovePeer(self._number, agent))

    def post_write(
        self,
        agent: str,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        group: int,
        post_before: float,
    ) -> int:
        """Let the end write, without a notification; see Transport. Durations travel, because
        clocks of hosts differ: the host sent its beat before we got it, so what the end counts from
        there ends before `post_before`."""
        handle = next(self._handles)
        nonce, came_at = self._host.beat
        within_s = post_before - came_at
        blocks = list(source_blocks), list(target_blocks)
        self._host.tell(Write(self._number, handle, agent, *blocks, group, nonce, within_s))
        return handle

    def poll(self) -> list[TransportEvent]:
        """What the end has reported since the last call."""
        events: list[TransportEvent] = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except Empty:
                return events

    def expect(self, data: bool) -> None:
        """See Transport."""
        self._host.tell(Expect(self._number, data))

    def disconnect(self, kept: Collection[str]) -> None:
        """Let the end break its connections; see Transport. A process that stands still does so
        when it goes on, or ends with the worker."""
        self._num_told += 1
        self._host.tell(Disconnect(self._number, sorted(kept)))

    @property
    def is_disconnecting(self) -> bool:
        """Whether the end has not broken all connections that it was told to."""
        return self._num_broken < self._num_told and not self._is_closed

    def close(self) -> None:
        """Close the end, and with it its connections."""
        self._is_closed = True
        self._host.forget(self._number)
        self._host.tell(CloseEnd(self._number))


def open_ends(hosts: Sequence[DistantHost], limit_s: float = OPEN_S) -> list[DistantEnd]:
    """Open an end in each process, all at the same time. Raises TransferError if one of them is not
    open in time, and then closes all."""
    deadline = time.monotonic() + limit_s
    ends = [host.begin_end() for host in hosts]
    try:
        for end in ends:
            end.wait_until_open(deadline)
    except TransferError:
        for end in ends:
            end.close()
        raise
    return ends
