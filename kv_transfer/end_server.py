"""The ends of a transport in a process that is not their owner's, who opens, tells and asks them.

Each end has a transport and a thread of its own (`TransferService`), which posts no write later
than it may. The process has a part of the owner's pool; one of its threads calls everything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from kv_transfer.service import TransferService
from kv_transfer.transfer_loop import (
    Fence,
    PeerAdded,
    PeerFailed,
    ServiceFailed,
    TransferEvent,
    WriteCommand,
    WriteFinished,
)
from kv_transfer.transports.end_messages import (
    AddPeer,
    CloseEnd,
    Disconnect,
    Disconnected,
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
    decode_order,
    encode,
)
from kv_transfer.transports.interface import PoolMemory, Transport
from protocol.errors import ConfigError, TransferError

_log = logging.getLogger(__name__)


class EndFailed(RuntimeError):
    """An end can do nothing any more, so its worker has to end."""


def _all_computed(group: int, blocks: Sequence[int]) -> Fence | None:
    return None


class EndServer:
    """The ends over `pool`. `sent_at` returns when we sent the beat with a nonce, or None if that
    was too long ago. `wake` is called from other threads when `drain` has something to return.
    `behind` returns the fence after which blocks of a group may be read, None for at once."""

    def __init__(
        self,
        open_transport: Callable[[], Transport],
        pool: PoolMemory,
        sent_at: Callable[[int], float | None],
        wake: Callable[[], None],
        behind: Callable[[int, Sequence[int]], Fence | None] = _all_computed,
    ) -> None:
        self._open_transport = open_transport
        self._pool = pool
        self._sent_at = sent_at
        self._wake = wake
        self._behind = behind
        self._ends: dict[int, TransferService] = {}
        self._openers: dict[int, threading.Thread] = {}  # of ends, by number
        self._closers: list[threading.Thread] = []
        self._reports: SimpleQueue[EndReport] = SimpleQueue()

    def take(self, data: bytes) -> None:
        """Carry out an order. Raises ProtocolError."""
        order = decode_order(data)
        if isinstance(order, OpenEnd):
            self._open(order.end)
            return
        service = self._ends.get(order.end)
        if service is None:
            return
        match order:
            case CloseEnd(end=number):
                self._close(number)
            case AddPeer():
                service.add_peer(order.agent, order.descriptor, order.num_blocks, order.shares)
            case RemovePeer(agent=agent):
                service.remove_peer(agent)
            case Write():
                self._write(service, order)
            case Expect(data=is_coming):
                service.expect(is_coming)
            case Disconnect(end=number, kept=kept):
                _log.info("%d connections of KV blocks are closed", service.disconnect(kept))
                self._reports.put(Disconnected(number))

    def drain(self) -> list[bytes]:
        """All reports since the last call. Raises EndFailed."""
        reports: list[bytes] = []
        for number, service in self._ends.items():
            for event in service.drain():
                report = _report(number, event)
                if report is not None:
                    reports.append(encode(report))
        while True:
            try:
                reports.append(encode(self._reports.get_nowait()))
            except Empty:
                return reports

    def close(self) -> None:
        """Close all ends, and wait until they are closed."""
        for number in list(self._ends):
            self._close(number)
        for each in self._closers:
            each.join()

    def _open(self, number: int) -> None:
        """Open an end in a thread, because that takes longer than others may wait for this one."""
        service = self._ends[number] = TransferService(self._open_transport, self._wake)

        def open_end() -> None:
            report: EndReport
            try:
                service.start()
                descriptor = service.register(self._pool)
                report = Opened(number, service.agent, descriptor, len(self._pool.parts))
            except (ConfigError, TransferError) as error:
                report = OpenFailed(number, str(error))
            self._reports.put(report)
            self._wake()

        opener = self._openers[number] = threading.Thread(target=open_end, name="kv-end")
        opener.start()

    def _close(self, number: int) -> None:
        """Close an end in a thread, too: it may still be opening."""
        service, opener = self._ends.pop(number), self._openers.pop(number)

        def close_end() -> None:
            opener.join()
            try:
                service.close()
            except TransferError as error:
                _log.warning("an end of KV transfers was not closed cleanly: %s", error)

        closer = threading.Thread(target=close_end, name="kv-end-closing")
        closer.start()
        self._closers = [*(each for each in self._closers if each.is_alive()), closer]

    def _write(self, service: TransferService, order: Write) -> None:
        sent_at = self._sent_at(order.nonce)
        if sent_at is None:
            late = "the order came too late"
            self._reports.put(WriteOver(order.end, order.handle, late))
            return
        command = WriteCommand(
            order.handle,
            order.agent,
            order.source_blocks,
            order.target_blocks,
            b"",
            sent_at + order.within_s,
            self._behind(order.group, order.source_blocks),
            group=order.group,
        )
        service.write(command)


def _report(number: int, event: TransferEvent) -> EndReport | None:
    match event:
        case PeerAdded(agent):
            return PeerIsReady(number, agent)
        case PeerFailed(agent, reason):
            return PeerIsLost(number, agent, reason)
        case WriteFinished(key=int(handle), error=error):
            return WriteOver(number, handle, error)
        case ServiceFailed(reason):
            raise EndFailed(reason)
    return None
