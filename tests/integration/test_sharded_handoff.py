"""KV handed over between pools of different tensor-parallel size: ranks of a gloo group, in
processes of their own, by the real transports."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.shard_ranks import (
    DEADLINE_S,
    FIRST_BLOCK,
    PROMPT_BLOCKS,
    Case,
    rank_main,
)

GRANTED = list(range(FIRST_BLOCK, PROMPT_BLOCKS))


class Group:
    """The ranks' processes."""

    def __init__(self, store: Path, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(theirs, str(store), rank, size))
            process.daemon = True
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def play(self, case: Case) -> list[dict[str, Any]]:
        """What each target rank saw, in order."""
        for connection in self.connections:
            connection.send(case)
        answers = []
        for rank, connection in enumerate(self.connections):
            if rank == 1 and case.dies_after is not None:
                self.processes[rank].join(DEADLINE_S)
                assert self.processes[rank].exitcode == -9
                continue
            assert connection.poll(2 * DEADLINE_S), f"rank {rank} does not answer"
            answers.append(connection.recv())
        return [answer for answer in answers if answer]

    def end(self) -> None:
        """Stop those that live, and see all end."""
        for connection, process in zip(self.connections, self.processes, strict=True):
            if process.is_alive():
                connection.send(None)
            process.join(DEADLINE_S)
            connection.close()
        assert all(process.exitcode in (0, -9) for process in self.processes)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp("gloo") / "store", 6)
    yield group
    group.end()


@pytest.mark.parametrize(
    "case",
    [
        Case("nixl", 1, 1),
        Case("nixl", 1, 2),
        Case("nixl", 2, 1),
        Case("nixl", 2, 4),
        Case("nixl", 4, 2),
        Case("shm", 2, 4),
        Case("shm", 4, 2),
        Case("nixl", 2, 1, checksum=True),
        Case("nixl", 1, 2, checksum=True),
    ],
    ids=str,
)
def test_every_target_rank_gets_its_slice_of_the_whole(group: Group, case: Case) -> None:
    answers = group.play(case)
    assert len(answers) == case.target_size
    for answer in answers:
        assert answer == {
            "complete": 1,
            "failed": [],
            "unfenced": 1,
            "right": (GRANTED, True),
        }


def test_one_source_rank_s_wrong_digest_fails_the_whole(group: Group) -> None:
    (answer,) = group.play(Case("nixl", 2, 1, checksum=True, corrupt=True))
    assert answer["complete"] == 0
    assert answer["failed"] == [("rank 1: the digest of a block differs", ())]
    assert answer["unfenced"] == 1
    right, others_untouched = answer["right"]
    assert right == [index for index in GRANTED if index != 5]
    assert others_untouched


def test_a_source_rank_that_dies_in_the_middle(tmp_path: Path) -> None:
    """What it had written counts where the other rank's part is there, too, and nothing else."""
    group = Group(tmp_path / "store", 3)
    (answer,) = group.play(Case("nixl", 2, 1, dies_after=3))
    group.end()
    arrived = tuple(GRANTED[:3])
    assert answer["complete"] == 0
    assert answer["failed"] == [("rank 1: the prefill worker is gone", arrived)]
    assert answer["unfenced"] == 1
    assert answer["right"] == (list(arrived), True)
