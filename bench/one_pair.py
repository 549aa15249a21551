"""Tests whether one pair of processes keeps moving KV blocks through many transfers, cuts and
restarts.

    python -m bench.one_pair [--transfers 100000] [--restarts 200] [--transports nixl,shm]

A source writes blocks into a sink's pool by the transfer service, and the sink compares every block
with what was sent. After the transfers, the connection between them is cut while both live, and the
time until a transfer arrives again is measured. Then either side in turn is killed in the middle of
transfers and replaced; the survivor must go on with its successor. NIXL uses TCP, which can be cut.
Exits with 1 if a block is wrong or a pair does not heal.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from bench.reliability.connection_cut import connections_of, cut
from bench.reliability.socket_shutdown import shut_down_between
from kv_transfer.service import TransferService
from kv_transfer.transfer_loop import (
    NotificationArrived,
    PeerAdded,
    PeerFailed,
    WriteCommand,
    WriteFinished,
)
from kv_transfer.transports.interface import PoolMemory
from kv_transfer.transports.registry import create_transport

NUM_BLOCKS, BLOCK_BYTES = 16, 64 << 10
WAIT_S = 60.0
PAUSE_S = 200e-6
BURST = NUM_BLOCKS
"""The most transfers before the sink is checked, which reads each block before it is used again."""


class End:
    """One side: a pool, and a transfer service. Runs in a process of its own."""

    def __init__(self, transport: str) -> None:
        os.environ["UCX_TLS"] = "tcp,self"
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # a killed peer is an error to UCX
        self.service = TransferService(lambda: create_transport(transport, "cpu"), lambda: None)
        self.service.start()
        memory = self.service.allocate(NUM_BLOCKS * BLOCK_BYTES)
        num_words = NUM_BLOCKS * BLOCK_BYTES // 8
        flat = np.zeros(num_words, np.uint64)
        if memory is not None:
            flat = np.frombuffer(memory.view, np.uint64)[:num_words]
        self.blocks = flat.reshape(NUM_BLOCKS, -1)
        place = PoolMemory(self.blocks.ctypes.data, BLOCK_BYTES, NUM_BLOCKS, "cpu")
        self.descriptor = self.service.register(place)
        self.service.expect(True)
        self.num_right = self.num_wrong = 0
        self.last = -1
        self._peer: tuple[str, bytes] | None = None
        self._is_added = False

    def introduce(self) -> tuple[str, bytes]:
        """How peers reach this end."""
        return self.service.agent, self.descriptor

    def add_peer(self, agent: str, descriptor: bytes) -> bool:
        """Write to this peer from now on."""
        if self._peer is not None:
            self.service.remove_peer(self._peer[0])
        self._peer, self._is_added = (agent, descriptor), False
        return self._connect()

    def send(self, first: int, number: int) -> int:
        """Send numbered blocks one after the other; returns how many ended without an error. A peer
        that is lost is added again."""
        assert self._peer is not None
        done = 0
        for index in range(first, first + number):
            if not self._is_added and not self._connect():
                continue
            block = index % NUM_BLOCKS
            self.blocks[block] = index
            note = index.to_bytes(8, "little")
            self.service.write(WriteCommand(index, self._peer[0], [block], [block], note))
            finished = self._wait_for(WriteFinished)
            done += finished is not None and finished.error is None
        return done

    def received(self) -> tuple[int, int, int]:
        """Blocks that arrived as they were sent, others, and the last one's number."""
        for event in self.service.drain():
            if isinstance(event, NotificationArrived):
                self.last = int.from_bytes(event.payload, "little")
                is_right = bool((self.blocks[self.last % NUM_BLOCKS] == self.last).all())
                self.num_right += is_right
                self.num_wrong += not is_right
        return self.num_right, self.num_wrong, self.last

    def _connect(self) -> bool:
        assert self._peer is not None
        self.service.add_peer(*self._peer, NUM_BLOCKS)
        self._is_added = isinstance(self._wait_for((PeerAdded, PeerFailed)), PeerAdded)
        return self._is_added

    def _wait_for(self, kind: Any) -> Any:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            found = None
            for event in self.service.drain():
                if isinstance(event, PeerFailed):
                    self._is_added = False
                if isinstance(event, kind):
                    found = event
            if found is not None:
                return found
            time.sleep(PAUSE_S)
        return None


def serve(conn: Connection, transport: str) -> None:
    """Carry out commands until the pipe closes; check arriving blocks in between."""
    end = End(transport)
    while True:
        end.received()
        try:
            if not conn.poll(PAUSE_S):
                continue
            name, *arguments = conn.recv()
        except (EOFError, OSError):
            end.service.close()
            return
        conn.send(getattr(end, name)(*arguments))


class Side:
    """A process of one end, as this one sees it."""

    def __init__(self, transport: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._conn, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, transport), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, name: str, *arguments: Any) -> Any:
        """Carry out a command there, and return its answer."""
        self.begin(name, *arguments)
        return self._conn.recv()

    def begin(self, name: str, *arguments: Any) -> None:
        """Let the side begin with a command."""
        self._conn.send((name, *arguments))

    def answer(self) -> Any:
        """The answer to `begin`."""
        return self._conn.recv()

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self._conn.close()


@dataclass
class Pair:
    """A source and a sink over one transport; `next` numbers the transfers."""

    transport: str
    source: Side = field(init=False)
    sink: Side = field(init=False)
    next: int = 0

    def __post_init__(self) -> None:
        self.source, self.sink = Side(self.transport), Side(self.transport)
        self.connect()

    def connect(self) -> None:
        """Let the source write to the sink."""
        self.source.ask("add_peer", *self.sink.ask("introduce"))

    def send(self, number: int) -> int:
        """Send blocks; returns how many ended without an error at the source."""
        end, done = self.next + number, 0
        while self.next < end:
            first, self.next = self.next, min(end, self.next + BURST)
            sent = int(self.source.ask("send", first, self.next - first))
            done += sent
            if sent:
                wait_until(lambda: self.sink.ask("received")[2] == self.next - 1)
        return done

    def arrived(self) -> tuple[int, int]:
        """The blocks that arrived as they were sent, and the wrong ones, up to the last one."""
        wait_until(lambda: self.sink.ask("received")[2] == self.next - 1)
        right, wrong, _ = self.sink.ask("received")
        return right, wrong

    def cut(self) -> None:
        """Break the connection between the two, which live on."""
        if self.transport == "shm":
            shut_down_between(self.source.pid, self.sink.pid)
            return
        for one, other in ((self.source, self.sink), (self.sink, self.source)):
            sockets = psutil.Process(other.pid).net_connections("tcp")
            ports = {each.laddr.port for each in sockets if each.laddr}
            for connection in connections_of(one.pid, ports):
                cut(connection)

    def close(self) -> None:
        """End both."""
        self.source.kill()
        self.sink.kill()


def wait_until(check: Callable[[], bool]) -> bool:
    """Whether the check becomes true in time."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.002)
    return False


def heal(pair: Pair) -> float:
    """Cut the connection; the seconds until a block arrives again, inf if none does."""
    pair.cut()
    began = time.monotonic()
    while time.monotonic() - began < WAIT_S:
        if pair.send(1) and pair.sink.ask("received")[2] == pair.next - 1:
            return time.monotonic() - began
    return float("inf")


def restart(pair: Pair, is_source: bool) -> bool:
    """Kill one side in the middle of transfers and replace it; whether the survivor goes on."""
    first, pair.next = pair.next, pair.next + BURST
    pair.source.begin("send", first, BURST)
    wait_until(lambda: pair.sink.ask("received")[2] >= first + 2)
    if is_source:
        pair.source.kill()
        pair.source = Side(pair.transport)
    else:
        pair.sink.kill()
        pair.source.answer()
        pair.sink = Side(pair.transport)
    pair.connect()
    _, wrong, _ = pair.sink.ask("received")
    return pair.send(BURST) == BURST and pair.arrived()[1] == wrong == 0


def run(transport: str, transfers: int, restarts: int) -> tuple[dict[str, str], bool]:
    """Run every part with one transport; returns the figures, and whether no part failed."""
    pair, began = Pair(transport), time.monotonic()
    done = pair.send(transfers)
    right, wrong = pair.arrived()
    took_s = time.monotonic() - began
    healed_s = heal(pair)
    well = sum(restart(pair, is_source=bool(turn % 2)) for turn in range(restarts))
    pair.close()
    figures = {
        "transfers without an error": f"{done:,} of {transfers:,} in {took_s:.0f} s",
        "blocks that arrived as sent / wrong": f"{right:,} / {wrong:,}",
        "after a cut, healed within": f"{healed_s:.2f} s",
        "restarts after which the survivor went on": f"{well} of {restarts}",
    }
    is_whole = done == right == transfers and not wrong
    return figures, is_whole and healed_s < WAIT_S and well == restarts


def main(argv: list[str]) -> int:
    """Run and print a table for each transport; 0 if all is well."""
    parser = argparse.ArgumentParser(prog="python -m bench.one_pair", description=__doc__)
    parser.add_argument("--transfers", type=int, default=100_000)
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--transports", default="nixl,shm")
    arguments = parser.parse_args(argv)
    console, all_well = Console(soft_wrap=True), True
    for transport in arguments.transports.split(","):
        figures, is_well = run(transport, arguments.transfers, arguments.restarts)
        all_well = all_well and is_well
        table = Table("what", "", title=f"one pair over {transport}")
        for what, figure in figures.items():
            table.add_row(what, figure)
        console.print(table)
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
