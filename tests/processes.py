"""Processes and files that are left, or are not."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is only not waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def open_files() -> set[tuple[str, str]]:
    """This process's descriptors, and what each leads to. Others of the process may close theirs
    at any time; what has been opened since an earlier look is new in the set."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of this look
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
