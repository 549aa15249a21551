"""Bytes that this process sent, by link: RDMA ports and TCP peers.

RDMA: the ports' own counters in `/sys/class/infiniband` (words of 4 bytes), which other processes
of the machine share. TCP: Linux counts the bytes that each socket sent; libraries' sockets are
found in `/proc/self/fd`. The remaining bytes went through shared memory or CMA. Owns the thread
that measures, which does so only while `activity` grows.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

RDMA, TCP = "rdma", "tcp:"
PERIOD_S = 1.0
_WORD_BYTES = 4
_SENT = struct.Struct("=200xQ")
"""The beginning of Linux's `tcp_info`, up to `tcpi_bytes_sent`; kernels before 4.19 have less."""
_DESCRIPTORS = Path("/proc/self/fd")
_Ends = tuple[str, int, str, int]  # own address and port, then the peer's


class LinkCounters:
    """Measures the bytes sent so far, including those of closed sockets."""

    def __init__(self, system: Path = Path("/sys/class/infiniband")) -> None:
        self._system = system
        self._rdma_at_start = _rdma_bytes(system)
        self._sockets: dict[_Ends, int] = {}
        self._by_peer: dict[str, int] = {}

    def measure(self) -> dict[str, int]:
        """Bytes by link: `rdma` if there are RDMA ports, `tcp:ADDRESS` for each peer, and `tcp:`
        (always 0) if TCP could be measured."""
        found: dict[str, int] = {}
        rdma = _rdma_bytes(self._system)
        if rdma is not None and self._rdma_at_start is not None:
            found[RDMA] = rdma - self._rdma_at_start
        sockets = _sent_by_socket()
        if sockets is not None:
            self._take(sockets)
            found[TCP] = 0
            found |= {f"{TCP}{peer}": sent for peer, sent in self._by_peer.items()}
        return found

    def _take(self, sockets: dict[_Ends, int]) -> None:
        for key, sent in sockets.items():
            grown = sent - self._sockets.get(key, 0)
            if grown < 0:  # another socket of the same ports
                grown = sent
            if grown:
                peer = address_of(key[2])
                self._by_peer[peer] = self._by_peer.get(peer, 0) + grown
        self._sockets = sockets


class LinkWatch:
    """Measures in a thread of its own, while `activity` (a growing number) grows."""

    def __init__(self, counters: LinkCounters, activity: Callable[[], int]) -> None:
        self._counters = counters
        self._activity = activity
        self._latest = counters.measure()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-links", daemon=True)
        self._thread.start()

    def latest(self) -> dict[str, int]:
        """The last measurement. May be called from any thread."""
        return self._latest

    def close(self) -> None:
        """Stop measuring; returns when the thread has ended."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        seen = self._activity()
        while not self._stopping.wait(PERIOD_S):
            now = self._activity()
            if now != seen:
                seen = now
                self._latest = self._counters.measure()


def address_of(host: str) -> str:
    """An address without zone and without the prefix of mapped addresses."""
    return host.partition("%")[0].removeprefix("::ffff:")


def _sent_by_socket() -> dict[_Ends, int] | None:
    """Bytes sent by each TCP connection of this process; None if the system does not count them."""
    found: dict[_Ends, int] = {}
    try:
        descriptors = os.listdir(_DESCRIPTORS)
    except OSError:
        return None
    for name in descriptors:
        try:
            if os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                ends, sent = _sent_by(int(name))
                found[ends] = sent
        except OSError:
            continue  # closed meanwhile, or no TCP connection
        except struct.error:
            return None
    return found


def _sent_by(descriptor: int) -> tuple[_Ends, int]:
    """The ends of a TCP connection, and the bytes that it sent. Raises OSError for anything else,
    and struct.error if the system does not count them."""
    connection = socket.socket(fileno=descriptor)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT.size)
        own, peer = connection.getsockname(), connection.getpeername()
    finally:
        connection.detach()  # its owner closes it
    return (own[0], own[1], peer[0], peer[1]), _SENT.unpack(info)[0]


def _rdma_bytes(system: Path) -> int | None:
    """Bytes that all RDMA ports of the machine have sent; None without a port."""
    total, has_port = 0, False
    for counter in system.glob("*/ports/*/counters/port_xmit_data"):
        try:
            total += int(counter.read_text()) * _WORD_BYTES
            has_port = True
        except (OSError, ValueError):
            continue
    return total if has_port else None
