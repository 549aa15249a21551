"""Cuts one TCP connection of a process, as a network does: both ends see it break and live on.

Uses `ss -K`, which needs Linux with INET_DIAG_DESTROY and the permission to administer the network.
Does not know the purpose of the connections.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Container

import psutil

Connection = tuple[tuple[str, int], tuple[str, int]]
"""Local and remote address, each host and port."""


def can_cut() -> bool:
    """Whether connections can be cut here; tries it on a connection of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as ours:
            ours.settimeout(1.0)
            cut((ours.getsockname(), ours.getpeername()))
            try:
                ours.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True
            return True


def cut(connection: Connection) -> bool:
    """Break the connection; False if it did not exist or could not be broken."""
    command = shutil.which("ss")
    if command is None:
        return False
    (host, port), (other_host, other_port) = connection
    where = ["src", host, "sport", "=", str(port), "dst", other_host, "dport", "=", str(other_port)]
    killed = [command, "-H", "-K", "-t", *where]  # prints only the connections that it broke
    shown = subprocess.run(killed, capture_output=True, timeout=10, check=False).stdout
    return bool(shown.strip())


def connections_of(pid: int, others: Container[int]) -> list[Connection]:
    """A process's established connections whose remote port is one of `others`."""
    try:
        found = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return []
    return [
        ((_plain(each.laddr.ip), each.laddr.port), (_plain(each.raddr.ip), each.raddr.port))
        for each in found
        if each.status == psutil.CONN_ESTABLISHED and each.raddr and each.raddr.port in others
    ]


def listening_ports(pid: int) -> set[int]:
    """The ports on which a process listens."""
    try:
        found = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return set()
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


def _plain(address: str) -> str:
    """An IPv4-mapped address of an IPv6 socket (ZeroMQ's) as plain IPv4, which `ss` needs."""
    return address.removeprefix("::ffff:")
