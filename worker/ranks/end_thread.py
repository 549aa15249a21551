"""The ends of KV transfers in a hand that has a pool of its own: a thread that follows the head.

The thread carries out the orders that come on the hand's link, and reports what they lead to. If an
end fails, so does the hand, and with it the worker.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from functools import partial

import torch

from engine.device import bind_thread
from engine.kv_pool import KvPool
from engine.parallel.blocks_under_way import BlocksUnderWay
from kv_transfer.end_server import EndFailed, EndServer
from kv_transfer.transports.framed_stream import FramedStream
from kv_transfer.transports.interface import PoolMemory, Transport
from kv_transfer.transports.registry import open_end
from process.wakeup import Wakeup
from protocol.errors import ProtocolError
from worker.ranks.end_links import BEAT, MOST_BYTES
from worker.ranks.pool_memory import pool_memory

log = logging.getLogger(__name__)


class EndThread:
    """Serves the ends over a rank's `pool` from its start on, until `close`."""

    def __init__(
        self,
        link: socket.socket,
        open_transport: Callable[[], Transport],
        pool: PoolMemory,
        under_way: BlocksUnderWay,
        failed: Callable[[str], None],
    ) -> None:
        """`failed` is called from the thread, with the reason, if the ends can do nothing more. A
        write waits for the steps `under_way` that write to its blocks."""
        self._stream = FramedStream(link, MOST_BYTES)
        self._wakeup = Wakeup()
        self._failed = failed
        self._is_closing = False
        self._server = EndServer(
            open_transport, pool, lambda nonce: 0.0, self._wakeup.wake, under_way.behind
        )
        self._thread = threading.Thread(target=self._run, name="kv-ends", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the ends."""
        self._is_closing = True
        self._wakeup.wake()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        try:
            while not self._is_closing and not self._stream.is_ended:
                self._wait()
                self._turn()
        except (EndFailed, OSError, ProtocolError) as error:
            self._failed(str(error))
        self._server.close()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup.fileno(), select.POLLIN)
        wanted = select.POLLIN | (select.POLLOUT if self._stream.has_unsent else 0)
        poll.register(self._stream.socket, wanted)
        poll.poll()
        self._wakeup.clear()

    def _turn(self) -> None:
        """Carry out what has come, and report. Raises EndFailed, OSError and ProtocolError."""
        stream, server = self._stream, self._server
        for frame in stream.receive():
            if frame == BEAT:
                stream.queue(BEAT)
            else:
                server.take(frame)
        for report in server.drain():
            stream.queue(report)
        stream.flush()


def serve_ends(
    link: socket.socket, transport: str, pool: KvPool, under_way: BlocksUnderWay
) -> EndThread:
    """Serve the ends of a hand by the transport of this name."""
    opener = partial(_open_on, transport, pool.device)
    return EndThread(link, opener, pool_memory(pool), under_way, _end_process)


def _open_on(transport: str, device: torch.device) -> Transport:
    bind_thread(device)
    return open_end(transport, str(device))


def _end_process(reason: str) -> None:
    log.error("ends: its KV transfers failed: %s", reason)
    logging.shutdown()
    os._exit(1)
