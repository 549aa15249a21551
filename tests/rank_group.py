"""Processes that are ranks of one engine: how they meet, and how a test sees them."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.checkpoint.config import Shard
from engine.native.library import load_library
from engine.parallel.link_watch import LinkWatch
from engine.parallel.ranks import Ranks
from engine.parallel.sums import HostSums, stop_sums
from tests.forked import fork_context

RankMain = Callable[[Connection, str, int, int], None]
"""What a rank runs, with its end of a pipe, the file where ranks meet, its rank and their number:
job after job, as they come by the pipe, until there comes None."""


class RankGroup:
    """The processes; each does what comes by its pipe, and answers there."""

    def __init__(self, main: RankMain, store: Path, size: int) -> None:
        load_library()  # built once, and before anybody waits
        context = fork_context()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (theirs, str(store), rank, size)
            process = context.Process(target=main, args=args, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def do(self, job: Any, deadline_s: float, dying: Sequence[int] = ()) -> list[Any]:
        """The answers of all ranks to one job, but of those that die of it."""
        for connection in self._connections:
            connection.send(job)
        answers = []
        for rank, connection in enumerate(self._connections):
            if rank in dying:
                self._processes[rank].join(deadline_s)
                assert self._processes[rank].exitcode
                continue
            assert connection.poll(deadline_s), f"rank {rank} does not answer"
            answers.append(connection.recv())
        return answers

    def end(self, deadline_s: float) -> None:
        """Stop those that live, and see all end."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            lives = process.is_alive()
            if lives:
                connection.send(None)
            process.join(deadline_s)
            connection.close()
            assert not lives or process.exitcode == 0


def meet(store: str, rank: int, size: int, limit_s: float) -> Ranks:
    """The first `size` ranks of a group, once they are connected. Call it in the order of sizes."""
    place, memory = f"{store}-{size}", f"{store}-{size}.sums"
    num_bytes = HostSums.bytes_for(size)
    links = []
    if rank == 0:
        Path(memory).write_bytes(bytes(num_bytes))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{place}.new")
            listener.listen(size)
            os.rename(f"{place}.new", place)
            found = [listener.accept()[0] for _ in range(1, size)]
        links = sorted(found, key=lambda link: link.recv(1))
    else:
        deadline = time.monotonic() + limit_s
        while not os.path.exists(place):
            assert time.monotonic() < deadline, "rank 0 does not come"
            time.sleep(0.001)
        links = [socket.socket(socket.AF_UNIX)]
        links[0].connect(place)
        links[0].send(bytes([rank]))
    with open(memory, "r+b") as file:
        shared = memoryview(mmap.mmap(file.fileno(), num_bytes))
    kernels = load_library()
    sums = HostSums(kernels, shared, rank, size, limit_s)
    if rank == 0:
        LinkWatch(links, lambda lost: stop_sums(kernels, shared))
    return Ranks(Shard(rank, size), links, sums)
