"""Processes that the calling process forks by itself, as a test's stand-in for new programs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable

import psutil

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ForkedProcess:
    """What heads and fleets use of `subprocess.Popen`."""

    def __init__(self, life: Callable[[], int]) -> None:
        """Runs `life` in a new process, which ends with its result. Create it while this process
        has one thread."""
        self.pid = os.fork()
        if self.pid == 0:
            _live(life)
        self.returncode: int | None = None
        self._process = psutil.Process(self.pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end, and return its exit status. Raises subprocess.TimeoutExpired."""
        with self._lock:
            if self.returncode is None:
                try:
                    self.returncode = self._process.wait(timeout)
                except psutil.TimeoutExpired as error:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from error
            return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _live(life: Callable[[], int]) -> None:
    status = 1
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        status = life()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception:  # noqa: BLE001 - nobody else would print it
        traceback.print_exc()
    finally:
        os._exit(status)
