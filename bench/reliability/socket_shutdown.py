"""Breaks connections between two processes of one machine that no network can cut: Unix sockets.

Takes a process's end of the connection by `pidfd_getfd` and shuts it down: both processes see the
connection end and live on. Needs Linux 5.6 and the permission to trace the process.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)


def shut_down_between(pid: int, other: int) -> int:
    """Shut down the Unix sockets of a process whose other end belongs to `other`; returns their
    number."""
    number = 0
    with _pidfd(pid) as pidfd:
        for name in os.listdir(f"/proc/{pid}/fd"):
            fd = _LIBC.syscall(_PIDFD_GETFD, pidfd, int(name), 0)
            if fd >= 0:
                number += _shut_down(fd, other)
    return number


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _shut_down(fd: int, other: int) -> bool:
    """Shut down a connected Unix socket of which `other` has the other end; closes `fd`."""
    try:
        taken = socket.socket(fileno=fd)
    except OSError:  # no socket
        os.close(fd)
        return False
    with taken:
        if taken.family != socket.AF_UNIX:
            return False
        credentials = taken.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[0] != other:
            return False
        try:
            taken.shutdown(socket.SHUT_RDWR)
        except OSError:  # it listens
            return False
        return True
