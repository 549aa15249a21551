"""The head's side of the ends of KV transfers in its hands, whose pools no other process reaches.

A thread passes on orders and reports over the hands' links, and ends the worker when a hand no
longer answers: nobody knows what such a hand still writes. Unanswered beats are counted, not
seconds, so a hand is not lost because the head, or the whole machine, was suspended. All processes
of a host have one monotonic clock, so orders to hands name times and need no beat to count from.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from kv_transfer.transports.distant_end import DistantHost
from kv_transfer.transports.framed_stream import FramedStream
from process.wakeup import Wakeup
from protocol.errors import ProtocolError

MOST_BYTES = 64 * 1024 * 1024
"""The most bytes of one order or report."""
BEAT = b""
"""A frame that the hand sends back."""
_BEAT_S = 0.5
_PERIOD_MS = 250


@dataclass
class _Link:
    """The link to the hand with this number. A hand answers once it has loaded; until then its
    unanswered beats are None."""

    rank: int
    stream: FramedStream
    orders: SimpleQueue[bytes] = field(default_factory=SimpleQueue)
    num_unanswered: int | None = None


class EndLinks:
    """`hosts` are the ends in each hand, in the order of their numbers. `lost` is called from
    another thread, once, with the reason, when a hand has not answered the beats of `silence_s`, or
    sends something invalid."""

    def __init__(
        self,
        links: Sequence[socket.socket],
        silence_s: float,
        lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`links` lead to the hands from number 1 on, and belong to the caller."""
        self._links = [
            _Link(rank, FramedStream(link, MOST_BYTES)) for rank, link in enumerate(links, start=1)
        ]
        self._silence_s = silence_s
        self._lost = lost
        self._clock = clock
        self._wakeup = Wakeup()
        self._beat_at = 0.0
        self._is_closing = False
        self.hosts = [DistantHost(partial(self._order, each)) for each in self._links]
        self._poll = select.poll()
        self._poll.register(self._wakeup.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="hand-ends", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pass on nothing more. A second call does nothing."""
        if not self._is_closing:
            self._is_closing = True
            self._wakeup.wake()
            self._thread.join()
            self._wakeup.close()

    def _order(self, link: _Link, data: bytes) -> None:
        """Queue an order; any thread calls this."""
        link.orders.put(data)
        self._wakeup.wake()

    def _run(self) -> None:
        open_links = list(self._links)
        while not self._is_closing:
            for each in open_links:
                wanted = select.POLLIN | (select.POLLOUT if each.stream.has_unsent else 0)
                self._poll.register(each.stream.socket, wanted)
            self._poll.poll(_PERIOD_MS)
            self._wakeup.clear()
            now = self._clock()
            is_time = now >= self._beat_at
            self._beat_at = now + _BEAT_S if is_time else self._beat_at
            for each in list(open_links):
                try:
                    is_open = self._serve(each, is_time)
                except (OSError, ProtocolError) as error:
                    self._lost(f"rank {each.rank} sent an invalid report: {error}")
                    return
                if not is_open:
                    self._poll.unregister(each.stream.socket)
                    open_links.remove(each)
                elif (each.num_unanswered or 0) * _BEAT_S > self._silence_s:
                    self._lost(f"rank {each.rank} has not answered for {self._silence_s:g} s")
                    return

    def _serve(self, link: _Link, is_time: bool) -> bool:
        """Pass on orders and reports, and send a beat if `is_time`; False if the hand has ended,
        which `LinkWatch` reports. Raises OSError for a frame that is too long, and
        ProtocolError."""
        stream = link.stream
        for _ in range(link.orders.qsize()):
            stream.queue(link.orders.get())
        if is_time:
            stream.queue(BEAT)
            if link.num_unanswered is not None:
                link.num_unanswered += 1
        try:
            stream.flush()
            frames = stream.receive()
        except ConnectionError:
            return False
        for frame in frames:
            link.num_unanswered = 0
            if frame != BEAT:
                self.hosts[link.rank - 1].take(frame)
        return not stream.is_ended
