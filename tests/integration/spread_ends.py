"""A pool whose ranks lie in memories that know nothing of each other, each with a NIXL agent of its
own, as that of a worker on several hosts or cards."""

from __future__ import annotations

import time
from threading import Event, Thread

from kv_transfer.end_server import EndServer
from kv_transfer.transports.distant_end import DistantEnd, DistantHost, open_ends
from kv_transfer.transports.interface import PoolMemory
from kv_transfer.transports.registry import create_transport, open_end
from tests.integration.pool_ends import PoolEnd


class FarHost:
    """A host with a part of the pool. It gets orders at once, and reports when somebody reads."""

    def __init__(self, pool: PoolMemory) -> None:
        self.host = DistantHost(self._take)
        self.host.beat = (1, time.monotonic())
        self.is_stopped = False
        self._late: list[bytes] = []
        self._sent_at = {1: self.host.beat[1]}
        self._server = EndServer(
            lambda: open_end("nixl", "cpu"), pool, self._sent_at.get, lambda: None
        )

    def report(self) -> None:
        """Report to the head what has happened."""
        for data in self._server.drain():
            self.host.take(data)

    def go_on(self) -> None:
        """Carry out what came while the host was stopped."""
        self.is_stopped = False
        for data in self._late:
            self._server.take(data)
        self._late.clear()

    def close(self) -> None:
        """Close its ends."""
        self._server.close()

    def _take(self, data: bytes) -> None:
        if self.is_stopped:
            self._late.append(data)
        else:
            self._server.take(data)


class SpreadEnd(PoolEnd):
    """The transport of a worker whose parts of the pool lie on the head's host and on others."""

    def __init__(self) -> None:
        self.far: list[FarHost] = []
        super().__init__(create_transport("nixl", "cpu", self._open_others))

    def register(self, pools: list[PoolMemory]) -> None:
        """Register each host's part of the pool; the first one is the head's."""
        first, *others = pools
        self.far = [FarHost(each) for each in others]
        self.transport.register(first)

    def poll(self) -> None:
        """Make progress."""
        for each in self.far:
            each.report()
        super().poll()

    def close(self) -> None:
        """Close all ends."""
        self.transport.close()
        for each in self.far:
            each.close()

    def _open_others(self) -> list[DistantEnd]:
        """The ends, which a thread of each host opens while another one waits for its report."""
        is_open = Event()

        def report() -> None:
            while not is_open.wait(0.001):
                for each in self.far:
                    each.report()

        thread = Thread(target=report)
        thread.start()
        try:
            return open_ends([each.host for each in self.far])
        finally:
            is_open.set()
            thread.join()
