"""Tells a process to stop: on a signal, or when its parent process ends.

Records the request and wakes the owner's loop, which performs the orderly shutdown. A process that
is still starting has no loop, so the request is raised as `Stopped`. A second signal ends the
process at once. SIGHUP, whose default is to end a process, does nothing unless the owner handles
it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PARENT_POLL_S = 0.5
ORPHAN_GRACE_S = 60.0


class Stopped(BaseException):
    """The process was told to stop before it served. Like KeyboardInterrupt, this is no error."""


class StopSignal:
    """Handles SIGTERM, SIGINT and SIGHUP, and watches the parent if given its pid.

    `since` is the monotonic time in seconds of the first stop request, None before. Create it in
    the main thread; `close` restores the former handlers. An orphaned process that has not ended
    after ORPHAN_GRACE_S is ended by force, so that none is left behind.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        parent_pid: int | None = None,
        on_hangup: Callable[[], None] = lambda: None,
    ) -> None:
        """Signal handlers call `wake` and `on_hangup`, and another thread also calls `wake`: both
        must only wake a loop."""
        self.since: float | None = None
        self._is_final = self._is_signalled = False
        self._wake = wake
        self._on_hangup = on_hangup
        self._is_starting = False
        self._former: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._on_signal) for number in SIGNALS
        }
        self._former[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_sighup)
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
        """Ask to stop; `withdraw` takes this back."""
        if self.since is None:
            self.since = time.monotonic()
        self._wake()

    def insist(self) -> None:
        """Ask to stop for good, from another thread."""
        self._is_final = True
        if self._is_starting and not self._is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)  # the main thread raises `Stopped`
        else:
            self.request()

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """A context, for the main thread, in which a request to stop is raised as `Stopped`: in the
        middle of running code, and at the latest at the end."""
        self._is_starting = True
        try:
            self.check()
            yield
            self.check()
        finally:
            self._is_starting = False

    def check(self) -> None:
        """Raise `Stopped` if the process was told to stop, in case other code swallowed it
        before."""
        if self.is_set:
            raise Stopped

    def withdraw(self) -> bool:
        """Take back `request`. Returns False if a signal has arrived, somebody insists, or the
        parent has ended meanwhile."""
        if self._is_final:
            return False
        self.since = None
        return True

    def close(self) -> None:
        """Restore the former handlers and end the watch on the parent."""
        self._closed.set()
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._watch is not None:
            self._watch.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_signalled:
            _end_by(number)
        self._is_signalled = self._is_final = True
        self.request()
        if self._is_starting:
            raise Stopped

    def _on_sighup(self, number: int, frame: FrameType | None) -> None:
        self._on_hangup()

    def _watch_parent(self, parent_pid: int) -> None:
        while os.getppid() == parent_pid:
            if self._closed.wait(PARENT_POLL_S):
                return
        log.warning("process %d, which started this one, is gone: stopping", parent_pid)
        self.insist()
        if not self._closed.wait(ORPHAN_GRACE_S):
            os._exit(1)


def _end_by(number: int) -> None:
    """End as the signal's default action would. PID 1 has no default actions."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)
