"""Whether another process of this machine has ended.

The one proof that a process does nothing more: silence and an ended lease also fit one that only
stands still. Processes of other machines, or of other pid namespaces, cannot be watched.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


def machine_name() -> str:
    """Equal in processes that see each other by pid; "" where that cannot be told."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{os.stat(_PID_NAMESPACE).st_ino}"
    except OSError:
        return ""


class WatchedProcess:
    """A process by pid, told from a later one that gets the same."""

    def __init__(self, pid: int) -> None:
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._process = None

    def has_ended(self) -> bool:
        """Whether it has exited; one that is stopped has not, one that waits to be reaped has."""
        if self._process is None:
            return True
        try:
            is_running = self._process.is_running()
            return not is_running or self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
