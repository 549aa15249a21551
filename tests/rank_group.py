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

from engine.checkpoint.shard import Shard
from engine.native.library import load_library
from engine.parallel.link_watch import LinkWatch
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import RankMemory, RankSizes
from tests.forked import fork_context

_STEP_BYTES = 1 << 18

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
        """The answers of all ranks to one job, except of the ranks that it kills."""
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
        """Stop the processes that still run, and wait until all have ended."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            lives = process.is_alive()
            if lives:
                connection.send(None)
            process.join(deadline_s)
            connection.close()
            assert not lives or process.exitcode == 0


def meet(store: str, rank: int, size: int, limit_s: float, num_stages: int = 1) -> Ranks:
    """The first `size` ranks of a group, in stages, once they are connected. Call it in one order
    on all of them."""
    place, memory = f"{store}-{size}-{num_stages}", f"{store}-{size}-{num_stages}.memory"
    sizes = RankSizes(size // num_stages, num_stages, _STEP_BYTES)
    links = []
    if rank == 0:
        Path(memory).write_bytes(bytes(sizes.num_bytes))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{place}.new")
            listener.listen(size)
            listener.settimeout(limit_s)
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
        mapped = memoryview(mmap.mmap(file.fileno(), sizes.num_bytes))
    shared = RankMemory(load_library(), mapped, sizes)
    if rank == 0:
        LinkWatch(links, lambda lost: shared.stop())
    return shared.ranks(Shard.numbered(rank, sizes.tp_size, num_stages), links, limit_s)
