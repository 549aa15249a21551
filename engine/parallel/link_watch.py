"""Notices that another rank has ended: a thread that waits for a link's other end to close."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence

_PERIOD_MS = 1000


class LinkWatch:
    """Calls `lost`, once, with the rank of the first link that closes; the thread ends then, or
    within a second after `close`."""

    def __init__(self, links: Sequence[socket.socket], lost: Callable[[int], None]) -> None:
        """`links` belong to the ranks from 1 on, in this order."""
        self._ranks = {link.fileno(): rank for rank, link in enumerate(links, start=1)}
        self._lost = lost
        self._is_closed = False
        threading.Thread(target=self._watch, name="rank-links", daemon=True).start()

    def close(self) -> None:
        """Report no more."""
        self._is_closed = True

    def _watch(self) -> None:
        poll = select.poll()
        for file in self._ranks:
            poll.register(file, select.POLLRDHUP)
        while not self._is_closed:
            for file, _ in poll.poll(_PERIOD_MS):
                if not self._is_closed:
                    self._lost(self._ranks[file])
                return
