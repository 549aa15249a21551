"""Processes that tests did not start themselves."""

from __future__ import annotations

import psutil


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is only not waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
