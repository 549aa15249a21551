"""How fast KV blocks move between two processes of one host, over NIXL and through shared memory.

    python -m bench.transports [--rounds 15] [--pieces]

A sender and a receiver hold a pool for each transport and use it as workers do, by the transfer
service. In each round every transport makes every write once, in turn. The time runs from posting
to the notification's arrival at the receiver, which comes after all blocks; processor time is the
sender's. Prints medians and ratios.

With `--pieces` the writes are between workers of different ranks, whose blocks lie layer by layer
or so that each pair of ranks shares one piece of a block.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.tools.records import add_record_option, keep_table
from engine.cpu import huge_pages
from engine.device import torch_dtype
from kv_transfer.head_slices import num_pieces, plan_shares
from kv_transfer.service import TransferService
from kv_transfer.transfer_loop import NotificationArrived, PeerAdded, WriteCommand, WriteFinished
from kv_transfer.transports.interface import PoolMemory, PoolPart
from kv_transfer.transports.registry import create_transport
from kv_transfer.transports.ucx_network import ucx_network
from protocol.layout import KvLayout

TRANSPORTS = ("nixl", "shm")
_NUM_BLOCKS = 64
_REST_S = 0.03
_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Case:
    """One kind of write: scattered blocks of one size, of workers with one rank or with those of
    `layouts`, the sender's and the receiver's."""

    title: str
    block_bytes: int
    num_blocks: int
    layouts: tuple[KvLayout, KvLayout] | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of all blocks together."""
        return self.block_bytes * self.num_blocks

    @property
    def layout(self) -> KvLayout | None:
        """That of the receiver."""
        return None if self.layouts is None else self.layouts[1]

    @property
    def num_pieces(self) -> int:
        """Pieces of all blocks together, between all ranks."""
        if self.layouts is None:
            return self.num_blocks
        return self.num_blocks * sum(num_pieces(plan_shares(*self.layouts)[0]).values())


CASES = (
    Case("1 block of 16 KiB (bundled model)", 16 << 10, 1),
    Case("32 blocks of 16 KiB", 16 << 10, 32),
    Case("1 block of 1.75 MiB (Qwen3-0.6B)", 1792 << 10, 1),
    Case("32 blocks of 1.75 MiB (512 tokens)", 1792 << 10, 32),
)


_LLAMA_8B = KvLayout(
    model_fingerprint="bench",
    dtype="bfloat16",
    num_layers=32,
    num_kv_heads=8,
    block_size=16,
    head_dim=128,
)


def _between(source: int, target: int) -> list[Case]:
    """Writes between workers of so many ranks: before and after pieces are joined."""
    title = f"{source} to {target} ranks"
    found = []
    for order, peer_stages in (("layer by layer", 0), ("joined", 1)):
        one, other = (
            msgspec.structs.replace(_LLAMA_8B, peer_stages=peer_stages).shard(0, size)
            for size in (source, target)
        )
        case = Case(f"{title}, {order}", _LLAMA_8B.block_bytes, 32, (one, other))
        found.append(case)
    return found


PIECES = (
    Case("1 to 1 rank, whole blocks", _LLAMA_8B.block_bytes, 32),
    *_between(1, 2),
    *_between(4, 8),
)


class End:
    """A transfer service with a pool in it; all pages have been touched."""

    def __init__(self, transport: str, block_bytes: int, layout: KvLayout | None = None) -> None:
        self.service = TransferService(lambda: create_transport(transport, "cpu"), lambda: None)
        self.service.start()
        num_bytes = block_bytes * _NUM_BLOCKS
        memory = self.service.allocate(num_bytes)
        if memory is None:
            pool = huge_pages.zeros((num_bytes // 4,), torch_dtype("float32")).numpy()
        else:
            pool = np.frombuffer(memory.view, np.float32)
        pool[:] = 1.0
        self._pool = pool
        parts, address = [], pool.ctypes.data
        sizes = [block_bytes] if layout is None else [each.block_bytes for each in layout.ranks]
        for size in sizes:
            parts.append(PoolPart(address, size, "cpu"))
            address += size * _NUM_BLOCKS
        others = tuple(parts[1:])
        place = PoolMemory(parts[0].address, sizes[0], _NUM_BLOCKS, "cpu", others)
        self.descriptor = self.service.register(place)
        self.service.expect(True)

    def wait_for(self, kind: type) -> Any:
        """The next event of a kind; others are dropped."""
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            for event in self.service.drain():
                if isinstance(event, kind):
                    return event
            time.sleep(50e-6)
        raise TimeoutError(f"no {kind.__name__}")


def receive(conn: Connection) -> None:
    """The receiver's process: says when the notification of each write arrived."""
    ends: dict[tuple[str, Case], End] = {}
    while (key := conn.recv()) is not None:
        if key in ends:
            conn.send("ready")
            ends[key].wait_for(NotificationArrived)
            conn.send(time.time_ns())
        else:
            transport, case = key
            end = ends[key] = End(transport, case.block_bytes, case.layout)
            conn.send((end.service.agent, end.descriptor))
    for end in ends.values():
        end.service.close()


class Sender:
    """The sender's side, in this process, and a connection to the receiver."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._ends: dict[tuple[str, Case], End] = {}
        self._agents: dict[tuple[str, Case], str] = {}

    def connect(self, transport: str, case: Case) -> None:
        """Make pools at both ends and let this one write to the other."""
        key = (transport, case)
        self._conn.send(key)
        agent, descriptor = self._conn.recv()
        layouts = case.layouts
        own = None if layouts is None else layouts[0]
        end = self._ends[key] = End(transport, case.block_bytes, own)
        shares = () if layouts is None else plan_shares(*layouts)
        end.service.add_peer(agent, descriptor, _NUM_BLOCKS, shares)
        end.wait_for(PeerAdded)
        self._agents[key] = agent

    def write(self, transport: str, case: Case) -> tuple[float, float]:
        """One write: seconds until the receiver knows of it, and of this process's cores."""
        key = (transport, case)
        end, agent = self._ends[key], self._agents[key]
        self._conn.send(key)
        assert self._conn.recv() == "ready"
        time.sleep(_REST_S)
        source = list(range(0, 2 * case.num_blocks, 2))  # no two are adjacent
        begin_cpu, begin = time.process_time(), time.time_ns()
        end.service.write(WriteCommand(0, agent, source, source[::-1], b"note"))
        done = end.wait_for(WriteFinished)
        cpu = time.process_time() - begin_cpu
        if done.error is not None:
            raise RuntimeError(f"{transport}: {done.error}")
        return (self._conn.recv() - begin) / 1e9, cpu

    def close(self) -> None:
        """End the services at both ends."""
        self._conn.send(None)
        for end in self._ends.values():
            end.service.close()


Figures = dict[tuple[str, Case], list[tuple[float, float]]]


def measure(cases: Sequence[Case], num_rounds: int) -> Figures:
    """Seconds and processor seconds of every write, by transport and case."""
    os.environ.update(ucx_network(None, (), False, os.environ))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs,))
    receiver.start()
    sender = Sender(ours)
    figures: Figures = {}
    try:
        for case in cases:
            for transport in TRANSPORTS:
                sender.connect(transport, case)
                sender.write(transport, case)
        for number in range(num_rounds):
            order = TRANSPORTS if number % 2 else TRANSPORTS[::-1]
            for case in cases:
                for transport in order:
                    figures.setdefault((transport, case), []).append(sender.write(transport, case))
    finally:
        sender.close()
        receiver.join()
    return figures


def report_pieces(figures: Figures, num_rounds: int) -> Table:
    """Median GB/s, by the pieces that ranks share."""
    title = f"512 tokens of KV between workers of several ranks, medians of {num_rounds} writes"
    table = Table(title=title)
    for name in ("write", "descriptors", "of KiB", *(f"{each} GB/s" for each in TRANSPORTS)):
        table.add_column(name, justify="left" if name == "write" else "right")
    for case in PIECES:
        seconds = [
            statistics.median(value for value, _ in figures[each, case]) for each in TRANSPORTS
        ]
        table.add_row(
            case.title,
            f"{case.num_pieces:,}",
            f"{case.num_bytes // case.num_pieces >> 10:,}",
            *(f"{case.num_bytes / each / 1e9:.2f}" for each in seconds),
        )
    return table


def report(figures: Figures, num_rounds: int) -> Table:
    """Medians, and the ratio of NIXL's to shared memory's."""
    table = Table(title=f"KV blocks from process to process, medians of {num_rounds} writes")
    for name in (
        "write",
        "nixl ms",
        "shm ms",
        "nixl / shm",
        "shm GB/s",
        "nixl CPU ms",
        "shm CPU ms",
    ):
        table.add_column(name, justify="left" if name == "write" else "right")
    for case in CASES:
        nixl, shm = (
            [statistics.median(values) for values in zip(*figures[each, case], strict=True)]
            for each in TRANSPORTS
        )
        table.add_row(
            case.title,
            f"{1e3 * nixl[0]:.2f}",
            f"{1e3 * shm[0]:.2f}",
            f"{nixl[0] / shm[0]:.2f}x",
            f"{case.num_bytes / shm[0] / 1e9:.2f}",
            f"{1e3 * nixl[1]:.2f}",
            f"{1e3 * shm[1]:.2f}",
        )
    return table


def main(argv: list[str]) -> int:
    """Run and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.transports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pieces", action="store_true", help="between workers of several ranks")
    add_record_option(parser)
    arguments = parser.parse_args(argv)
    if arguments.pieces:
        table = report_pieces(measure(PIECES, arguments.rounds), arguments.rounds)
    else:
        table = report(measure(CASES, arguments.rounds), arguments.rounds)
    Console(soft_wrap=True).print(table)
    keep_table(arguments.record, "pieces" if arguments.pieces else "transports", table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
