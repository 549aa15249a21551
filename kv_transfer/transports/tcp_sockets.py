"""TCP sockets of this process, found in /proc: UCX gives no access to its own.

Used to break the connections over which peers write here. Linux only; elsewhere nothing is found.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator

_FOLDER = "/proc/self/fd"


def listening_ports() -> set[int]:
    """The ports on which this process listens."""
    ports = set()
    for each in _tcp_sockets():
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            ports.add(each.getsockname()[1])
    return ports


def shut_down(ports: Collection[int], remote_ports: Collection[int], kept: Collection[str]) -> int:
    """Shut down the connections with one of `ports` at our end or one of `remote_ports` at the
    other end, except those with a host in `kept`. Returns their number.

    The kernel drops what arrives afterwards, so that the other process gets an error.
    """
    number = 0
    for each in _tcp_sockets():
        try:
            host, port = each.getpeername()[:2]
            is_meant = each.getsockname()[1] in ports or port in remote_ports
            if is_meant and host.removeprefix("::ffff:") not in kept:
                each.shutdown(socket.SHUT_RDWR)
                number += 1
        except OSError:  # it is not connected, or no longer
            continue
    return number


def _tcp_sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets. Each is closed after its turn of the caller's loop."""
    try:
        names = os.listdir(_FOLDER)
    except FileNotFoundError:
        return
    for name in names:
        try:
            fd = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            found = socket.socket(fileno=fd)
        except OSError:  # no socket
            os.close(fd)
            continue
        with found:
            is_tcp = found.type == socket.SOCK_STREAM and found.family != socket.AF_UNIX
            if is_tcp:
                yield found
