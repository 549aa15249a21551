"""The sockets on which a process can be reached, in whatever network namespace it runs.

Reads /proc/PID, because psutil looks into the namespace of its own process. Linux only.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"  # the state of a TCP socket
_ACCEPTS = 1 << 16  # the flag of a Unix socket that listens
_DATAGRAM = 2


@dataclass(frozen=True, order=True)
class Listener:
    """One socket: "TCP" or "UDP" with address and port, or "Unix" with its name and port 0."""

    kind: str
    address: str
    port: int

    def __str__(self) -> str:
        if self.kind == "Unix":
            return f"Unix {self.address}"
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.kind} {host}:{self.port}"


def listeners_of(pid: int) -> list[Listener]:
    """Sockets that others can connect or send to, sorted. A Unix socket counts if it has a name,
    "@..." if it is an abstract one."""
    process = Path("/proc") / str(pid)
    own = _inodes(process)
    found = {listener for inode, listener in [*_inet(process), *_unix(process)] if inode in own}
    return sorted(found)


def _inodes(process: Path) -> set[str]:
    """The process's sockets."""
    inodes = set()
    for file in (process / "fd").iterdir():
        try:
            target = os.readlink(file)
        except FileNotFoundError:
            continue  # closed since it was listed
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def _inet(process: Path) -> Iterator[tuple[str, Listener]]:
    """TCP sockets that listen and all UDP sockets of the process's namespace, with their inodes."""
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for fields in _rows(process / "net" / name):
            local, state, inode = fields[1], fields[3], fields[9]
            kind = name[:3].upper()
            if kind == "UDP" or state == _LISTENS:
                yield inode, Listener(kind, *_address(local))


def _unix(process: Path) -> Iterator[tuple[str, Listener]]:
    """Unix sockets with a name that take connections or datagrams, with their inodes."""
    for fields in _rows(process / "net" / "unix"):
        flags, kind, inode = int(fields[3], 16), int(fields[4], 16), fields[6]
        if len(fields) > 7 and (flags & _ACCEPTS or kind == _DATAGRAM):
            yield inode, Listener("Unix", fields[7], 0)


def _rows(table: Path) -> Iterator[list[str]]:
    if table.exists():
        for line in table.read_text().splitlines()[1:]:
            yield line.split()


def _address(local: str) -> tuple[str, int]:
    """Address and port of "0100007F:1F90"; the kernel prints words in the machine's order."""
    address, _, port = local.partition(":")
    packed = bytes.fromhex(address)
    if sys.byteorder == "little":
        packed = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed), int(port, 16)
