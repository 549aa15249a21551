"""Hands of a forked worker: forked before the worker has threads, and given their links later.

A hand that is started the usual way takes two seconds to import torch. As a usual one, a forked
hand is a child of its worker, and the kernel ends it when the worker ends.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
from collections.abc import Sequence
from functools import partial

from process.bound_command import bind_to
from tests.forks import ForkedProcess
from worker.ranks import hand
from worker.ranks.processes import environment_of_hands

_RANKS = re.compile(r"--(tensor-parallel|pipeline-parallel|nnodes|node-rank)=(\d+)")


def num_hands(arguments: Sequence[str]) -> int:
    """The number of hands that a process with these flags of a worker starts."""
    found = dict(_RANKS.fullmatch(each).groups() for each in arguments if _RANKS.fullmatch(each))  # type: ignore[union-attr]
    flags = {name: int(value) for name, value in found.items()}
    num_ranks = flags.get("tensor-parallel", 1) * flags.get("pipeline-parallel", 1)
    on_host = num_ranks // flags.get("nnodes", 1)
    return on_host if flags.get("node-rank", 0) else on_host - 1


class ForkedHands:
    """Hands that wait for their links. Create it while the process has one thread."""

    def __init__(self, number: int) -> None:
        self._waiting = [_fork() for _ in range(number)]

    def start(self, link: socket.socket) -> ForkedProcess:
        """Stands for `worker.ranks.processes.start_hand`."""
        process, way = self._waiting.pop()
        with way:
            socket.send_fds(way, [b"-"], [link.fileno()])
        return process


def _fork() -> tuple[ForkedProcess, socket.socket]:
    """Fork a hand. Returns its process, and the socket over which it gets its link."""
    ours, theirs = socket.socketpair()
    process = ForkedProcess(partial(_live, theirs, ours, os.getpid()))
    theirs.close()
    return process, ours


def _live(way: socket.socket, other_end: socket.socket, head: int) -> int:
    other_end.close()
    if not bind_to(head, signal.SIGKILL):
        return 1
    with way:
        _, (link, *_), _, _ = socket.recv_fds(way, 1, 1)
    environment = environment_of_hands()
    os.environ.clear()
    os.environ.update(environment)
    status = hand.main([str(link), str(head)])
    logging.shutdown()
    return status
