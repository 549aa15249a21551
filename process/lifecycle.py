"""Tells a process to stop: on a signal, or when its parent process ends.

Only records the request and wakes the owner's loop; the owner performs the orderly shutdown. A
second signal ends the process at once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PARENT_POLL_S = 0.5
ORPHAN_GRACE_S = 60.0


class StopSignal:
    """Handles SIGTERM and SIGINT, and watches the parent if told its pid.

    `since` is the monotonic time in seconds of the first stop request, None before. Create it in
    the main thread; `close` restores the former handlers. An orphaned process that has not ended
    after ORPHAN_GRACE_S is ended by force, so that none is left behind.
    """

    def __init__(self, wake: Callable[[], None], parent_pid: int | None = None) -> None:
        """`wake` is called from signal handlers and another thread: it must only wake a loop."""
        self.since: float | None = None
        self._wake = wake
        self._former: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._on_signal) for number in SIGNALS
        }
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None
        if parent_pid is not None:
            self._watch = threading.Thread(
                target=self._watch_parent, args=(parent_pid,), name="baton-parent", daemon=True
            )
            self._watch.start()

    @property
    def is_set(self) -> bool:
        """Whether the process was told to stop."""
        return self.since is not None

    def request(self) -> None:
        """Ask to stop, as a signal would."""
        if self.since is None:
            self.since = time.monotonic()
        self._wake()

    def close(self) -> None:
        """Restore the former handlers and end the watch on the parent."""
        self._closed.set()
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._watch is not None:
            self._watch.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.since is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.request()

    def _watch_parent(self, parent_pid: int) -> None:
        while os.getppid() == parent_pid:
            if self._closed.wait(PARENT_POLL_S):
                return
        log.warning("process %d, which started this one, is gone: stopping", parent_pid)
        self.request()
        if not self._closed.wait(ORPHAN_GRACE_S):
            os._exit(1)
