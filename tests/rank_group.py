"""Processes that are ranks of one torch.distributed group, as a test sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.forked import fork_context

RankMain = Callable[[Connection, str, int, int], None]
"""What a rank runs, with its end of a pipe, the file where ranks meet, its rank and their number:
job after job, as they come by the pipe, until there comes None."""


class RankGroup:
    """The processes; each does what comes by its pipe, and answers there."""

    def __init__(self, main: RankMain, store: Path, size: int) -> None:
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
