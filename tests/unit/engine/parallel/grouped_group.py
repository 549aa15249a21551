"""Ranks in processes of their own that reach each other by gloo, for tests of what cards do."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from engine.checkpoint.shard import Shard
from engine.parallel.grouped_ranks import grouped_ranks
from engine.parallel.process_groups import RankGroups
from engine.parallel.ranks import Ranks
from tests.forked import fork_context

DEADLINE_S = 60.0
CPU = torch.device("cpu")

Work = Callable[[Ranks], Any]
"""What each rank does, and answers."""


class CapturableGroups(RankGroups):
    """Groups of CPUs in which steps are captured, as between cards."""

    is_captured = True


class StagedGroups(RankGroups):
    """Groups of CPUs whose tensors are copied first, as those of ranks that share a card."""

    is_staged = True


def work_of_ranks(
    work: Work,
    size: int,
    num_stages: int = 1,
    kind: type[RankGroups] = CapturableGroups,
) -> list[Any]:
    """The answers of `num_stages` stages of `size` ranks, by their numbers. Each runs in a forked
    process, which has one process group in its life."""
    with ExitStack() as stack:
        file = os.memfd_create("meeting")
        stack.callback(os.close, file)
        pairs = [socket.socketpair() for _ in range(1, size * num_stages)]
        for end in (end for pair in pairs for end in pair):
            stack.callback(end.close)
        return _answers(work, Shard.numbered(0, size, num_stages), kind, pairs, file)


def _answers(
    work: Work,
    first: Shard,
    kind: type[RankGroups],
    pairs: list[tuple[socket.socket, socket.socket]],
    file: int,
) -> list[Any]:
    num_ranks, size, num_stages = first.num_ranks, first.size, first.num_stages
    pipes, processes = [], []
    for number in range(num_ranks):
        shard = Shard.numbered(number, size, num_stages)
        links = [pairs[number - 1][1]] if number else [ours for ours, _ in pairs]
        ours, theirs = fork_context().Pipe(duplex=False)
        arguments = (theirs, work, kind, shard, links, f"/proc/{os.getpid()}/fd/{file}")
        process = fork_context().Process(target=_live, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers = []
    for number, pipe in enumerate(pipes):
        assert pipe.poll(DEADLINE_S), f"rank {number} does not answer"
        with suppress(EOFError):
            answers.append(pipe.recv())
    for process in processes:
        process.join(DEADLINE_S)
    assert len(answers) == num_ranks, "a rank has ended without an answer"
    return answers


def _live(
    result: Connection,
    work: Work,
    kind: type[RankGroups],
    shard: Shard,
    links: Sequence[socket.socket],
    place: str,
) -> None:
    torch.set_num_threads(1)
    file = os.open(place, os.O_RDWR)
    groups = kind(shard, CPU, file, DEADLINE_S, sharing=shard.num_ranks)
    result.send(work(grouped_ranks(groups, links)))
    groups.close()
