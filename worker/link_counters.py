"""Bytes that this process sent, by link: RDMA ports and TCP peers.

RDMA: the ports' own counters in `/sys/class/infiniband` (words of 4 bytes), which other processes
of the machine share. TCP: `ss` shows each socket of a process with the bytes that it sent. What
neither shows went through shared memory or CMA. Owns the thread that measures; a measurement takes
some 10 ms, so it is made only while `activity` grows.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

RDMA, TCP = "rdma", "tcp:"
PERIOD_S = 1.0
_WORD_BYTES = 4
_SS = ("ss", "-t", "-i", "-n", "-H", "-p")
_SS_TIMEOUT_S = 5.0
_SENT = re.compile(r"\bbytes_sent:(\d+)")
_Socket = tuple[str, str]  # own and peer's address with port


class LinkCounters:
    """Measures the bytes sent so far, including those of closed sockets."""

    def __init__(self, pid: int, system: Path = Path("/sys/class/infiniband")) -> None:
        self._pid = pid
        self._system = system
        self._rdma_at_start = _rdma_bytes(system)
        self._sockets: dict[_Socket, int] = {}
        self._by_peer: dict[str, int] = {}

    def measure(self) -> dict[str, int]:
        """Bytes by link: `rdma` if there are RDMA ports, `tcp:ADDRESS` for each peer, and `tcp:`
        (always 0) if TCP could be measured."""
        found: dict[str, int] = {}
        rdma = _rdma_bytes(self._system)
        if rdma is not None and self._rdma_at_start is not None:
            found[RDMA] = rdma - self._rdma_at_start
        listing = _listing()
        if listing is not None:
            self._take(sent_by_socket(listing, self._pid))
            found[TCP] = 0
            found |= {f"{TCP}{peer}": sent for peer, sent in self._by_peer.items()}
        return found

    def _take(self, sockets: dict[_Socket, int]) -> None:
        for key, sent in sockets.items():
            grown = sent - self._sockets.get(key, 0)
            if grown < 0:  # another socket of the same ports
                grown = sent
            if grown:
                peer = address_of(key[1])
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


def sent_by_socket(listing: str, pid: int) -> dict[_Socket, int]:
    """Bytes sent by each TCP socket of a process, from the output of `ss -tinHp`: a line with
    state, queues, addresses and users, then an indented line with the details."""
    found: dict[_Socket, int] = {}
    owner = f"pid={pid},"
    key: _Socket | None = None
    for line in listing.splitlines():
        if line[:1].isspace():
            sent = _SENT.search(line)
            if key is not None and sent is not None:
                found[key] = int(sent[1])
            key = None
            continue
        words = line.split()
        key = (words[3], words[4]) if len(words) > 5 and owner in line else None
    return found


def address_of(endpoint: str) -> str:
    """The address of `ADDRESS:PORT`, without brackets, zone and the prefix of mapped addresses."""
    address = endpoint.rpartition(":")[0].strip("[]").partition("%")[0]
    return address.removeprefix("::ffff:")


def _listing() -> str | None:
    """The output of `ss`; None if it cannot be run."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            _SS, capture_output=True, text=True, timeout=_SS_TIMEOUT_S, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("cannot measure TCP: %s", error)
        return None
    return done.stdout


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
