"""Detects that another process of this machine has ended.

Only the end of a process proves that it does no more work: a stopped process, too, is silent and
loses its lease. Processes of other machines or pid namespaces cannot be watched.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


def machine_name() -> str:
    """A name shared by the processes that see each other by pid; "" if it cannot be determined."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{os.stat(_PID_NAMESPACE).st_ino}"
    except OSError:
        return ""


class WatchedProcess:
    """A process by pid. A later process with the same pid counts as another process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._process: psutil.Process | None = None
        self._has_ended = False
        self.has_ended()

    def has_ended(self) -> bool:
        """Whether the process is known to have exited. A stopped process has not exited; a zombie
        has. While this process can open no files, nothing new is known."""
        try:
            self._has_ended = self._has_ended or self._look()
        except psutil.NoSuchProcess:
            self._has_ended = True
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        return self._has_ended

    def _look(self) -> bool:
        if self._process is None:
            self._process = psutil.Process(self._pid)
        is_running = self._process.is_running()
        return not is_running or self._process.status() == psutil.STATUS_ZOMBIE
