"""Makes one UCX worker of this process look dead: its connections break, and nobody listens on its
ports any more, but the process lives on."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from pathlib import Path

_FOLDER = Path("/proc/self/fd")
_DECOYS: list[socket.socket] = []
"""Sockets that took the places of those that listened."""


def deafen(ports: Collection[int], peer_ports: Collection[int]) -> int:
    """Break the connections that use one of these ports at our or the other end, and stop listening
    on `ports`. Returns the number of sockets that were closed."""
    return sum(_deafen(int(path.name), ports, peer_ports) for path in list(_FOLDER.iterdir()))


def _deafen(fd: int, ports: Collection[int], peer_ports: Collection[int]) -> bool:
    try:
        found = socket.socket(fileno=os.dup(fd))
    except OSError:  # no socket, or closed meanwhile
        return False
    with found:
        if found.type != socket.SOCK_STREAM or found.family == socket.AF_UNIX:
            return False
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            if found.getsockname()[1] not in ports:
                return False
            _DECOYS.append(socket.socket())
            os.dup2(_DECOYS[-1].fileno(), fd)  # which closes the one that listens
            return True
        try:
            is_meant = found.getsockname()[1] in ports or found.getpeername()[1] in peer_ports
            if is_meant:
                found.shutdown(socket.SHUT_RDWR)
            return is_meant
        except OSError:  # not connected
            return False
